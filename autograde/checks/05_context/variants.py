"""Checks of lesson 05: keys and values gathered, and tokens traded for heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autograde.check import Check
from autograde.checks.attended import judge_bytes, judge_table, judge_values
from autograde.checks.attention import Heads, refused, try_attention, try_wrong_tables
from autograde.checks.tokens import APART, UNLIKE, group_of
from autograde.verdict import Finding


def planned(seed: int, plans: list[tuple]) -> list[Heads]:
    return [
        Heads(world_size=sum(map(len, groups)), groups=groups, seed=seed + i, **plan)
        for i, (groups, plan) in enumerate(plans)
    ]


class AllGatherAttention(Check):
    exercise = "context.all_gather_attention"
    points = {"output": 1, "gradient": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Heads]:
        if level == "visible":
            plans = [
                ((tuple(range(4)),), {"b": 2, "s": 24, "heads": 4, "kv_heads": 2, "order": "zigzag"}),
                (UNLIKE, {"b": 1, "s": 12, "order": "shuffled"}),
                (UNLIKE, {"b": 1, "s": 6, "heads": 3}),
            ]
        else:
            k = 1 + seed % 3
            plans = [
                ((tuple(range(5)),), {"b": 1, "s": 10 * k, "heads": 3, "kv_heads": 3, "order": "contiguous"}),
                (APART, {"b": 2, "s": 12, "d": 3, "order": "shuffled", "twice": True}),
                (APART, {"b": 1, "s": 12 * k, "order": "zigzag", "logits": "rising"}),
            ]
        plans.append((((0, 1, 2),), {"s": 6, "wrong_table": True, "properties": ("output",)}))
        return planned(seed, plans)

    @staticmethod
    def program(solution: Any, case: Heads) -> dict:
        return (try_wrong_tables if case.wrong_table else try_attention)(solution, case)

    def judge(self, case: Heads, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.wrong_table:
            yield judge_table(case, outcomes)
            return
        look = "Every rank has used this rank's keys and values. Who has their gradients?"
        yield from judge_values(case, outcomes, look, "Over which keys, and under which mask, do these queries look?")
        times = 2 if case.twice else 1

        def others(rank: int) -> float:
            return times * (len(case.place(rank)[1]) - 1) * case.block(rank)

        expected = {("all_gather", "forward"): others, ("reduce_scatter", "backward"): others}
        words = "K and V gathered forward, their gradients scattered backward"
        yield judge_bytes(case, ledger, expected, words, 2 * times)


class AllToAllAttention(Check):
    exercise = "context.all_to_all_attention"
    points = {"output": 1, "gradient": 2, "traffic": 1, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Heads]:
        used = ("output", "gradient", "traffic")
        if level == "visible":
            plans = [
                ((tuple(range(4)),), {"b": 2, "s": 24, "heads": 8, "kv_heads": 4, "order": "zigzag"}),
                (UNLIKE, {"b": 1, "s": 12, "heads": 6, "kv_heads": 3, "order": "shuffled"}),
                (UNLIKE, {"b": 1, "s": 6, "heads": 3, "kv_heads": 3}),
            ]
        else:
            k = 1 + seed % 3
            plans = [
                ((tuple(range(5)),), {"s": 10 * k, "heads": 10, "kv_heads": 5, "order": "contiguous"}),
                (APART, {"b": 2, "s": 12, "heads": 6, "kv_heads": 6, "d": 3, "order": "shuffled", "twice": True}),
                (APART, {"b": 1, "s": 12 * k, "heads": 12, "kv_heads": 6, "order": "zigzag", "logits": "rising"}),
            ]
        cases = planned(seed, [(groups, plan | {"properties": used}) for groups, plan in plans])
        uneven = {"s": 6, "heads": 6, "kv_heads": 2, "properties": ("arguments",)}
        return [*cases, *planned(seed, [(((0, 1, 2),), uneven)])]

    @staticmethod
    def program(solution: Any, case: Heads) -> dict:
        if "arguments" not in case.properties:
            return try_attention(solution, case)
        group, rank = group_of(case), dist.get_rank()
        q, k = (torch.ones(1, h, case.tokens_of(rank), case.d) for h in (case.heads, case.kv_heads))
        return {"refused": refused(solution, q, k, k, group)}

    def judge(self, case: Heads, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if "arguments" in case.properties:
            raised = outcomes[0]["refused"]
            done = f"raise {raised}" if raised else "are split without a word"
            seen = f"{case.heads} query heads and {case.kv_heads} key heads over {case.world_size} ranks {done}"
            detail = "expected a ValueError that says so, before anything is sent"
            yield Finding("arguments", raised == "ValueError", seen, detail, error=0.0)
            return
        look = (
            "Backward, each gradient goes where its tensor came from. To which tokens, in which order, and which heads?"
        )
        yield from judge_values(case, outcomes, look)
        times = 2 if case.twice else 1

        def traded(rank: int) -> float:
            n = len(case.place(rank)[1])
            return times * (n - 1) / n * (2 * case.queries(rank) + case.block(rank))

        expected = {("all_to_all", "forward"): traded, ("all_to_all", "backward"): traded}
        words = "q, k, v and the output traded each way"
        yield judge_bytes(case, ledger, expected, words, 4 * times)
