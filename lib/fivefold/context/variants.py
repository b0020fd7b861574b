"""Two other ways to let queries see the tokens of all ranks: gather the keys and values, or trade tokens for heads."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.attention import causal_mask
from fivefold.context.order import check_positions
from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single


class _GatherFromRanks(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward: (rows, ...) on each rank, (n·rows, ...) gathered."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        all_gather_single(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_single(mine, grad.contiguous(), group=ctx.group)
        return mine, None


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor | None = None
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks, which are gathered first.

    The arguments and the result are those of `ring_attention`. Forward: an all-gather of K and V, here of both together
    (two carry the same bytes), then attention of s/n queries over s keys in one call. Backward: one reduce-scatter of
    their gradient, which gives every rank the sum of all ranks' gradients of its own keys and values. Forward, the
    bytes are the ring's; backward the ring sends K and V once more. But nothing hides these, and all K and V are in
    memory at once, and saved. With few key heads they are small beside the rest, and any mask is easy (Llama 3, section
    3.3.2).
    """
    check_positions(positions, group, q.shape[2])
    gathered = _GatherFromRanks.apply(torch.stack((k, v)), group)  # (n·2, b, h_kv, s/n, d)
    k, v = gathered.unflatten(0, (-1, 2)).movedim(0, 3).flatten(3, 4)  # (b, h_kv, s, d) each
    mask = None
    if positions is not None:
        positions = positions.to(q.device)
        mask = causal_mask(positions[group.rank()], positions.flatten())  # (s/n, s)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class _Exchange(torch.autograd.Function):
    """All-to-all of equal pieces, along the first dimension: forward, and of the gradient backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(exchanged, x.contiguous(), group=group)
        return exchanged

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


def _tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, h, s/n, d), all heads of this rank's tokens, to (b, h/n, s, d), this rank's heads of all tokens."""
    pieces = x.unflatten(1, (group.size(), -1)).movedim(1, 0)  # (n, b, h/n, s/n, d): heads for each rank
    return _Exchange.apply(pieces, group).movedim(0, 2).flatten(2, 3)


def _heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(b, h/n, s, d) back to (b, h, s/n, d)."""
    pieces = x.unflatten(2, (group.size(), -1)).movedim(2, 0)  # (n, b, h/n, s/n, d): tokens for each rank
    return _Exchange.apply(pieces, group).movedim(0, 1).flatten(1, 2)


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor | None = None
) -> Tensor:
    """Attention in which each rank has some heads of all tokens, traded for all heads of some tokens.

    The arguments and the result are those of `ring_attention`. An all-to-all each for q, k and v turns (b, h, s/n, d)
    into (b, h/n, s, d); rank r gets the r-th n-th of the query heads and of the key heads, which belong together. After
    ordinary attention a fourth turns the output back. Backward: the same four the other way. A rank sends less as
    ranks are added, while the ring's K and V stay as they are; but there cannot be more ranks than key heads. Raises
    ValueError where n does not divide the query heads and the key heads (DeepSpeed-Ulysses, Jacobs et al. 2023,
    section 3.1).
    """
    check_positions(positions, group, q.shape[2])
    heads, kv_heads = q.shape[1], k.shape[1]
    if math.gcd(heads, kv_heads) % group.size():
        raise ValueError(
            f"{heads} query heads and {kv_heads} key heads cannot be split over the {group.size()} ranks of all-to-all "
            f"attention: choose a number of ranks that divides {math.gcd(heads, kv_heads)}"
        )
    q, k, v = (_tokens_for_heads(x, group) for x in (q, k, v))
    if positions is None:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    else:
        order = positions.flatten().argsort().to(q.device)  # in the order of the sequence, causal needs no mask
        q, k, v = (x[:, :, order] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, order.argsort()]
    return _heads_for_tokens(out, group)
