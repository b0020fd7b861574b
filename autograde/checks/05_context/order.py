"""Checks of lesson 05: which tokens a rank holds, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autograde.case import Case
from autograde.check import Check
from autograde.checks.tokens import APART, UNLIKE, Tokens, group_of
from autograde.compare import compare, compare_all
from autograde.traffic import expect
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Orders(Case):
    """Whole sequences to reorder: for each problem the ranks, the tokens in a chunk, and the dimension of tokens."""

    problems: tuple[tuple[int, int, int], ...]
    refused: bool = False

    def __str__(self) -> str:
        return f"1 rank, sequences for {', '.join(str(n) for n, _, _ in self.problems)} ranks"

    def x(self, place: int) -> Tensor:
        """Distinct integers (…) with the tokens in the problem's dimension."""
        n, chunk, dim = self.problems[place]
        shape = [3, 2, 4]
        shape[dim] = 2 * n * chunk
        generator = torch.Generator().manual_seed(1000 * self.seed + place)
        return torch.randperm(torch.Size(shape).numel(), generator=generator).view(shape)

    def mixed(self, place: int) -> Tensor:
        """The same in zig-zag order, chosen token by token."""
        n, chunk, dim = self.problems[place]
        return self.x(place).index_select(dim, torch.tensor(places(n, chunk)))


def places(n: int, chunk: int) -> list[int]:
    """Where the tokens stand that rank 0, rank 1, … hold."""
    order = [c for i in range(n) for c in (i, 2 * n - 1 - i)]
    return [c * chunk + j for c in order for j in range(chunk)]


class ZigZag(Check):
    exercise = "context.zigzag"
    points = {"order": 1, "arguments": 1}
    there = True  # into zig-zag order; False is back

    def cases(self, seed: int, level: str) -> list[Orders]:
        k = 1 + seed % 3
        usual = ((4, 2, 1), (1, 3, 1), (3, 1, 1)) if level == "visible" else ((8, k, 1), (5, 2, 1))
        other = ((2, 3, 0), (3, 2, 2), (2, 1, -1)) if level == "visible" else ((6, k, 2), (2, k, -2))
        return [
            Orders(world_size=1, seed=seed, problems=usual, properties=("order",)),
            Orders(world_size=1, seed=seed + 1, problems=other, refused=True, properties=("arguments",)),
        ]

    @staticmethod
    def program(solution: Any, case: Orders) -> dict:
        return try_order(solution, case, there=True)

    def judge(self, case: Orders, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        for place, (n, chunk, dim) in enumerate(case.problems):
            sides = case.x(place), case.mixed(place)
            given, wanted = sides if self.there else sides[::-1]
            words = f"the order of {2 * n * chunk} tokens for {n} rank{'s' if n > 1 else ''}"
            words += "" if dim == 1 else f" in dimension {dim}"
            yield compare(name, words, [o["done"][place] for o in outcomes], wanted, "exact")
            yield compare(name, "x afterwards", [o["after"][place] for o in outcomes], given, "exact")
        if case.refused:
            yield refusal(name, "30 tokens for 4 ranks", outcomes[0]["refused"])


class UnZigZag(ZigZag):
    exercise = "context.unzigzag"
    there = False

    @staticmethod
    def program(solution: Any, case: Orders) -> dict:
        return try_order(solution, case, there=False)


def try_order(solution: Any, case: Orders, there: bool) -> dict:
    """Reorder each problem's tokens; where they are in dimension 1, that is the default."""
    done, after = [], []
    for place, (n, _, dim) in enumerate(case.problems):
        x = case.x(place) if there else case.mixed(place)
        done.append(solution(x, n) if dim == 1 else solution(x, n, dim))
        after.append(x)
    return {"done": done, "after": after, "refused": refused_by(lambda: solution(torch.ones(2, 30), 4))}


def refused_by(call: Any) -> str:
    """What a call raises: "" for nothing, "ValueError" for that or a kind of it."""
    try:
        call()
    except Exception as error:
        return "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return ""


def refusal(property: str, what: str, raised: str) -> Finding:
    done = f"raise {raised}" if raised else "are cut without a word"
    return Finding(property, raised == "ValueError", f"{what} {done}", "expected an error that says so", error=0.0)


@dataclass(frozen=True, kw_only=True)
class Tables(Case):
    """Tokens of n ranks, `chunk` in each of 2n chunks, in the orders of the names."""

    sizes: tuple[tuple[int, int], ...]
    orders: tuple[str, ...]

    def __str__(self) -> str:
        return f"1 rank, tokens {' and '.join(self.orders)} over {', '.join(str(n) for n, _ in self.sizes)} ranks"

    def tables(self) -> dict[str, Tensor]:
        found = {}
        for n, chunk in self.sizes:
            s = 2 * n * chunk
            shuffled = torch.randperm(s, generator=torch.Generator().manual_seed(self.seed))
            order = {"contiguous": torch.arange(s), "zig-zag": torch.tensor(places(n, chunk)), "shuffled": shuffled}
            found |= {f"{s} tokens {name} over {n} ranks": order[name].view(n, -1) for name in self.orders}
        return found


class CausalWork(Check):
    exercise = "context.causal_work"
    points = {"contiguous": 1, "zigzag": 1}

    def cases(self, seed: int, level: str) -> list[Tables]:
        k = 1 + seed % 5
        sizes = ((4, 3), (8, 8), (1, 2)) if level == "visible" else ((8, k), (3, 4), (5, 1))
        return [
            Tables(world_size=1, seed=seed, sizes=sizes, orders=("contiguous",), properties=("contiguous",)),
            Tables(world_size=1, seed=seed, sizes=sizes, orders=("zig-zag", "shuffled"), properties=("zigzag",)),
        ]

    @staticmethod
    def program(solution: Any, case: Tables) -> dict:
        tables = case.tables()
        return {"work": {name: solution(table) for name, table in tables.items()}, "after": tables}

    def judge(self, case: Tables, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        wanted = {}
        for words, table in case.tables().items():
            mask = torch.ones(table.numel(), table.numel(), dtype=torch.int64).tril()  # a row for each query
            wanted[words] = torch.stack([mask[row].sum() for row in table])
        yield compare_all(name, [o["work"] for o in outcomes], [wanted] * len(outcomes), "exact")
        yield compare_all(name, [o["after"] for o in outcomes], [case.tables()] * len(outcomes), "exact")


class LocalTokens(Check):
    exercise = "context.local_tokens"
    points = {"inputs": 1, "labels": 1, "positions": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        if level == "visible":
            sizes = [(4, (tuple(range(4)),), 2, 16), (4, UNLIKE, 1, 12), (4, ((0, 3), (1, 2)), 1, 8)]
        else:
            sizes = [(5, APART, 3, 12 * (1 + seed % 3)), (8, (tuple(range(8)),), 1, 16)]
        return [
            Tokens(world_size=world, groups=groups, b=b, s=s, seed=seed + i)
            for i, (world, groups, b, s) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        group, tokens = group_of(case), whole_tokens(case, dist.get_rank())
        found = dict(zip(("inputs", "labels", "positions"), solution(tokens, group), strict=True))
        n = group.size()
        raised = refused_by(lambda: solution(torch.ones(1, 2 * n + 2, dtype=torch.int64), group)) if n > 1 else "alone"
        return found | {"after": tokens, "refused": raised}

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected: dict[str, list[Tensor]] = {"inputs": [], "labels": [], "positions": [], "after": []}
        for rank in range(case.world_size):
            _, ranks, number = case.place(rank)
            n, tokens = len(ranks), whole_tokens(case, rank)
            own = torch.tensor(places(n, case.s // (2 * n))).view(n, -1)[number]
            for name, wanted in (("inputs", tokens[:, own]), ("labels", tokens[:, own + 1]), ("positions", own)):
                expected[name].append(wanted)
            expected["after"].append(tokens)
        look = {
            "inputs": "",
            "labels": "Which token follows in the sequence?",
            "positions": "From where is it counted?",
        }
        for name in ("inputs", "labels", "positions"):
            yield compare(
                name, f"the tensor of {name}", [o[name] for o in outcomes], expected[name], "exact", look.get(name, "")
            )
        yield compare("inputs", "tokens afterwards", [o["after"] for o in outcomes], expected["after"], "exact")
        rank = case.groups[0][0]
        n = len(case.groups[0])
        yield refusal("inputs", f"{2 * n + 1} tokens for {n} ranks", outcomes[rank]["refused"])
        finding = expect("inputs", ledger)
        if not finding.passed:
            yield finding


def whole_tokens(case: Tokens, rank: int) -> Tensor:
    """Sequences of s + 1 tokens, others for each group. Every token is another, so no two places are alike."""
    shape = case.b, case.s + 1
    generator = torch.Generator().manual_seed(1000 * case.seed + case.place(rank)[0])
    return torch.randperm(shape[0] * shape[1], generator=generator).view(shape)
