"""A case: what a check tries. It travels to the ranks, so this file imports next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autograde.verdict import numbered


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
