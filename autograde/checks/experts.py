"""What checks of expert parallelism share: tokens of every rank, the experts that each chose, and where rows go.

All that is expected is written out from the definition, row by row, and not with the library's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autograde.checks.among import Among
from autograde.checks.training import group_of
from autograde.traffic import size_in_words
from autograde.verdict import Finding

NUMBER = 8  # bytes of a float64, and of an int64


class Row(NamedTuple):
    """One copy of a token on its way: the rank of the world that it is from, its place there, choice and expert."""

    rank: int
    token: int
    choice: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class Routed(Among):
    """Tokens of each rank and what they chose; E experts over each group.

    `never` are experts that nobody chooses. `dropped` is the share of choices that are dropped, None where no `keep` is
    given. `by_token`: rows travel in the order of tokens, and not of experts, within what one rank is sent.
    """

    num_experts: int
    top_k: int
    tokens: tuple[int, ...]
    never: tuple[int, ...] = ()
    dropped: float | None = None
    by_token: bool = False
    h: int = 3

    def __str__(self) -> str:
        words = f"{super().__str__()}, {self.num_experts} experts, top {self.top_k}"
        words += f", tokens {' '.join(map(str, self.tokens))}"
        words += f", nobody chooses {' '.join(map(str, self.never))}" if self.never else ""
        return words + (", some choices dropped" if self.dropped is not None else "")

    def x(self, rank: int) -> Tensor:
        """(T, h), not contiguous."""
        return self.numbers(rank, self.h, self.tokens[rank]).t()

    def experts(self, rank: int) -> Tensor:
        """(T, top_k), different ones for a token."""
        scores = self.numbers(100 + rank, self.tokens[rank], self.num_experts)
        scores[:, list(self.never)] = -100
        return scores.argsort(dim=1, descending=True)[:, : self.top_k]

    def keep(self, rank: int) -> Tensor | None:
        if self.dropped is None:
            return None
        draw = torch.Generator().manual_seed(7 * self.seed + rank)
        return torch.rand(self.tokens[rank], self.top_k, generator=draw) >= self.dropped

    def gates(self, rank: int) -> Tensor:
        """(T, top_k), not contiguous."""
        return self.numbers(200 + rank, self.top_k, self.tokens[rank]).t()

    def made(self, rank: int, what: int = 300) -> Tensor:
        """(T, E, h): a number for whatever comes of each token of a rank on each expert."""
        return self.numbers(what + rank, self.tokens[rank], self.num_experts, self.h)

    def rows(self, source: int) -> list[Row]:
        """The rows that a rank sends, in the order in which they travel."""
        experts, keep = self.experts(source), self.keep(source)
        places = [(t, k) for t in range(self.tokens[source]) for k in range(self.top_k)]
        rows = [Row(source, t, k, int(experts[t, k])) for t, k in places if keep is None or keep[t, k]]
        here = self.num_experts // len(self.peers(source))
        return sorted(rows, key=lambda row: row.expert // here if self.by_token else row.expert)

    def own(self, rank: int) -> range:
        """The experts of a rank."""
        here, number = self.num_experts // len(self.peers(rank)), self.place(rank)[1]
        return range(here * number, here * (number + 1))

    def arriving(self, rank: int) -> list[Row]:
        """The rows that a rank receives, as they come: by sender."""
        return [row for source in self.peers(rank) for row in self.rows(source) if row.expert in self.own(rank)]

    def received(self, rank: int) -> list[Row]:
        """The same by expert, then by sending rank, then by position."""
        return sorted(self.arriving(rank), key=lambda row: (row.expert, self.place(row.rank)[1], row.token))

    def sends(self, rank: int) -> list[int]:
        """Rows to each rank of the group."""
        rows = self.rows(rank)
        return [sum(row.expert in self.own(other) for row in rows) for other in self.peers(rank)]

    def receives(self, rank: int) -> list[int]:
        return [sum(row.rank == other for row in self.arriving(rank)) for other in self.peers(rank)]

    def stack(self, rows: Sequence[Row], of: Callable[[Row], Tensor]) -> Tensor:
        """(R, h) of one row each; (0, h) of none."""
        return torch.stack([of(row) for row in rows]) if rows else torch.zeros(0, self.h, dtype=torch.float64)


def my_group(case: Among) -> Any:
    return group_of(case.groups)[0]


class Exchanged(Protocol):
    """Who sends how many rows of h numbers to whom."""

    world_size: int
    num_experts: int
    h: int

    def peers(self, rank: int) -> Sequence[int]:
        """The ranks of a rank's group."""

    def sends(self, rank: int) -> list[int]:
        """Rows to each of them."""

    def receives(self, rank: int) -> list[int]:
        """Rows from each of them."""


def expect_exchanges(
    property: str, case: Exchanged, ledger: Any, forward: Sequence[str], backward: Sequence[str], phase: str = "",
    others: bool = False,
) -> Finding:  # fmt: skip
    """Whether every rank made these all-to-alls over its group, with the rows that were routed, and nothing else.

    Each word of `forward` and `backward` is "out" for rows to experts, "back" for rows from them, or "counts" for whole
    numbers, one an expert or less. Calls of another `phase` are not looked at, nor are all-reduces where there may be
    `others`.
    """
    most = 0.0
    for rank in range(case.world_size):
        calls = [call for call in ledger[rank].communications if call.phase == phase]
        calls = [call for call in calls if not (others and call.op == "all_reduce")]
        most = max(most, sum(call.sent for call in calls))
        if problem := _foreign(case, rank, calls):
            return Finding(property, False, problem, _where(calls))
        for way, wanted in (("forward", forward), ("backward", backward)):
            own = [call for call in calls if call.backward == (way == "backward")]
            number = len(wanted) if len(case.peers(rank)) > 1 else 0
            if len(own) != number:
                seen = f"{len(own)} all-to-all{'' if len(own) == 1 else 's'} {way} on rank {rank}, expected {number}"
                return Finding(property, False, seen, _where(own))
            for call, word in zip(own, wanted, strict=False):
                if problem := _sizes(case, rank, call, word):
                    return Finding(property, False, problem, _where([call]))
    number = f"{len(forward)} all-to-all{'' if len(forward) == 1 else 's'}"
    seen = f"{number} forward, {len(backward)} backward"
    return Finding(property, True, seen, f"at most {size_in_words(most)} a rank, to each as routed")


def _foreign(case: Exchanged, rank: int, calls: Sequence[Any]) -> str:
    for call in calls:
        if call.op != "all_to_all" or call.ranks != tuple(case.peers(rank)):
            name = call.op.replace("_", "-")
            return (
                f"{name} in ranks {list(call.ranks)} on rank {rank}, expected all-to-alls in {list(case.peers(rank))}"
            )
    return ""


def _sizes(case: Exchanged, rank: int, call: Any, word: str) -> str:
    """What is wrong with the bytes that one call sends to each rank."""
    splits = call.splits or (call.bytes / len(call.ranks),) * len(call.ranks)
    if word == "counts":
        most = NUMBER * case.num_experts
        return f"{size_in_words(call.bytes)} of counts on rank {rank}, expected at most {size_in_words(most)}" * (
            call.bytes > most
        )
    rows = case.sends(rank) if word == "out" else case.receives(rank)
    wanted = [NUMBER * case.h * number for number in rows]
    for other, sent, right in zip(call.ranks, splits, wanted, strict=True):
        if sent != right:
            way = "backward" if call.backward else "forward"
            seen = f"rank {rank} sends {size_in_words(sent)} to rank {other} {way}, expected {size_in_words(right)}"
            return f"{seen} ({right // NUMBER // case.h} rows)"
    return ""


def _where(calls: Sequence[Any]) -> str:
    lines = list(dict.fromkeys(call.line for call in calls if call.line))
    return f"called at {', '.join(lines[:3])}" if lines else ""
