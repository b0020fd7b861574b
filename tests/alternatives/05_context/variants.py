"""Right solutions of lesson 05 that are written in another way than the library's: all-gather and all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(pieces, x, group=group)
        return torch.cat(pieces, dim=2)

    @staticmethod
    def backward(ctx, grad):
        pieces = [piece.contiguous() for piece in grad.chunk(ctx.group.size(), dim=2)]
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces, group=ctx.group)
        return own, None


def _look_at(positions, q, group):
    if positions is not None and positions.shape != (group.size(), q.shape[2]):
        raise ValueError("another shape")


def all_gather_attention__lists(q, k, v, group, positions=None):
    """K and V gathered apart, and scores written out."""
    _look_at(positions, q, group)
    k, v = _Gather.apply(k, group), _Gather.apply(v, group)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if positions is not None:
        scores = scores.masked_fill(positions.reshape(-1)[None] > positions[group.rank()][:, None], float("-inf"))
    return torch.softmax(scores, -1) @ v


def all_gather_attention__in_order(q, k, v, group, positions=None):
    """Keys side by side with values along the last dimension, and put into the order of the sequence."""
    _look_at(positions, q, group)
    both = _Gather.apply(torch.cat((k, v), dim=-1), group)
    mask = None
    if positions is not None:
        order = positions.flatten().argsort()
        both = both[:, :, order]
        mask = torch.arange(len(order)) <= positions[group.rank()][:, None]
    k, v = both.chunk(2, dim=-1)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


class _Trade(torch.autograd.Function):
    """Cut along one dimension for the ranks, join what comes along another."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.back = group, join, cut
        pieces = [piece.contiguous() for piece in x.chunk(group.size(), cut)]
        come = [torch.empty_like(piece) for piece in pieces]
        work = dist.all_to_all(come, pieces, group=group, async_op=True)
        work.wait()
        return torch.cat(come, join)

    @staticmethod
    def backward(ctx, grad):
        group, cut, join = ctx.back
        return _Trade.apply(grad, group, cut, join), None, None, None


def _refuse(q, k, n):
    if q.shape[1] % n or k.shape[1] % n:
        raise ValueError(f"{n} ranks must divide the heads")


def all_to_all_attention__lists(q, k, v, group, positions=None):
    """all_to_all with lists, and a mask in the order of arrival."""
    _refuse(q, k, group.size())
    q, k, v = (_Trade.apply(x, group, 1, 2) for x in (q, k, v))
    mask = None
    if positions is not None:
        arrived = positions.flatten()
        mask = arrived[None, :] <= arrived[:, None]
    return _Trade.apply(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), group, 2, 1)


def all_to_all_attention__together(q, k, v, group, positions=None):
    """q, k and v of a rank in one message, query heads before key heads before value heads."""
    n = group.size()
    _refuse(q, k, n)
    h, g = q.shape[1] // n, k.shape[1] // n
    packed = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], dim=2).flatten(1, 2)
    q, k, v = _Trade.apply(packed, group, 1, 2).split([h, g, g], dim=1)
    k, v = (x.repeat_interleave(h // g, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if positions is not None:
        arrived = positions.flatten()
        scores = scores.masked_fill(arrived[None, :] > arrived[:, None], -torch.inf)
    return _Trade.apply(scores.softmax(-1) @ v, group, 2, 1)
