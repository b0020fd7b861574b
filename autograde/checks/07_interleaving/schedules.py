"""Checks of lesson 07 for its two schedules: 1F1B and interleaved 1F1B."""

from __future__ import annotations

from fivefold.pipeline import Durations, looped

from autograde.checks.schedules import Planned, ScheduleCheck


class OneFOneB(ScheduleCheck):
    exercise = "pipeline.one_f_one_b"
    points = {"valid": 1, "bubble": 1, "memory": 2, "gradient": 1}

    def idle(self, case: Planned, d: Durations) -> float:
        return (case.p - 1) * (d.forward + d.input_gradient + d.weight_gradient)

    def alive(self, case: Planned, rank: int) -> int:
        return min(case.p - rank, case.m)


class Interleaved(ScheduleCheck):
    exercise = "pipeline.interleaved"
    points = {"valid": 1, "bubble": 2, "memory": 1, "gradient": 1, "arguments": 1}
    visible = ((4, 8, 2), (2, 4, 3), (3, 6, 1), (3, 3, 2), (1, 2, 2))
    hidden = ((5, 5, 3), (2, 2, 4), (4, 4, 3), (1, 1, 1), (3, 9, 2))
    executed = (((2, 4, 2),), ((3, 3, 2), (2, 2, 3)))
    refused = ((4, 6, 2), (3, 2, 2))

    def routes(self, case: Planned) -> tuple[tuple[int, ...], ...]:
        return looped(case.p, case.v)

    def idle(self, case: Planned, d: Durations) -> float:
        """Durations are those of a stage, of which a rank has v: the bubble is that of p-1 of them."""
        return (case.p - 1) * (d.forward + d.input_gradient + d.weight_gradient)

    def alive(self, case: Planned, rank: int) -> int:
        return min(2 * (case.p - rank - 1) + (case.v - 1) * case.p + 1, case.m * case.v)
