"""How long a step takes under a plan, by part."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fivefold import cost
from fivefold.layout import Layout
from fivefold.plan.compute import Pass, head_seconds, layer_seconds, memory_seconds
from fivefold.plan.layout import Plan, stage_layers
from fivefold.plan.links import exchange_seconds
from fivefold.plan.memory import parameters_of, rank_parameters
from fivefold.plan.model import MODERN, Model, Software, Work
from fivefold.runtime.cluster import Cluster

# Collectives are programs on the GPU: DeepSeek-V3 gives them 20 of its 132 multiprocessors (report, section 3.2.2).
# While an exchange is hidden behind computation, computation has the others.
TAKEN = 20 / 132


class Seconds(NamedTuple):
    """Where the time of a step goes, on the slowest rank. Exchanges are counted where they are exposed."""

    compute: float
    tp: float
    cp: float
    ep: float
    pp: float
    dp: float
    bubble: float

    @property
    def total(self) -> float:
        return sum(self)


class Stage(NamedTuple):
    """Seconds of one micro-batch: on the slowest stage by part, both ways; on a mean one of the others by direction."""

    compute: float
    tp: float
    cp: float
    ep: float
    forward: float
    backward: float  # with what is computed again
    weight: float  # the part of backward that makes gradients of weights


def step_seconds(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> Seconds:
    """Seconds of one step under `plan`, by part: `Seconds(compute, tp, cp, ep, pp, dp, bubble)`.

    A rank works on m micro-batches, one after the other. Each costs its stage's layers forward and backward
    (`stage_seconds`: compute, and exchanges over TP, CP and EP, which are exposed), and messages to the next stage and
    back (`message_seconds`). The pipeline fills and drains through the other stages: `cost.bubble_seconds` of their
    times, with half of the messages in each direction. Data parallelism adds what cannot hide (`data_seconds`), and
    the optimizer's pass over its states counts as compute (`optimizer_seconds`).
    """
    m = plan.num_microbatches(work)
    stage = stage_seconds(model, plan, work, cluster, software)
    message = message_seconds(model, plan, work, cluster, software)
    forward, backward = stage.forward + message / 2, stage.backward + message / 2
    bubble = cost.bubble_seconds(
        plan.schedule, plan.layout.pp, forward, backward - stage.weight, stage.weight, plan.chunks
    )
    data = data_seconds(model, plan, work, cluster, software)
    update = optimizer_seconds(model, plan, cluster, software)
    compute, *exchanges = (m * part for part in stage[:4])  # compute, tp, cp, ep
    return Seconds(compute + update, *exchanges, m * message, data, bubble)


def stage_seconds(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> Stage:
    """What one micro-batch costs: `Stage(compute, tp, cp, ep, forward, backward, weight)`.

    The first four are those of the slowest stage, which all wait for in every micro-batch; the last three are the mean
    of the other stages, which a micro-batch goes through once as the pipeline fills and drains.
    """
    return _stage_seconds(
        model, plan.layout, work.context, plan.micro_batch, plan.recompute, plan.sequence_parallel,
        stage_layers(model, plan), cluster, software,
    )  # fmt: skip


@cache
def _stage_seconds(
    model: Model, layout: Layout, context: int, micro_batch: int, recompute: str, sequence_parallel: bool,
    layers: tuple[int, int], cluster: Cluster, software: Software,
) -> Stage:  # fmt: skip
    args = model, layout, context, micro_batch, recompute, sequence_parallel, cluster, software
    forward, backward, weight = layer_seconds(*args)
    if model.moe_layers:
        share, moe = model.moe_layers / model.layers, layer_seconds(*args, experts=True)
        forward = forward.times(1 - share) + moe.forward.times(share)
        backward = backward.times(1 - share) + moe.backward.times(share)
        weight = (1 - share) * weight + share * moe.weight
    head = head_seconds(model, layout.tp, micro_batch * context // layout.cp, cluster, software)
    p, stages = layout.pp, []
    for n, ends in ((layers[0], p == 1), (layers[1], True)):
        there = forward.times(n) + Pass(head[0] if ends else 0.0)
        back = backward.times(n) + Pass(head[1] if ends else 0.0)
        if p == 1:
            others = there.total, back.total, n * weight
        else:
            rest, heads = (model.layers - n) / (p - 1), (0 if ends else 1) / (p - 1)
            others = forward.total * rest + head[0] * heads, backward.total * rest + head[1] * heads, weight * rest
        stages.append(Stage(*(there + back), *others))
    return max(stages, key=lambda stage: sum(stage[:4]))


def message_seconds(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> float:
    """A micro-batch's activations to the next stage and their gradients back, for each chunk of a rank: exposed.

    TP ranks send one part each: with sequence parallelism they hold no more, without it Megatron-LM scatters and
    gathers (Narayanan et al. 2021, section 4.1).
    """
    size = software.element_bytes * plan.tokens(work) * model.hidden / plan.layout.tp
    return 2 * plan.chunks * exchange_seconds("send", "pp", size, plan.layout, cluster)


def _left(exchange: float, compute: float) -> float:
    """Seconds that an exchange adds to a computation beside which it runs."""
    hidden = min(exchange, compute / (1 - TAKEN))
    return exchange - hidden + TAKEN * hidden


def data_seconds(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> float:
    """What data parallelism and ZeRO add to a step: exchanges that are not hidden, and what hidden ones slow down.

    Up to stage 2 a step sums gradients once, all-reduce or reduce-scatter, and gathers parameters once. With overlap
    the sum hides behind the last micro-batch's backward, the gather behind the first one's forward. In stage 3 each
    layer is gathered before forward, before what is computed again and before backward, and its gradient scattered, for
    every micro-batch, behind computation.
    """
    layout, m = plan.layout, plan.num_microbatches(work)
    if layout.dp * layout.cp == 1:
        return 0.0
    stage = stage_seconds(model, plan, work, cluster, software)
    forward, backward = stage.forward, stage.backward
    scatter, gather = state_seconds(model, layout, stage_layers(model, plan), cluster, software)
    if plan.zero == 0:
        gather *= software.gradient_bytes / software.element_bytes  # the second half of an all-reduce
    beside_gather = software.overlap != "none"
    if plan.zero == 3:
        gather *= m * (3 if plan.recompute == "full" else 2)
        scatter, forward, backward = m * scatter, m * forward, m * backward
        if software.overlap == "all":
            return _left(gather + scatter, forward + backward)
        return (_left(gather, forward + backward) if beside_gather else gather) + scatter
    added = _left(gather, forward) if beside_gather else gather
    return added + (_left(scatter, backward) if software.overlap == "all" else scatter)


@cache
def state_seconds(
    model: Model, layout: Layout, layers: tuple[int, int], cluster: Cluster, software: Software
) -> tuple[float, float]:
    """Seconds of one reduce-scatter of a rank's gradients, and of one all-gather of its parameters.

    `layers` are those of a middle and of an end stage; a message for each: what is started often waits often.
    """
    dense, experts = parameters_of(model, layout, layers)
    copies = Layout(dp=layout.dp * layout.cp // layout.ep, pp=layout.pp, tp=layout.tp * layout.ep)
    n, times = layers[0], []
    for op, size in (("reduce_scatter", software.gradient_bytes), ("all_gather", software.element_bytes)):
        seconds = n * exchange_seconds(op, "dp_cp", dense * size / n, layout, cluster, software.rails)
        if experts:  # the ranks that hold the same experts are ep times as far apart
            seconds += n * exchange_seconds(op, "dp", experts * size / n, copies, cluster, software.rails)
        times.append(seconds)
    return times[0], times[1]


def optimizer_seconds(model: Model, plan: Plan, cluster: Cluster, software: Software = MODERN) -> float:
    """Adam reads a gradient and three states of 4 bytes, and writes three and a parameter of 2: 30 bytes each."""
    if not software.counted:
        return 0.0
    dense, experts = rank_parameters(model, plan)
    shards = plan.layout.dp * plan.layout.cp if plan.zero else 1
    return memory_seconds(30 * (dense / shards + experts / max(1, shards // plan.layout.ep)), cluster)
