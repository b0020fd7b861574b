"""Checks of lesson 06 for its two schedules: naive and GPipe."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.pipeline import Durations, Forward, Schedule

from autograde.checks.schedules import Planned, ScheduleCheck
from autograde.verdict import Finding


class Naive(ScheduleCheck):
    """One micro-batch at a time: it has the bubble that it has, so what is asked is that nothing piles up."""

    exercise = "pipeline.naive"
    points = {"valid": 1, "memory": 1, "gradient": 1}

    def alive(self, case: Planned, rank: int) -> int:
        return 1


class GPipe(ScheduleCheck):
    exercise = "pipeline.gpipe"
    points = {"valid": 1, "order": 1, "bubble": 1, "memory": 1, "gradient": 1}

    def idle(self, case: Planned, d: Durations) -> float:
        return (case.p - 1) * (d.forward + d.input_gradient + d.weight_gradient)

    def alive(self, case: Planned, rank: int) -> int:
        return case.m

    def also(self, case: Planned, schedule: Schedule) -> Iterator[Finding]:
        """All forwards of a rank come before its first backward."""
        for rank, actions in enumerate(schedule.actions):
            kinds = [isinstance(action, Forward) for action in actions]
            if (at := kinds.index(False)) < case.m:
                seen = f"rank {rank}, action {at}: {actions[at]} before the last of {case.m} forwards"
                yield Finding("order", False, seen, "GPipe does all forwards, then all backwards")
                return
        yield Finding("order", True, "all forwards, then all backwards")
