"""Ranks, their coordinates and their groups: DP x PP x CP x TP, and EP folded over DP x CP.

The functions on a `Layout` are arithmetic and need no running ranks. `make_mesh` turns a layout into process groups,
once, on every rank; whatever communicates is handed one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout import Layout, LayoutError, check_sizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Coordinates(NamedTuple):
    """Where a rank stands on each axis. From left to right: from the axis that changes slowest to the fastest."""

    dp: int
    pp: int
    cp: int
    tp: int


class Block(NamedTuple):
    """A block of the work cube: which sequences, which tokens of each, which layers."""

    sequences: range
    tokens: range
    layers: range


def servers(layout: Layout, gpus_per_server: int = 8) -> int:
    """How many servers a layout fills, one rank a GPU: rank r sits in server r // gpus_per_server."""
    return math.ceil(layout.world_size / gpus_per_server)


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """Where `rank` stands in `layout`: `Coordinates(dp=, pp=, cp=, tp=)`.

    TP changes fastest from one rank to the next, then CP, then PP, DP slowest, so that the axis with the most traffic
    has the nearest neighbours (the order of Llama 3, section 3.3.2). In dp2,cp2,pp2,tp2, rank 13 = 0b1101 is at dp 1,
    pp 1, cp 0, tp 1. Raises LayoutError where the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise LayoutError(f"rank {rank} is outside layout {layout}: its ranks go from 0 to {layout.world_size - 1}")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    dp, pp = divmod(rest, layout.pp)
    return Coordinates(dp, pp, cp, tp)


def rank(coordinates: Coordinates, layout: Layout) -> int:
    """The rank that stands at `coordinates`: the inverse of the function `coordinates`.

    Raises LayoutError where a coordinate is negative or not below its axis's degree.
    """
    for axis, place in zip(Coordinates._fields, coordinates, strict=True):
        if not 0 <= place < getattr(layout, axis):
            raise LayoutError(
                f"{axis} coordinate {place} is outside layout {layout}: take 0 to {getattr(layout, axis) - 1}"
            )
    dp, pp, cp, tp = coordinates
    return ((dp * layout.pp + pp) * layout.cp + cp) * layout.tp + tp


def groups(layout: Layout, axes: str | Sequence[str]) -> list[list[int]]:
    """The groups of an axis ("tp") or of a product of axes (("dp", "cp")): lists of ranks.

    A group holds the ranks that differ in these axes only: all their other coordinates are equal. Every rank is in
    exactly one group. Ranks ascend in a group, and groups are listed by their first rank. Axes are dp, cp, pp and tp;
    the order in which `axes` names them changes nothing. Raises LayoutError for another axis.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in axes:
        if axis not in Coordinates._fields:
            raise LayoutError(f"{axis!r} is not one of dp, cp, pp and tp; for ep see expert_groups")
    found: dict[tuple[int, ...], list[int]] = {}
    for r in range(layout.world_size):
        place = coordinates(r, layout)._asdict()
        others = tuple(place[axis] for axis in place if axis not in axes)
        found.setdefault(others, []).append(r)
    return list(found.values())


def expert_groups(layout: Layout) -> list[list[int]]:
    """The groups over which the experts are spread: lists of ep ranks, which together hold every expert once.

    EP is folded over DP x CP: in each DP x CP group (ranks of one pp and one tp, ascending), every ep ranks in a row
    are a group. A rank's place in its group says which experts it holds. Groups are listed by their first rank. In
    dp2,cp2,tp2,ep2 they are [0, 2], [1, 3], [4, 6], [5, 7].
    """
    ep = layout.ep
    return sorted(ranks[i : i + ep] for ranks in groups(layout, ("dp", "cp")) for i in range(0, len(ranks), ep))


def expert_data_groups(layout: Layout) -> list[list[int]]:
    """The groups that hold the same experts: lists of dp·cp/ep ranks, over which expert gradients are summed.

    In each DP x CP group, the ranks with the same place in their expert group: every ep-th rank. Groups are listed by
    their first rank. In dp2,cp2,tp2,ep2 they are [0, 4], [1, 5], [2, 6], [3, 7].
    """
    ep = layout.ep
    return sorted(ranks[i::ep] for ranks in groups(layout, ("dp", "cp")) for i in range(ep))


def tied_groups(layout: Layout) -> list[list[int]]:
    """The first and the last stage of each pipeline, which share the embedding where it is tied; none where pp is 1."""
    return [[ranks[0], ranks[-1]] for ranks in groups(layout, "pp") if len(ranks) > 1]


def _piece(size: int, pieces: int, index: int) -> range:
    short, longer = divmod(size, pieces)
    start = index * short + min(index, longer)
    return range(start, start + short + (index < longer))


def blocks_of_work(layout: Layout, sequences: int, tokens: int, layers: int) -> list[Block]:
    """The block of the cube sequences x tokens x layers that each rank works on: one `Block` of ranges for each rank.

    DP splits the sequences, CP the tokens of each sequence, PP the layers: in contiguous pieces, in order, as even as
    can be, the first (size mod degree) of them longer by one. TP splits no edge of the cube: it splits the matrices
    inside a layer, so the tp ranks of a group share a block. There are dp·cp·pp different blocks.
    """
    blocks = []
    for r in range(layout.world_size):
        at = coordinates(r, layout)
        blocks.append(
            Block(
                _piece(sequences, layout.dp, at.dp),
                _piece(tokens, layout.cp, at.cp),
                _piece(layers, layout.pp, at.pp),
            )
        )
    return blocks


def inside_server(layout: Layout, gpus_per_server: int = 8, axis: str = "tp") -> bool:
    """Whether every group of `axis` (dp, cp, pp, tp or ep) stays inside one server, off the slow links between servers.

    Rank r sits in server r // gpus_per_server. tp16 spills over two servers of 8; tp8 does not; but tp3 does as soon as
    there are 9 ranks, since ranks 6, 7 and 8 form a group.
    """
    spread = expert_groups(layout) if axis == "ep" else groups(layout, axis)
    return all(ranks[0] // gpus_per_server == ranks[-1] // gpus_per_server for ranks in spread)


@dataclass(frozen=True)
class Mesh:
    """The process groups to which one rank belongs.

    An axis of degree 1 has the group of this rank alone: every operation of `torch.distributed` works in it, and sends
    nothing. So code that is right for n ranks is right for one, without a special case.
    """

    layout: Layout
    rank: int
    coordinates: Coordinates
    world: ProcessGroup
    tp: ProcessGroup
    cp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup  # gradients of every parameter that is no expert; mean over tokens
    ep: ProcessGroup  # tokens on their way to experts
    ep_dp: ProcessGroup  # gradients of experts
    tied: ProcessGroup | None = None  # gradients of a tied embedding; None on the stages between

    @property
    def expert_rank(self) -> int:
        """This rank's place in its expert group: it holds the experts expert_rank·E/ep up to (expert_rank + 1)·E/ep."""
        return (self.coordinates.dp * self.layout.cp + self.coordinates.cp) % self.layout.ep


def _lists_by_name(layout: Layout) -> dict[str, list[list[int]]]:
    lists = {axis: groups(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
    # Where two names mean the same ranks for the same purpose, one group serves both.
    if layout.cp > 1:
        lists["dp_cp"] = groups(layout, ("dp", "cp"))
    if layout.ep > 1:
        lists["ep"] = expert_groups(layout)
        lists["ep_dp"] = expert_data_groups(layout)
    lists["tied"] = tied_groups(layout)
    return lists


def make_mesh(layout: Layout) -> Mesh:
    """The groups of `layout` for this rank, made inside an initialised process group.

    Every rank makes every group, its own or not, in the same order: `new_group` is a collective of the whole world, and
    hangs where ranks disagree. (With `use_local_synchronization` its members alone may make a group, where all of them
    keep to one order.) Each group carries its axis as its name. Raises LayoutError where the number of ranks is not the
    layout's.
    """
    import torch.distributed as dist  # here, so that a layout can be checked without loading torch

    check_sizes(layout, ranks=dist.get_world_size())
    me = dist.get_rank()
    alone = dist.new_group([me], use_local_synchronization=True, group_desc="alone")
    mine = {"world": dist.group.WORLD}
    for name, lists in _lists_by_name(layout).items():
        for ranks in lists:
            group = dist.new_group(ranks, group_desc=name) if len(ranks) > 1 else alone
            if me in ranks:
                mine[name] = group
    if layout.cp == 1:
        mine["dp_cp"] = mine["dp"]
    if layout.ep == 1:
        mine["ep"], mine["ep_dp"] = alone, mine["dp_cp"]
    return Mesh(layout, me, coordinates(me, layout), **mine)
