"""Tensor parallelism: matrices split over a group of ranks (Shoeybi et al. 2019, Megatron-LM, section 3)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _CopyToRanks(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Let every rank of `group` go on with the same `x`: the function f of Megatron-LM (section 3, figure 3).

    x: any shape, equal on all ranks of the group. Returns it unchanged. No communication forward; backward, the
    gradient of x is the sum of the gradients that the ranks have for their copies: one all-reduce. The gradient that
    comes in is left as it is.
    """
    return _CopyToRanks.apply(x, group)


class _SumOverRanks(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up what the ranks of `group` hold, so that all hold the sum: the function g of Megatron-LM (section 3).

    x: any shape, the same on all ranks of the group; it is left as it is. Returns the sum: one all-reduce. Backward,
    every rank already has the gradient of the sum, and it is the gradient of each part: no communication.
    """
    return _SumOverRanks.apply(x, group)
