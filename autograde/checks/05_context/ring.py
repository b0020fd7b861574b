"""The check of lesson 05's ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autograde.check import Check
from autograde.checks.attended import judge_half, judge_memory, judge_overlap, judge_ring, judge_table, judge_values
from autograde.checks.attention import Heads, try_attention, try_half, try_measured, try_wrong_tables
from autograde.checks.tokens import APART, UNLIKE
from autograde.verdict import Finding

VALUES = ("output", "gradient", "traffic")
HELD = ("memory", "overlap")
LOOK = "Whose queries has a block met on its way? Each has a share in the block's dK and dV."
LOOK_Q = "Which log-sum-exp, which mask, and are the shares of all blocks added?"


class RingAttention(Check):
    exercise = "context.ring_attention"
    points = {"output": 2, "gradient": 3, "traffic": 2, "memory": 1, "overlap": 2}
    measure = True

    def cases(self, seed: int, level: str) -> list[Heads]:
        four, six, eight = ((tuple(range(n)),) for n in (4, 6, 8))
        if level == "visible":
            plans = [
                (four, {"b": 2, "s": 24, "heads": 4, "kv_heads": 2, "order": "zigzag", "properties": VALUES}),
                (UNLIKE, {"b": 1, "s": 12, "order": "shuffled", "logits": "rising", "properties": VALUES}),
                (six, {"s": 48, "d": 8, "properties": ("traffic", *HELD)}),
            ]
        else:
            k = 1 + seed % 3
            plans = [
                (eight, {"b": 1, "s": 16 * k, "heads": 3, "kv_heads": 3, "order": "contiguous", "properties": VALUES}),
                (APART, {"b": 2, "s": 12, "d": 3, "order": "shuffled", "twice": True, "properties": VALUES}),
                (APART, {"b": 1, "s": 12 * k, "order": "zigzag", "logits": "lifted", "properties": VALUES}),
                (six, {"s": 48 * k, "d": 6, "heads": 4, "kv_heads": 2, "properties": ("traffic", *HELD)}),
            ]
        plans += [
            (((0, 1, 2),), {"s": 6, "heads": 2, "d": 8, "half": True, "properties": ("output",)}),
            (((0, 1, 2),), {"s": 6, "wrong_table": True, "properties": ("output",)}),
        ]
        return [
            Heads(world_size=sum(map(len, groups)), groups=groups, seed=seed + i, **plan)
            for i, (groups, plan) in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Heads) -> dict:
        if case.half or case.wrong_table:
            return (try_half if case.half else try_wrong_tables)(solution, case)
        return (try_measured if "memory" in case.properties else try_attention)(solution, case)

    def judge(self, case: Heads, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.half or case.wrong_table:
            yield (judge_half if case.half else judge_table)(case, outcomes)
            return
        if "memory" in case.properties:
            yield judge_ring(case, ledger)
            yield judge_memory(case, outcomes, ledger)
            yield judge_overlap(case, ledger)
            return
        yield from judge_values(case, outcomes, LOOK, LOOK_Q)
        yield judge_ring(case, ledger)
