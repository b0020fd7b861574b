"""Checks of lesson 00: what goes around a ring."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from autograde.check import Check
from autograde.checks.among import EVEN, GROUPS, UNEVEN, Pieces, Whole, empty_is_nan, planned, uneven_pieces
from autograde.checks.messages import expect_messages
from autograde.checks.training import group_of
from autograde.compare import compare
from autograde.verdict import Finding

NUMBER = 8  # bytes of a float64
FOUR, UNEQUAL, FIVE, APART, _ = GROUPS


def _judge_ring(
    case: Pieces | Whole, outcomes: list, expected: list, given: list, ledger: Any, passes: int, sent: list
) -> Iterator[Finding]:
    """The result, and x as it was; in even cases each rank's messages, in uneven ones the bytes of a group."""
    value = case.properties[0]
    yield compare(value, "the result", [o["result"] for o in outcomes], expected)
    yield compare(value, "x afterwards", [o["x"] for o in outcomes], given, "exact")
    if case.properties == EVEN:
        messages = [passes * (len(case.peers(rank)) - 1) for rank in range(case.world_size)]
        yield expect_messages("traffic", ledger, case.groups, messages, sent, ring=True)
        return
    yield expect_messages(value, ledger, case.groups, ring=True)
    for ranks in case.groups:
        total = sum(call.bytes for rank in ranks for call in ledger[rank].communications if call.op == "send")
        if total > (most := sum(sent[rank] for rank in ranks)):
            yield Finding(value, False, f"ranks {list(ranks)} send {total} B together, expected at most {most} B")


class ReduceScatter(Check):
    exercise = "collectives.ring_reduce_scatter"
    points = {"output": 1, "traffic": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Pieces]:
        return uneven_pieces(seed, level)

    @staticmethod
    def program(solution: Any, case: Pieces) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        x, (sizes, _) = case.whole(rank), case.of(rank)
        with empty_is_nan():
            return {"result": solution(x, sizes, group), "x": x}

    def judge(self, case: Pieces, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, sent = [], []
        for rank in range(case.world_size):
            sizes, number = case.of(rank)
            expected.append(sum(case.whole(r) for r in case.peers(rank)).split(sizes)[number])
            sent.append(NUMBER * prod(case.row) * (sum(sizes) - sizes[number]))
        given = [case.whole(rank) for rank in range(case.world_size)]
        yield from _judge_ring(case, outcomes, expected, given, ledger, 1, sent)


class AllGather(Check):
    exercise = "collectives.ring_all_gather"
    points = {"output": 1, "traffic": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Pieces]:
        return uneven_pieces(seed, level)

    @staticmethod
    def program(solution: Any, case: Pieces) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        x, (sizes, _) = case.piece(rank), case.of(rank)
        with empty_is_nan():
            return {"result": solution(x, sizes, group), "x": x}

    def judge(self, case: Pieces, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, sent = [], []
        for rank in range(case.world_size):
            sizes, number = case.of(rank)
            expected.append(torch.cat([case.piece(r) for r in case.peers(rank)]))
            sent.append(NUMBER * prod(case.row) * (sum(sizes) - sizes[(number + 1) % len(sizes)]))
        given = [case.piece(rank) for rank in range(case.world_size)]
        yield from _judge_ring(case, outcomes, expected, given, ledger, 1, sent)


class AllReduce(Check):
    exercise = "collectives.ring_all_reduce"
    points = {"output": 1, "traffic": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Whole]:
        plans = [(FOUR, (8,), EVEN), (UNEQUAL, (2, 3), EVEN)]
        plans += [(FOUR, (5,), UNEVEN), (FOUR, (7,), UNEVEN), (FOUR, (), UNEVEN)]
        if level == "hidden":
            k = 1 + seed % 3
            plans = [(FIVE, (k, 5), EVEN), (APART, (6, k), EVEN), (APART, (k, 7), UNEVEN), (FIVE, (2,), UNEVEN)]
            plans += [(FIVE, (0, 3), UNEVEN)]
        named = [{"groups": g, "shape": shape, "properties": names} for g, shape, names in plans]
        return planned(Whole, seed, [plan | {"transposed": len(plan["shape"]) == 2} for plan in named])

    @staticmethod
    def program(solution: Any, case: Whole) -> dict:
        (group, _), x = group_of(case.groups), case.x(dist.get_rank())
        with empty_is_nan():
            return {"result": solution(x, group), "x": x}

    def judge(self, case: Whole, outcomes: list, ledger: Any) -> Iterator[Finding]:
        every = range(case.world_size)
        expected = [sum(case.x(r) for r in case.peers(rank)) for rank in every]
        sizes = [len(case.peers(rank)) for rank in every]
        # All pieces as large as the largest: whoever fills up to equal pieces sends that.
        sent = [2 * (n - 1) * -(-case.count // n) * NUMBER for n in sizes]
        yield from _judge_ring(case, outcomes, expected, [case.x(rank) for rank in every], ledger, 2, sent)
        for rank in every if case.properties == UNEVEN else ():
            largest = max((c.bytes for c in ledger[rank].communications if c.op == "send"), default=0)
            if largest > (most := -(-case.count // sizes[rank]) * NUMBER):
                yield Finding("uneven", False, f"rank {rank} sends {largest} B at once, expected at most {most} B")
        first = [outcomes[case.peers(rank)[0]]["result"] for rank in every]
        look = "Is each number summed once, in one order, and then copied?"
        name = "the result, beside that of the first rank of its group,"
        yield compare(case.properties[0], name, [o["result"] for o in outcomes], first, "exact", look)
