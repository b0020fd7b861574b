"""Linear layers split over a group of ranks, and the two exchanges between the ranks that make them exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


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


def shard(full: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's piece of `full`: a copy, contiguous.

    `full` is cut along `dim` into group.size() equal pieces, in the order of the group's ranks. Raises ValueError where
    that dimension cannot be split.
    """
    size, t = full.shape[dim], group.size()
    if size % t:
        raise ValueError(f"dimension {dim} of size {size} cannot be split over {t} ranks: choose a multiple of {t}")
    return full.detach().chunk(t, dim)[group.rank()].clone(memory_format=torch.contiguous_format)


class ColumnLinear(nn.Module):
    """A linear layer whose output features are split over the ranks of `group`, t of them (Megatron-LM, section 3).

    Rank r computes the r-th of t equal pieces of the output, from the whole input: no communication forward. Backward,
    the gradient of the input is the sum over ranks: one all-reduce, that of `copy_to_ranks`.
    """

    split = {"weight": 0, "bias": 0}  # parameter -> the dimension along which it is cut

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        enter: Exchange | None = None,
    ):
        """`weight` (out, in) and `bias` (out), or None, are those of the whole layer; this rank keeps its own part.

        self.weight (out/t, in) and self.bias (out/t), or None, are `nn.Parameter`s. `enter(x, group)` is what the input
        passes first: `copy_to_ranks` where None is given. Raises ValueError where t does not divide out.
        """
        super().__init__()
        self.group, self.enter = group, enter or copy_to_ranks
        self.weight = nn.Parameter(shard(weight, group))
        self.bias = None if bias is None else nn.Parameter(shard(bias, group))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in), equal on all ranks -> (..., out/t), this rank's piece of the output."""
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer whose input features are split over the ranks of `group`, t of them (Megatron-LM, section 3).

    It takes what a `ColumnLinear` gives. Rank r multiplies the r-th of t equal pieces of the input with its piece of
    the weight; the products add up to the output: one all-reduce forward, that of `sum_over_ranks`. No communication
    backward.
    """

    split = {"weight": 1}  # the bias is whole on every rank

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        leave: Exchange | None = None,
    ):
        """`weight` (out, in) and `bias` (out), or None, are those of the whole layer.

        self.weight (out, in/t), this rank's part, and self.bias (out), whole, or None, are `nn.Parameter`s, and copies.
        `leave(product, group)` is what the product passes: `sum_over_ranks` where None is given. Raises ValueError
        where t does not divide in.
        """
        super().__init__()
        self.group, self.leave = group, leave or sum_over_ranks
        self.weight = nn.Parameter(shard(weight, group, dim=1))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in/t), this rank's piece -> (..., out), the whole output, with the bias added once."""
        total = self.leave(F.linear(x, self.weight), self.group)  # (..., out)
        return total if self.bias is None else total + self.bias


class _OverlappedLinear(torch.autograd.Function):
    """x weightᵀ + bias; backward, the sum of x's gradient over ranks travels while the weight's is computed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x_grad, work = None, None
        if ctx.needs_input_grad[0]:
            x_grad = grad @ weight  # (..., in)
            work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        grad_rows = grad.flatten(0, -2)  # (tokens, out/t)
        weight_grad = grad_rows.T @ x.flatten(0, -2)
        bias_grad = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return x_grad, weight_grad, bias_grad, None


class OverlappedColumnLinear(nn.Module):
    """`ColumnLinear` with its communication hidden behind its computation: the same numbers, the same all-reduce.

    Backward, the all-reduce of the input's gradient starts as soon as that gradient is computed, and travels while the
    weight's and the bias's are computed. It is waited for last. Where the input needs no gradient there is none.
    """

    split = {"weight": 0, "bias": 0}

    def __init__(self, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup):
        """The whole layer's `weight` (out, in) and `bias` (out), or None; what is kept is what `ColumnLinear` keeps."""
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(shard(weight, group))
        self.bias = None if bias is None else nn.Parameter(shard(bias, group))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in), equal on all ranks -> (..., out/t), this rank's piece of the output."""
        return _OverlappedLinear.apply(x, self.weight, self.bias, self.group)


def split_dimensions(module: nn.Module) -> dict[str, int]:
    """The parameters of `module` that are cut over ranks: name -> the dimension along which.

    It reads `split` of each module's class. Parameters that it does not name are whole, and equal on all ranks.
    """
    return {
        f"{path}.{name}".removeprefix("."): dim
        for path, part in module.named_modules()
        for name, dim in getattr(type(part), "split", {}).items()
        if getattr(part, name) is not None
    }
