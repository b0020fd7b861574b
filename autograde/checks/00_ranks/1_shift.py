"""Check of lesson 00: a message to the next rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autograde.check import Check
from autograde.checks.among import GROUPS, Shifted, planned
from autograde.checks.messages import entries_here, expect_messages, left_open
from autograde.checks.training import group_of
from autograde.compare import compare
from autograde.verdict import Finding

NUMBER = 8  # bytes of a float64
FOUR, UNEQUAL, FIVE, APART, _ = GROUPS


class Shift(Check):
    exercise = "collectives.shift"
    points = {"output": 1, "traffic": 1, "waits": 1}

    def cases(self, seed: int, level: str) -> list[Shifted]:
        others = (FOUR, 2, True), (UNEQUAL, -1, False), (FOUR, 4, False)
        plans = [(FOUR, 1, False, ()), *((*plan, ("output",)) for plan in others)]
        if level == "hidden":
            plans = [(FIVE, 2 + seed % 2, False), (APART, 1, True), (FIVE, -3, True), (((0, 1),), 3, False)]
        names = "groups", "distance", "transposed", "properties"
        return planned(Shifted, seed, [dict(zip(names, plan, strict=False)) for plan in plans])

    @staticmethod
    def program(solution: Any, case: Shifted) -> dict:
        (group, _), rank, first = group_of(case.groups), dist.get_rank(), len(entries_here())
        x, received = case.x(rank), torch.full_like(case.x(case.source(rank)).contiguous(), -1)
        result = solution(x, received, group, case.distance)
        dist.barrier()  # a rank that leaves while its message is under way would keep the receiver waiting
        return {"result": result, "received": received, "x": x, "open": left_open(entries_here()[first:])}

    def judge(self, case: Shifted, outcomes: list, ledger: Any) -> Iterator[Finding]:
        every = range(case.world_size)
        expected = {name: [case.x(case.source(rank)) for rank in every] for name in ("received", "result")}
        expected["x"] = [case.x(rank) for rank in every]
        for name, values in expected.items():
            yield compare("output", name, [o[name] for o in outcomes], values, "exact")
        sent = [NUMBER * case.x(rank).numel() * case.moves(rank) for rank in every]
        yield expect_messages("traffic", ledger, case.groups, [int(case.moves(rank)) for rank in every], sent)
        yield self._waits(ledger)

    def _waits(self, ledger: Any) -> Finding:
        for rank in ledger.ranks:
            started = left_open(rank.entries)
            if "recv" in started:
                look = "The caller may read `received` as soon as shift returns. Is it filled by then?"
                return Finding("waits", False, f"rank {rank.rank} starts a receive and never waits for it", look=look)
            if started:
                look = "The caller may write into x as soon as shift returns. Has x left by then?"
                return Finding("waits", False, f"rank {rank.rank} starts a send and never waits for it", look=look)
        return Finding("waits", True, "nothing is under way at the end")
