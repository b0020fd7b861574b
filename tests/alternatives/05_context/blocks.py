"""Right solutions of lesson 05 that are written in another way than the library's: blocks of keys."""

from __future__ import annotations

import torch


def merge__sigmoid(out_a, lse_a, out_b, lse_b):
    """The share of b is the sigmoid of the difference, as ring-flash-attention writes it."""
    nothing = lse_a.isneginf() & lse_b.isneginf()
    share = torch.sigmoid((lse_b - lse_a).masked_fill(nothing, 0.0)).unsqueeze(-1)
    lse = torch.where(nothing, lse_a, torch.maximum(lse_a, lse_b) + torch.log1p(torch.exp(-(lse_a - lse_b).abs())))
    return out_a * (1 - share) + out_b * share, lse


def merge__stacked(out_a, lse_a, out_b, lse_b):
    """A softmax over the two parts."""
    both = torch.stack((lse_a, lse_b))
    weights = torch.softmax(both, dim=0).nan_to_num(0.0)
    out = (weights.unsqueeze(-1) * torch.stack((out_a, out_b))).sum(0)
    return out, torch.logsumexp(both, dim=0)


def merge__by_the_larger(out_a, lse_a, out_b, lse_b):
    """Both measured from the larger of the two, sums before the quotient."""
    top = torch.where(lse_a > lse_b, lse_a, lse_b)
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    total = a + b
    out = (a[..., None] * out_a + b[..., None] * out_b) / total.clamp(
        min=1e-300 if total.dtype.itemsize == 8 else 1e-30
    )[..., None]
    return out, top + total.log()


def online_softmax__merged(blocks):
    """Each block by torch's softmax, merged by its log-sum-exp."""
    out = lse = None
    for scores, values in blocks:
        part = scores.softmax(-1).nan_to_num(0.0) @ values
        part_lse = scores.logsumexp(-1)
        if out is None:
            out, lse = part, part_lse
            continue
        both = torch.stack((lse, part_lse))
        w = both.softmax(0).nan_to_num(0.0)[..., None]
        out, lse = w[0] * out + w[1] * part, both.logsumexp(0)
    return out, lse


def online_softmax__large_finite(blocks):
    """A very low number in the place of minus infinity, and the state in one list."""
    low = -1e300
    state = None
    for scores, values in iter(blocks):
        m = scores.max(-1, keepdim=True).values.clamp(min=low)
        p = (scores - m).exp()
        new = [m, p.sum(-1, keepdim=True), p @ values]
        if state is not None:
            top = torch.maximum(state[0], m)
            was, now = (state[0] - top).exp(), (m - top).exp()
            new = [top, was * state[1] + now * new[1], was * state[2] + now * new[2]]
        state = new
    m, total, weighted = state
    seen = total > 0
    lse = torch.where(seen, m + total.log(), -torch.inf).squeeze(-1)
    return torch.where(seen, weighted / torch.where(seen, total, 1.0), 0.0), lse


def online_softmax__key_by_key(blocks):
    """One key at a time."""
    state = None
    for scores, values in blocks:
        for j in range(scores.shape[-1]):
            score, value = scores[..., j], values[..., j, :]
            if state is None:
                shape = *score.shape, value.shape[-1]
                state = torch.full_like(score, -torch.inf), torch.zeros_like(score), value.new_zeros(shape)
            m, total, out = state
            top = torch.maximum(m, score)
            base = torch.where(top == -torch.inf, 0.0, top)
            old, new = torch.exp(m - base), torch.exp(score - base)
            state = top, total * old + new, out * old[..., None] + new[..., None] * value[..., None, :]
        del scores, values
    m, total, out = state
    return torch.where(total[..., None] > 0, out / total[..., None], 0.0), m + total.log()
