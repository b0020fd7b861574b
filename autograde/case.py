"""A case: what a check tries. It travels to the ranks, so this file imports next to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from autograde.verdict import in_words, numbered


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to try; a check's own cases add their sizes and options. Must be hashable: tuples, no lists.

    `properties` are those that this case looks at, none meaning all: where a case cannot be run to its end, these fail.
    """

    world_size: int
    seed: int = 0
    properties: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = [f.name for f in fields(self) if f.name not in ("world_size", "seed", "properties")]
        sizes = [f"{name.replace('_', ' ')} {getattr(self, name)}" for name in own]
        return ", ".join([numbered(self.world_size, "rank"), *sizes])


def ranks_in_words(groups: Iterable[Sequence[int]]) -> str:
    """`4 ranks`, `4 ranks in groups [0, 1] and [2, 3]`."""
    groups = [list(ranks) for ranks in groups]
    together = numbered(sum(map(len, groups)), "rank")
    return together if len(groups) == 1 else f"{together} in groups {in_words(groups)}"
