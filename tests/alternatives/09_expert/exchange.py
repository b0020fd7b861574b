"""Right solutions of lesson 09 that are written in another way than the library's: tokens there and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.expert import Plan, all_to_all
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor


class _Started(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.sends, ctx.receives, ctx.group = inputs

    @staticmethod
    def forward(x, sends, receives, group):
        out = torch.empty((sum(receives), *x.shape[1:]), dtype=x.dtype)
        dist.all_to_all_single(out, x.clone(memory_format=torch.contiguous_format), receives, sends, group, True).wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        back = torch.empty((sum(ctx.sends), *grad.shape[1:]), dtype=grad.dtype)
        work = dist.all_to_all_single(back, grad.contiguous(), ctx.sends, ctx.receives, group=ctx.group, async_op=True)
        work.wait()
        return back, None, None, None


def all_to_all__started_and_waited_for(x, sends, receives, group):
    """An asynchronous call, and a context set up apart."""
    return _Started.apply(x, sends, receives, group)


def all_to_all__torch_has_it(x, sends, receives, group):
    """torch's own differentiable all-to-all."""
    return wait_tensor(all_to_all_single_autograd(x.contiguous(), receives, sends, group))


def dispatch__rank_by_rank(x, experts, num_experts, group, keep=None):
    """Lists of choices for each expert; counts as lists of tensors; blocks joined expert by expert."""
    n, top_k = group.size(), experts.shape[1]
    if num_experts % n != 0:
        raise ValueError(f"{n} ranks cannot share {num_experts} experts evenly")
    each = num_experts // n
    keep = torch.ones_like(experts, dtype=torch.bool) if keep is None else keep
    lists = [
        [t * top_k + k for t in range(len(x)) for k in range(top_k) if experts[t, k] == e and keep[t, k]]
        for e in range(num_experts)
    ]
    sent = torch.tensor([choice for own in lists for choice in own], dtype=torch.int64)
    sizes = [torch.tensor([len(own) for own in lists[r * each : (r + 1) * each]]) for r in range(n)]
    theirs = [torch.empty(each, dtype=torch.int64) for _ in range(n)]
    dist.all_to_all(theirs, sizes, group=group)
    sends, receives = [int(own.sum()) for own in sizes], [int(own.sum()) for own in theirs]
    rows = all_to_all(x[torch.div(sent, top_k, rounding_mode="floor")], sends, receives, group)
    lengths = torch.cat(theirs).tolist()
    blocks = torch.arange(len(rows)).split(lengths)
    by_expert = torch.cat([blocks[r * each + e] for e in range(each) for r in range(n)])
    return rows.index_select(0, by_expert), sum(theirs), Plan(sent, by_expert, sends, receives)


def dispatch__dropped_ones_last(x, experts, num_experts, group, keep=None):
    """Dropped choices get a number above all experts, and are cut off at the end of the sort."""
    if num_experts % group.size():
        raise ValueError("make ep a divisor of the experts")
    each = num_experts // group.size()
    wanted = experts.flatten() if keep is None else experts.flatten().masked_fill(~keep.flatten(), num_experts)
    order = wanted.argsort(stable=True)
    sent = order[wanted[order] < num_experts]
    tally = torch.zeros(num_experts, dtype=torch.int64).index_add(0, wanted[sent], torch.ones_like(sent))
    others = torch.zeros_like(tally)
    dist.all_to_all_single(others, tally, group=group)
    sends, receives = tally.view(-1, each).sum(1).tolist(), others.view(-1, each).sum(1).tolist()
    rows = all_to_all(x.index_select(0, sent // experts.shape[1]), sends, receives, group)
    label = torch.cat([torch.full((int(m),), i % each) for i, m in enumerate(others)] or [tally[:0]])
    place = torch.sort(label, stable=True).indices
    return rows[place], torch.stack(others.split(each)).sum(0), Plan(sent, place, sends, receives)


def combine__choice_by_choice(y, gates, plan, group):
    """Every choice gets a place of its own, and a token sums over its choices."""
    undone = torch.empty_like(plan.regrouped)
    undone[plan.regrouped] = torch.arange(len(plan.regrouped))
    back = all_to_all(y[undone], plan.receives, plan.sends, group)
    every = torch.zeros(gates.numel(), y.shape[1], dtype=y.dtype).index_copy(0, plan.sent, back)
    return torch.einsum("tk,tkh->th", gates, every.view(*gates.shape, y.shape[1]))


def combine__matrix_product(y, gates, plan, group):
    """Rows put in place by scattering, then summed by a matrix of gates."""
    arrived = torch.zeros_like(y).index_put((plan.regrouped,), y)
    back = all_to_all(arrived, plan.receives, plan.sends, group)
    token, number = plan.sent // gates.shape[1], torch.arange(len(back))
    weights = torch.zeros(len(gates), len(back), dtype=gates.dtype)
    return weights.index_put((token, number), gates.reshape(-1)[plan.sent]) @ back
