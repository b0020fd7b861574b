"""Right solutions of lesson 01 that are written in another way than the library's."""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.distributed as dist
from fivefold.layout import LayoutError
from fivefold.mesh import Block, Coordinates, Mesh

ORDER = ("dp", "pp", "cp", "tp")


def _degrees(layout):
    return [getattr(layout, axis) for axis in ORDER]


def servers__from_the_degrees(layout, gpus_per_server=8):
    """Whole numbers alone, and one more where something is left."""
    gpus = layout.dp * layout.cp * layout.pp * layout.tp
    return gpus // gpus_per_server + (1 if gpus % gpus_per_server else 0)


def servers__counted(layout, gpus_per_server=8):
    """The numbers of the servers that some rank sits in."""
    return len({r // gpus_per_server for r in range(layout.world_size)})


def coordinates__numpy(rank, layout):
    """NumPy's own numbering of an array [dp, pp, cp, tp]."""
    try:
        return Coordinates(*map(int, np.unravel_index(rank, _degrees(layout))))
    except ValueError:
        raise LayoutError(f"no rank {rank}") from None


def coordinates__modulo(rank, layout):
    """Each axis by itself: how often it has changed, round its degree."""
    if rank < 0 or rank >= layout.world_size:
        raise LayoutError(f"no rank {rank}")
    tp, cp, pp = layout.tp, layout.cp, layout.pp
    return Coordinates(dp=rank // (tp * cp * pp), pp=rank // (tp * cp) % pp, cp=rank // tp % cp, tp=rank % tp)


def coordinates__walked(rank, layout):
    """Walk through all places in order, and stop at the rank."""
    for r, place in enumerate(itertools.product(*map(range, _degrees(layout)))):
        if r == rank:
            return Coordinates._make(place)
    raise LayoutError(f"no rank {rank}")


def rank__strides(coordinates, layout):
    """A stride for each axis: how many ranks further its next place is."""
    strides = {"tp": 1, "cp": layout.tp, "pp": layout.tp * layout.cp, "dp": layout.tp * layout.cp * layout.pp}
    for axis in strides:
        if getattr(coordinates, axis) not in range(getattr(layout, axis)):
            raise LayoutError(f"{axis} is outside")
    return sum(getattr(coordinates, axis) * stride for axis, stride in strides.items())


def rank__looked_up(coordinates, layout):
    """Where the place stands among all places."""
    try:
        return list(itertools.product(*map(range, _degrees(layout)))).index(tuple(coordinates))
    except ValueError:
        raise LayoutError(f"nobody stands at {coordinates}") from None


def groups__array(layout, axes):
    """The array of ranks, with the axes moved to its end."""
    axes = {axes} if isinstance(axes, str) else set(axes)
    if axes - set(ORDER):
        raise LayoutError("no such axis")
    inside = [i for i, axis in enumerate(ORDER) if axis in axes]
    moved = np.moveaxis(np.arange(layout.world_size).reshape(_degrees(layout)), inside, range(4 - len(inside), 4))
    return sorted(moved.reshape(-1, np.prod([_degrees(layout)[i] for i in inside])).tolist())


def groups__neighbours_of_each(layout, axes):
    """For every rank the ranks that differ in the axes only; each such list once."""
    axes = [axes] if isinstance(axes, str) else list(axes)
    if not all(axis in ORDER for axis in axes):
        raise LayoutError("no such axis")
    at = list(itertools.product(*map(range, _degrees(layout))))
    others = [i for i, axis in enumerate(ORDER) if axis not in axes]
    found = []
    for place in at:
        group = [r for r, other in enumerate(at) if all(other[i] == place[i] for i in others)]
        if group not in found:
            found.append(group)
    return found


def _dp_cp(layout):
    """An array of ranks with a line for each DP x CP group."""
    ranks = torch.arange(layout.world_size).view(_degrees(layout))
    return ranks.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)


def expert_groups__view(layout):
    """A view of the array of ranks, ep wide."""
    return sorted(_dp_cp(layout).reshape(-1, layout.ep).tolist())


def expert_groups__by_number(layout):
    """Ranks of one pp, one tp and one number dp·CP + cp over ep, in the order in which they turn up."""
    found = {}
    for r, (dp, pp, cp, tp) in enumerate(itertools.product(*map(range, _degrees(layout)))):
        found.setdefault((pp, tp, (dp * layout.cp + cp) // layout.ep), []).append(r)
    return list(found.values())


def expert_data_groups__transposed(layout):
    """Columns of the array of ranks, ep wide."""
    columns = _dp_cp(layout).unflatten(1, (-1, layout.ep)).transpose(1, 2)
    return sorted(columns.flatten(0, 1).tolist())


def expert_data_groups__by_place(layout):
    """Ranks of one pp, one tp and one place dp·CP + cp modulo ep, in the order in which they turn up."""
    found = {}
    for r, (dp, pp, cp, tp) in enumerate(itertools.product(*map(range, _degrees(layout)))):
        found.setdefault((pp, tp, (dp * layout.cp + cp) % layout.ep), []).append(r)
    return list(found.values())


def blocks_of_work__array_split(layout, sequences, tokens, layers):
    """NumPy cuts each edge, and the places are walked in the order of the ranks."""

    def cut(size, degree):
        ends = [0, *np.cumsum([len(piece) for piece in np.array_split(np.arange(size), degree)]).tolist()]
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    cuts = cut(sequences, layout.dp), cut(layers, layout.pp), cut(tokens, layout.cp)
    return [Block(s, t, n) for s, n, t in itertools.product(*cuts) for _ in range(layout.tp)]


def blocks_of_work__dealt(layout, sequences, tokens, layers):
    """Lengths are dealt out one by one; a piece begins where those before it end."""
    edges = {}
    for axis, size in (("dp", sequences), ("cp", tokens), ("pp", layers)):
        lengths = [0] * getattr(layout, axis)
        for i in range(size):
            lengths[i % len(lengths)] += 1
        edges[axis] = [range(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    blocks = []
    for dp, pp, cp, _ in itertools.product(*map(range, _degrees(layout))):
        blocks.append(Block(layers=edges["pp"][pp], tokens=edges["cp"][cp], sequences=edges["dp"][dp]))
    return tuple(blocks)


def inside_server__servers_of_each_group(layout, gpus_per_server=8, axis="tp"):
    """The set of servers of each group."""
    spread = expert_groups__view(layout) if axis == "ep" else groups__array(layout, axis)
    for ranks in spread:
        if len({r // gpus_per_server for r in ranks}) > 1:
            return False
    return True


def inside_server__rank_by_rank(layout, gpus_per_server=8, axis="tp"):
    """The server of the first rank with the same other coordinates must be that of every later one."""
    first = {}
    for r, (dp, pp, cp, tp) in enumerate(itertools.product(*map(range, _degrees(layout)))):
        place = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}
        others = tuple(place[other] for other in ORDER if other != axis)
        key = (pp, tp, (dp * layout.cp + cp) // layout.ep) if axis == "ep" else others
        if first.setdefault(key, r // gpus_per_server) != r // gpus_per_server:
            return False
    return True


def _lists(layout):
    """The ranks of every group, by name."""
    lists = {axis: groups__array(layout, axis) for axis in ORDER}
    lists["tied"] = [[ranks[0], ranks[-1]] for ranks in lists["pp"]] if layout.pp > 1 else []
    lists["dp_cp"] = groups__array(layout, ["dp", "cp"])
    if layout.ep > 1:
        lists |= {"ep": expert_groups__view(layout), "ep_dp": expert_data_groups__transposed(layout)}
    return lists


def _mesh(layout, made):
    """A mesh of the groups by name, where some names share one group."""
    me = dist.get_rank()
    made.setdefault("ep", dist.new_group([me], use_local_synchronization=True))
    made.setdefault("ep_dp", made["dp_cp"])
    return Mesh(layout, me, coordinates__numpy(me, layout), dist.group.WORLD, **made)


def _refuse(layout):
    if layout.world_size != dist.get_world_size():
        raise LayoutError("another number of ranks")


def make_mesh__subgroups(layout):
    """Torch makes all groups of an axis at one call, and picks this rank's."""
    _refuse(layout)
    made = {}
    for name, lists in _lists(layout).items():
        own, _ = dist.new_subgroups_by_enumeration(lists, group_desc=name) if lists else (None, [])
        if own is not None:
            made[name] = own
    return _mesh(layout, made)


def make_mesh__members_only(layout):
    """Only a group's members make it, which torch allows when it is told so."""
    _refuse(layout)
    made = {}
    for name, lists in _lists(layout).items():
        for ranks in lists:
            if dist.get_rank() in ranks:
                made[name] = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
    return _mesh(layout, made)
