"""Checks of lesson 00: a broadcast and an all-to-all."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from autograde.check import Check
from autograde.checks.among import EVEN, GROUPS, UNEVEN, Exchange, Rooted, empty_is_nan, planned
from autograde.checks.messages import expect_messages, log_rounds, rounds
from autograde.checks.training import group_of
from autograde.compare import compare
from autograde.verdict import Finding

NUMBER = 8  # bytes of a float64
FOUR, UNEQUAL, FIVE, APART, SEVEN = GROUPS


class Broadcast(Check):
    exercise = "collectives.tree_broadcast"
    points = {"output": 1, "rounds": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Rooted]:
        plans = [(FOUR, (2, 3), (2,)), (UNEQUAL, (4,), (1, 0)), (FOUR, (), (0,)), (SEVEN, (2,), (0,))]
        if level == "hidden":
            plans = [(FIVE, (0,), (4,)), (APART, (3,), (1, 2)), (SEVEN, (2,), (1 + seed % 6,)), (FIVE, (3,), (2,))]
        return planned(Rooted, seed, [{"groups": g, "shape": shape, "roots": roots} for g, shape, roots in plans])

    @staticmethod
    def program(solution: Any, case: Rooted) -> dict:
        (group, place), x = group_of(case.groups), case.x(dist.get_rank())
        return {"result": solution(x, case.roots[place], group), "x": x}

    def judge(self, case: Rooted, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected = [case.x(case.root(rank)) for rank in range(case.world_size)]
        for name in ("result", "x"):
            yield compare("output", name, [o[name] for o in outcomes], expected, "exact")
        most, number = max(map(len, case.groups)), rounds(ledger)
        seen, fewest = f"{number} rounds for {most} ranks", log_rounds(most)
        look = "After a round, which ranks have x? What does each of them do in the next?"
        if number < fewest:
            look = "Rounds are counted in messages. By which other way does x get to the ranks?"
        yield (
            Finding("rounds", True, seen)
            if number == fewest
            else Finding("rounds", False, f"{seen}, expected {fewest}", look=look)
        )
        yield self._traffic(case, ledger)

    def _traffic(self, case: Rooted, ledger: Any) -> Finding:
        found, size = expect_messages("traffic", ledger, case.groups), NUMBER * case.count
        for rank in range(case.world_size) if found.passed else ():
            calls, wanted = ledger[rank].communications, int(rank != case.root(rank))
            number, other = sum(c.op == "recv" for c in calls), [c for c in calls if c.op == "send" and c.bytes != size]
            if number != wanted:
                return Finding("traffic", False, f"rank {rank} receives {number} times, expected {wanted}")
            if other:
                return Finding("traffic", False, f"rank {rank} sends {other[0].bytes} B at once, expected {size} B")
        total = case.world_size - len(case.groups)
        return Finding("traffic", True, f"{total} messages in all", f"{size} B each") if found.passed else found


class AllToAll(Check):
    exercise = "collectives.pairwise_all_to_all"
    points = {"output": 1, "traffic": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Exchange]:
        plans = [
            (FOUR, lambda i, j: 2, EVEN, (2,)),
            (UNEQUAL, lambda i, j: 1, EVEN, ()),
            (FOUR, lambda i, j: (3 * i + 2 * j) % 4, UNEVEN, (2, 3)),
            (FOUR, lambda i, j: 2 * (j == 1), UNEVEN, (2,)),
        ]
        if level == "hidden":
            k = 1 + seed % 3
            plans = [(FIVE, lambda i, j: k, EVEN, (1, 3)), (APART, lambda i, j: (2 * i + j * k) % 3, UNEVEN, ())]
            plans += [(FIVE, lambda i, j: (i + 1) * (j != 2) % 4, UNEVEN, (3,)), (FIVE, lambda i, j: 0, UNEVEN, (2,))]
        tables = [
            tuple(tuple(tuple(rows(i, j) for j in range(len(g))) for i in range(len(g))) for g in groups)
            for groups, rows, *_ in plans
        ]
        named = [
            {"groups": groups, "properties": names, "row": row, "tables": table}
            for (groups, _, names, row), table in zip(plans, tables, strict=True)
        ]
        return planned(Exchange, seed, named)

    @staticmethod
    def program(solution: Any, case: Exchange) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        x = case.x(rank)
        with empty_is_nan():
            return {"result": solution(x, *case.rows(rank), group), "x": x}

    def judge(self, case: Exchange, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, sent, value = [], [], case.properties[0]
        every = range(case.world_size)
        for rank in every:
            (rows, _), (_, number) = case.rows(rank), case.place(rank)
            expected.append(torch.cat([case.x(r).split(case.rows(r)[0])[number] for r in case.peers(rank)]))
            sent.append(NUMBER * prod(case.row) * (sum(rows) - rows[number]))
        yield compare(value, "the result", [o["result"] for o in outcomes], expected, "exact")
        yield compare(value, "x afterwards", [o["x"] for o in outcomes], [case.x(rank) for rank in every], "exact")
        messages = [len(case.peers(rank)) - 1 for rank in every] if case.properties == EVEN else None
        yield expect_messages(case.properties[-1], ledger, case.groups, messages, sent)
