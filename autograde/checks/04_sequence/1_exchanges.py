"""Checks of lesson 04: how tokens are gathered and scattered, and how each region draws its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autograde.check import Check
from autograde.checks.sequence import (
    judge_exchange,
    judge_regions,
)
from autograde.checks.tokens import (
    APART,
    PAIRS,
    UNLIKE,
    Exchange,
    Tokens,
    exchange_cases,
    group_of,
    try_exchange,
    try_regions,
)
from autograde.verdict import Finding


class GatherTokens(Check):
    exercise = "sequence.gather_tokens"
    points = {"output": 1, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        return exchange_cases(seed, level)

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        return try_exchange(solution, case, Exchange(gathers=True))

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        look = "All ranks of the group used this rank's tokens. Whose gradients do these get?"
        return judge_exchange(case, outcomes, ledger, Exchange(gathers=True), look)


class ScatterTokens(Check):
    exercise = "sequence.scatter_tokens"
    points = {"output": 1, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        uneven = Tokens(world_size=4, groups=UNLIKE, s=7, properties=("output",))
        return exchange_cases(seed, level) + ([uneven] if level == "visible" else [])

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        if not case.properties:
            return try_exchange(solution, case, Exchange(gathers=False))
        group = group_of(case)
        try:
            solution(torch.ones(case.b, case.s, case.h), group)
        except Exception as error:
            return {"refused": type(error).__name__}
        return {"refused": ""}

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if not case.properties:
            look = "What this rank handed in is in the sums of all tokens. Who knows the gradient of each sum?"
            yield from judge_exchange(case, outcomes, ledger, Exchange(gathers=False), look)
            return
        refused = outcomes[0]["refused"]
        done = f"raise {refused}" if refused else "are cut without a word"
        seen = f"{case.s} tokens for {len(case.groups[0])} ranks {done}"
        yield Finding("output", refused == "ValueError", seen, "expected a ValueError that says so", error=0.0)


class RegionRng(Check):
    exercise = "sequence.region_rng"
    points = {"split": 1, "replicated": 1, "passes": 1, "restored": 1, "outside": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        sizes = [(4, UNLIKE), (4, PAIRS)] if level == "visible" else [(5, APART), (3, ((0, 1, 2),))]
        return [Tokens(world_size=world, groups=groups, seed=seed + i) for i, (world, groups) in enumerate(sizes)]

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        return try_regions(solution, case)

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        return judge_regions(case, outcomes, ledger)
