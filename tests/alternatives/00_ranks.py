"""Right solutions of lesson 00 that are written in another way than the library's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.collectives import shift


def shift__one_batch(x, received, group, distance=1):
    """Both messages handed to torch in one list."""
    n, rank = group.size(), group.rank()
    to, source = ((rank + d) % n for d in (distance, -distance))
    if to == rank:
        received.copy_(x)
        return received
    send = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=source)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received


def shift__receive_started_first(x, received, group, distance=1):
    """The receive is started, the send waits; ranks of the world, found from those of the group."""
    n, rank = group.size(), group.rank()
    if distance % n:
        receiving = dist.irecv(received, dist.get_global_rank(group, (rank - distance) % n), group)
        dist.send(x.contiguous(), dist.get_global_rank(group, (rank + distance) % n), group)
        receiving.wait()
    else:
        received[...] = x
    return received


def shift__lowest_of_each_ring_receives_first(x, received, group, distance=1):
    """Blocking calls alone: the distance makes several rings, and in each the lowest rank receives first."""
    n, rank = group.size(), group.rank()
    to, source = (rank + distance) % n, (rank - distance) % n
    if to == rank:
        return received.copy_(x)
    ring, at = [], rank
    while at not in ring:
        ring.append(at)
        at = (at + distance) % n
    steps = [lambda: dist.send(x.contiguous(), group=group, group_dst=to)]
    steps.insert(0 if rank == min(ring) else 1, lambda: dist.recv(received, group=group, group_src=source))
    for step in steps:
        step()
    return received


def ring_reduce_scatter__in_a_copy(x, sizes, group):
    """Sums are kept in a copy of x, in place."""
    n, rank = group.size(), group.rank()
    sums = list(x.clone().split(sizes))
    for step in range(1, n):
        leaving, growing = sums[(rank - step) % n], sums[(rank - step - 1) % n]
        growing += shift(leaving, torch.zeros_like(growing), group)
    return sums[rank]


def ring_reduce_scatter__other_way_round(x, sizes, group):
    """Around the ring in the other direction, with messages of its own; an empty piece is not sent at all."""
    n, rank = group.size(), group.rank()
    ends = torch.tensor(sizes).cumsum(0).tolist()

    def mine(r):
        return x[ends[r % n] - sizes[r % n] : ends[r % n]]

    piece = mine(rank + 1)
    for step in range(2, n + 1):
        coming = torch.empty_like(mine(rank + step))
        works = []
        if len(piece):
            works.append(dist.isend(piece.contiguous(), group=group, group_dst=(rank - 1) % n))
        if len(coming):
            works.append(dist.irecv(coming, group=group, group_src=(rank + 1) % n))
        for work in works:
            work.wait()
        piece = coming + mine(rank + step)
    return piece + 0


def ring_all_gather__list(x, sizes, group):
    """A list of pieces by rank, put together at the end."""
    n, rank = group.size(), group.rank()
    pieces = [None] * n
    pieces[rank], last = x, rank
    for _ in range(n - 1):
        source = (last - 1) % n
        pieces[source] = shift(pieces[last], torch.empty((sizes[source], *x.shape[1:]), dtype=x.dtype), group)
        last = source
    return torch.cat(pieces)


def ring_all_gather__backwards(x, sizes, group):
    """Pieces travel to the rank before."""
    n, rank = group.size(), group.rank()
    whole = torch.zeros(sum(sizes), *x.shape[1:], dtype=x.dtype)
    starts = [sum(sizes[:r]) for r in range(n)]
    views = [whole[start : start + rows] for start, rows in zip(starts, sizes, strict=True)]
    views[rank][:] = x
    for step in range(n - 1):
        shift(views[(rank + step) % n], views[(rank + step + 1) % n], group, distance=-1)
    return whole


def ring_all_reduce__filled_up(x, group):
    """Filled up with zeros until n divides it; both passes in one loop over equal pieces."""
    n, rank = group.size(), group.rank()
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % n))
    rows = flat.clone().view(n, flat.numel() // n)
    for step in range(2 * (n - 1)):
        out, into = (rank - step - 1) % n, (rank - step - 2) % n
        coming = shift(rows[out], torch.empty_like(rows[into]), group)
        rows[into] = rows[into] + coming if step < n - 1 else coming
    return rows.flatten()[: x.numel()].reshape(x.shape)


def ring_all_reduce__first_pieces_larger(x, group):
    """Bounds of the pieces computed from the number of elements; reduce into a copy, then copy what arrives."""
    n, rank = group.size(), group.rank()
    total = x.clone(memory_format=torch.contiguous_format).view(-1)
    bounds = [total.numel() * r // n for r in range(n + 1)]
    pieces = [total[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    for step in range(n - 1):
        target = pieces[(rank - step - 1) % n]
        target += shift(pieces[(rank - step) % n], torch.empty_like(target), group)
    for step in range(n - 1):
        shift(pieces[(rank - step + 1) % n], pieces[(rank - step) % n], group)
    return total.view_as(x)


def tree_broadcast__far_first(x, root, group):
    """The other binomial tree: the root reaches farthest first, and each who has x serves the ranks behind it."""
    n = group.size()
    place, reach = (group.rank() - root) % n, 1
    while reach < n:
        reach *= 2
    while reach > 1:
        reach //= 2
        if place % (2 * reach) == 0 and place + reach < n:
            dist.send(x, group=group, group_dst=(root + place + reach) % n)
        elif place % (2 * reach) == reach:
            dist.recv(x, group=group, group_src=(root + place - reach) % n)
    return x


def tree_broadcast__halves(x, root, group):
    """Whoever has x for a range of places gives the upper half of the range away, until it is alone in it."""
    n = group.size()
    me = (group.rank() - root) % n
    low, high, sends = 0, n, []
    while high - low > 1:
        middle = (low + high + 1) // 2
        if me == low:
            sends.append(dist.isend(x, dist.get_global_rank(group, (root + middle) % n), group))
        elif me == middle:
            dist.recv(x, dist.get_global_rank(group, (root + low) % n), group)
        low, high = (low, middle) if me < middle else (middle, high)
    for send in sends:
        send.wait()
    return x


def pairwise_all_to_all__all_at_once(x, send_sizes, receive_sizes, group):
    """Everything is started, then everything is waited for; empty parts are left out."""
    rank = group.rank()
    parts = list(x.split(send_sizes))
    came = [x.new_empty(rows, *x.shape[1:]) for rows in receive_sizes]
    came[rank] = parts[rank]
    works = []
    for peer in (r for r in range(group.size()) if r != rank):
        if receive_sizes[peer]:
            works.append(dist.irecv(came[peer], group=group, group_src=peer))
        if send_sizes[peer]:
            works.append(dist.isend(parts[peer].contiguous(), group=group, group_dst=peer))
    for work in works:
        work.wait()
    return torch.cat(came)


def pairwise_all_to_all__backwards(x, send_sizes, receive_sizes, group):
    """In step d to the rank d places before; rows are found by index."""
    n, rank = group.size(), group.rank()
    starts = [sum(send_sizes[:r]) for r in range(n)]
    came = {rank: x[starts[rank] : starts[rank] + send_sizes[rank]].clone()}
    for d in range(n - 1, 0, -1):
        to, source = (rank - d) % n, (rank + d) % n
        buffer = torch.empty(receive_sizes[source], *x.shape[1:], dtype=x.dtype)
        came[source] = shift(x[starts[to] : starts[to] + send_sizes[to]], buffer, group, -d)
    return torch.cat([came[r] for r in range(n)])


def collective_seconds__by_cases(op, n, num_bytes, alpha, beta, algorithm=None):
    """No table: a case for each op."""
    rounds = 0
    while 2**rounds < n:
        rounds += 1
    piece, whole = alpha + beta * num_bytes / n, alpha + beta * num_bytes
    if op == "all_reduce" and algorithm in (None, "ring"):
        return 2 * (n - 1) * piece
    if op == "all_reduce" and algorithm == "tree":
        return 2 * rounds * whole
    if op in ("reduce_scatter", "all_gather") and algorithm in (None, "ring"):
        return (n - 1) * piece
    if op == "all_to_all" and algorithm in (None, "pairwise"):
        return (n - 1) * piece
    if op in ("broadcast", "reduce") and algorithm in (None, "tree"):
        return rounds * whole
    if op == "broadcast" and algorithm == "flat":
        return (n - 1) * whole
    if op == "send" and algorithm in (None, "direct"):
        return whole
    raise ValueError(f"{op} {algorithm}?")


def collective_seconds__recursive(op, n, num_bytes, alpha, beta, algorithm=None):
    """Composed: an all-reduce is two other collectives, a tree is as many messages as the largest rank has bits."""
    first = {"broadcast": "tree", "reduce": "tree", "all_to_all": "pairwise", "send": "direct"}
    algorithm = algorithm or first.get(op, "ring")
    link = num_bytes, alpha, beta
    match op, algorithm:
        case "all_reduce", "ring":
            return 2 * collective_seconds__recursive("reduce_scatter", n, *link)
        case "all_reduce", "tree":
            return sum(collective_seconds__recursive(half, n, *link) for half in ("reduce", "broadcast"))
        case ("reduce_scatter" | "all_gather", "ring") | ("all_to_all", "pairwise"):
            return (n - 1) * collective_seconds__recursive("send", n, num_bytes / n, alpha, beta)
        case "broadcast" | "reduce", "tree":
            return (n - 1).bit_length() * collective_seconds__recursive("send", n, *link)
        case "broadcast", "flat":
            return (n - 1) * collective_seconds__recursive("send", n, *link)
        case "send", "direct":
            return alpha + num_bytes * beta
    raise ValueError(f"no formula for {op!r} with {algorithm!r}")
