"""Checks of lesson 00: ranks and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autograde.alpha_beta import Costs, calls, seconds
from autograde.among import EVEN, GROUPS, UNEVEN, Exchange, Pieces, Rooted, Shifted, Whole, planned, uneven_pieces
from autograde.check import Check
from autograde.compare import compare, compare_all
from autograde.messages import entries_here, expect_messages, log_rounds, rounds, unwaited
from autograde.question import Question
from autograde.training import group_of
from autograde.verdict import Finding

NUMBER = 8  # bytes of a float64
FOUR, UNEQUAL, FIVE, APART, SEVEN = GROUPS


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
        return {"result": result, "received": received, "x": x, "open": unwaited(entries_here()[first:])}

    def judge(self, case: Shifted, outcomes: list, ledger: Any) -> Iterator[Finding]:
        every = range(case.world_size)
        expected = {name: [case.x(case.source(rank)) for rank in every] for name in ("received", "result")}
        expected["x"] = [case.x(rank) for rank in every]
        for name, values in expected.items():
            yield compare("output", name, [o[name] for o in outcomes], values, "exact")
        sent = [NUMBER * case.x(rank).numel() * case.moves(rank) for rank in every]
        yield expect_messages("traffic", ledger, case.groups, [int(case.moves(rank)) for rank in every], sent)
        still = [rank for rank in every if unwaited(ledger[rank].entries)]
        look = "The caller may write into x as soon as shift returns. Has x left by then?"
        yield (
            Finding("waits", False, f"rank {still[0]} starts a message and never waits for it", look=look)
            if still
            else Finding("waits", True, "nothing is under way at the end")
        )


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
            yield Finding(value, False, f"ranks {list(ranks)} send {total} B together, expected {most} B")


class ReduceScatter(Check):
    exercise = "collectives.ring_reduce_scatter"
    points = {"output": 1, "traffic": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Pieces]:
        return uneven_pieces(seed, level)

    @staticmethod
    def program(solution: Any, case: Pieces) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        x, (sizes, _) = case.whole(rank), case.of(rank)
        return {"result": solution(x, sizes, group), "x": x}

    def judge(self, case: Pieces, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, sent = [], []
        for rank in range(case.world_size):
            sizes, number = case.of(rank)
            expected.append(sum(case.whole(r) for r in case.peers(rank)).split(sizes)[number])
            sent.append(NUMBER * case.width * (sum(sizes) - sizes[number]))
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
        return {"result": solution(x, sizes, group), "x": x}

    def judge(self, case: Pieces, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, sent = [], []
        for rank in range(case.world_size):
            sizes, number = case.of(rank)
            expected.append(torch.cat([case.piece(r) for r in case.peers(rank)]))
            sent.append(NUMBER * case.width * (sum(sizes) - sizes[(number + 1) % len(sizes)]))
        given = [case.piece(rank) for rank in range(case.world_size)]
        yield from _judge_ring(case, outcomes, expected, given, ledger, 1, sent)


class AllReduce(Check):
    exercise = "collectives.ring_all_reduce"
    points = {"output": 1, "traffic": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Whole]:
        plans = [(FOUR, (8,), EVEN), (UNEQUAL, (2, 3), EVEN), (FOUR, (5,), UNEVEN), (FOUR, (), UNEVEN)]
        if level == "hidden":
            k = 1 + seed % 3
            plans = [(FIVE, (k, 5), EVEN), (APART, (6, k), EVEN), (APART, (k, 7), UNEVEN), (FIVE, (2,), UNEVEN)]
            plans += [(FIVE, (0, 3), UNEVEN)]
        named = [{"groups": g, "shape": shape, "properties": names} for g, shape, names in plans]
        return planned(Whole, seed, [plan | {"transposed": len(plan["shape"]) == 2} for plan in named])

    @staticmethod
    def program(solution: Any, case: Whole) -> dict:
        (group, _), x = group_of(case.groups), case.x(dist.get_rank())
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


class Broadcast(Check):
    exercise = "collectives.tree_broadcast"
    points = {"output": 1, "rounds": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Rooted]:
        plans = [(FOUR, (2, 3), (2,)), (UNEQUAL, (4,), (1, 0)), (FOUR, (), (0,))]
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
        yield (
            Finding("rounds", True, seen)
            if number <= fewest
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
            (FOUR, lambda i, j: 2, EVEN),
            (UNEQUAL, lambda i, j: 1, EVEN),
            (FOUR, lambda i, j: (3 * i + 2 * j) % 4, UNEVEN),
            (FOUR, lambda i, j: 2 * (j == 1), UNEVEN),
        ]
        if level == "hidden":
            k = 1 + seed % 3
            plans = [(FIVE, lambda i, j: k, EVEN), (APART, lambda i, j: (2 * i + j * k) % 3, UNEVEN)]
            plans += [(FIVE, lambda i, j: (i + 1) * (j != 2) % 4, UNEVEN), (FIVE, lambda i, j: 0, UNEVEN)]
        tables = [
            tuple(tuple(tuple(rows(i, j) for j in range(len(g))) for i in range(len(g))) for g in groups)
            for groups, rows, _ in plans
        ]
        named = zip(plans, tables, strict=True)
        return planned(Exchange, seed, [{"groups": g, "properties": names, "tables": t} for (g, _, names), t in named])

    @staticmethod
    def program(solution: Any, case: Exchange) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        x = case.x(rank)
        return {"result": solution(x, *case.rows(rank), group), "x": x}

    def judge(self, case: Exchange, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, sent, value = [], [], case.properties[0]
        every = range(case.world_size)
        for rank in every:
            (rows, _), (_, number) = case.rows(rank), case.place(rank)
            expected.append(torch.cat([case.x(r).split(case.rows(r)[0])[number] for r in case.peers(rank)]))
            sent.append(NUMBER * case.width * (sum(rows) - rows[number]))
        yield compare(value, "the result", [o["result"] for o in outcomes], expected, "exact")
        yield compare(value, "x afterwards", [o["x"] for o in outcomes], [case.x(rank) for rank in every], "exact")
        messages = [len(case.peers(rank)) - 1 for rank in every] if case.properties == EVEN else None
        yield expect_messages(case.properties[-1], ledger, case.groups, messages, sent)


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
        found = compare_all(name, outcomes, [expected])
        yield Finding(name, True, f"{len(expected)} calls", error=found.error) if found.passed else found


questions = [
    Question(
        id="00.sum",
        text="**Five** ranks each hold their own number: 0, 1, 2, 3 and 4. All of them call `dist.all_reduce` on it. "
        "Which number does rank 3 hold afterwards?",
        answer=10,
        why="0 + 1 + 2 + 3 + 4, on every rank",
        mistakes={
            3: "that is what it held before; an all-reduce overwrites it with the sum",
            6: "that is the sum over ranks 0 to 3; there are five ranks, and the last one is rank 4",
            15: "ranks are counted from 0: the five are 0, 1, 2, 3 and 4",
            2: "that is the mean; without another word an all-reduce sums",
            4: "that is the largest; without another word an all-reduce sums",
        },
    ),
    Question(
        id="00.missing",
        text="Four ranks train. The data of rank 2 runs out one step earlier, so it leaves the loop while the others "
        "call `dist.all_reduce` once more. What happens?",
        answer="c",
        choices={
            "a": (
                "The others get the sum over three ranks.",
                "an all-reduce is over the whole group; torch does not know that rank 2 has nothing to say",
            ),
            "b": ("Rank 2 raises an error.", "rank 2 has done nothing wrong on its own: it has ended well"),
            "c": (
                "The others wait for rank 2, for ever or until a time limit. Here it is reported at once.",
                "yes: a collective is a promise of every rank. With torch alone the limit is 30 minutes",
            ),
            "d": (
                "Rank 2 is called back for the step that it missed.",
                "nothing runs on a rank but its own program, from top to bottom",
            ),
        },
    ),
    Question(
        id="00.bytes",
        text="A model has 2 GB of gradients. **8 ranks** all-reduce them around a ring. How many **GB** does each rank "
        "send?",
        answer=3.5,
        unit="GB",
        tolerance=0.01,
        why="2 · 7/8 · 2 GB: two passes, each of seven pieces of an eighth",
        mistakes={
            1.75: "that is one pass, a reduce-scatter; the sums have to come back to everybody",
            4: "that is 2M; a rank never sends the piece that it ends up with, so it is 2 · 7/8 · M",
            14: "that is the whole tensor to each of seven others; a ring sends a piece at a time",
            28: "that is the whole tensor in each of the 14 steps; a step carries an eighth of it",
            2: "that is M, as if everybody sent to one place; then one rank would send seven times as much",
            0.25: "that is one message; a rank sends 14 of them",
        },
    ),
    Question(
        id="00.rounds",
        text="A checkpoint is read by one rank and broadcast to **100 ranks** in all, by a tree. How many **rounds** "
        "does that take?",
        answer=7,
        why="after k rounds 2ᵏ ranks have it: 64 after six, 128 after seven",
        mistakes={
            99: "that is the root sending to each, one after the other; those who have it already can help",
            6: "after six rounds 64 ranks have it; 36 are still waiting",
            50: "that would be a chain from both ends; in a round everyone who has it sends",
            8: "after seven rounds 128 ranks could have it: that is enough",
        },
    ),
    Question(
        id="00.small",
        text="**64 ranks** all-reduce a single number, such as the loss. A message takes α = 5 µs to start; 4 bytes "
        "take no time worth counting. How many **times as long** as by a tree does it take by a ring?",
        answer=10.5,
        tolerance=0.01,
        why="126 messages one after the other against 12: for small tensors the start is everything",
        mistakes={
            10.67: "a ring makes 2(n−1) = 126 steps, not 128: a rank does not lack its own piece",
            5.25: "the tree makes two trips of 6 rounds: one to collect the sum, one to spread it",
            21: "the ring makes two passes of 63 steps; you have the tree with one trip of 6 rounds",
            1: "per byte they are close; but here only the number of messages counts",
            0.095: "that is the other way round: the tree over the ring",
        },
    ),
]
