"""Right solutions of lesson 05 that are written in another way than the library's: the ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.attention import block_attention, block_attention_backward, merge


def _look_at(positions, q, group):
    if positions is not None and positions.shape != (group.size(), q.shape[2]):
        raise ValueError("another shape")


def _mask(positions, r, source):
    return None if positions is None else positions[source][None, :] <= positions[r][:, None]


def _post(tensors, group, to):
    """Start to send tensors to a neighbour, and to receive as many from the other."""
    rank, n = group.rank(), group.size()
    right, left = (dist.get_global_rank(group, (rank + step) % n) for step in (to, -to))
    there = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    works = [dist.irecv(t, src=left, group=group, tag=i) for i, t in enumerate(there)]
    works += [dist.isend(t.contiguous(), dst=right, group=group, tag=i) for i, t in enumerate(tensors)]
    return there, works


class _Apart(torch.autograd.Function):
    """K and V in messages of their own, round the ring the other way; gradients follow, the own share first kept."""

    @staticmethod
    def forward(ctx, q, k, v, group, positions):
        rank, n = group.rank(), group.size()
        held, out = [k, v], torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
        for step in range(n):
            if step < n - 1:
                there, works = _post(held, group, -1)
            source = (rank + step) % n
            out, lse = merge(out, lse, *block_attention(q, *held, _mask(positions, rank, source)))
            if step < n - 1:
                for work in works:
                    work.wait()
                held = there
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.more = group, positions
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        group, positions = ctx.more
        rank, n = group.rank(), group.size()
        held, coming, dq = [k, v], None, torch.zeros_like(q)
        for step in range(n):
            if step < n - 1:
                there, works = _post(held, group, -1)
            mask = _mask(positions, rank, (rank + step) % n)
            share, *shares = block_attention_backward(dout, q, *held, out, lse, mask)
            dq = dq + share
            if step == 0:
                mine = shares
            else:
                if coming is not None:
                    for work in coming[1]:
                        work.wait()
                    shares = [a + b for a, b in zip(shares, coming[0], strict=True)]
                coming = _post(shares, group, -1)
            if step < n - 1:
                for work in works:
                    work.wait()
                held = there
        if coming is not None:
            for work in coming[1]:
                work.wait()
            mine = [a + b for a, b in zip(mine, coming[0], strict=True)]
        return dq, *mine, None, None


def ring_attention__messages_apart(q, k, v, group, positions=None):
    """isend and irecv of K and of V, the other way round."""
    _look_at(positions, q, group)
    return _Apart.apply(q, k, v, group, positions)


class _Sums(torch.autograd.Function):
    """Unnormalised sums and a running maximum, as in the paper; the block's own gradient is computed last."""

    @staticmethod
    def forward(ctx, q, k, v, group, positions):
        rank, n, groups = group.rank(), group.size(), q.shape[1] // k.shape[1]
        block, scale = torch.cat((k, v), dim=-1).contiguous(), q.shape[-1] ** -0.5
        top, total, weighted = q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3]), torch.zeros_like(q)
        for step in range(n):
            flight = _fly(block, group) if step + 1 < n else None
            kb, vb = (x.repeat_interleave(groups, 1) for x in block.chunk(2, dim=-1))
            scores = q @ kb.transpose(-1, -2) * scale
            if positions is not None:
                hidden = positions[(rank - step) % n][None] > positions[rank][:, None]
                scores = scores.masked_fill(hidden, -torch.inf)
            new = torch.maximum(top, scores.amax(-1))
            base = torch.where(new.isinf(), 0.0, new)
            weights, old = torch.exp(scores - base[..., None]), torch.exp(top - base)
            total, weighted = total * old + weights.sum(-1), weighted * old[..., None] + weights @ vb
            top = new
            block = flight() if flight else block
        out, lse = weighted / total[..., None], top + total.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.positions = group, positions
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        group, positions = ctx.group, ctx.positions
        rank, n = group.rank(), group.size()
        block, dq, flight, carried = torch.stack((k, v)), 0, None, None
        if n > 1:
            block = _fly(block, group)()  # the own block is left for the end
        for step in range(1, n + 1):
            ahead = _fly(block, group) if step < n - 1 else None
            source = (rank - step) % n
            kv = block if step < n else torch.stack((k, v))
            parts = block_attention_backward(grad, q, kv[0], kv[1], out, lse, _mask(positions, rank, source))
            dq = dq + parts[0]
            own = torch.stack(parts[1:])
            carried = own + (flight() if flight else 0)
            flight = _fly(carried, group) if step < n else None
            block = ahead() if ahead else block
        return dq, carried[0], carried[1], None, None


def _fly(x, group):
    there = torch.empty_like(x)
    n, rank = group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    works = [dist.isend(x, ranks[(rank + 1) % n], group=group), dist.irecv(there, ranks[rank - 1], group=group)]

    def land():
        [work.wait() for work in works]
        return there

    return land


def ring_attention__sums(q, k, v, group, positions=None):
    """No merge: running maximum, sum and output of the whole row; own keys come last in backward."""
    _look_at(positions, q, group)
    return _Sums.apply(q, k, v, group, positions)
