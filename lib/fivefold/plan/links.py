"""Which axis gets which link, and what an exchange over a group costs there."""

from __future__ import annotations

import math
from functools import cache

from fivefold import cost
from fivefold.layout import Layout
from fivefold.runtime.cluster import Cluster, Link


def place(layout: Layout, cluster: Cluster) -> dict[str, Link]:
    """The link that holds up each axis of `layout`: `cluster.inside` a server, or `cluster.between` servers.

    Ranks are numbered with TP innermost, then CP, PP and DP outermost, and fill servers of `cluster.gpus_per_server`
    in that order. An axis has the link inside where every one of its groups stays on one server; one group that does
    not is enough to hold up all. Expert groups are ep ranks in a row of a DP x CP group, as in `mesh.expert_groups`.
    Axes of degree 1 send nothing and are left out. (The order: Llama 3 report, section 3.3.2.)
    """

    def link(span: int) -> Link:
        """Inside where no server ends within `span` ranks in a row that belong together."""
        stays = layout.world_size <= cluster.gpus_per_server or cluster.gpus_per_server % span == 0
        return cluster.inside if stays else cluster.between

    found, span = {}, 1
    for axis in ("tp", "cp", "pp", "dp"):
        degree = getattr(layout, axis)
        span *= degree  # ranks in a row that hold whole groups of this axis
        if degree > 1:
            found[axis] = link(span)
    if layout.ep > 1:
        if layout.cp % layout.ep == 0 or layout.pp == 1:
            span = layout.tp * layout.ep
        else:  # a group goes on in the next data-parallel copy, behind a whole pipeline
            span = layout.tp * layout.pp * math.lcm(layout.cp, layout.ep)
        found["ep"] = link(span)
    return found


def sharing(axis: str, layout: Layout, cluster: Cluster) -> int:
    """How many ranks of a group of `axis` are on one server, 1 where servers hold unequal numbers of them.

    `axis` is tp, cp, pp, dp, ep, or dp_cp: all ranks that hold the same shards, over which ZeRO splits and sums.
    """
    step = {"tp": 1, "cp": layout.tp, "pp": layout.tp * layout.cp, "dp": layout.tp * layout.cp * layout.pp}
    if axis == "dp_cp":
        return sharing("dp", layout, cluster) * sharing("cp", layout, cluster)
    if axis == "ep":
        near = sharing("cp", layout, cluster)
        return min(layout.ep, near) if near < layout.cp else min(layout.ep, sharing("dp_cp", layout, cluster))
    degree, room = getattr(layout, axis), max(1, cluster.gpus_per_server // step[axis])
    here = min(degree, room)
    return here if degree % here == 0 else 1


def degree(axis: str, layout: Layout) -> int:
    """Ranks in a group of `axis`."""
    return layout.dp * layout.cp if axis == "dp_cp" else getattr(layout, axis)


@cache
def exchange_seconds(op: str, axis: str, size: float, layout: Layout, cluster: Cluster, rails: bool = True) -> float:
    """Seconds of a collective on a whole tensor of `size` bytes over a group of `axis`, by the replay's model.

    With g > 1 ranks of the group on each of s servers the ring is taken apart: rings inside, and rings between servers
    on g network cards at once (`runtime.timing` has the formulas). Without `rails` one ring goes through all ranks,
    at the pace of one card. A "send" is a message to the next rank of the axis. An all-to-all takes as long as the
    busier of a rank's two links.
    """
    n = degree(axis, layout)
    if n == 1:
        return 0.0
    if op == "send":
        return place(layout, cluster)[axis].seconds(size)
    g = sharing(axis, layout, cluster)
    inside, between = cluster.inside, cluster.between
    if g == n:
        return cost.collective_seconds(op, n, size, inside.alpha, 1 / inside.bandwidth)
    if op == "all_to_all":
        return max((n - g) * between.seconds(size / n), (g - 1) * inside.seconds(size / n))
    if g == 1 or not rails:
        return cost.collective_seconds(op, n, size, between.alpha, 1 / between.bandwidth)
    servers = n // g
    once = (servers - 1) * between.seconds(size / n) + (g - 1) * inside.seconds(size / g)
    return 2 * once if op == "all_reduce" else once
