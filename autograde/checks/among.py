"""Cases in which ranks stand in groups, and each group does the same for itself. They travel to the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autograde.case import Case, ranks_in_words
from autograde.verdict import in_words

Groups = tuple[tuple[int, ...], ...]
FOUR: Groups = ((0, 1, 2, 3),)
UNEQUAL: Groups = ((0, 1, 2), (3,))
FIVE: Groups = ((0, 1, 2, 3, 4),)
APART: Groups = ((0, 2), (1, 3, 4))  # a rank's number in its group is another one than in the world
SEVEN: Groups = (tuple(range(7)),)
GROUPS = FOUR, UNEQUAL, FIVE, APART, SEVEN
EVEN, UNEVEN = ("output", "traffic"), ("uneven",)  # what a case looks at, whose pieces are of one size or are not


@dataclass(frozen=True, kw_only=True)
class Among(Case):
    """Ranks in groups; all numbers are random, of float64, other ones for every rank of the world."""

    groups: Groups

    def __str__(self) -> str:
        return ranks_in_words(self.groups)

    def place(self, rank: int) -> tuple[int, int]:
        """Which group a rank of the world is in, and its number there."""
        group = next(i for i, ranks in enumerate(self.groups) if rank in ranks)
        return group, self.groups[group].index(rank)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's group."""
        return self.groups[self.place(rank)[0]]

    def numbers(self, rank: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Shifted(Among):
    """Every rank passes its x on by `distance` places."""

    distance: int
    transposed: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}, distance {self.distance}{', x transposed' if self.transposed else ''}"

    def x(self, rank: int) -> Tensor:
        """Of another size on every rank, empty on rank 1, unless it is transposed."""
        return self.numbers(rank, 3, 2).t() if self.transposed else self.numbers(rank, (rank + 2) % 3, 2)

    def source(self, rank: int) -> int:
        ranks = self.peers(rank)
        return ranks[(ranks.index(rank) - self.distance) % len(ranks)]

    def moves(self, rank: int) -> bool:
        return self.source(rank) != rank


@dataclass(frozen=True, kw_only=True)
class Whole(Among):
    """Every rank has an x of the same shape."""

    shape: tuple[int, ...]
    transposed: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}, x of shape {self.shape}{', transposed' if self.transposed else ''}"

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def x(self, rank: int) -> Tensor:
        numbers = self.numbers(rank, *reversed(self.shape))
        return numbers.t() if self.transposed else numbers.view(self.shape)


@dataclass(frozen=True, kw_only=True)
class Rooted(Whole):
    """One rank of each group has what all shall have: `roots`, counted in the group."""

    roots: tuple[int, ...]

    def __str__(self) -> str:
        roots = f"root {self.roots[0]}"
        if len(self.roots) > 1:
            roots = f"roots {in_words(self.roots)}, one for each group and counted in it"
        return f"{super().__str__()}, {roots}"

    def root(self, rank: int) -> int:
        """The root of a rank's group, as a rank of the world."""
        return self.peers(rank)[self.roots[self.place(rank)[0]]]


@dataclass(frozen=True, kw_only=True)
class Pieces(Among):
    """A tensor in pieces, one a rank: `sizes` are their rows, group by group; `row` is the shape of each row."""

    sizes: Groups
    row: tuple[int, ...] = (2,)

    def __str__(self) -> str:
        rows = " · ".join(" ".join(map(str, sizes)) for sizes in self.sizes)
        return f"{super().__str__()}, pieces of {rows} rows{_of_shape(self.row)}"

    def of(self, rank: int) -> tuple[list[int], int]:
        """The sizes of the pieces in a rank's group, and the rank's number there."""
        group, number = self.place(rank)
        return list(self.sizes[group]), number

    def whole(self, rank: int) -> Tensor:
        """A tensor of all the pieces' rows."""
        return self.numbers(rank, sum(self.of(rank)[0]), *self.row)

    def piece(self, rank: int) -> Tensor:
        """A tensor of the rows of this rank's piece."""
        sizes, number = self.of(rank)
        return self.numbers(rank, sizes[number], *self.row)


@dataclass(frozen=True, kw_only=True)
class Exchange(Among):
    """`tables` has, group by group, the rows from each rank (line) to each (column); `row` is the shape of each row."""

    tables: tuple[Groups, ...]
    row: tuple[int, ...] = (2,)

    def __str__(self) -> str:
        lines = [" / ".join(" ".join(map(str, line)) for line in table) for table in self.tables]
        return f"{super().__str__()}, rows from each (line) to each {' · '.join(lines)}{_of_shape(self.row)}"

    @property
    def width(self) -> int:
        """The numbers in a row."""
        return math.prod(self.row)

    def rows(self, rank: int) -> tuple[list[int], list[int]]:
        """The rows that a rank sends to each of its group, and receives from each."""
        group, number = self.place(rank)
        return list(self.tables[group][number]), [line[number] for line in self.tables[group]]

    def x(self, rank: int) -> Tensor:
        return self.numbers(rank, sum(self.rows(rank)[0]), *self.row)


def planned(kind: type[Among], seed: int, plans: list[dict[str, Any]]) -> list[Any]:
    """A case of `kind` for each plan, with a seed of its own and as many ranks as its groups have."""
    return [kind(world_size=sum(map(len, p["groups"])), seed=seed + i, **p) for i, p in enumerate(plans)]


def uneven_pieces(seed: int, level: str) -> list[Pieces]:
    """Cases of even pieces, and of uneven and empty ones, in one, two and three dimensions.

    Hidden ones are in groups of neither four nor neighbours.
    """
    plans = [
        (FOUR, ((2, 2, 2, 2),), EVEN, (2,)),
        (UNEQUAL, ((3, 3, 3), (2,)), EVEN, ()),
        (FOUR, ((3, 0, 1, 2),), UNEVEN, (2, 3)),
        (FOUR, ((0, 0, 0, 0),), UNEVEN, (2,)),
    ]
    if level == "hidden":
        k = 1 + seed % 3
        plans = [
            (FIVE, ((k,) * 5,), EVEN, (1, 3)),
            (APART, ((k, k), (2, 2, 2)), EVEN, (3,)),
            (APART, ((0, k), (k, 4, 0)), UNEVEN, ()),
            (FIVE, ((0, 0, k, 0, 0),), UNEVEN, (3, 1, 2)),
        ]
    names = "groups", "sizes", "properties", "row"
    return planned(Pieces, seed, [dict(zip(names, plan, strict=True)) for plan in plans])


def _of_shape(row: tuple[int, ...]) -> str:
    """What to add where a row is not the usual vector."""
    if len(row) == 1:
        return ""
    return f", each of shape {row}" if row else ", each a single number"


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` and its like give with NaN: what a solution forgets to write is seen as such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
