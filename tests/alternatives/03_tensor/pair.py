"""Right solutions of lesson 03 that are written in another way than the library's: the conjugate pair."""

from __future__ import annotations

import torch
import torch.distributed as dist


def copy_to_ranks__hook(x, group):
    """No autograd function: a hook on a view of x."""

    def total(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    copy = x.view_as(x)
    if copy.requires_grad:
        copy.register_hook(total)
    return copy


class _Copy(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[1]

    @staticmethod
    def forward(x, group):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = torch.empty_like(grad).copy_(grad)
        work = dist.all_reduce(total, group=ctx.group, async_op=True)
        work.wait()
        return total, None


def copy_to_ranks__copied_and_asynchronous(x, group):
    """An autograd function with its context set up apart; the sum is started, then waited for."""
    return _Copy.apply(x, group)


def sum_over_ranks__straight_through(x, group):
    """No autograd function: what the others hold is added as a constant, so the gradient passes through x alone."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x.detach())


class sum_over_ranks__class:  # noqa: N801
    """A class in the place of a function: calling it gives the result."""

    def __new__(cls, x, group):
        return _Sum.apply(x, group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.mark_non_differentiable()
        whole = torch.zeros_like(part) + part
        dist.all_reduce(whole, op=dist.ReduceOp.SUM, group=group)
        return whole

    @staticmethod
    def backward(ctx, *grads):
        return (*grads, None)
