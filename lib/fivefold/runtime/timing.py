"""How long one operation takes on a cluster, which links it occupies, and what it moves from rank to rank.

Collectives are rings (Patarasuk and Yuan 2009; Thakur et al. 2005): an all-reduce of M bytes on n ranks takes 2(n−1)
steps of M/n bytes. Where a group has g > 1 ranks on each of s > 1 servers, the ring is taken apart: rings inside the
servers, and rings between them on all g network links at once, as with one network card a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.runtime.cluster import Cluster
from fivefold.runtime.ledger import Communication

Port = tuple[int, bool, bool]  # rank, inside its server?, outgoing?
Bytes = dict[tuple[int, int], float]


def seconds(calls: Sequence[Communication], cluster: Cluster) -> float:
    """Time of one operation from when all its ranks are there; `calls` has one entry a rank, send before recv.

    In the formulas n ranks, M bytes as the ledger counts them (one shard for an all-gather, all pieces for a
    reduce-scatter), α and β of the slowest link of the ring:

    | operation | on one server, or with one rank a server | g ranks on each of s servers |
    | --- | --- | --- |
    | all-reduce | 2(n−1)(α + M/(nβ)) | 2(g−1)(α + M/(gβ)) inside + 2(s−1)(α + M/(gsβ)) between |
    | all-gather | (n−1)(α + M/β) | (s−1)(α + M/β) between + (g−1)(α + sM/β) inside |
    | reduce-scatter | (n−1)(α + M/(nβ)) | the same as an all-gather of M/n |
    | broadcast, reduce | (n−1)α + M/β, a chain with pieces as small as you like | the same |
    | gather, scatter | the root's links, one message after the other | the same |
    | all-to-all | the busiest link, one message after the other | the same |
    | barrier | an all-reduce of nothing | the same |
    """
    first = calls[0]
    if first.op in ("send", "recv"):
        sender, receiver = ends(calls)
        return cluster.link(sender, receiver).seconds(first.bytes)
    ranks = first.ranks
    if len(ranks) == 1:
        return 0.0
    if first.op in ("all_reduce", "barrier", "all_gather", "reduce_scatter"):
        return _ring_seconds(first.op, ranks, max(call.bytes for call in calls), cluster)
    if first.op in ("broadcast", "reduce"):
        link = cluster.slowest_link(ranks)
        return (len(ranks) - 1) * link.alpha + max(call.bytes for call in calls) / link.bandwidth
    return _busiest_link(moved(calls, cluster), cluster)


def moved(calls: Sequence[Communication], cluster: Cluster | None = None) -> Bytes:
    """Bytes that one operation moves, by (from, to); on one server where no cluster is given."""
    first, cluster = calls[0], cluster or Cluster(gpus_per_server=1 << 30)
    if first.op in ("send", "recv"):
        return {ends(calls): first.bytes}
    ranks, most = first.ranks, max(call.bytes for call in calls)
    if first.op == "all_to_all":
        return {pair: size for me, call in zip(ranks, calls, strict=True) for pair, size in _pieces(me, call).items()}
    if first.op in ("gather", "scatter"):
        root, size = first.peer, most if first.op == "gather" else most / len(ranks)
        others = [rank for rank in ranks if rank != root]
        return {(rank, root) if first.op == "gather" else (root, rank): size for rank in others}
    if first.op in ("broadcast", "reduce"):
        start = ranks.index(first.peer)
        chain = ranks[start:] + ranks[:start]
        hops = zip(chain, chain[1:], strict=False)
        return {hop if first.op == "broadcast" else hop[::-1]: most for hop in hops}
    return _ring_bytes(first.op, ranks, most, cluster)


def ports(calls: Sequence[Communication], cluster: Cluster) -> list[Port]:
    """The ends of links that the operation occupies from its start to its end."""
    found: dict[Port, None] = {}
    for a, b in moved(calls, cluster):
        inside = cluster.is_inside(a, b)
        found[a, inside, True] = found[b, inside, False] = None
    return list(found)


def ends(calls: Sequence[Communication]) -> tuple[int, int]:
    """Sender and receiver of a message, from its send and its recv."""
    send, recv = calls
    return recv.peer, send.peer


def _split(ranks: Sequence[int], cluster: Cluster) -> tuple[int, int]:
    """(g, s): ranks a server and servers, (n, 1) or (1, n) where the group cannot be taken apart."""
    servers = cluster.servers(ranks)
    if len(servers) == 1:
        return len(ranks), 1
    g = len(servers[0])
    return (g, len(servers)) if all(len(own) == g for own in servers) else (1, len(ranks))


def _ring_seconds(op: str, ranks: Sequence[int], size: float, cluster: Cluster) -> float:
    (g, s), n = _split(ranks, cluster), len(ranks)
    inside, between = cluster.inside, cluster.between
    if op in ("all_reduce", "barrier"):
        return 2 * (g - 1) * inside.seconds(size / g) + 2 * (s - 1) * between.seconds(size / n)
    shard = size if op == "all_gather" else size / n
    return (s - 1) * between.seconds(shard) + (g - 1) * inside.seconds(s * shard)


def _ring_bytes(op: str, ranks: Sequence[int], size: float, cluster: Cluster) -> Bytes:
    (g, s), n = _split(ranks, cluster), len(ranks)
    if op in ("all_reduce", "barrier"):
        local, remote = 2 * (g - 1) / g * size, 2 * (s - 1) / n * size
    else:
        shard = size if op == "all_gather" else size / n
        local, remote = (g - 1) * s * shard, (s - 1) * shard
    if s == 1 or g == 1:
        return dict.fromkeys(_circle(ranks), local or remote)
    servers = cluster.servers(ranks)
    found = {hop: local for own in servers for hop in _circle(own)}
    for rail in zip(*servers, strict=True):  # the i-th GPUs of all servers make a ring of their own
        found |= dict.fromkeys(_circle(rail), remote)
    return found


def _circle(ranks: Sequence[int]) -> list[tuple[int, int]]:
    if len(ranks) == 1:
        return []
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))


def _pieces(me: int, call: Communication) -> Bytes:
    """What rank `me` hands to each of the others in an all-to-all; nothing is sent for an empty piece."""
    splits = call.splits or (call.bytes / len(call.ranks),) * len(call.ranks)
    return {(me, rank): size for rank, size in zip(call.ranks, splits, strict=True) if rank != me and size}


def _busiest_link(sizes: Bytes, cluster: Cluster) -> float:
    """Each port sends, or receives, its messages one after the other; all ports work at once."""
    load: dict[Port, float] = {}
    for (a, b), size in sizes.items():
        inside = cluster.is_inside(a, b)
        for port in ((a, inside, True), (b, inside, False)):
            load[port] = load.get(port, 0.0) + cluster.link(a, b).seconds(size)
    return max(load.values(), default=0.0)
