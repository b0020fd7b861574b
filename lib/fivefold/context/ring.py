"""Ring attention: each rank keeps its queries, and the blocks of keys and values go around (Liu et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.attention import block_attention, block_attention_backward, merge
from fivefold.context.order import block_mask, check_positions


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to send `x` to the next rank of the ring, and to receive what the previous rank sends: of the same shape.

    It returns at once, with a function: call that to wait for both, and to get what has arrived. Whatever is computed
    between the two calls hides the transfer. The next of the last rank is the first. Leave x as it is until then. Two
    ranks at least: nobody sends to itself.
    """
    rank, n = group.rank(), group.size()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n)
    works = dist.batch_isend_irecv([send, receive])

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def ring_blocks(block: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Every rank's block in turn, this rank's own first: n pairs (rank that it comes from, block).

    block: this rank's, of the same shape on all ranks of `group`. At each step the block that is here goes on to the
    next rank, so the blocks of the ranks before this one arrive one after the other. The next block is on its way
    while the caller computes with this one; so two are held at a time. n - 1 transfers for n ranks: none for one.
    """
    rank, n = group.rank(), group.size()
    for step in range(n - 1):
        arrive = pass_on(block, group)
        yield (rank - step) % n, block
        block = arrive()
    yield (rank + 1) % n, block


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor | None) -> Tensor:
        rank, out, lse = group.rank(), None, None
        for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), group):
            part = block_attention(q, k_block, v_block, block_mask(positions, rank, source))
            out, lse = part if source == rank else merge(out, lse, *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, positions)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, positions = ctx.saved_tensors
        rank, dq = ctx.group.rank(), torch.zeros_like(q, dtype=lse.dtype)
        arrive = partial(dq.new_zeros, (2, *k.shape))  # what others have added to this block's gradient
        for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), ctx.group):
            mask = block_mask(positions, rank, source)
            dq_share, *dkv_share = block_attention_backward(dout, q, k_block, v_block, out, lse, mask)
            dq += dq_share
            dkv = torch.stack(dkv_share).to(dq.dtype)
            if source == rank:
                own = dkv  # it stays here, until the others' shares have come home
            else:
                arrive = pass_on(arrive() + dkv, ctx.group)
        dk, dv = own + arrive()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor | None = None
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks of `group`, exact, a block of them at a time.

    q (b, h, s/n, d), k and v (b, h_kv, s/n, d): this rank's tokens. `positions` (n, s/n): where the tokens of each rank
    stand in the sequence; a query sees the keys that do not stand after it. None: it sees all. Returns (b, h, s/n, d)
    in q's dtype. Raises ValueError for positions of another shape.

    Forward: n steps. At each, attention over the block of keys and values that is here is merged into the result so far
    by its log-sum-exp, while the block goes on to the next rank: n - 1 blocks from each rank, here with K and V in one
    message (two carry the same bytes), and no collective. Saved for backward: q, k, v, out and lse of this rank's
    tokens.

    Backward: the blocks go around once more. A block's dK and dV follow it: each rank adds its share to what it has
    received of them, and sends the sum on, until the sum is home at the rank that owns the block, which adds its own
    share last. The messages are n - 1 more of each kind, and dQ stays where it is (Ring Attention, Liu et al. 2023,
    algorithm 1; the mathematics of a block is `attention.block_attention_backward`).
    """
    check_positions(positions, group, q.shape[2])
    return _RingAttention.apply(q, k, v, group, None if positions is None else positions.to(q.device))
