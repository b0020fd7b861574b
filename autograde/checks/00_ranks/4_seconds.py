"""Check of lesson 00: what a collective costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autograde.check import Check
from autograde.checks.alpha_beta import Costs, calls, judge_seconds, seconds
from autograde.verdict import Finding


class CollectiveSeconds(Check):
    exercise = "cost.collective_seconds"
    points = {"seconds": 1, "algorithm": 1, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Costs]:
        ranks = (2, 5, 8) if level == "visible" else (1, 3, 16, 33 + seed % 30)
        link = {"num_bytes": 3e6 + seed % 1000, "alpha": 5e-6, "beta": 1 / 2e9, "seed": seed}
        return [Costs(world_size=1, ranks=ranks, properties=(name,), **link) for name in self.points]

    @staticmethod
    def program(solution: Any, case: Costs) -> dict:
        return calls(lambda op, n, *way: solution(op, n, *case.link, *way), case)

    def judge(self, case: Costs, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,), expected = case.properties, calls(lambda op, n, *way: seconds(op, n, *case.link, *way), case)
        yield judge_seconds(name, outcomes[0], expected)
