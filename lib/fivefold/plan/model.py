"""What is trained and on what: a model's sizes, a step's tokens, the software that runs it, the modelled cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.runtime import cluster as machines
from fivefold.runtime.cluster import GPU, Cluster, Link


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer. Its numbers of parameters count matrices, norms and, with `bias`, biases.

    `gated`: the MLP has three matrices (SwiGLU) and not two. With `experts`, every `moe_every`-th layer has so many
    MLPs, of which a token visits `top_k`. `tied`: the output layer shares the embedding's weight.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # inner width of the MLP, or of each expert
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    moe_every: int = 1
    gated: bool = True
    tied: bool = False
    bias: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            sizes = f"hidden {self.hidden}, heads {self.heads}, K/V heads {self.kv_heads}"
            raise ValueError(f"{sizes}: each has to divide the one before it")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}: choose 1 to {self.experts}, the number of experts")

    def __hash__(self) -> int:
        """Of few sizes, since a model is a key of many caches."""
        return hash((self.layers, self.hidden, self.ffn, self.experts))

    @property
    def kv_width(self) -> int:
        """Numbers in a token's keys: K/V heads times their size."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def moe_layers(self) -> int:
        return self.layers // self.moe_every if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Matrices of a layer's attention: Q, K, V and the projection."""
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def mlp_parameters(self) -> int:
        """Matrices of one MLP or one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def whole_parameters(self) -> int:
        """Of a layer, what tensor parallelism leaves whole on every rank: norms, and biases after a sum."""
        return (6 if self.bias else 2) * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model (Ψ)."""
        return self._total(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of the experts, its top_k."""
        return self._total(self.top_k)

    def _total(self, experts: int) -> int:
        moe = self.moe_layers
        biases = (self.hidden + 2 * self.kv_width + self.ffn if self.bias else 0) + self.whole_parameters
        mlps = (self.layers - moe + moe * experts) * self.mlp_parameters + moe * self.hidden * self.experts
        ends = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * (self.attention_parameters + biases) + mlps + ends


@dataclass(frozen=True)
class Work:
    """One step: `tokens` of the global batch, in sequences of `context` tokens."""

    tokens: int
    context: int

    def __post_init__(self) -> None:
        if self.context < 1 or self.tokens < 1 or self.tokens % self.context:
            near = max(1, round(self.tokens / max(1, self.context))) * max(1, self.context)
            raise ValueError(f"{self.tokens} tokens are no whole number of sequences of {self.context}: take {near}")

    @property
    def sequences(self) -> int:
        return self.tokens // self.context


@dataclass(frozen=True)
class Software:
    """What the program that trains does, as far as time and memory depend on it.

    The defaults are what is usual now.

    - `flash`: attention in one kernel, which keeps no scores; `causal`: it computes nothing that the mask hides.
    - `fused`: a norm, a rotation, an activation function is one pass over memory, not one for each operator.
    - `lean`: what one pass over memory can make again (norms' results, the MLP's activation) is not kept for backward.
    - `overlap`: which exchanges of data parallelism run beside computation: "all", "gathers" of parameters, "none".
    - `rails`: a ring over whole servers uses all their network cards, not one.
    - `regather`: with sequence parallelism, gathered inputs are gathered again in backward (Korthikanti et al. 2022).
    - `half`: "selective" computes every other product and all passes over memory again, as torchtitan does, not the
      scores alone. `dropout`: masks are drawn and kept.
    - bytes of a number in a weight or an activation, of a gradient, of a parameter's optimizer states.
    - `counted`: passes over memory and the optimizer take time.
    """

    flash: bool = True
    causal: bool = True
    fused: bool = True
    lean: bool = True
    overlap: str = "all"
    rails: bool = True
    gradient_bytes: int = 4
    regather: bool = True
    dropout: bool = False
    half: bool = False
    element_bytes: int = 2
    optimizer_bytes: int = 12
    counted: bool = True

    def __hash__(self) -> int:
        """Of few fields, since it is a key of many caches."""
        return hash((self.flash, self.fused, self.overlap, self.gradient_bytes))


MODERN = Software()
MEGATRON_2021 = Software(
    flash=False, causal=False, lean=False, overlap="none", gradient_bytes=2, regather=False, dropout=True
)  # fmt: skip
DEEPSPEED_2021 = replace(MEGATRON_2021, overlap="gathers", rails=False)
COURSE = Software(  # the trainer of this library, on float32
    causal=False, lean=False, overlap="none", regather=False, element_bytes=4, optimizer_bytes=8, counted=False
)  # fmt: skip
EAGER = Software(fused=False, lean=False, half=True)  # torchtitan: PyTorch operators one by one
COMPILED = replace(EAGER, fused=True)  # and with torch.compile

# The one fitted number of each GPU type: the share of its peak that large matrix products reach. See `published`.
EFFICIENCY = {"A100": 0.702, "H100": 0.603}
EFFICIENCY |= dict.fromkeys(("H800", "H200", "H100-96GB"), EFFICIENCY["H100"])
PROTOCOL = 120 / 128  # of a link's bandwidth: NCCL's LL128 sends 120 bytes of data in 128

# Grand Teton's H100: HBM2e, 500 W. Its peak is unknown, "between SXM and NVL"; the NVL's is taken (835.5 TFLOPS).
H100_96GB = GPU("H100-96GB", 835.5e12, 96e9, 2.4e12)


def cluster(name: str = "h100", **changes: object) -> Cluster:
    """A preset of `runtime.cluster` at the speed that programs reach, where presets have the makers' figures.

    Matrix products run at EFFICIENCY of the peak, links at PROTOCOL of their bandwidth. "h100-96gb" is torchtitan's.
    Raises ValueError for another name.
    """
    if name == "h100-96gb":
        base = replace(machines.cluster("h100", **changes), gpu=H100_96GB)
    else:
        base = machines.cluster(name, **changes)
    share = EFFICIENCY[base.gpu.name]
    return replace(base, efficiency=share, inside=_reached(base.inside), between=_reached(base.between))


def _reached(link: Link) -> Link:
    return replace(link, bandwidth=link.bandwidth * PROTOCOL)


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200, name: str = "") -> Model:
    """A GPT as in Narayanan et al. 2021: an MLP four times as wide, biases, a tied embedding."""
    return Model(
        layers, hidden, heads, heads, 4 * hidden, vocabulary, gated=False, tied=True, bias=True, name=name
    )  # fmt: skip


# Sizes: Narayanan et al. 2021 table 1; Llama 3 report table 3; Mixtral 8x7B, Jiang et al. 2024 table 1.
MODELS = {
    model.name: model
    for model in (
        gpt(24, 2304, 24, name="gpt-1.7b"),
        gpt(40, 6144, 48, name="gpt-18b"),
        gpt(96, 12288, 96, name="gpt3-175b"),
        gpt(105, 20480, 128, name="gpt-530b"),
        gpt(128, 25600, 160, name="gpt-1t"),
        Model(32, 4096, 32, 8, 14336, 128256, name="llama3-8b"),
        Model(80, 8192, 64, 8, 28672, 128256, name="llama3-70b"),
        Model(126, 16384, 128, 8, 53248, 128256, name="llama3-405b"),
        Model(32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2, name="mixtral-8x7b"),
    )
}
