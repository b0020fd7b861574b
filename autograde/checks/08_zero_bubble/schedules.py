"""Checks of lesson 08, schedules: how long ranks idle, by three clocks, and four schedules that idle less."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fivefold import pipeline
from fivefold.pipeline import Durations, Overlapped, Schedule, both_ways, in_order, simulate, straight, v_shaped

from autograde.case import Case
from autograde.check import Check
from autograde.checks.schedules import CLOSE, Planned, ScheduleCheck
from autograde.verdict import Finding, numbered

LONG = 60  # iterations after which one more takes as long as any
SAME = 1e-6  # of times: differences of sums of thousands of durations


@dataclass(frozen=True, kw_only=True)
class Clocked(Case):
    """Schedules `(name, p, m)` of the library, each with durations of F, I and W, alike for all stages or for each."""

    schedules: tuple[tuple[str, int, int], ...]
    unequal: bool = False
    stuck: bool = False

    def __str__(self) -> str:
        if self.stuck:
            return "a schedule that cannot reach its end"
        names = ", ".join(f"{name} p {p} m {m}" for name, p, m in self.schedules)
        return f"{names}{', stages of unequal times' if self.unequal else ''}"

    def made(self) -> list[tuple[Schedule, Durations | None]]:
        """The schedules and their durations; None, which is equal times, for the first."""
        if self.stuck:
            circle = [in_order(words.split(), [rank]) for rank, words in enumerate(["F B F B", "F F B B"])]
            return [(Schedule("stuck", 2, straight(2), circle), None)]
        draw, found = random.Random(self.seed), []
        for number, (name, *sizes) in enumerate(self.schedules):
            schedule = getattr(pipeline, name)(*sizes)
            each = schedule.num_stages if self.unequal else 1
            times = [[round(draw.uniform(0.5, 2), 2) for _ in range(each)] for _ in range(3)]
            plain = Durations(*(own if self.unequal else own[0] for own in times))
            found.append((schedule, plain if number or self.unequal else None))
        return found


class MarginalIdle(Check):
    exercise = "pipeline.marginal_idle"
    points = {"value": 2, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Clocked]:
        if level == "visible":
            names = [("zb_h2", 4, 8), ("one_f_one_b", 4, 8), ("zb_v", 3, 6), ("gpipe", 2, 3)]
            uneven = [("zb_h1", 3, 5), ("one_f_one_b", 4, 2)]
        else:
            names, uneven = (
                [("zb_h2", 3, 5 + seed % 4), ("dualpipe", 4, 8)],
                [("zb_h2", 4, 9), ("zb_v", 3, 5 + seed % 3)],
            )
        cases = [(tuple(names), False, False), (tuple(uneven), True, False), ((), False, True)]
        return [
            Clocked(
                world_size=1, schedules=schedules, unequal=unequal, stuck=stuck, seed=seed + i,
                properties=("arguments",) if stuck else ("value",),
            )
            for i, (schedules, unequal, stuck) in enumerate(cases)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Callable, case: Clocked) -> dict:
        if not case.stuck:
            return {
                f"{schedule.name} on {schedule.num_ranks} ranks": list(
                    map(float, solution(schedule) if durations is None else solution(schedule, durations))
                )
                for schedule, durations in case.made()
            }
        try:
            solution(*case.made()[0])
        except NotImplementedError:
            raise
        except Exception as error:
            return {"refused": type(error).__name__}
        return {"refused": ""}

    def judge(self, case: Clocked, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.stuck:
            refused = outcomes[0]["refused"]
            seen = f"a schedule that cannot reach its end {f'raises {refused}' if refused else 'gives a number'}"
            right = refused == "ValueError"
            yield Finding("arguments", right, seen, "" if right else "expected a ValueError that says so")
            return
        for schedule, durations in case.made():
            name = f"{schedule.name} on {schedule.num_ranks} ranks"
            before, after = (simulate(schedule, durations, n) for n in (LONG, LONG + 1))
            wanted = [after.makespan - before.makespan - busy / (LONG + 1) for busy in after.busy]
            got = outcomes[0][name]
            if len(got) != len(wanted):
                yield Finding("value", False, f"{name}: {len(got)} numbers, expected one for each rank")
                return
            for rank, (one, other) in enumerate(zip(got, wanted, strict=True)):
                if abs(one - other) > SAME:
                    seen = f"{name}: rank {rank} idles for {one:.4g}, expected {other:.4g}"
                    yield Finding("value", False, seen, f"F, I and W take {_times(durations)}")
                    return
        yield Finding("value", True, numbered(len(case.schedules), "schedule"), error=0.0)


def _times(d: Durations | None) -> str:
    return "1" if d is None else f"{d.forward}, {d.input_gradient} and {d.weight_gradient}"


class Split(ScheduleCheck):
    """A schedule whose backward is split. W is no longer than F and I: where it is, the papers state no bubble."""

    points = {"valid": 1, "bubble": 2, "memory": 1, "gradient": 1}
    letters = "FIW"

    def durations(self, case: Planned) -> list[Durations]:
        draw, found = random.Random(case.seed), [Durations()]
        for _ in range(2):
            f, i = (round(draw.uniform(0.5, 2), 2) for _ in range(2))
            found.append(Durations(f, i, round(min(f, i) * draw.uniform(0.4, 1), 2)))
        return found


class ZbH1(Split):
    exercise = "pipeline.zb_h1"
    executed = (((3, 2), (2, 3)), ((4, 6), (4, 2)))

    def idle(self, case: Planned, d: Durations) -> float | None:
        return (case.p - 1) * (d.forward + d.input_gradient - d.weight_gradient) if case.m >= case.p else None

    def alive(self, case: Planned, rank: int) -> int:
        return min(case.p, case.m)


class ZbH2(Split):
    exercise = "pipeline.zb_h2"
    metric = "window"
    visible = ((4, 8), (3, 5), (4, 2), (2, 4), (1, 3), (5, 1))
    hidden = ((5, 9), (6, 13), (5, 3), (2, 3), (1, 1), (3, 6))

    def idle(self, case: Planned, d: Durations) -> float | None:
        enough = case.m >= 2 * case.p - 1
        return (case.p - 1) * (d.forward + d.input_gradient - 2 * d.weight_gradient) if enough else None

    def alive(self, case: Planned, rank: int) -> int:
        return min(2 * case.p - 1, case.m)


class ZbV(Split):
    exercise = "pipeline.zb_v"
    points = {"valid": 1, "bubble": 2, "memory": 1, "gradient": 1, "arguments": 1}
    metric = "window"
    visible = ((4, 8), (3, 5), (2, 4), (1, 1), (4, 7))
    hidden = ((5, 9), (6, 14), (2, 3), (1, 3), (3, 6))
    executed = (((3, 5), (2, 4)), ((4, 7), (2, 3)))
    refused = ((4, 6), (3, 2))

    def routes(self, case: Planned) -> tuple[tuple[int, ...], ...]:
        return v_shaped(case.p)

    def durations(self, case: Planned) -> list[Durations]:
        """Equal times alone: the paper states no bubble for others."""
        return [Durations(*[times] * 3) for times in (1.0, 0.5)]

    def idle(self, case: Planned, d: Durations) -> float | None:
        return 0.0

    def alive(self, case: Planned, rank: int) -> int:
        return 2 * case.p


class DualPipe(Split):
    exercise = "pipeline.dualpipe"
    points = {"valid": 1, "bubble": 2, "memory": 1, "gradient": 1, "arguments": 1}
    letters = "FBIW"
    visible = ((4, 8), (2, 4), (4, 10), (6, 12))
    hidden = ((6, 14), (2, 6), (8, 16), (4, 12))
    executed = (((2, 4), (4, 8)), ((4, 10), (2, 6)))
    refused = ((3, 8), (4, 9), (4, 6))

    def routes(self, case: Planned) -> tuple[tuple[int, ...], ...]:
        return both_ways(case.p)

    def durations(self, case: Planned) -> list[Durations]:
        """T_F = T_I, T_W no longer; a pair takes its two parts together, or less."""
        draw, found = random.Random(case.seed), [Durations(overlapped=3.0), Durations(overlapped=2.5)]
        for _ in range(2):
            f = round(draw.uniform(0.5, 2), 2)
            w = round(f * draw.uniform(0.4, 1), 2)
            found.append(Durations(f, f, w, overlapped=2 * f + w - draw.uniform(0.2, 0.9) * f))
        return found

    def idle(self, case: Planned, d: Durations) -> float | None:
        backward = d.input_gradient + d.weight_gradient
        return (case.p / 2 - 1) * (d.overlapped + backward - 3 * d.weight_gradient)

    def alive(self, case: Planned, rank: int) -> int:
        return case.p + 1

    def also(self, case: Planned, schedule: Schedule) -> Iterator[Finding]:
        """The whole takes the time of the ranks with the most pairs, m - p - 1, and their bubble."""
        for d in self.durations(case):
            work = d.forward + d.input_gradient + d.weight_gradient
            pairs = case.m - case.p - 1
            allowed = self.idle(case, d) + case.m * work - pairs * (work - d.overlapped)
            took = simulate(schedule, d).makespan
            if took > allowed + CLOSE:
                overlapped = sum(isinstance(action, Overlapped) for action in schedule.actions[case.p // 2])
                seen = f"it takes {took:.4g}, expected at most {allowed:.4g}"
                times = f"F {d.forward}, I {d.input_gradient}, W {d.weight_gradient}, F&B {d.overlapped:.3g}; "
                times += f"rank {case.p // 2} overlaps {overlapped} forwards with a backward"
                yield Finding("bubble", False, seen, times)
                return
