"""Right solutions of lesson 09 that are written in another way than the library's: routing, capacity, balance."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
import torch.distributed as dist
from fivefold.expert import Routing
from torch.nn import functional as F


def route__one_choice_after_the_other(logits, top_k):
    """The likeliest expert, then the likeliest of the others; argmax gives the first of equals."""
    if top_k < 1 or top_k > logits.shape[1]:
        raise ValueError("choose another top_k")
    probs = torch.exp(logits - logits.logsumexp(1, keepdim=True))
    left, chosen = logits.detach().softmax(1).clone(), []
    for _ in range(top_k):
        best = left.max(1, keepdim=True).values
        numbers = torch.arange(logits.shape[1]).expand_as(left)
        first = torch.where(left == best, numbers, logits.shape[1]).min(1).values if len(left) else numbers[:, 0]
        chosen.append(first)
        left = left.scatter(1, first[:, None], -1.0)
    experts = torch.stack(chosen, 1)
    return Routing(probs, experts, probs[torch.arange(len(probs))[:, None], experts])


def route__python_sort(logits, top_k):
    """Rows sorted in Python, whose sort keeps equals in order; the gates from a one-hot product."""
    if top_k not in range(1, logits.size(-1) + 1):
        raise ValueError(f"no {top_k} experts")
    probs = F.softmax(logits, -1)
    ranked = [sorted(range(len(row)), key=lambda e, row=row: -row[e])[:top_k] for row in probs.tolist()]
    experts = torch.tensor(ranked, dtype=torch.long).reshape(len(probs), top_k)
    gates = (F.one_hot(experts, logits.size(-1)).to(probs.dtype) * probs[:, None]).sum(-1)
    return Routing(probs=probs, experts=experts, gates=gates)


def route_within_servers__token_by_token(logits, top_k, servers, most):
    """Loops over tokens; closed servers never enter the list."""
    num_experts = logits.shape[1]
    if num_experts % servers or not 0 < most <= servers or top_k > most * (num_experts // servers) or top_k < 1:
        raise ValueError("these numbers do not fit")
    each = num_experts // servers
    probs = logits.softmax(1)
    rows = []
    for row in probs.tolist():
        blocks = [row[s * each : (s + 1) * each] for s in range(servers)]
        score = [sum(sorted(block, reverse=True)[: -(-top_k // most)]) for block in blocks]
        opened = sorted(range(servers), key=lambda s, score=score: -score[s])[:most]
        candidates = [s * each + i for s in sorted(opened) for i in range(each)]
        rows.append(sorted(candidates, key=lambda e, row=row: -row[e])[:top_k])
    experts = torch.tensor(rows, dtype=torch.int64).view(len(probs), top_k)
    return Routing(probs, experts, torch.gather(probs, 1, experts))


def route_within_servers__ranks_of_servers(logits, top_k, servers, most):
    """Each server's place among all, and the experts of closed ones below every probability."""
    num_experts = logits.shape[1]
    if servers < 1 or num_experts % servers:
        raise ValueError("uneven servers")
    if top_k < 1 or most < 1 or most > servers or most * num_experts // servers < top_k:
        raise ValueError("too few experts are open")
    with torch.no_grad():
        probs = logits.softmax(1).view(len(logits), servers, num_experts // servers)
        score = probs.sort(2, descending=True).values[:, :, : (top_k + most - 1) // most].sum(2)
        rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        shut = (rank >= most).repeat_interleave(num_experts // servers, 1)
        score = probs.flatten(1).masked_fill(shut, -math.inf)
        experts = score.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    probs = logits.softmax(1)
    return Routing(probs, experts, probs.gather(1, experts))


def capacity__whole_numbers(num_tokens, num_experts, top_k, factor):
    """No fraction is ever rounded."""
    exact = Fraction(factor) * num_tokens * top_k / num_experts
    return -((-exact.numerator) // exact.denominator)


def capacity__even_share_first(num_tokens, num_experts, top_k, factor):
    """The formula in the paper's order."""
    share = num_tokens * top_k / num_experts * factor
    return int(share) + (share > int(share))


def within_capacity__loops(experts, num_experts, limit):
    """Choice by choice, token by token."""
    taken, mask = [0] * num_experts, torch.zeros(experts.shape, dtype=torch.bool)
    for k in range(experts.shape[1]):
        for t in range(experts.shape[0]):
            e = int(experts[t, k])
            mask[t, k] = taken[e] < limit
            taken[e] += 1
    return mask


def within_capacity__sorted(experts, num_experts, limit):
    """A stable sort puts an expert's choices next to each other, the earlier ones first."""
    flat = experts.T.flatten()
    order = torch.sort(flat, stable=True).indices
    sizes = torch.bincount(flat, minlength=num_experts)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    mask = torch.empty(len(flat), dtype=torch.bool)
    mask[order] = torch.arange(len(flat)) - starts < limit
    return mask.reshape(experts.shape[::-1]).T


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups):
        x = x.clone()
        for group in groups:
            dist.all_reduce(x, group=group, async_op=True).wait()
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def balance_loss__one_message(probs, experts, groups):
    """Counts and probabilities in one tensor."""
    wide = torch.float64 if probs.dtype == torch.float64 else torch.float32
    chosen = F.one_hot(experts, probs.shape[1]).sum((0, 1)).to(wide)
    chosen, mass = _Total.apply(torch.cat([chosen, probs.to(wide).sum(0)]), list(groups)).chunk(2)
    tokens = chosen.sum() / experts.shape[1]
    return (chosen / chosen.sum() * (mass / tokens)).sum() * probs.shape[1]


def balance_loss__straight_through(probs, experts, groups):
    """Sums without autograd; the gradient passes through this rank's own part. Counts as whole numbers."""
    num_experts, top_k = probs.shape[1], experts.shape[1]
    mine = probs.to(torch.promote_types(probs.dtype, torch.float32)).sum(0)
    counts, everyone = torch.bincount(experts.reshape(-1), minlength=num_experts), mine.detach().clone()
    for group in groups:
        dist.all_reduce(counts, group=group)
        dist.all_reduce(everyone, group=group)
    mass = mine + (everyone - mine.detach())
    return num_experts * top_k * torch.dot(counts.to(mass.dtype), mass) / counts.sum() ** 2
