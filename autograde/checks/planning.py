"""Cases of the planner's exercises, and what each should answer: sums and searches of their own, from given parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fivefold import cost, mesh, plan
from fivefold.layout import Layout
from fivefold.runtime.cluster import Cluster

from autograde.case import Case
from autograde.verdict import Finding

GPT = plan.gpt(24, 1024, 16, 32000, name="a GPT of 24 layers")
DENSE = plan.Model(20, 2048, 16, 4, 5632, 64000, name="20 layers with grouped K/V heads")
UNEVEN = plan.Model(30, 4096, 32, 8, 14336, 128256, name="30 layers on uneven stages")
MIXED = plan.Model(16, 2048, 16, 8, 4096, 32000, experts=8, top_k=2, moe_every=2, name="16 layers, 8 experts in half")


@dataclass(frozen=True, kw_only=True)
class Placed(Case):
    """Layouts to place on servers of so many GPUs."""

    layouts: tuple[str, ...]
    gpus_per_server: int

    def __str__(self) -> str:
        return f"servers of {self.gpus_per_server} GPUs, {len(self.layouts)} layouts"


@dataclass(frozen=True, kw_only=True)
class Planned(Case):
    """A model, a step and a plan; `sizes` is what the judge reads, the rest tells people."""

    model: plan.Model
    work: plan.Work
    plans: tuple[plan.Plan, ...]
    cluster: Cluster
    software: plan.Software = plan.MODERN

    def __str__(self) -> str:
        return f"{self.model.name}, {counted(len(self.plans), 'plan')}{self.programs}"

    @property
    def programs(self) -> str:
        """What tells that this is not what is usual now."""
        return "" if self.software == plan.MODERN else " with other software"


@dataclass(frozen=True, kw_only=True)
class Searched(Case):
    """A model, a step and GPUs to find a plan for."""

    model: plan.Model
    work: plan.Work
    gpus: int
    cluster: Cluster
    software: plan.Software = plan.MODERN
    options: plan.Options | None = None

    def __str__(self) -> str:
        size, tokens = self.model.parameters / 1e9, self.work.context
        more = ("" if self.software == plan.MODERN else ", other software") + (", few options" if self.options else "")
        gpus = f"{self.gpus} {self.cluster.gpu.name}"
        return f"{self.model.name}: {size:.1f}e9 parameters, {tokens:,} tokens, {gpus}{more}"


def links_by_rank(layout: Layout, gpus_per_server: int) -> dict[str, str]:
    """Where each axis's groups are, from the lists of ranks: "inside", or "between" where one group is on two."""
    found = {}
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        if getattr(layout, axis) == 1:
            continue
        groups = mesh.expert_groups(layout) if axis == "ep" else mesh.groups(layout, axis)
        apart = any(len({rank // gpus_per_server for rank in group}) > 1 for group in groups)
        found[axis] = "between" if apart else "inside"
    return found


def memory_by_hand(case: Planned, one: plan.Plan) -> dict[str, float]:
    """The fields of `Memory`, added up piece by piece."""
    model, software, layout = case.model, case.software, one.layout
    m = case.work.sequences // (layout.dp * one.micro_batch)
    dense, experts = plan.rank_parameters(model, one)
    most = max(plan.stage_layers(model, one)[:1])
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for held, copies in ((dense, layout.dp * layout.cp), (experts, layout.dp * layout.cp // layout.ep)):
        split = {"optimizer": one.zero > 0, "gradients": one.zero == 3, "parameters": one.zero == 3}
        split["gradients"] |= one.zero == 2 and m == 1
        sizes = {"parameters": software.element_bytes, "gradients": software.gradient_bytes}
        for name, size in (sizes | {"optimizer": software.optimizer_bytes}).items():
            found[name] += held * size / (copies if split[name] else 1)
        if one.zero == 3 and copies > 1:
            found["parameters"] += 2 * held / most * software.element_bytes
    alive = cost.peak_activations(one.schedule, layout.pp, m, one.chunks)
    kept = alive * most * plan.layer_bytes(model, one, case.work, software)
    if one.recompute != "none":
        kept += plan.layer_bytes(model, one, case.work, software, "none")
    tokens = one.micro_batch * case.work.context // layout.cp
    logits = tokens * model.vocabulary / layout.tp * (software.element_bytes + 4)
    found["activations"] = kept + logits * (m if one.schedule == "gpipe" else 1)
    found["limit"] = 0.94 * case.cluster.gpu.memory
    return found


def seconds_by_hand(case: Planned, one: plan.Plan) -> dict[str, float]:
    """The fields of `Seconds`, from what one micro-batch costs."""
    args = case.model, one, case.work, case.cluster, case.software
    m = case.work.sequences // (one.layout.dp * one.micro_batch)
    stage, message = plan.stage_seconds(*args), plan.message_seconds(*args)
    waiting = (one.layout.pp - 1) * (stage.forward + stage.backward + message)
    bubble = {"gpipe": waiting, "one_f_one_b": waiting, "interleaved": waiting / one.chunks}
    bubble["zb_h1"] = waiting - 2 * (one.layout.pp - 1) * stage.weight
    found = {name: m * getattr(stage, name) for name in ("compute", "tp", "cp", "ep")}
    update = plan.optimizer_seconds(case.model, one, case.cluster, case.software)
    data = plan.data_seconds(*args)
    found["compute"] += update
    return found | {"pp": m * message, "dp": data, "bubble": bubble[one.schedule]}


def data_by_hand(case: Planned, one: plan.Plan) -> float:
    """What data parallelism adds, from the seconds of one sum and one gather over the DP x CP group."""
    model, software, layout, cluster = case.model, case.software, one.layout, case.cluster
    if layout.dp * layout.cp == 1:
        return 0.0
    m = case.work.sequences // (layout.dp * one.micro_batch)
    dense, experts = plan.rank_parameters(model, one)
    layers = plan.stage_layers(model, one)[0]

    def once(op: str, size: int) -> float:
        args = layout, cluster, software.rails
        took = layers * plan.exchange_seconds(op, "dp_cp", dense * size / layers, *args)
        if experts:
            far = Layout(layout.dp * layout.cp // layout.ep, 1, layout.pp, layout.tp * layout.ep)
            took += layers * plan.exchange_seconds(op, "dp", experts * size / layers, far, *args[1:])
        return took

    total = once("reduce_scatter", software.gradient_bytes)
    gather = once("all_gather", software.element_bytes)
    if one.zero == 0:
        gather *= software.gradient_bytes / software.element_bytes
    stage = plan.stage_seconds(model, one, case.work, cluster, software)
    forward, backward = stage.forward, stage.backward
    if one.zero == 3:
        gather, total = gather * m * (3 if one.recompute == "full" else 2), total * m
        if software.overlap == "all":
            return beside(gather + total, m * (forward + backward))
        return (beside(gather, m * (forward + backward)) if software.overlap == "gathers" else gather) + total
    first = gather if software.overlap == "none" else beside(gather, forward)
    return first + (beside(total, backward) if software.overlap == "all" else total)


def beside(exchange: float, compute: float) -> float:
    """What an exchange adds to a computation beside which it runs, when it takes 20 of 132 multiprocessors."""
    slower = compute / (1 - 20 / 132)
    return exchange - compute if exchange > slower else exchange * 20 / 132


def numbers(property: str, words: str, got: Any, wanted: float, look: str = "") -> Finding:
    """A number that agrees to 1e-9."""
    if not isinstance(got, int | float) or isinstance(got, bool):
        return Finding(property, False, f"{words} is {type(got).__name__}, expected a number", look)
    scale = max(abs(wanted), 1e-30)
    error = abs(got - wanted) / scale
    if wanted == 0:
        error = abs(got)
    right = error < 1e-9
    places = next((n for n in (6, 9, 12) if f"{got:.{n}g}" != f"{wanted:.{n}g}"), 17) if not right else 6
    seen = f"{words} is {got:.{places}g}, expected {wanted:.{places}g}"
    if wanted:
        ratio = got / wanted
        seen += f" ({ratio:.{max(4, places)}g} times)"
        if any(abs(ratio / factor - 1) < 1e-6 for power in (3, 6, 9) for factor in (10**power, 10**-power)):
            seen += ": in which unit is it?"
    return Finding(property, right, seen, look, error=error)


def counted(n: int, word: str, ending: str = "s") -> str:
    """`n` of a thing: "1 rank", "2 ranks"."""
    return f"{n:,} {word}{ending if n != 1 else ''}"


def fields(value: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A named tuple's fields, or those of anything that has them, as plain data."""
    return {name: getattr(value, name) for name in names}


def work_for(model: plan.Model, sequences: int, context: int) -> plan.Work:
    return plan.Work(sequences * context, context)


def shapes(seed: int) -> Iterator[tuple[int, ...]]:
    """A few small layouts that a seed picks: dp, cp, pp, tp, ep."""
    degrees = [(1, 2, 3, 4)[(seed >> 2 * i) % 4] for i in range(4)]
    dp, cp, pp, tp = degrees
    yield dp, cp, pp, tp, 1
    yield tp, pp, cp, dp, tp * pp if tp * pp < 9 else 1
