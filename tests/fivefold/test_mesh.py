from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fivefold import mesh
from fivefold.layout import Layout, LayoutError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

ORDER = ("dp", "pp", "cp", "tp")  # outermost first
NAMES = ("tp", "cp", "pp", "dp", "dp_cp", "ep", "ep_dp", "tied")


@st.composite
def layouts(draw, largest=5):
    """Layouts with unequal degrees, and an ep that divides dp·cp."""
    dp, cp, pp, tp = (draw(st.integers(1, largest)) for _ in range(4))
    ep = draw(st.sampled_from([d for d in range(1, dp * cp + 1) if dp * cp % d == 0]))
    return Layout(dp=dp, cp=cp, pp=pp, tp=tp, ep=ep)


def cube(layout):
    """NumPy's own numbering of the ranks: an array [dp, pp, cp, tp]."""
    return np.arange(layout.world_size).reshape([getattr(layout, axis) for axis in ORDER])


def numpy_groups(layout, axes):
    inside = [i for i, axis in enumerate(ORDER) if axis in axes]
    moved = np.moveaxis(cube(layout), inside, range(4 - len(inside), 4))
    return sorted(moved.reshape(-1, np.prod([getattr(layout, ORDER[i]) for i in inside], dtype=int)).tolist())


@given(layouts())
def test_coordinates_are_numpys(layout):
    """Coordinates are the index of the rank in NumPy's array of ranks, and `rank` is their inverse."""
    for r in range(layout.world_size):
        at = mesh.coordinates(r, layout)
        assert tuple(at) == np.unravel_index(r, cube(layout).shape)
        assert mesh.rank(at, layout) == r


def test_coordinates_outside():
    """A rank or a coordinate outside the layout is refused in one line."""
    layout = Layout(dp=2, tp=3)
    for r in (-1, 6):
        with pytest.raises(LayoutError, match=f"rank {r} is outside layout dp2,tp3: its ranks go from 0 to 5"):
            mesh.coordinates(r, layout)
    for at in (mesh.Coordinates(0, 0, 0, 3), mesh.Coordinates(0, 0, 0, -1)):
        with pytest.raises(LayoutError, match="tp coordinate .* take 0 to 2"):
            mesh.rank(at, layout)


@given(layouts(), st.sets(st.sampled_from(ORDER), min_size=1))
def test_groups_are_numpys(layout, axes):
    """Groups of an axis and of any product of axes are NumPy's slices of the ranks, whatever the axes' order."""
    expected = numpy_groups(layout, axes)
    assert mesh.groups(layout, tuple(axes)) == expected
    assert mesh.groups(layout, tuple(reversed(sorted(axes)))) == expected
    if len(axes) == 1:
        assert mesh.groups(layout, *axes) == expected


def test_groups_of_an_unknown_axis():
    """EP is no axis of the array of ranks; the error says where its groups are."""
    with pytest.raises(LayoutError, match="see expert_groups"):
        mesh.groups(Layout(dp=2, ep=2), "ep")


@given(layouts())
def test_expert_groups_tile_dp_cp(layout):
    """Expert and expert-data groups are rows and columns of each DP x CP group written ep wide."""
    rows, columns = [], []
    for ranks in numpy_groups(layout, ("dp", "cp")):
        table = np.array(ranks).reshape(-1, layout.ep)
        rows += table.tolist()
        columns += table.T.tolist()
    assert mesh.expert_groups(layout) == sorted(rows)
    assert mesh.expert_data_groups(layout) == sorted(columns)
    for ranks in mesh.expert_groups(layout):
        assert len({(at.pp, at.tp) for at in (mesh.coordinates(r, layout) for r in ranks)}) == 1


def test_expert_groups_by_hand():
    """The example of the docstrings, and EP wider than CP."""
    layout = Layout.parse("dp2,cp2,tp2,ep2")
    assert mesh.expert_groups(layout) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.expert_data_groups(layout) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    wide = Layout.parse("dp2,cp2,pp2,tp2,ep4")
    assert mesh.expert_groups(wide)[:2] == [[0, 2, 8, 10], [1, 3, 9, 11]]
    assert all(len(ranks) == 1 for ranks in mesh.expert_data_groups(wide))


@given(layouts(largest=4), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_blocks_fill_the_cube(layout, sequences, tokens, layers):
    """Blocks cover each cell of the work cube exactly tp times, in NumPy's even pieces, whatever the sizes."""
    work = np.zeros((sequences, tokens, layers), dtype=int)
    blocks = mesh.blocks_of_work(layout, sequences, tokens, layers)
    assert len(blocks) == layout.world_size
    for block in blocks:
        work[np.ix_(*block)] += 1
    assert (work == layout.tp).all()
    for size, axis, edge in ((sequences, "dp", 0), (tokens, "cp", 1), (layers, "pp", 2)):
        pieces = np.array_split(np.arange(size), getattr(layout, axis))
        for r, block in enumerate(blocks):
            assert list(block[edge]) == pieces[getattr(mesh.coordinates(r, layout), axis)].tolist()


def test_published_cubes():
    """Data 4, Pipeline 2, Tensor 4 is 32 GPUs, 4 servers, 8 blocks of work; Tensor 16 spills over two servers."""
    layout = Layout.parse("dp4,pp2,tp4")
    assert (layout.world_size, mesh.servers(layout)) == (32, 4)
    assert len(set(mesh.blocks_of_work(layout, 64, 2048, 48))) == 8
    assert mesh.inside_server(layout)
    assert not mesh.inside_server(Layout(tp=16)) and mesh.servers(Layout(tp=16)) == 2
    assert mesh.inside_server(Layout(tp=16), gpus_per_server=16)
    assert not mesh.inside_server(Layout(dp=3, tp=3)) and mesh.inside_server(Layout(dp=2, tp=3))
    assert mesh.inside_server(Layout(cp=2, tp=4), axis="cp") and not mesh.inside_server(Layout(dp=2, tp=8), axis="dp")
    assert mesh.inside_server(Layout(dp=4, cp=2, tp=2, ep=2), axis="ep")
    assert not mesh.inside_server(Layout(dp=4, cp=2, tp=2, ep=8), axis="ep")


def on_a_fake_rank(rank, layout, fn):
    """Call fn inside a process group of the `fake` backend, as `rank` of the layout's world."""
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        return fn()
    finally:
        dist.destroy_process_group()


@settings(max_examples=8, deadline=None)
@given(layouts(largest=3))
def test_mesh_has_device_meshs_groups(layout):
    """On every rank, the groups of make_mesh hold the ranks that torch's DeviceMesh gives for the same axes."""

    def compare():
        made = mesh.make_mesh(layout)
        device_mesh = init_device_mesh("cpu", [getattr(layout, a) for a in ORDER], mesh_dim_names=ORDER)
        flat = device_mesh["dp", "cp"]._flatten("dp_cp")
        assert tuple(device_mesh.get_coordinate()) == tuple(made.coordinates)
        for name in (*ORDER, "dp_cp"):
            expected = flat.mesh.tolist() if name == "dp_cp" else device_mesh[name].mesh.tolist()
            group = getattr(made, name)
            assert dist.get_process_group_ranks(group) == expected
            assert (group.size(), group.rank()) == (len(expected), expected.index(made.rank))

    for rank in range(layout.world_size):
        on_a_fake_rank(rank, layout, compare)


@pytest.mark.parametrize("text", ["dp2,cp2,pp3,tp2,ep4", "dp4,tp2,ep2", "cp3,pp2", "dp2,ep2", "dp1"])
def test_groups_are_made_in_one_order(text, monkeypatch):
    """Every rank calls new_group for the same ranks in the same order, each group of two ranks or more once a name."""
    layout = Layout.parse(text)
    calls = defaultdict(list)
    new_group = dist.new_group

    def recorded(ranks, **named):
        if not named.get("use_local_synchronization"):  # the group of one, which nobody else needs to hear of
            calls[dist.get_rank()].append((named["group_desc"], tuple(ranks)))
        return new_group(ranks, **named)

    monkeypatch.setattr(dist, "new_group", recorded)
    for rank in range(layout.world_size):
        on_a_fake_rank(rank, layout, lambda: mesh.make_mesh(layout))
    assert len({tuple(made) for made in calls.values()}) <= 1
    made = calls[0]
    assert len(made) == len(set(made)) and all(len(ranks) > 1 for _, ranks in made)


def test_group_names():
    """Each group carries its axis as its name, for the traffic table; equal names where two axes are one."""

    def names(layout):
        def read():
            made = mesh.make_mesh(layout)
            return {name: getattr(made, name) and getattr(made, name).group_desc for name in NAMES}

        return on_a_fake_rank(0, layout, read)

    everything = names(Layout.parse("dp4,cp2,pp3,tp2,ep2"))
    assert everything == {name: name for name in NAMES}
    data_only = names(Layout.parse("dp4"))
    alone = dict.fromkeys(NAMES, "alone") | {"tied": None}
    assert data_only == alone | {"dp": "dp", "dp_cp": "dp", "ep_dp": "dp"}
    middle = Layout.parse("pp3")
    assert on_a_fake_rank(1, middle, lambda: mesh.make_mesh(middle).tied) is None


def test_wrong_number_of_ranks():
    """A world of another size than the layout's is refused before any group is made."""
    with pytest.raises(LayoutError, match="layout dp2,tp3 needs 6 ranks, 4 were given"):
        on_a_fake_rank(0, Layout(dp=4), lambda: mesh.make_mesh(Layout(dp=2, tp=3)))


def _sums(rank, layout, path, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=layout.world_size, init_method=f"file://{path}")
    made = mesh.make_mesh(layout)
    for name in NAMES:
        group = getattr(made, name)
        value = torch.tensor(2**rank)
        if group is not None:
            dist.all_reduce(value, group=group)
        results[rank, NAMES.index(name)] = value
    results[rank, len(NAMES)] = made.expert_rank
    dist.destroy_process_group()


def test_groups_on_real_ranks(tmp_path):
    """On 12 processes with gloo, an all-reduce of 2**rank over each group adds up exactly its members."""
    layout = Layout.parse("dp2,cp3,pp2,ep2")
    results = torch.zeros(layout.world_size, len(NAMES) + 1, dtype=torch.int64).share_memory_()
    torch.multiprocessing.start_processes(
        _sums, (layout, str(tmp_path / "store"), results), layout.world_size, start_method="fork"
    )
    lists = {axis: mesh.groups(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
    lists |= {"dp_cp": mesh.groups(layout, ("dp", "cp")), "ep": mesh.expert_groups(layout)}
    lists |= {"ep_dp": mesh.expert_data_groups(layout), "tied": mesh.tied_groups(layout)}
    for column, name in enumerate(NAMES):
        for ranks in lists[name]:
            assert results[ranks, column].tolist() == [sum(2**r for r in ranks)] * len(ranks)
    for ranks in mesh.expert_groups(layout):
        assert results[ranks, -1].tolist() == list(range(layout.ep))
