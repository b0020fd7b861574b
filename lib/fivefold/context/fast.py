"""Ring attention on the fused kernels: what a causal mask hides is never computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.attention import fused_block_attention, fused_block_attention_backward, merge
from fivefold.context.order import check_positions
from fivefold.context.ring import pass_on, ring_blocks


def fast_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor | None = None
) -> Tensor:
    """`ring_attention` by fused kernels: the same arguments, result, messages and saved tensors, and less work.

    It needs a rank's tokens in ascending order, as contiguous parts and zig-zag have them. Then a rank's own block is
    causal attention as the kernel knows it, and in any other block a query sees the first so many keys and no others:
    rows that see the same number are one call without a mask. Under zig-zag that is one call a step: all queries over
    the earlier chunk of a block from a lower rank, the later queries over all of a block from a higher one. Raises
    ValueError for positions of another shape, or not ascending. (zhuzilin/ring-flash-attention, its zig-zag.)
    """
    check_positions(positions, group, q.shape[2])
    if positions is not None and (positions.diff(dim=1) <= 0).any():
        raise ValueError("the positions of a rank do not ascend: sort its tokens, or use ring_attention")
    return _FastRing.apply(q, k, v, group, None if positions is None else positions.cpu())


class _FastRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor | None) -> Tensor:
        rank = group.rank()
        for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), group):
            if source == rank:
                out, lse = fused_block_attention(q, k_block, v_block, causal=positions is not None)
                out = out.to(lse.dtype)
                continue
            for rows, keys in _visible(positions, rank, source, q.shape[2]):
                part = fused_block_attention(q[:, :, rows], k_block[:, :, keys], v_block[:, :, keys])
                out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, positions)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, positions = ctx.saved_tensors
        rank, arrive = ctx.group.rank(), partial(lse.new_zeros, (2, *k.shape))
        for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), ctx.group):
            if source == rank:
                grads = fused_block_attention_backward(dout, q, k, v, out, lse, causal=positions is not None)
                dq, own = grads[0].to(lse.dtype), torch.stack(grads[1:])
                continue
            parts = []
            for rows, keys in _visible(positions, rank, source, q.shape[2]):
                of_rows = [x[:, :, rows] for x in (dout, q, out, lse)]
                parts.append((rows, keys, _part_backward(*of_rows, k_block[:, :, keys], v_block[:, :, keys])))
            dkv = arrive()
            for rows, keys, (dq_share, dk_share, dv_share) in parts:
                dq[:, :, rows] += dq_share
                dkv[0, :, :, keys] += dk_share
                dkv[1, :, :, keys] += dv_share
            arrive = pass_on(dkv, ctx.group)
        dk, dv = arrive() + own
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _part_backward(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return fused_block_attention_backward(dout, q, k, v, out, lse.contiguous())


def _visible(positions: Tensor | None, rank: int, source: int, num_tokens: int) -> Iterator[tuple[slice, slice]]:
    """What `rank` sees of the block of another rank: pairs (rows, keys), in which every row sees every key, no other.

    Both ranks' positions ascend, so a row sees the first so many keys, and a later row as many or more.
    """
    if positions is None:
        yield slice(num_tokens), slice(num_tokens)
        return
    seen = torch.searchsorted(positions[source], positions[rank])  # (s/n,): keys that stand before each row
    start = 0
    for keys, rows in zip(*(x.tolist() for x in torch.unique_consecutive(seen, return_counts=True)), strict=True):
        if keys:
            yield slice(start, start + rows), slice(keys)
        start += rows
