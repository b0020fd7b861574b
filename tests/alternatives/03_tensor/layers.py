"""Right solutions of lesson 03 that are written in another way than the library's: layers."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.tensor import ColumnLinear, RowLinear, copy_to_ranks, shard, sum_over_ranks
from torch import nn


def _with_hook(x, group):
    copy = x.view_as(x)
    if copy.requires_grad:
        copy.register_hook(lambda grad: _total(grad.clone(), group))
    return copy


def _total(grad, group):
    dist.all_reduce(grad, group=group)
    return grad


def _rows(tensor, group):
    """This rank's rows, by their numbers."""
    if tensor.shape[0] % group.size():
        raise ValueError(f"{tensor.shape[0]} rows over {group.size()} ranks")
    width = tensor.shape[0] // group.size()
    return tensor[group.rank() * width : (group.rank() + 1) * width].clone()


class ColumnLinear__by_numbers(nn.Module):  # noqa: N801
    """The rows of its piece counted out; one product more for the bias; its own f, a hook on the input."""

    def __init__(self, weight, bias, group, enter=None):
        super().__init__()
        self.weight = nn.Parameter(_rows(weight, group))
        self.register_parameter("bias", None if bias is None else nn.Parameter(_rows(bias, group)))
        self.get_x = lambda x: (enter or _with_hook)(x, group)

    def forward(self, x):
        product = self.get_x(x) @ self.weight.T
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """x weightᵀ; backward, the gradient of x is summed over the ranks at once."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x_grad = grad @ weight
        work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        weight_grad = grad.flatten(0, -2).T @ x.flatten(0, -2)
        work.wait()
        return x_grad, weight_grad, None


class ColumnLinear__own_backward(nn.Linear):  # noqa: N801
    """A linear layer of torch's with new parameters, and a backward written out where no other `enter` is given."""

    def __init__(self, weight, bias, group, enter=None):
        super().__init__(weight.shape[1], 1, bias=bias is not None, dtype=weight.dtype)
        self.weight = nn.Parameter(shard(weight, group))
        if bias is not None:
            self.bias = nn.Parameter(shard(bias, group))
        self.group, self.enter = group, enter

    def forward(self, x):
        if self.enter is not None:
            return super().forward(self.enter(x, self.group))
        product = _Product.apply(x, self.weight, self.group)
        return product if self.bias is None else product + self.bias


class RowLinear__scattered_columns(nn.Module):  # noqa: N801
    """The columns of its piece gathered by index; the bias as a row of its own."""

    def __init__(self, weight, bias, group, leave=None):
        super().__init__()
        features = weight.shape[1]
        if features % group.size() != 0:
            raise ValueError("choose another number of ranks")
        mine = torch.arange(features).view(group.size(), -1)[group.rank()]
        self.weight = nn.Parameter(weight.index_select(1, mine))
        self.bias = nn.Parameter(bias.clone()) if bias is not None else None
        self.finish = leave or sum_over_ranks
        self.ranks = [group]

    def forward(self, x):
        total = self.finish(torch.einsum("...i,oi->...o", x, self.weight), *self.ranks)
        return torch.add(total, self.bias) if self.bias is not None else total


class RowLinear__straight_through(nn.Module):  # noqa: N801
    """No autograd function where no other `leave` is given: what the other ranks add is a constant."""

    def __init__(self, weight, bias, group, leave=None):
        super().__init__()
        self.weight = nn.Parameter(shard(weight, group, dim=-1))
        self.bias = bias if bias is None else nn.Parameter(bias + 0)
        self.group, self.leave = group, leave or self.sum

    @staticmethod
    def sum(product, group):
        others = product.detach().clone()
        dist.all_reduce(others, group=group)
        return product + (others - product.detach())

    def forward(self, x):
        whole = self.leave(F.linear(x, self.weight), self.group)
        return whole + (0 if self.bias is None else self.bias)


class MLP__in_sequence(nn.Sequential):  # noqa: N801
    """A sequence whose layers have names."""

    def __init__(self, w_in, b_in, w_out, b_out, group, enter=None, leave=None):
        super().__init__()
        self.add_module("column", ColumnLinear(w_in, b_in, group, **({"enter": enter} if enter else {})))
        self.add_module("gelu", nn.GELU())
        self.add_module("row", RowLinear(w_out, b_out, group, **({"leave": leave} if leave else {})))


class _Named(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class MLP__in_one_piece(nn.Module):  # noqa: N801
    """No split layers inside: parameters cut here, and both exchanges called in one forward."""

    def __init__(self, w_in, b_in, w_out, b_out, group, enter=None, leave=None):
        super().__init__()
        self.column = _Named(shard(w_in, group), None if b_in is None else shard(b_in, group))
        self.row = _Named(shard(w_out, group, 1), None if b_out is None else b_out.clone())
        self.exchanges = enter or copy_to_ranks, leave or sum_over_ranks
        self.group = group

    def forward(self, x):
        enter, leave = self.exchanges
        hidden = F.gelu(F.linear(enter(x, self.group), self.column.weight, self.column.bias))
        y = leave(hidden @ self.row.weight.T, self.group)
        return y if self.row.bias is None else y + self.row.bias


class GatedMLP__two_products(nn.Module):  # noqa: N801
    """Gate and up cut one by one, and multiplied one by one."""

    def __init__(self, w_in, w_out, group, enter=None, leave=None):
        super().__init__()
        gate, up = w_in.chunk(2)
        self.w_in = nn.Parameter(torch.stack([shard(gate, group), shard(up, group)]))
        self.row = RowLinear(w_out, None, group, leave)
        self.group, self.enter = group, enter or copy_to_ranks

    def forward(self, x):
        x = self.enter(x, self.group)
        return self.row(F.silu(x @ self.w_in[0].T) * (x @ self.w_in[1].T))


class GatedMLP__rows_by_number(nn.Module):  # noqa: N801
    """Both halves' rows chosen in one go, one product of three dimensions."""

    def __init__(self, w_in, w_out, group, enter=None, leave=None):
        super().__init__()
        inner = w_in.shape[0] // 2
        mine = torch.arange(inner).chunk(group.size())[group.rank()]
        self.w_in = nn.Parameter(w_in[torch.cat([mine, inner + mine])].view(2, len(mine), -1))
        self.row = RowLinear(w_out, None, group, leave or sum_over_ranks)
        self.group, self.enter = group, enter or copy_to_ranks

    def forward(self, x):
        both = torch.einsum("...h,gih->g...i", self.enter(x, self.group), self.w_in)
        return self.row(both[1] * both[0] * both[0].sigmoid())
