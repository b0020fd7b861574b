"""Right solutions of lesson 09 that are written in another way than the library's: the layer, gradients, cost."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fivefold.expert import balance_loss, capacity, combine, dispatch, route, with_loss, within_capacity
from fivefold.tensor import copy_to_ranks, sum_over_ranks
from torch import nn
from torch.nn import functional as F


class MoE__expert_by_expert(nn.Module):  # noqa: N801
    """A loop over the rank's experts; gates and experts enter the region beside the tokens, in one tensor."""

    def __init__(self, router, w_in, w_out, top_k, group, tp_group, enter=copy_to_ranks, leave=sum_over_ranks,
                 capacity_factor=None, balance_weight=0.0, balance_groups=()):  # fmt: skip
        super().__init__()
        each, inner = router.shape[0] // group.size(), w_in.shape[1] // tp_group.size()
        first, column = each * group.rank(), inner * tp_group.rank()
        self.router = nn.Parameter(router.detach().clone())
        self.w_in = nn.Parameter(w_in[first : first + each, column : column + inner].detach().clone())
        self.w_out = nn.Parameter(w_out[first : first + each, :, column : column + inner].detach().clone())
        self.options = top_k, group, tp_group, enter, leave
        self.factor, self.weight, self.over = capacity_factor, balance_weight, list(balance_groups)
        self.balance = None

    def forward(self, x):
        top_k, group, tp, enter, leave = self.options
        b, s, h = x.shape
        routing = route(F.linear(x.reshape(-1, h), self.router), top_k)
        numbers = routing.experts.to(x.dtype).view(b, s, top_k)
        both = enter(torch.cat([x, routing.gates.view(b, s, top_k)], -1), tp)
        numbers = enter(numbers, tp).detach()
        tokens, gates = both[..., :h].reshape(-1, h), both[..., h:].reshape(-1, top_k)
        experts = numbers.round().long().reshape(-1, top_k)
        keep = None
        if self.factor is not None:
            keep = within_capacity(
                experts, len(self.router), capacity(len(tokens), len(self.router), top_k, self.factor)
            )
        rows, counts, plan = dispatch(tokens, experts, len(self.router), group, keep)
        blocks = rows.split(counts.tolist())
        made = [F.gelu(block @ a.T) @ c.T for block, a, c in zip(blocks, self.w_in, self.w_out, strict=True)]
        y = leave(combine(torch.cat(made), gates, plan, group).view(both.shape[0], both.shape[1], h), tp)
        if self.weight:
            loss = balance_loss(routing.probs, routing.experts, self.over)
            self.balance = loss.detach().clone()
            y = with_loss(y, self.weight * loss)
        return y


class MoE__row_by_row(nn.Module):  # noqa: N801
    """Each row is multiplied with its own expert's matrices; the last balance loss is a buffer."""

    def __init__(self, router, w_in, w_out, top_k, group, tp_group, enter=copy_to_ranks, leave=sum_over_ranks,
                 capacity_factor=None, balance_weight=0.0, balance_groups=()):  # fmt: skip
        super().__init__()
        w_in, w_out = (w.tensor_split(group.size())[group.rank()] for w in (w_in, w_out))
        t, r = tp_group.size(), tp_group.rank()
        self.w_out = nn.Parameter(w_out.unflatten(2, (t, -1))[:, :, r].clone())
        self.w_in = nn.Parameter(w_in.unflatten(1, (t, -1))[:, r].clone())
        self.router = nn.Parameter(router + 0)
        self.k, self.ep, self.tp, self.ways = top_k, group, tp_group, (enter, leave)
        self.limits, self.even = capacity_factor, (balance_weight, balance_groups)
        self.register_buffer("balance", torch.zeros(()))

    def forward(self, x):
        enter, leave = self.ways
        probs, experts, gates = route((x @ self.router.T).flatten(0, 1), self.k)
        shape = (*x.shape[:2], self.k)
        gates = enter(gates.unflatten(0, x.shape[:2]), self.tp).flatten(0, 1)
        chosen = enter(experts.view(shape), self.tp).flatten(0, 1)
        inside = enter(x, self.tp)
        total = len(self.router)
        room = None if self.limits is None else capacity(len(chosen), total, self.k, self.limits)
        keep = None if room is None else within_capacity(chosen, total, room)
        rows, counts, plan = dispatch(inside.flatten(0, 1), chosen, total, self.ep, keep)
        number = torch.arange(len(counts)).repeat_interleave(counts)
        middle = F.gelu(torch.einsum("rh,rfh->rf", rows, self.w_in[number]))
        y = torch.einsum("rf,rhf->rh", middle, self.w_out[number])
        out = leave(combine(y, gates, plan, self.ep).view(inside.shape), self.tp)
        weight, groups = self.even
        if weight:
            loss = balance_loss(probs, experts, groups)
            self.balance = loss.detach()
            out = with_loss(out, weight * loss)
        return out


def average_gradients__divided_before(layer, everyone, copies):
    """Each part is divided before it is summed; the experts' gradients travel in one message."""
    n = everyone.size()
    layer.router.grad.div_(n)
    dist.all_reduce(layer.router.grad, group=everyone, async_op=True).wait()
    grads = [layer.w_in.grad, layer.w_out.grad]
    flat = torch.cat([grad.reshape(-1) for grad in grads]) / n
    dist.all_reduce(flat, group=copies)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view(grad.shape))


def average_gradients__means_put_right(layer, everyone, copies):
    """The mean over the copies, times their share of all ranks."""
    for name, parameter in layer.named_parameters():
        total = parameter.grad.contiguous().clone()
        group = everyone if name == "router" else copies
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)
        parameter.grad.copy_(total * (group.size() / everyone.size()))


def expert_traffic__four_passes(tokens, h, top_k, ep):
    """Dispatch and combine, forward and backward; one rank in ep is home."""
    away = tokens * top_k * (1 - 1 / ep)
    return sum(away * h for _ in ("dispatch", "combine", "gradient of combine", "gradient of dispatch"))


def expert_traffic__rank_by_rank(tokens, h, top_k, ep):
    """An even part to each of the other ranks."""
    to_one = tokens * top_k * h / ep
    return 4.0 * sum(to_one for other in range(ep) if other != 0)
