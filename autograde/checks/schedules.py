"""The check of a schedule: is it valid, how long do ranks idle, what do they keep, what are its gradients?

A check of this kind names the sizes to try, where stages live, which of three times is the bubble, and what is allowed;
any schedule that keeps to it is right, whatever its order.

    class OneFOneB(ScheduleCheck):
        exercise = "pipeline.one_f_one_b"
        def idle(self, case, d): return (case.p - 1) * (d.forward + d.input_gradient + d.weight_gradient)
        def alive(self, case, rank): return min(case.p - rank, case.m)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from fivefold import pipeline
from fivefold.pipeline import (
    Backward,
    Durations,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
    find_faults,
    marginal_idle,
    simulate,
    straight,
)

from autograde.case import Case
from autograde.check import Check
from autograde.checks import staged
from autograde.checks.encoded import KINDS, decode, encode
from autograde.compare import compare_all
from autograde.verdict import Finding, numbered

METRICS = {
    "makespan": "from the first action of all to the last",
    "window": "between a rank's own first and last action",
    "marginal": "in one more iteration, with no flush before it",
}
CLOSE = 1e-9  # of times: sums of a few hundred durations of about 1, in float64


@dataclass(frozen=True, kw_only=True)
class Planned(Case):
    """A schedule of p ranks, m micro-batches and, where v is not 0, v chunks a rank.

    It is made on one rank and judged on paper, or executed on p ranks; `refused` sizes are to raise a ValueError.
    """

    p: int
    m: int
    v: int = 0
    executed: bool = False
    refused: bool = False

    def __str__(self) -> str:
        chunks = f", v {self.v}" if self.v else ""
        how = ", executed" if self.executed else ", which cannot be" if self.refused else ""
        return f"p {self.p}, m {self.m}{chunks}{how}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the solution is called with."""
        return (self.p, self.m, self.v) if self.v else (self.p, self.m)


class ScheduleCheck(Check):
    """A schedule against what its paper promises. `idle` and `alive` say what is allowed, both of them at most."""

    points: ClassVar[dict[str, float]] = {"valid": 1, "bubble": 1, "memory": 1, "gradient": 1}
    visible: ClassVar[Sequence[tuple[int, ...]]] = ((4, 8), (3, 5), (4, 2), (2, 4), (1, 3), (5, 1))
    hidden: ClassVar[Sequence[tuple[int, ...]]] = ((6, 9), (5, 3), (2, 1), (7, 15), (1, 1), (3, 6))
    executed: ClassVar[Sequence[Sequence[tuple[int, ...]]]] = (((3, 4),), ((4, 2), (2, 5)))  # visible, hidden
    refused: ClassVar[Sequence[tuple[int, ...]]] = ()
    metric: ClassVar[str] = "makespan"
    letters: ClassVar[str] = "FB"  # the kinds of work: "FIW" for a backward that is split, "FBIW" for either
    messages: ClassVar[bool] = False  # whether sends and receives stand in the lists

    def routes(self, case: Planned) -> tuple[tuple[int, ...], ...]:
        """Where the stages live; `looped`, `v_shaped` and `both_ways` are others."""
        return straight(case.p)

    def idle(self, case: Planned, d: Durations) -> float | None:
        """The most that a rank may idle, by `metric`; None where these durations have no bound."""
        raise NotImplementedError

    def alive(self, case: Planned, rank: int) -> int:
        """The most micro-batches, each counted on each of the rank's stages, that it may keep: from F to B or W."""
        raise NotImplementedError

    def durations(self, case: Planned) -> list[Durations]:
        """Equal times, and others; the same for all stages."""
        draw = random.Random(case.seed)
        others = [tuple(round(draw.uniform(0.5, 2), 2) for _ in range(3)) for _ in range(2)]
        return [Durations(*times) for times in [(1.0, 1.0, 1.0), *others]]

    def also(self, case: Planned, schedule: Schedule) -> Iterator[Finding]:
        """What else the exercise asks of a valid schedule; nothing here."""
        return iter(())

    def cases(self, seed: int, level: str) -> list[Planned]:
        hidden = level == "hidden"
        on_paper = tuple(name for name in self.points if name not in ("gradient", "arguments"))
        plans = [(sizes, {"properties": on_paper}) for sizes in (self.hidden if hidden else self.visible)]
        if "gradient" in self.points:
            ways = {"executed": True, "properties": ("gradient",)}
            plans += [(sizes, ways) for sizes in self.executed[hidden]]
        if "arguments" in self.points:
            plans += [(sizes, {"refused": True, "properties": ("arguments",)}) for sizes in self.refused]
        return [
            Planned(
                world_size=sizes[0] if ways.get("executed") else 1, seed=seed + number,
                **dict(zip("pmv", sizes, strict=False)), **ways,
            )
            for number, (sizes, ways) in enumerate(plans)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Callable, case: Planned) -> dict:
        if case.refused:
            return {"refused": _refusal(lambda: solution(*case.sizes))}
        schedule = solution(*case.sizes)
        made = encode(schedule)
        if case.executed and isinstance(schedule, Schedule) and _can_run(schedule, case):
            return {"schedule": made} | staged.execute(pipeline.run, schedule, case.seed)
        return {"schedule": made}

    def judge(self, case: Planned, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.refused:
            yield self._judge_refusal(case, outcomes[0]["refused"])
            return
        for rank, outcome in enumerate(outcomes):
            problem, schedule = self._shape(case, outcome["schedule"])
            if problem:
                first, *others = case.properties
                yield Finding(first, False, problem + (f" on rank {rank}" if len(outcomes) > 1 else ""))
                yield from (Finding(name, None, "not judged: it is no such schedule") for name in others)
                return
        if case.executed:
            yield self._judge_run(case, schedule, outcomes)
            return
        valid = judge_valid(schedule, case.seed)
        yield valid
        if valid.passed:
            yield from self.also(case, schedule)
        for name, judge in (("bubble", self._judge_bubble), ("memory", self._judge_memory)):
            if name in self.points:
                yield judge(case, schedule) if valid.passed else Finding(name, None, "not judged: it is not valid")

    def _shape(self, case: Planned, made: Any) -> tuple[str, Schedule | None]:
        """What keeps a result from being judged, or the schedule."""
        try:
            schedule = decode(made)
        except ValueError as error:
            return str(error), None
        routes = self.routes(case)
        if schedule.num_microbatches != case.m:
            return f"it is for {numbered(schedule.num_microbatches, 'micro-batch')}, expected {case.m}", None
        if schedule.routes != routes:
            return f"the stages are on the ranks {_listed(schedule.routes)}, expected {_listed(routes)}", None
        if schedule.has_messages and not self.messages:
            return "messages are in the lists, expected computation only", None
        steps = {step.letter for actions in schedule.actions for a in actions for step in getattr(a, "steps", ())}
        if extra := sorted(steps - set(self.letters)):
            return f"actions of kind {extra[0]} are in the lists, expected {' and '.join(self.letters)}", None
        return "", schedule

    def _judge_bubble(self, case: Planned, schedule: Schedule) -> Finding:
        for durations in self.durations(case):
            allowed = self.idle(case, durations)
            if allowed is None:
                continue
            idle = idle_of(schedule, durations, self.metric)
            rank = max(range(case.p), key=idle.__getitem__)
            if idle[rank] > allowed + CLOSE:
                where = METRICS[self.metric]
                seen = f"rank {rank} idles for {idle[rank]:.4g}, expected at most {allowed:.4g}"
                d = durations
                times = f"F {d.forward}, I {d.input_gradient}, W {d.weight_gradient}; idle time is counted {where}"
                return Finding("bubble", False, seen, times)
        return Finding("bubble", True, f"at most what is allowed, {self.metric}, at equal and unequal times")

    def _judge_memory(self, case: Planned, schedule: Schedule) -> Finding:
        peaks = [alive(schedule, rank) for rank in range(case.p)]
        for rank, (peak, index) in enumerate(peaks):
            if peak > (most := self.alive(case, rank)):
                seen = f"rank {rank} keeps {numbered(peak, 'activation')}, expected at most {most}"
                return Finding("memory", False, seen, f"after its action {index}, {schedule.actions[rank][index]}")
        return Finding("memory", True, f"at most {numbered(max(peak for peak, _ in peaks), 'activation')} a rank")

    def _judge_run(self, case: Planned, schedule: Schedule, outcomes: list) -> Finding:
        if faults := find_faults(schedule):
            return Finding("gradient", False, f"it cannot be executed: {faults[0]}")
        if any("gradient" not in outcome for outcome in outcomes):
            return Finding("gradient", False, "it was not executed: the ranks made unlike schedules")
        wanted = [
            staged.expected(schedule.stages_of(rank), schedule.num_stages, case.m, case.seed) for rank in range(case.p)
        ]
        return compare_all("gradient", [outcome["gradient"] for outcome in outcomes], wanted, "layers")

    def _judge_refusal(self, case: Planned, refused: str) -> Finding:
        if refused == "ValueError":
            return Finding("arguments", True, "refuses what it cannot schedule")
        done = f"raises {refused}" if refused else "is scheduled without a word"
        return Finding("arguments", False, f"p {case.p}, m {case.m} {done}", "expected a ValueError that says so")


def judge_valid(schedule: Schedule, seed: int) -> Finding:
    """Whether it breaks no rule, and comes to its end with random durations of every stage and of messages."""
    if faults := find_faults(schedule):
        more = f"and {len(faults) - 1} more" if len(faults) > 1 else ""
        return Finding("valid", False, str(faults[0]), more, "Draw it: the first broken rule is marked.")
    draw = random.Random(seed)
    for _ in range(3):
        times = [tuple(draw.uniform(0.1, 3) for _ in range(schedule.num_stages)) for _ in range(3)]
        durations = Durations(*times, communication=draw.uniform(0, 2))
        if problem := _out_of_time(schedule, durations):
            return Finding("valid", False, problem, "with random durations")
    return Finding("valid", True, "no rule is broken, whatever the durations")


def idle_of(schedule: Schedule, durations: Durations, metric: str) -> tuple[float, ...]:
    """Each rank's idle time by one of the three metrics: "makespan", "window", "marginal"."""
    if metric == "marginal":
        return marginal_idle(schedule, durations)
    run = simulate(schedule, durations)
    return run.idle_by_makespan if metric == "makespan" else run.idle_in_window


def alive(schedule: Schedule, rank: int) -> tuple[int, int]:
    """The most activations that a rank keeps at once, and the action that is the first to make them so many.

    One is kept from a forward to the whole backward, or to the weight gradient, of its stage and micro-batch.
    """
    now = peak = at = 0
    for index, action in enumerate(schedule.actions[rank]):
        now += sum(isinstance(step, Forward) for step in action.steps)
        if now > peak:
            peak, at = now, index
        now -= sum(isinstance(step, Backward | WeightGradient) for step in action.steps)
    return peak, at


def _can_run(schedule: Schedule, case: Planned) -> bool:
    return schedule.num_ranks == dist.get_world_size() and schedule.num_microbatches == case.m and not (
        find_faults(schedule)
    )  # fmt: skip


def _refusal(build: Callable) -> str:
    """The name of the exception that `build` raises, empty where it raises none."""
    try:
        build()
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return ""


def _out_of_time(schedule: Schedule, durations: Durations) -> str:
    """The first step that starts before what it needs is there, or a rank that does not end; empty where none does."""
    run = simulate(schedule, durations)
    if run.waiting:
        rank, index = next(iter(run.waiting.items()))
        return f"rank {rank} waits for ever at action {index}, {schedule.actions[rank][index]}"
    ends = {step: event.end for events in run.events for event in events for step in event.action.steps}
    for events in run.events:
        for event in events:
            for step in event.action.steps:
                before = [KINDS["F"](step.stage - 1, step.microbatch)] if isinstance(step, Forward) else []
                if isinstance(step, Backward | InputGradient):
                    above = (step.stage + 1, step.microbatch)
                    before = [KINDS["F"](step.stage, step.microbatch), KINDS["B"](*above), KINDS["I"](*above)]
                if any(ends.get(other, 0) > event.start + CLOSE for other in before):
                    return f"rank {event.rank}, action {event.index}: {event.action} starts before what it needs"
    return ""


def _listed(routes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(list(route)) for route in routes)
