"""The modelled cluster: published figures, placement, and the time and bytes of one operation, against closed forms."""

from __future__ import annotations

import math
import random

import pytest
from fivefold.runtime import cluster as clusters
from fivefold.runtime import timing
from fivefold.runtime.cluster import Cluster, Link, cluster
from fivefold.runtime.ledger import Communication, sent_bytes

SLOW = Link("slow", alpha=3.0, bandwidth=2.0)
FAST = Link("fast", alpha=0.5, bandwidth=16.0)


def calls(op, ranks, sizes, peer=None, splits=None):
    sizes = sizes if isinstance(sizes, list) else [sizes] * len(ranks)
    splits = splits or [()] * len(ranks)
    return [
        Communication(0, op, "g", tuple(ranks), 0, size, peer=peer, splits=split)
        for size, split in zip(sizes, splits, strict=True)
    ]


def test_presets_have_the_published_figures():
    """The numbers that the course's facts state: peak FLOPS, links in one direction, DeepSeek's H800."""
    assert clusters.A100.flops == 312e12
    assert clusters.H100.flops == clusters.H800.flops == pytest.approx(989e12, rel=1e-3)
    assert [link.bandwidth / 1e9 for link in (clusters.NVLINK3, clusters.NVLINK4, clusters.NVLINK5)] == [300, 450, 900]
    assert clusters.PRESETS["h800"].inside.bandwidth == 160e9
    assert clusters.PRESETS["h800"].between.bandwidth == clusters.ROCE.bandwidth == 50e9
    # Ring attention (Liu et al. 2023, table 2): smallest blocks that hide their transfer.
    assert clusters.A100.flops / clusters.NVLINK3.bandwidth == pytest.approx(1.0e3, rel=0.05)
    assert clusters.A100.flops / clusters.EDR.bandwidth == pytest.approx(24.5e3, rel=0.03)


def test_every_preset_and_its_figures_are_in_the_table_of_sources():
    """A number without a source has no place in the docs."""
    table = clusters.__doc__
    for preset in clusters.PRESETS.values():
        if preset.inside.name == "an instant link":
            continue
        for figure in (preset.gpu.flops / 1e12, preset.inside.bandwidth / 1e9, preset.between.bandwidth / 1e9):
            assert f"{figure:g}" in table
        assert preset.gpu.name in table
    assert f"{clusters.NVLINK_ALPHA * 1e6:.1f} µs" in table and f"{clusters.NETWORK_ALPHA * 1e6:.1f} µs" in table


def test_ranks_fill_servers_in_order():
    """Eight a server unless said otherwise; a pair on one server has the inside link."""
    eight, four = cluster("h100"), cluster("h100", gpus_per_server=4)
    assert [eight.server(r) for r in (0, 7, 8, 17)] == [0, 0, 1, 2]
    assert eight.link(0, 7) is clusters.NVLINK4 and four.link(0, 7) is clusters.NDR
    assert eight.slowest_link((0, 1, 7)) is clusters.NVLINK4 and eight.slowest_link((0, 8)) is clusters.NDR


def test_placement_follows_another_order_of_the_axes():
    """With tp innermost a tp group shares a server; placed dp innermost, a dp group does, and tp crosses."""
    degrees = {"tp": 2, "cp": 3, "dp": 4}
    plain = Cluster(gpus_per_server=4)
    turned = plain.placed(degrees, innermost=("dp", "tp", "cp"))
    tp, dp = [0, 1], [0, 6, 12, 18]
    assert plain.slowest_link(tp) is plain.inside and plain.slowest_link(dp) is plain.between
    assert turned.slowest_link(tp) is turned.between and turned.slowest_link(dp) is turned.inside
    assert sorted(turned.placement) == list(range(24))
    assert plain.placed(degrees, innermost=("tp", "cp", "dp")).placement == tuple(range(24))
    with pytest.raises(ValueError, match="must name each"):
        plain.placed(degrees, innermost=("dp", "tp"))


def test_bad_clusters_are_refused_in_one_line():
    """Each message says what to do."""
    with pytest.raises(ValueError, match="choose a100, h100"):
        cluster("b200")
    with pytest.raises(ValueError, match="give it 1 or more"):
        cluster(gpus_per_server=0)
    with pytest.raises(ValueError, match="up to 1"):
        cluster(efficiency=1.5)
    with pytest.raises(ValueError, match="a slot of its own"):
        Cluster(placement=(0, 0))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_rings_on_one_server_take_the_textbook_time(n):
    """Thakur et al. 2005, section 4: all-reduce 2(n−1)(α + M/(nβ)); its two halves (n−1)(α + M/(nβ))."""
    one, m, ranks = Cluster(inside=SLOW, gpus_per_server=n), 840.0, range(n)
    step = 3.0 + m / n / 2.0
    assert timing.seconds(calls("all_reduce", ranks, m), one) == pytest.approx(2 * (n - 1) * step)
    assert timing.seconds(calls("reduce_scatter", ranks, m), one) == pytest.approx((n - 1) * step)
    assert timing.seconds(calls("all_gather", ranks, m / n), one) == pytest.approx((n - 1) * step)
    assert timing.seconds(calls("barrier", ranks, 0), one) == pytest.approx(2 * (n - 1) * 3.0)
    assert timing.seconds(calls("broadcast", ranks, m, peer=1), one) == pytest.approx((n - 1) * 3.0 + m / 2.0)


def test_one_rank_alone_needs_no_time():
    """A group of one communicates with nobody."""
    assert timing.seconds(calls("all_reduce", [3], 100.0), Cluster(inside=SLOW)) == 0


@pytest.mark.parametrize(("g", "s"), [(2, 2), (4, 3), (8, 2)])
def test_a_hierarchical_all_reduce_is_its_three_parts(g, s):
    """Reduce-scatter inside, all-reduce of M/g between servers on every rail at once, all-gather inside."""
    m, ranks = 960.0, range(g * s)
    both = Cluster(inside=FAST, between=SLOW, gpus_per_server=g)
    rail = Cluster(inside=FAST, between=SLOW, gpus_per_server=1)
    parts = [
        timing.seconds(calls("reduce_scatter", range(g), m), both),
        timing.seconds(calls("all_reduce", range(s), m / g), rail),
        timing.seconds(calls("all_gather", range(g), m / g), both),
    ]
    assert timing.seconds(calls("all_reduce", ranks, m), both) == pytest.approx(sum(parts))
    halves = [("reduce_scatter", m), ("all_gather", m / (g * s))]
    assert sum(timing.seconds(calls(op, ranks, size), both) for op, size in halves) == pytest.approx(sum(parts))
    assert sum(parts) < timing.seconds(calls("all_reduce", ranks, m), rail)


def test_a_group_with_one_rank_a_server_or_unequal_numbers_is_a_plain_ring_on_the_network():
    """Nothing can be taken apart: every step takes as long as the slowest hop."""
    two = Cluster(inside=FAST, between=SLOW, gpus_per_server=2)
    for ranks in ([0, 2, 4], [0, 1, 2]):
        assert timing.seconds(calls("all_reduce", ranks, 30.0), two) == pytest.approx(4 * (3.0 + 10 / 2.0))


def test_an_uneven_all_to_all_lasts_as_long_as_its_busiest_link():
    """Rank 0 sends 40 and 8 bytes; what rank 1 receives from both is more: 40 and 24; nothing is sent for 0 bytes."""
    splits = [(5, 40, 8), (0, 9, 2), (0, 24, 1)]
    group = calls("all_to_all", [0, 1, 2], [53, 11, 25], splits=splits)
    assert timing.seconds(group, Cluster(inside=SLOW)) == pytest.approx((3 + 40 / 2) + (3 + 24 / 2))
    assert timing.moved(group) == {(0, 1): 40, (0, 2): 8, (1, 2): 2, (2, 1): 24}
    # With rank 2 on another server its messages have links of their own: rank 1 gets both at once.
    apart = Cluster(inside=SLOW, between=SLOW, gpus_per_server=2)
    assert timing.seconds(group, apart) == pytest.approx(3 + 40 / 2)


def test_rooted_operations_queue_at_the_root():
    """A gather is n−1 messages into one rank, one after the other."""
    group = calls("gather", range(4), 10.0, peer=2)
    assert timing.seconds(group, Cluster(inside=SLOW)) == pytest.approx(3 * (3 + 10 / 2))
    assert timing.moved(group) == {(0, 2): 10.0, (1, 2): 10.0, (3, 2): 10.0}
    scatter = calls("scatter", range(4), [0, 0, 40, 0], peer=2)
    assert timing.moved(scatter) == {(2, 0): 10.0, (2, 1): 10.0, (2, 3): 10.0}


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather"])
def test_bytes_moved_are_those_that_the_ledger_says_leave_the_ranks(op):
    """Summed over ranks, the hops carry what `sent_bytes` counts, on groups of any size."""
    for n in (2, 3, 7):
        size = random.Random(n).randrange(1, 100) * n
        group = calls(op, range(n), size, peer=0)
        for call in group:
            call.own = size // n if op == "all_to_all" else 0
        assert sum(timing.moved(group).values()) == pytest.approx(sum(sent_bytes(call) for call in group))


def test_a_hierarchical_ring_spares_the_network():
    """Two servers of four: between them 2(s−1)/s · M/g from each rank, and the rest inside."""
    m = 64.0
    moved = timing.moved(calls("all_reduce", range(8), m), Cluster(gpus_per_server=4))
    assert {size for (a, b), size in moved.items() if a // 4 != b // 4} == {2 * (1 / 2) * m / 4}
    assert {size for (a, b), size in moved.items() if a // 4 == b // 4} == {2 * (3 / 4) * m}
    assert len(moved) == 16


def test_an_instant_cluster_costs_nothing():
    """For schedules in unit steps: no latency, no time for bytes."""
    assert timing.seconds(calls("all_reduce", range(20), 1e12), cluster("instant")) == 0
    assert math.isinf(cluster("instant").inside.bandwidth)
