"""Collectives from point-to-point messages: what `torch.distributed` does inside, written out.

Each rank of a group calls the same function. Tensors may have any dtype and any number of rows, none included; where
ranks hold unequal pieces, `sizes` says how many rows of the first dimension each has.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def shift(x: Tensor, received: Tensor, group: dist.ProcessGroup, distance: int = 1) -> Tensor:
    """Pass `x` on around the ring of `group`, and fill `received` with what comes from behind.

    Rank r sends x to the rank `distance` places further, r + distance, and receives from r - distance, both modulo the
    number of ranks n. Every rank calls it at the same time: a send that waits for its receiver would wait for ever,
    since all ranks would be sending. Where the distance is a multiple of n the two are this rank itself, and x is
    copied without a message.

    x: any shape. received: contiguous, of the shape and dtype of the x that comes in, which may be of another size.
    Returns received. One message out, one in.
    """
    n, rank = group.size(), group.rank()
    if distance % n == 0:
        return received.copy_(x)
    x = x.contiguous()
    sending = dist.isend(x, group=group, group_dst=(rank + distance) % n)
    dist.recv(received, group=group, group_src=(rank - distance) % n)
    sending.wait()
    return received


def ring_reduce_scatter(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Add up the x of all ranks, and leave each rank its piece of the sum: rank r gets rows of piece r.

    x: (sum(sizes), …), the same shape on all ranks; it is left as it is. sizes: n numbers, the rows of each rank's
    piece, in order; 0 is allowed. Returns (sizes[rank], …).

    In each of n - 1 steps a rank hands one piece to the next rank, and adds its own x to the piece that arrives; that
    one it hands on in the next step. A piece starts on the rank after its owner and reaches the owner last, with n - 1
    additions behind it. n - 1 messages; (n - 1)/n·M bytes a rank, where x has M (Patarasuk and Yuan 2009).
    """
    n, rank = group.size(), group.rank()
    pieces = x.split(sizes)
    travelling = pieces[(rank - 1) % n]
    for step in range(2, n + 1):
        own = pieces[(rank - step) % n]
        travelling = own + shift(travelling, own.new_empty(own.shape), group)
    return travelling.clone()


def ring_all_gather(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Give every rank the pieces of all ranks, one after the other in the order of the ranks.

    x: (sizes[rank], …), this rank's piece. sizes: n numbers, the rows of each rank's piece; 0 is allowed. Returns
    (sum(sizes), …), of the dtype of x, equal on all ranks.

    In each of n - 1 steps a rank hands on the piece that it got in the step before, its own in the first. n - 1
    messages; (n - 1)/n·M bytes a rank, where the result has M (Patarasuk and Yuan 2009).
    """
    n, rank = group.size(), group.rank()
    gathered = x.new_empty(sum(sizes), *x.shape[1:])
    pieces = gathered.split(sizes)
    pieces[rank].copy_(x)
    for step in range(n - 1):
        shift(pieces[(rank - step) % n], pieces[(rank - step - 1) % n], group)
    return gathered


def ring_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up the x of all ranks, and give every rank the sum.

    x: any shape, the same on all ranks; it is left as it is. Returns the sum in the shape of x, bit for bit equal on
    all ranks. The elements are cut into n pieces as even as can be, also where n does not divide their number (or
    filled up until it does); a reduce-scatter sums the pieces and an all-gather spreads the sums. 2(n - 1) messages;
    2(n - 1)/n·M bytes a rank for an x of M bytes, which hardly depends on n (Patarasuk and Yuan 2009).
    """
    flat = x.flatten()
    sizes = [len(piece) for piece in flat.tensor_split(group.size())]
    piece = ring_reduce_scatter(flat, sizes, group)
    return ring_all_gather(piece, sizes, group).view(x.shape)


def tree_broadcast(x: Tensor, root: int, group: dist.ProcessGroup) -> Tensor:
    """Fill `x` on every rank with that of rank `root`, in ⌈log₂ n⌉ rounds.

    x: contiguous, the same shape and dtype on all ranks; overwritten except on the root. root: a rank of `group`,
    counted within it. Returns x. In a round everyone who has x sends it to one rank that has not, so that their number
    doubles; it works for any root and for an n that is no power of two. A rank receives once, and sends at most once a
    round: n - 1 messages in all (the binomial tree of Thakur et al. 2005).
    """
    n = group.size()
    place = (group.rank() - root) % n  # the root stands at place 0
    have = 1  # places 0 to have - 1 have x
    while have < n:
        if place < have and place + have < n:
            dist.send(x, group=group, group_dst=(root + place + have) % n)
        elif have <= place < 2 * have:
            dist.recv(x, group=group, group_src=(root + place - have) % n)
        have *= 2
    return x


def pairwise_all_to_all(x: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send every rank its own part of x, and receive what every rank has for this one.

    x: (sum(send_sizes), …); the first send_sizes[0] rows go to rank 0, the next send_sizes[1] to rank 1 and so on.
    receive_sizes[r]: the rows that rank r sends here; 0 is allowed in both. Returns (sum(receive_sizes), …), of the
    dtype of x, by the rank they come from. In step d a rank sends to the rank d places further and receives from the
    rank d places behind, so that every rank sends one message and receives one; what a rank keeps is copied, and an
    empty part may be left out. n - 1 messages (Thakur et al. 2005).
    """
    n, rank = group.size(), group.rank()
    received = x.new_empty(sum(receive_sizes), *x.shape[1:])
    outgoing, incoming = x.split(send_sizes), received.split(receive_sizes)
    for distance in range(n):
        shift(outgoing[(rank + distance) % n], incoming[(rank - distance) % n], group, distance)
    return received
