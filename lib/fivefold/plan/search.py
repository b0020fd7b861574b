"""All layouts of a cluster, ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fivefold.layout import Layout
from fivefold.plan.layout import Plan
from fivefold.plan.memory import Memory, fits
from fivefold.plan.model import MODERN, Model, Software, Work
from fivefold.plan.time import Seconds, step_seconds
from fivefold.runtime.cluster import Cluster


class Choice(NamedTuple):
    """A plan, what it needs, and how long its step takes."""

    plan: Plan
    memory: Memory
    seconds: Seconds


@dataclass(frozen=True)
class Options:
    """What a search tries besides the degrees of the axes. More of anything takes longer.

    ZeRO's stage 0 is not tried: it keeps more than stage 1 and sums as much.
    """

    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = ("one_f_one_b", "interleaved", "zb_h1")
    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = ("none", "full")
    most_tp: int = 16
    most_cp: int = 64
    most_chunks: int = 16


def search(
    model: Model, work: Work, gpus: int, cluster: Cluster, software: Software = MODERN, options: Options | None = None
) -> list[Choice]:
    """Every plan for exactly `gpus` GPUs that fits, the fastest first: `Choice(plan, memory, seconds)`.

    In three steps. Make it fit: cut the model by TP, CP and PP (`cuts`). Fill with data parallelism: all GPUs that are
    left, and experts spread over them (`filled`). Tune: ZeRO stage, micro-batch, schedule and recomputation
    (`tunings`). What does not fit is left out; where times are equal, what needs less memory comes first. An empty
    list says that nothing fits. (The three steps follow the takeaways in Narayanan et al. 2021, section 3.)
    """
    options, found = options or Options(), []
    for cut in cuts(model, work, gpus, options):
        for layout in filled(model, work, gpus, cut):
            for plan in tunings(model, work, layout, options):
                memory = fits(model, plan, work, cluster, software)
                if memory.fits:
                    found.append(Choice(plan, memory, step_seconds(model, plan, work, cluster, software)))
    return sorted(found, key=lambda choice: (choice.seconds.total, choice.memory.total))


def survey(
    model: Model, work: Work, gpus: int, cluster: Cluster, software: Software = MODERN, options: Options | None = None
) -> list[Choice]:
    """Every plan for `gpus` GPUs, whether it fits or not: first those that do, in both halves the fastest first."""
    found = []
    for cut in cuts(model, work, gpus, options):
        for layout in filled(model, work, gpus, cut):
            for plan in tunings(model, work, layout, options):
                memory = fits(model, plan, work, cluster, software)
                found.append(Choice(plan, memory, step_seconds(model, plan, work, cluster, software)))
    return sorted(found, key=lambda choice: (not choice.memory.fits, choice.seconds.total, choice.memory.total))


def cuts(model: Model, work: Work, gpus: int, options: Options | None = None) -> Iterator[Layout]:
    """Every way to cut the model and its sequences over some of the GPUs: layouts of TP, CP and PP, without DP."""
    options = options or Options()
    for tp in _divisors(gpus, options.most_tp):
        if model.heads % tp or model.ffn % tp or max(model.kv_heads, tp) % min(model.kv_heads, tp):
            continue
        for cp in _divisors(gpus // tp, options.most_cp):
            if cp > 1 and work.context % (2 * cp):
                continue
            for pp in _divisors(gpus // (tp * cp), model.layers):
                yield Layout(cp=cp, pp=pp, tp=tp)


def filled(model: Model, work: Work, gpus: int, cut: Layout) -> Iterator[Layout]:
    """`cut` with as much data parallelism as fills the GPUs, for every EP that divides the experts and the ranks.

    None where a data-parallel rank would have no sequence, or not as many as the others.
    """
    dp, left = divmod(gpus, cut.world_size)
    if left or dp < 1 or work.sequences % dp:
        return
    for ep in _divisors(dp * cut.cp, max(1, model.experts)):
        if ep == 1 or model.experts % ep == 0:
            yield Layout(dp, cut.cp, cut.pp, cut.tp, ep)


def tunings(model: Model, work: Work, layout: Layout, options: Options | None = None) -> Iterator[Plan]:
    """Every plan for a layout: ZeRO stages, micro-batches that divide the batch, schedules, recomputation."""
    options = options or Options()
    stages = options.zero if layout.dp * layout.cp > 1 else options.zero[:1]
    for b in options.micro_batch:
        if work.sequences % (layout.dp * b):
            continue
        m = work.sequences // (layout.dp * b)
        ways = list(_schedules(model, layout.pp, m, options))
        for zero in stages:
            if zero == 2 and m > 1 and 1 in stages:
                continue  # gradients that are added up are whole: the same as stage 1
            for schedule, v in ways:
                for again in options.recompute:
                    yield Plan(layout, zero, schedule, v, b, again)


def _schedules(model: Model, p: int, m: int, options: Options) -> Iterator[tuple[str, int]]:
    """Schedules with their chunks a rank; interleaving wants m divisible by p, and chunks of equally many layers."""
    layers = -(-model.layers // p)
    for name in options.schedules if p > 1 else options.schedules[:1]:
        if name != "interleaved":
            yield name, 1
        elif m % p == 0 and p > 1:
            most = min(options.most_chunks, (model.layers + 2) // p)  # the ends may have a layer less
            yield from ((name, v) for v in _divisors(layers, most) if v > 1)


@cache
def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]
