"""Right solutions of lesson 03 that are written in another way than the library's: the vocabulary, and the formula."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.cost import collective_bytes
from fivefold.tensor import sum_over_ranks
from torch import nn


class VocabEmbedding__one_hot(nn.Module):  # noqa: N801
    """A product with one-hot rows, in which a token of another rank is a row of zeros."""

    def __init__(self, weight, group, leave=None):
        super().__init__()
        t, rows = group.size(), -(-len(weight) // group.size())
        padded = weight.new_zeros(t * rows, weight.shape[1])
        padded[: len(weight)] = weight
        self.weight = nn.Parameter(padded[group.rank() * rows : (group.rank() + 1) * rows].clone())
        self.start, self.group, self.leave = group.rank() * rows, group, leave or sum_over_ranks

    def forward(self, tokens):
        own = torch.arange(self.start, self.start + len(self.weight))
        return self.leave((tokens[..., None] == own).to(self.weight.dtype) @ self.weight, self.group)


class VocabEmbedding__filled_in(nn.Module):  # noqa: N801
    """Rows looked up for this rank's own tokens alone, and put into a tensor of zeros."""

    def __init__(self, weight, group, leave=None):
        super().__init__()
        missing = -len(weight) % group.size()
        padded = torch.cat([weight, torch.zeros(missing, weight.shape[1], dtype=weight.dtype)])
        self.weight = nn.Parameter(padded.unflatten(0, (group.size(), -1))[group.rank()].clone())
        self.group, self.leave = group, leave

    def forward(self, tokens):
        rows = len(self.weight)
        mine = tokens.div(rows, rounding_mode="floor") == self.group.rank()
        found = torch.zeros(*tokens.shape, self.weight.shape[1], dtype=self.weight.dtype)
        found = found.index_put((mine,), self.weight[tokens[mine] % rows])
        return (self.leave or sum_over_ranks)(found, self.group)


class _Loss(torch.autograd.Function):
    """Backward written out: softmax minus one-hot."""

    @staticmethod
    def forward(ctx, logits, targets, group, ignored):
        start, width = group.rank() * logits.shape[-1], logits.shape[-1]
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exps = (logits - top.unsqueeze(-1)).exp()
        one_hot = torch.arange(start, start + width) == targets.unsqueeze(-1)
        shifted = torch.where(one_hot, logits - top.unsqueeze(-1), 0)
        both = torch.stack([exps.sum(-1), shifted.sum(-1)])  # one all-reduce of two numbers a token
        dist.all_reduce(both, group=group)
        counted = targets != ignored
        ctx.save_for_backward(exps / both[0].unsqueeze(-1), one_hot, counted)
        return torch.where(counted, both[0].log() - both[1], 0)

    @staticmethod
    def backward(ctx, grad):
        softmax, one_hot, counted = ctx.saved_tensors
        return (softmax - one_hot.to(softmax.dtype)) * (grad * counted).unsqueeze(-1), None, None, None


def vocab_cross_entropy__own_backward(logits, targets, group, ignore_index=-100):
    """Two all-reduces in the place of three: sums and target logits travel together."""
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return _Loss.apply(wide, targets, group, ignore_index)


def vocab_cross_entropy__by_logsumexp(logits, targets, group, ignore_index=-100):
    """Each rank's logsumexp, finite also where all is padding; the target's logit as a sum over a mask."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    logits = logits.clamp_min(torch.finfo(logits.dtype).min / 4)
    own = logits.logsumexp(-1)
    top = own.detach().clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    total = top + sum_over_ranks((own - top).exp(), group).log()
    columns = torch.arange(logits.shape[-1]) + group.rank() * logits.shape[-1]
    mine = columns == targets[..., None]
    target = sum_over_ranks(torch.where(mine, logits, 0).sum(-1), group)
    return torch.where(targets == ignore_index, torch.zeros_like(total), total - target)


def vocab_cross_entropy__in_place(logits, targets, group, ignore_index=-100):
    """No function g: all-reduces straight into tensors of the graph, whose gradients are those of the parts."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    m = x.detach().max(dim=-1, keepdim=True)[0]
    dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
    x = x - m
    first, width = group.rank() * x.shape[-1], x.shape[-1]
    here = (targets >= first) & (targets < first + width) & (targets != ignore_index)
    picked = F.one_hot((targets - first) * here, width).to(x.dtype) * here[..., None]
    sums, own = x.exp().sum(-1), (x.nan_to_num(neginf=0.0) * picked).sum(-1)
    parts = []
    for part in (sums, own):
        others = part.detach().clone()
        dist.all_reduce(others, group=group)
        parts.append(part + (others - part.detach()))
    return (parts[0].log() - parts[1]) * (targets != ignore_index)


def tensor_traffic__by_all_reduces(b, s, h, t):
    """From the bytes of one all-reduce, as if a number had one byte."""
    return sum(collective_bytes("all_reduce", t, b * s * h) for _layer in ("attention", "mlp") for _way in "fb")


def tensor_traffic__by_pieces(b, s, h, t):
    """Four all-reduces, each of t - 1 pieces sent twice."""
    piece = b * s * h / t
    return 4 * (t - 1) * (piece + piece)
