"""Expert parallelism: a mixture of experts whose experts live on different ranks.

A router picks top_k of E experts for each token (Shazeer et al. 2017; Fedus et al. 2021, Switch Transformers). Each
rank of the group holds E/n experts, in order. Tokens travel to their experts and back: two all-to-alls forward, two
backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.tensor import copy_to_ranks, sum_over_ranks


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    probs: Tensor  # (T, E), each row sums to 1
    experts: Tensor  # (T, top_k), int64, the chosen experts, the likeliest first
    gates: Tensor  # (T, top_k), their probabilities


class Plan(NamedTuple):
    """How the copies of tokens that were sent away find their way back."""

    sent: Tensor  # (S,) which entry of the flattened (T, top_k) choices each sent row is
    regrouped: Tensor  # (R,) which received row stands at each place, after sorting by expert
    sends: list[int]  # rows sent to each rank
    receives: list[int]  # rows received from each rank


def route(logits: Tensor, top_k: int) -> Routing:
    """Choose top_k experts for each token.

    logits: (T, E), where T may be 0. Returns a Routing: the softmax over all E experts, the top_k likeliest of each
    token, and their probabilities as they are (not rescaled to sum 1, so that the router learns also where top_k is 1).
    Of equally likely experts the one with the smaller number comes first; torch.topk does not promise that. Gradients
    reach the logits through probs and gates. Raises ValueError where top_k is not between 1 and E.
    Fedus et al. 2021, section 2.1.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"top_k is {top_k}: choose 1 to {logits.shape[-1]}, the number of experts")
    probs = logits.softmax(dim=-1)
    experts = probs.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return Routing(probs, experts, probs.gather(-1, experts))


def route_within_servers(logits: Tensor, top_k: int, servers: int, most: int) -> Routing:
    """Choose top_k experts for each token, on `most` servers at most.

    logits: (T, E), where T may be 0; the E experts stand on `servers` servers, E/servers on each, in order. A server's
    score is the sum of the probabilities of its ceil(top_k / most) likeliest experts. The `most` servers with the
    highest scores are open to the token, and its experts are the top_k likeliest on them. Of equals the one with the
    smaller number comes first, servers and experts alike. Returns what `route` does: probs is the softmax over all E
    experts. Raises ValueError where `servers` does not divide E, `most` is not between 1 and `servers`, or the open
    servers have fewer than top_k experts.
    DeepSeek-V3 2024, section 2.1.2 (node-limited routing).
    """
    each = logits.shape[-1] // servers  # experts of a server
    if logits.shape[-1] % servers or not 1 <= most <= servers or not 1 <= top_k <= most * each:
        open_to = f"{most} of {servers} servers"
        raise ValueError(f"top_k is {top_k}, {logits.shape[-1]} experts, {open_to}: give even servers, and enough")
    probs = logits.softmax(dim=-1)
    by_server = probs.detach().unflatten(-1, (servers, each))  # (T, servers, E/servers)
    best = by_server.sort(dim=-1, descending=True).values[..., : math.ceil(top_k / most)]
    chosen = best.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :most]  # (T, most) servers
    closed = torch.ones(by_server.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, chosen, False)
    scores = by_server.masked_fill(closed[..., None], -1.0).flatten(1)
    experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return Routing(probs, experts, probs.gather(-1, experts))


def capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """How many tokens an expert takes: ceil(num_tokens · top_k / num_experts · factor).

    num_tokens: the tokens of one rank. factor: 1 is just enough where the load is even, more leaves room.
    Fedus et al. 2021, equation 3, with top_k choices for each token as in Megatron-LM.
    """
    return math.ceil(num_tokens * top_k * factor / num_experts)


def within_capacity(experts: Tensor, num_experts: int, limit: int) -> Tensor:
    """Which choices an expert with room for `limit` tokens takes; the others are dropped.

    experts: (T, top_k), where T may be 0. Returns a bool mask (T, top_k). All first choices come before all second
    choices; among equals the token with the smaller position comes first. So a token's second choice never pushes out
    another's first.
    Lepikhin et al. 2020, GShard, algorithm 1.
    """
    by_choice = experts.t().reshape(-1)  # (top_k·T,) all first choices, then all second ones
    chosen = nn.functional.one_hot(by_choice, num_experts)  # (top_k·T, E)
    before = (chosen.cumsum(0) - chosen).gather(1, by_choice[:, None])[:, 0]  # earlier choices of the same expert
    return (before < limit).view(experts.shape[1], experts.shape[0]).t()


def balance_loss(probs: Tensor, experts: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """E · Σ f·P over experts: 1 where the load is even, up to E where one expert gets everything.

    probs: (T, E), experts: (T, top_k), of this rank's tokens. f is the share of all choices that fell on an expert, P
    its mean probability, both over the tokens of all ranks of `groups`: the loss does not depend on how tokens are
    split. T may differ between ranks, and be 0. Returns a scalar, the same on every rank, of float32 or of the dtype of
    probs where that is wider. Communication: for each group, all-reduces of two numbers an expert, forward only. The
    gradient flows through P alone, to this rank's own probs; summed over ranks it is the gradient of one loss.
    Fedus et al. 2021, equations 4 to 6 (without α).
    """
    num_experts, wide = probs.shape[1], torch.promote_types(probs.dtype, torch.float32)
    counts = torch.bincount(experts.flatten(), minlength=num_experts).to(wide)  # bfloat16 counts to 256 only
    total = probs.sum(0, dtype=wide)  # (E,)
    for group in groups:
        counts, total = sum_over_ranks(counts, group), sum_over_ranks(total, group)
    top_k = experts.shape[1]
    tokens = counts.sum() / top_k
    return num_experts * (counts / (tokens * top_k) * total / tokens).sum()


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        out = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.receives, ctx.sends, ctx.group), None, None, None


def all_to_all(x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x to the ranks of `group`, and rows from them; backward, gradients of rows go back the way the rows came.

    x: (sum of sends, …): first the sends[0] rows for the group's rank 0, then the sends[1] rows for its rank 1, and so
    on. Returns (sum of receives, …): the receives[0] rows from rank 0, then those from rank 1, and so on. Any number
    may be 0, and every rank takes part. Communication: one all-to-all forward, one backward.
    """
    return _AllToAll.apply(x, sends, receives, group)


def dispatch(
    x: Tensor, experts: Tensor, num_experts: int, group: dist.ProcessGroup, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Plan]:
    """Send each token to the ranks that hold its experts.

    x: (T, h), the tokens of this rank; T may be 0. experts: (T, top_k). keep: (T, top_k) bool, the choices that are not
    dropped; None keeps all. Rank i of the group's n holds the experts i·E/n up to (i + 1)·E/n. Returns the tokens that
    this rank's experts got, (R, h), sorted by expert, then by sending rank, then by position; their number for each of
    its E/n experts, (E/n,) int64; and the Plan with which `combine` sends them back. Every rank takes part, also one
    that sends or gets nothing. Communication: the counts (E integers), then the rows, both all-to-all; backward, the
    rows' gradients.
    Raises ValueError where n does not divide E.
    """
    n = group.size()
    if num_experts % n:
        raise ValueError(f"{num_experts} experts cannot be spread over ep{n}: make ep a divisor of {num_experts}")
    choices = experts.flatten()  # (T·top_k,)
    order = choices.argsort(stable=True)  # by expert, which is by rank too
    sent = order if keep is None else order[keep.flatten()[order]]
    counts = torch.bincount(choices[sent], minlength=num_experts).view(n, -1)  # (n, E/n) rows for each rank and expert
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)  # (n, E/n) rows from each rank for each of my experts
    sends, receives = counts.sum(1).tolist(), received.sum(1).tolist()
    rows = all_to_all(x[sent // experts.shape[1]], sends, receives, group)  # (R, h) by sender, then by expert
    mine = torch.arange(counts.shape[1], device=x.device).repeat(n).repeat_interleave(received.flatten())  # (R,)
    regrouped = mine.argsort(stable=True)
    return rows[regrouped], received.sum(0), Plan(sent, regrouped, sends, receives)


def combine(y: Tensor, gates: Tensor, plan: Plan, group: dist.ProcessGroup) -> Tensor:
    """Send the experts' outputs back and add them up for each token, weighted by its gates.

    y: (R, h), in the order in which `dispatch` gave the tokens. gates: (T, top_k). Returns (T, h): for each token the
    sum over its choices of gate · output; a dropped choice adds nothing. Communication: one all-to-all of rows;
    backward, one of their gradients. Gradients reach y and gates.
    """
    back = all_to_all(y[plan.regrouped.argsort()], plan.receives, plan.sends, group)  # (S, h) in the order sent
    weighted = back * gates.flatten()[plan.sent, None]
    return weighted.new_zeros(gates.shape[0], y.shape[1]).index_add(0, plan.sent // gates.shape[1], weighted)


def grouped_mlp(x: Tensor, counts: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """All experts of a rank at once: row blocks of x through their own pair of matrices.

    x: (R, h), sorted by expert. counts: (E',) rows of each expert, zeros allowed. w_in: (E', f, h), w_out: (E', h, f).
    Returns (R, h): for rows of expert e, gelu(x · w_in[e]ᵀ) · w_out[e]ᵀ. Blocks are padded to the longest, so that each
    step is one batched product.
    """
    expert = torch.arange(len(counts), device=x.device).repeat_interleave(counts)  # (R,)
    place = (
        torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[expert]
    )  # (R,) within its expert's block
    longest = int(counts.max()) if len(counts) else 0
    padded = x.new_zeros(len(counts), longest, x.shape[1]).index_put((expert, place), x)  # (E', longest, h)
    hidden = nn.functional.gelu(padded @ w_in.transpose(1, 2))  # (E', longest, f)
    return (hidden @ w_out.transpose(1, 2))[expert, place]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x unchanged; whoever runs backward through it minimises `loss` too.

    So a loss that arises inside a layer needs no way out of a pipeline stage.
    """
    return _WithLoss.apply(x, loss)


class MoE(nn.Module):
    """A layer of E expert MLPs, spread over ranks by expert (`group`) and split inside each expert (`tp_group`).

    router (E, h), w_in (E, f, h), w_out (E, h, f): all are given whole; a rank keeps the router, its E/n experts, and
    of each the f/t inner columns of its place in tp_group. `enter` and `leave` are the pair around a tensor-parallel
    region, as in `MLP`: tokens and gates enter, the output leaves. The router stands before the region, so its gradient
    is whole on every rank of tp_group.

    capacity_factor: None drops nothing. balance_weight: weight of the balance loss over the tokens of balance_groups,
    which is added to what backward minimises; `balance` is its last value.

    forward: (b, s, h) to (b, s, h), for each token the sum over its top_k experts of gate · MLP. The gradients of an
    expert are those of the tokens that came to it here: they are to be summed over the ranks that hold the same expert,
    and over no others, unscaled.
    """

    split = {"w_in": 1, "w_out": 2}  # over tp_group; dimension 0 of both is spread over `group`

    def __init__(
        self, router: Tensor, w_in: Tensor, w_out: Tensor, top_k: int, group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup, enter: Callable = copy_to_ranks, leave: Callable = sum_over_ranks,
        capacity_factor: float | None = None, balance_weight: float = 0.0,
        balance_groups: Sequence[dist.ProcessGroup] = (),
    ):  # fmt: skip
        super().__init__()
        self.top_k, self.group, self.tp_group = top_k, group, tp_group
        self.enter, self.leave = enter, leave
        self.capacity_factor, self.balance_weight = capacity_factor, balance_weight
        self.balance_groups = tuple(balance_groups)
        self.balance = torch.tensor(0.0)
        mine = slice(*(len(router) // group.size() * (group.rank() + i) for i in (0, 1)))
        self.router = nn.Parameter(router.clone())
        self.w_in = nn.Parameter(w_in[mine].chunk(tp_group.size(), 1)[tp_group.rank()].clone())  # (E/n, f/t, h)
        self.w_out = nn.Parameter(w_out[mine].chunk(tp_group.size(), 2)[tp_group.rank()].clone())  # (E/n, h, f/t)

    def forward(self, x: Tensor) -> Tensor:
        routing = route(x.flatten(0, 1) @ self.router.t(), self.top_k)
        gates = self.enter(routing.gates.view(*x.shape[:2], self.top_k), self.tp_group)  # (b, s, top_k)
        with torch.no_grad():
            experts = self.enter(routing.experts.view(*x.shape[:2], self.top_k), self.tp_group).flatten(0, 1)
        tokens = self.enter(x, self.tp_group)  # (b, s, h)
        keep = None
        if self.capacity_factor is not None:
            limit = capacity(len(experts), len(self.router), self.top_k, self.capacity_factor)
            keep = within_capacity(experts, len(self.router), limit)
        rows, counts, plan = dispatch(tokens.flatten(0, 1), experts, len(self.router), self.group, keep)
        y = grouped_mlp(rows, counts, self.w_in, self.w_out)
        out = self.leave(combine(y, gates.flatten(0, 1), plan, self.group).view_as(tokens), self.tp_group)
        if self.balance_weight:
            loss = balance_loss(routing.probs, routing.experts, self.balance_groups)
            self.balance = loss.detach()
            out = with_loss(out, self.balance_weight * loss)
        return out


def average_gradients(layer: MoE, everyone: dist.ProcessGroup, copies: dist.ProcessGroup) -> None:
    """Turn the gradients of this rank's loss into those of the mean of all ranks' losses, in a `MoE` after backward.

    Each rank of `everyone` has tokens of its own, and a loss. `copies` are those of them that hold the same experts as
    this rank: one in every expert group. The router saw this rank's tokens; the experts saw tokens of their whole
    expert group, and their gradients are already sums over its losses. Writes into the tensors that `.grad` is.
    Communication: one all-reduce for each parameter. (The balance loss is one loss of all ranks, of which each adds its
    part: for a mean, give it a weight that is as many times as large as there are ranks.)
    """
    for parameter, group in ((layer.router, everyone), (layer.w_in, copies), (layer.w_out, copies)):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= everyone.size()
