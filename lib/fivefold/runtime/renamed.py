"""Collectives that torch 2.13 renamed, called under their newer names by every torch from 2.9 on, without a warning."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(
    out: Tensor, x: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Write `x` (rows, ...) of every rank of `group`, one after the other, into `out` (n·rows, ...).

    Both are contiguous; n is the size of the group. With `async_op` it returns a work whose `wait()` ends it.
    """
    return _all_gather(out, x, group=group, async_op=async_op)


def reduce_scatter_single(
    out: Tensor, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:  # fmt: skip
    """Sum `x` (n·rows, ...) over the n ranks of `group`, and write piece r of n into `out` (rows, ...) of rank r.

    Both are contiguous. With `async_op` it returns a work whose `wait()` ends it.
    """
    return _reduce_scatter(out, x, op=op, group=group, async_op=async_op)
