"""A byte-level GPT with a mixture of experts, made of the course's parts, so that all five axes can split it at once.

It is built stage by stage: a `Stage` is a run of layers, the first with the embedding, the last with the output layer.
Every whole matrix comes from a seed by its name, and parts keep their share of it: so each layout starts from exactly
the weights of one process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fivefold import context, expert, recompute, sequence, tensor
from fivefold.layout import Layout, check_sizes
from fivefold.mesh import Mesh


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of the model."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128  # inner width of the MLP, and of each expert
    experts: int = 4
    top_k: int = 2
    moe_every: int = 2  # every second layer, from the second on, has experts in the place of the MLP; 0: none has
    vocabulary: int = 256
    tied: bool = True  # the output layer shares the embedding's weight
    balance_weight: float = 0.01  # of the experts' balance loss, as the mean over layers and micro-batches
    rope_base: float = 10_000.0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} is no multiple of twice the {self.heads} heads: change one of them")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv heads: choose a divisor")
        if self.moe_layers and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}: choose 1 to {self.experts}, the number of experts")

    def has_experts(self, layer: int) -> bool:
        return self.moe_every > 0 and layer % self.moe_every == self.moe_every - 1

    @property
    def moe_layers(self) -> int:
        return sum(map(self.has_experts, range(self.layers)))

    def check(self, layout: Layout, num_chunks: int = 1) -> None:
        """Raise LayoutError, one line that names the number to change, where the layout does not fit this model."""
        check_sizes(
            layout, heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn, layers=self.layers, num_chunks=num_chunks,
            experts=self.experts if self.moe_layers else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How the model is computed; none of it changes what is computed."""

    sequence_parallel: bool = False
    recomputation: str = "none"  # "selective": the attention core; "full": every block
    fused_attention: bool = False
    num_microbatches: int = 1  # over which the balance loss is a mean

    def __post_init__(self) -> None:
        if self.recomputation not in ("none", "selective", "full"):
            raise ValueError(f"recomputation is {self.recomputation!r}: choose none, selective or full")


@dataclass(frozen=True)
class Role:
    """What the trainer must know of a parameter to sum its gradient over the right ranks, and to count it once."""

    name: str  # in the whole model
    split: int | None = None  # the dimension cut over the TP group; None: whole on each of these ranks
    expert: bool = False  # it belongs to an expert, of which there are copies on the `ep_dp` group only
    tied: bool = False  # the embedding's weight, which the first and the last stage share


class Stage(nn.Module):
    """Some layers of the GPT, as one rank holds them.

    `layers` are their numbers. The `first` stage takes token ids (b, s/c), the others activations; the `last` gives
    logits (b, s/c, V/t), the others activations. Activations are (b, s/c, h), or (b, s/(c·t), h) in sequence
    parallelism. `positions` (c, s/c) says where in the sequence the tokens of each CP rank stand.
    """

    def __init__(
        self, config: GPTConfig, layers: range, mesh: Mesh, positions: Tensor, first: bool, last: bool,
        options: Options | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.mesh, self.first, self.last = config, mesh, first, last
        options = options or Options()
        parts = _Parts(config, mesh, positions, options)
        self.embedding = parts.embedding() if first else None
        self.blocks = nn.ModuleDict({str(layer): parts.block(layer) for layer in layers})
        self.norm = parts.norm() if last else None
        self.head = parts.head() if last else None
        if first and last and config.tied:
            self.head.weight = self.embedding.weight
        self._wrap = recompute.full if options.recomputation == "full" else lambda block: block
        cos, sin = rotary_table(config, positions[mesh.coordinates.cp])
        self.register_buffer("cos", cos, persistent=False)  # buffers follow the stage to its device
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = self._wrap(block)(x, partial(rotate, self.cos, self.sin))
        return self.head(self.norm(x)) if self.last else x

    def roles(self) -> dict[nn.Parameter, Role]:
        """Every parameter of the stage, once, with its role; names are those of the whole model."""
        found: dict[nn.Parameter, Role] = {}
        for path, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                tied = self.config.tied and module in (self.embedding, self.head)
                whole_name = "embedding.weight" if tied else f"{path}.{name}"
                in_expert = isinstance(module, expert.MoE) and name != "router"
                role = Role(whole_name, getattr(type(module), "split", {}).get(name), in_expert, tied)
                found.setdefault(parameter, role)
        return found

    def balance(self) -> list[Tensor]:
        """The last balance loss of each layer with experts."""
        return [block.mlp.balance for block in self.blocks.values() if isinstance(block.mlp, expert.MoE)]


def whole(config: GPTConfig, name: str, *shape: int) -> Tensor:
    """A whole matrix of the model, the same on every rank: normal numbers from a seed that belongs to its name.

    Their standard deviation is 0.02 for the embedding and (2/(in + out))^½ for (…, out, in) matrices.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))
    deviation = 0.02 if name == "embedding" else (2 / (shape[-1] + shape[-2])) ** 0.5
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * deviation).to(config.dtype)


class _Parts:
    """Makes the parts of a stage, for one rank of a mesh."""

    def __init__(self, config: GPTConfig, mesh: Mesh, positions: Tensor, options: Options):
        self.config, self.mesh, self.options = config, mesh, options
        split = options.sequence_parallel
        self.enter = sequence.gather_tokens if split else tensor.copy_to_ranks
        self.leave = sequence.scatter_tokens if split else tensor.sum_over_ranks
        self.core = self._core(positions)

    def _core(self, positions: Tensor) -> Callable:
        ring = context.fast_ring_attention if self.options.fused_attention else context.ring_attention
        core = partial(_ring_core, ring, group=self.mesh.cp, positions=positions)
        return recompute.selective(core) if self.options.recomputation == "selective" else core

    def embedding(self) -> nn.Module:
        weight = whole(self.config, "embedding", self.config.vocabulary, self.config.hidden)
        return tensor.VocabEmbedding(weight, self.mesh.tp, leave=self.leave)

    def head(self) -> nn.Module:
        name = "embedding" if self.config.tied else "head"
        weight = whole(self.config, name, self.config.vocabulary, self.config.hidden)
        return tensor.VocabLogits(weight, self.mesh.tp, enter=self.enter)

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.hidden, dtype=self.config.dtype)

    def block(self, layer: int) -> nn.Module:
        mlp = self.moe(layer) if self.config.has_experts(layer) else self.mlp(layer)
        split = self.options.sequence_parallel
        return sequence.Block(self.attention(layer), mlp, self.norm(), self.norm(), self.mesh.tp, split=split)

    def attention(self, layer: int) -> nn.Module:
        c = self.config
        size = c.hidden // c.heads
        rows = (c.heads + 2 * c.kv_heads) * size
        qkv = whole(c, f"{layer} qkv", rows, c.hidden)
        out = whole(c, f"{layer} out", c.hidden, c.heads * size)
        zeros = partial(torch.zeros, dtype=c.dtype)
        return tensor.Attention(
            qkv, zeros(rows), out, zeros(c.hidden), c.heads, c.kv_heads, self.mesh.tp, self.core, self.enter, self.leave
        )

    def mlp(self, layer: int) -> nn.Module:
        c, zeros = self.config, partial(torch.zeros, dtype=self.config.dtype)
        w_in, w_out = whole(c, f"{layer} in", c.ffn, c.hidden), whole(c, f"{layer} out of mlp", c.hidden, c.ffn)
        return tensor.MLP(w_in, zeros(c.ffn), w_out, zeros(c.hidden), self.mesh.tp, self.enter, self.leave)

    def moe(self, layer: int) -> nn.Module:
        c, mesh = self.config, self.mesh
        router = whole(c, f"{layer} router", c.experts, c.hidden)
        w_in = whole(c, f"{layer} experts in", c.experts, c.ffn, c.hidden)
        w_out = whole(c, f"{layer} experts out", c.experts, c.hidden, c.ffn)
        # In sequence parallelism the ranks of a TP group route different tokens, and the loss counts them all.
        over = (mesh.dp_cp, mesh.tp) if self.options.sequence_parallel else (mesh.dp_cp,)
        weight = c.balance_weight / (c.moe_layers * self.options.num_microbatches)
        return expert.MoE(
            router, w_in, w_out, c.top_k, mesh.ep, mesh.tp, self.enter, self.leave,
            balance_weight=weight, balance_groups=over,
        )  # fmt: skip


def _ring_core(ring: Callable, q: Tensor, k: Tensor, v: Tensor, group: object, positions: Tensor) -> Tensor:
    return ring(q, k, v, group, positions)


def rotary_table(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (s, d/2) of the angles position · base^(-2i/d) (Su et al. 2021, RoFormer, section 3.2.2)."""
    half = config.hidden // config.heads // 2
    frequencies = config.rope_base ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None].double() * frequencies  # (s, d/2)
    return angles.cos().to(config.dtype), angles.sin().to(config.dtype)


def rotate(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair (i, i + d/2) of q and k (b, heads, s, d) by its token's angle, so that q · k sees distances."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    return turned(q), turned(k)
