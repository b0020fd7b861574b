"""The layers of a transformer block, split over a group of ranks: one all-reduce forward and one backward each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.tensor.linear import ColumnLinear, Exchange, RowLinear, copy_to_ranks, shard

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class MLP(nn.Module):
    """Two linear layers with a GELU between them, split over `group` (Megatron-LM, section 3, figure 3a).

    The first is split by columns, so that each rank applies the GELU to its own inner features; the second by rows, so
    that it takes them as they are. One all-reduce forward, after the second; one backward, before the first.
    """

    def __init__(
        self,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        group: dist.ProcessGroup,
        enter: Exchange | None = None,
        leave: Exchange | None = None,
    ):
        """Whole weights and biases: w_in (inner, h), b_in (inner), w_out (h, inner), b_out (h).

        self.column is a `ColumnLinear`, self.row a `RowLinear`; `enter` and `leave` are theirs.
        """
        super().__init__()
        self.column = ColumnLinear(w_in, b_in, group, enter)
        self.row = RowLinear(w_out, b_out, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., h), equal on all ranks -> (..., h), equal on all ranks."""
        return self.row(F.gelu(self.column(x)))


class GatedMLP(nn.Module):
    """The SwiGLU layer (Shazeer 2020): w_out (silu(gate) * up), where one product with w_in gives gate and up.

    Split over `group` like `MLP`: one all-reduce each way. A rank multiplies its own gates with its own ups, so it
    needs the same columns of both.
    """

    split = {"w_in": 1}

    def __init__(
        self,
        w_in: Tensor,
        w_out: Tensor,
        group: dist.ProcessGroup,
        enter: Exchange | None = None,
        leave: Exchange | None = None,
    ):
        """Whole weights: w_in (2·inner, h), the rows of gate before the rows of up; w_out (h, inner). No biases.

        self.w_in (2, inner/t, h) is this rank's part of gate and of up, self.row a `RowLinear`; `enter` and `leave` as
        in `MLP`.
        """
        super().__init__()
        self.group, self.enter = group, enter or copy_to_ranks
        self.w_in = nn.Parameter(shard(w_in.unflatten(0, (2, -1)), group, dim=1))
        self.row = RowLinear(w_out, None, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., h), equal on all ranks -> (..., h), equal on all ranks."""
        both = F.linear(self.enter(x, self.group), self.w_in.flatten(0, 1))  # (..., 2·inner/t)
        gate, up = both.chunk(2, dim=-1)
        return self.row(F.silu(gate) * up)


def check_heads(num_heads: int, num_kv_heads: int, group: dist.ProcessGroup) -> None:
    """Raise ValueError where `num_heads` query heads cannot share the key heads, or these not be split over `group`."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key heads: choose a divisor")
    if num_kv_heads % (t := group.size()):
        raise ValueError(f"{num_kv_heads} key heads cannot be split over {t} ranks: choose a multiple of {t}")


def causal_attention(q: Tensor, k: Tensor, v: Tensor, drop: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The attention core, written out: softmax(q kᵀ / sqrt(d)) v, where a token sees itself and those before it.

    q (b, heads, s, d), k and v (b, kv_heads, s, d): query head i reads key head i // (heads/kv_heads). Returns
    (b, heads, s, d). `drop` is applied to the probabilities (b, heads, s, s), which are kept for backward.
    """
    (b, heads, s, d), kv_heads = q.shape, k.shape[1]
    grouped = (q * d**-0.5).reshape(b, kv_heads, -1, d)  # (b, kv_heads, heads/kv_heads·s, d)
    scores = (grouped @ k.mT).view(b, heads, s, s)
    future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    if drop is not None:
        probabilities = drop(probabilities)
    return (probabilities.reshape(b, kv_heads, -1, s) @ v).view(b, heads, s, d)


class Attention(nn.Module):
    """Self-attention whose heads are split over `group`: each rank attends with its own (Megatron-LM, figure 3b).

    One product gives queries, keys and values, split by columns; the output projection is split by rows. One all-reduce
    forward, one backward. Query heads may share key and value heads (grouped-query attention).
    """

    def __init__(
        self,
        qkv_weight: Tensor,
        qkv_bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        group: dist.ProcessGroup,
        core: Core | None = None,
        enter: Exchange | None = None,
        leave: Exchange | None = None,
    ):
        """Whole weights, for heads of size d.

        qkv_weight ((num_heads + 2·num_kv_heads)·d, h) and qkv_bias are laid out by key head: for each of them the rows
        of the num_heads/num_kv_heads query heads that read it, then its own, then those of its value head. out_weight
        (h, num_heads·d) takes the query heads in order; out_bias (h). Biases may be None. self.qkv is a `ColumnLinear`,
        self.out a `RowLinear`; `enter` and `leave` are theirs. `core(q, k, v)` is `causal_attention` where None is
        given; it gets the num_heads/t query heads and the num_kv_heads/t key heads of this rank, unrepeated. Raises
        ValueError where heads cannot be grouped, or not split over the ranks.
        """
        super().__init__()
        check_heads(num_heads, num_kv_heads, group)
        self.core = core or causal_attention
        self.kv_heads, self.per_group = num_kv_heads // group.size(), num_heads // num_kv_heads
        self.qkv = ColumnLinear(qkv_weight, qkv_bias, group, enter)
        self.out = RowLinear(out_weight, out_bias, group, leave)

    def forward(self, x: Tensor, rotate: Rotate | None = None) -> Tensor:
        """x (b, s, h), equal on all ranks -> (b, s, h), equal on all ranks.

        `rotate(q, k)` answers with q (b, num_heads/t, s, d) and k (b, num_kv_heads/t, s, d) turned by the positions of
        their tokens (rotary embedding); the core gets these.
        """
        qkv = self.qkv(x).unflatten(-1, (self.kv_heads, self.per_group + 2, -1))  # (b, s, kv_heads/t, per_group + 2, d)
        parts = qkv.permute(0, 2, 3, 1, 4).split([self.per_group, 1, 1], dim=2)
        q, k, v = (part.flatten(1, 2).contiguous() for part in parts)  # (b, heads, s, d)
        if rotate is not None:
            q, k = rotate(q, k)
        heads = self.core(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))
