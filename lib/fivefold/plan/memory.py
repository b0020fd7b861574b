"""What a rank keeps under a plan, and whether it fits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fivefold import cost
from fivefold.layout import Layout
from fivefold.plan.layout import Plan, stage_layers
from fivefold.plan.model import MODERN, Model, Software, Work
from fivefold.runtime.cluster import Cluster

RESERVE = 0.06  # of a GPU's memory, for CUDA, NCCL's buffers and holes between tensors: chosen, not measured


class Memory(NamedTuple):
    """Bytes on the fullest rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # kept for backward at the peak, and one micro-batch's logits
    limit: float  # what the GPU has for them

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def fits(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> Memory:
    """The memory of the fullest rank: `Memory(parameters, gradients, optimizer, activations, limit)`, in bytes.

    Of each parameter that a rank holds (`rank_parameters`) it keeps `software.element_bytes`, of its gradient
    `software.gradient_bytes`, of Adam's states `software.optimizer_bytes`. ZeRO splits states over the ranks that hold
    the same parameters: DP x CP, for experts DP x CP / EP. Stage 1 splits the optimizer, stage 2 gradients too, stage
    3 parameters too. With more than one micro-batch a rank adds gradients up whole, so stage 2 splits them with one
    micro-batch only; stage 3 always. Stage 3 on more than one rank holds two gathered layers besides, of experts too:
    2 / `stage_layers(model, plan)[0]` of the rank's parameters.

    Activations: a layer's bytes (`layer_bytes`) for each layer of a stage and each micro-batch in flight
    (`cost.peak_activations`); one layer whole more where anything is computed again (`plan.recompute` is not "none");
    and each logit of one micro-batch (GPipe: of all) twice, once in `software.element_bytes` and once in 4. The limit
    is the GPU's memory less the share RESERVE of it (6%).
    """
    layout, m = plan.layout, plan.num_microbatches(work)
    layers = stage_layers(model, plan)[0]
    shards = layout.dp * layout.cp
    parameters = gradients = optimizer = 0.0
    for held, n in zip(rank_parameters(model, plan), (shards, shards // layout.ep), strict=True):
        parameters += software.element_bytes * held / (n if plan.zero == 3 else 1)
        gradients += software.gradient_bytes * held / (n if plan.zero == 3 or (plan.zero == 2 and m == 1) else 1)
        optimizer += software.optimizer_bytes * held / (n if plan.zero else 1)
        if plan.zero == 3 and n > 1:
            parameters += 2 * software.element_bytes * held / layers
    alive = cost.peak_activations(plan.schedule, layout.pp, m, plan.chunks)
    kept = alive * layers * layer_bytes(model, plan, work, software)
    if plan.recompute != "none":
        kept += layer_bytes(model, plan, work, software, "none")
    logits = (4 + software.element_bytes) * plan.tokens(work) * model.vocabulary / layout.tp
    if plan.schedule == "gpipe":
        logits *= m
    return Memory(parameters, gradients, optimizer, kept + logits, cluster.gpu.memory * (1 - RESERVE))


def rank_parameters(model: Model, plan: Plan) -> tuple[float, float]:
    """Parameters of the fullest stage that one rank holds: those outside experts, and those of experts.

    TP splits matrices and embeddings, EP experts, PP layers; norms are whole.
    """
    return parameters_of(model, plan.layout, stage_layers(model, plan))


@cache
def parameters_of(model: Model, layout: Layout, layers: tuple[int, int]) -> tuple[float, float]:
    """The same for `layers` layers of a middle and of an end stage."""
    share = model.moe_layers / model.layers
    biases = model.hidden + 2 * model.kv_width + (1 - share) * model.ffn if model.bias else 0
    mlp = (1 - share) * model.mlp_parameters
    layer = (model.attention_parameters + biases + mlp) / layout.tp + model.whole_parameters
    layer += share * model.experts * model.hidden  # the router
    experts = share * model.experts * model.mlp_parameters / layout.tp / layout.ep
    embeddings = model.embedding_parameters / layout.tp * (2 if layout.pp == 1 and not model.tied else 1)
    middle, end = layers
    return max((middle * layer, middle * experts), (end * layer + embeddings, end * experts), key=sum)


def layer_bytes(
    model: Model, plan: Plan, work: Work, software: Software = MODERN, recompute: str | None = None
) -> float:
    """Bytes that one layer keeps for backward, of one micro-batch, on one rank: table 2 of Korthikanti et al. 2022.

    Its entries by what they are, so that gated MLPs and grouped K/V heads have theirs. For a token, in numbers of 2
    bytes: the two norms' inputs 2h, inputs of the two pairs 2h, q, k and v, the projection's input h, before and after
    the activation function 2 or 3 times ffn; bytes for dropouts' masks; without flash attention 5 bytes a score (2 + 2
    and a mask). With `lean` software inputs of pairs and the activation's result are made again. "full" keeps the
    layer's input; "selective" no scores, or with `half` every other product's result.
    `recompute` is the plan's where it is not given.
    """
    recompute = recompute or plan.recompute
    layout, tokens, h = plan.layout, plan.tokens(work), model.hidden
    element, split = software.element_bytes, layout.tp if plan.sequence_parallel else 1
    if recompute == "full":
        return element * tokens * h / split
    copies = model.top_k * model.moe_layers / model.layers + 1 - model.moe_layers / model.layers
    gates = 2 if model.gated else 1
    if recompute == "selective" and software.half:
        results = 3 * h + 2 * model.kv_width + copies * gates * model.ffn  # of all products with weights
        return element * tokens * (h / split + (h + results / 2) / layout.tp)
    whole = element * h * 2 + (2 * h if software.dropout else 0)
    inputs = 0 if software.lean else 2 * element * h  # of the two pairs: gathered, unless they are gathered again
    inner = gates + (0 if software.lean else 1)
    inside = element * (2 * h + 2 * model.kv_width + copies * inner * model.ffn)
    scores = 0.0
    if recompute == "none" and not software.flash:
        scores = (2 * element + (1 if software.dropout else 0)) * model.heads * work.context
    own = inputs / (split if software.regather else 1)
    return tokens * (whole / split + own + (inside + scores) / layout.tp)
