"""Attention over blocks of keys: partial outputs, each with its log-sum-exp, that merge into the exact result.

The log-sum-exp `lse` of a row is log(sum_j exp(score_j)), over the keys that it has seen: -inf where it has seen
none. It is all that two partial outputs need in order to be merged, and all that a backward needs in order to make
the probabilities again.

Shapes: b batch, h query heads, h_kv key and value heads (grouped-query attention: h_kv divides h, and query head i
reads key head i // (h/h_kv)), sq and sk tokens of the queries and of the keys, d size of a head.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Blocks = Iterable[tuple[Tensor, Tensor]]  # pairs (scores, values), each of some keys


def online_softmax(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ values, where scores and values come in blocks of keys, each seen once, in any order.

    `blocks` gives pairs (scores (..., sq, sk_i), values (..., sk_i, d)); one pair at least, one key at least in each.
    A score of -inf is a key that the row may not see. Returns `out` (..., sq, d) and `lse` (..., sq), both of the whole
    row. A row that sees no key at all has out 0 and lse -inf.

    It keeps, for each row, the largest score m so far, the sum of exp(score - m), and the sum of exp(score - m)·value.
    Where a block raises m, both sums are rescaled by exp(old m - new m), so that no exponential overflows, however the
    scores grow (Milakov and Gimelshein 2018, algorithm 3; FlashAttention, algorithm 1).
    """
    largest = total = weighted = None
    for scores, values in blocks:
        if largest is None:
            largest = scores.new_full(scores.shape[:-1], -torch.inf)  # (..., sq)
            total = torch.zeros_like(largest)
            weighted = values.new_zeros(*largest.shape, values.shape[-1])  # (..., sq, d)
        raised = torch.maximum(largest, scores.amax(dim=-1))
        # A row that has seen nothing has m = -inf, and -inf - -inf is NaN: measure such a row from 0.
        reference = raised.masked_fill(raised.isneginf(), 0.0)
        rescale = torch.exp(largest - reference)
        weights = torch.exp(scores - reference[..., None])  # (..., sq, sk_i)
        total = total * rescale + weights.sum(dim=-1)
        weighted = weighted * rescale[..., None] + weights @ values
        largest = raised
    out = weighted / total.masked_fill(total == 0, 1.0)[..., None]
    return out, largest + torch.log(total)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both parts, from the attention over each.

    `out_a`, `out_b` (..., s, d) are normalised outputs over two sets of keys with none in common; `lse_a`, `lse_b`
    (..., s) their log-sum-exps. Returns `out` (..., s, d) and `lse` (..., s): lse = log(exp(lse_a) + exp(lse_b)), and
    each part weighs exp(its lse - lse). Nothing overflows where an lse is large. A row that has seen nothing in one
    part (lse = -inf) keeps the other part as it is; seen in neither, it stays finite: out 0 and lse -inf. Outputs in
    half precision are merged, and returned, in the precision of the lse (Ring Attention; FlashAttention-2, section
    2.3).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    reference = lse.masked_fill(lse.isneginf(), 0.0)  # -inf - -inf would be NaN
    weight_a = torch.exp(lse_a - reference)[..., None]
    weight_b = torch.exp(lse_b - reference)[..., None]
    return weight_a * out_a + weight_b * out_b, lse


def causal_mask(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Which keys each query may see: (sq, sk), true where the key's position is not after the query's.

    Positions are those in the whole sequence, (sq,) and (sk,), whichever tokens a rank holds.
    """
    return k_positions[None, :] <= q_positions[:, None]


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of all queries over one block of keys, with the log-sum-exp that lets blocks be merged.

    `q` (b, h, sq, d), `k` and `v` (b, h_kv, sk, d); `mask` (sq, sk), true where a query may see a key; `scale` is
    1/sqrt(d) where it is not given. Returns `out` (b, h, sq, d) in q's dtype, and `lse` (b, h, sq) in float32 or
    wider. A row that sees no key has out 0 and lse -inf.
    """
    scores = _scores(q, k, mask, _scale(q, scale))  # (b, h_kv, h/h_kv, sq, sk)
    lse = torch.logsumexp(scores, dim=-1)
    out = _probabilities(scores, lse) @ _wide(v).unsqueeze(2)  # (b, h_kv, h/h_kv, sq, d)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def block_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's share of dq, and its dk and dv, from the gradient `dout` of the output.

    `q`, `k`, `v`, `mask`, `scale` are those of the forward. `out` and `lse` are of the *whole* row, after all blocks
    are merged: with the final lse, exp(score - lse) is the final probability, and the blocks' dq add up to the exact
    one. With P the probabilities and D = rowsum(dout * out): dV = Pᵀ dout, dP = dout Vᵀ, dS = P * (dP - D), dQ =
    scale·dS K, dK = scale·dSᵀ Q; a key head adds up those of its query heads (FlashAttention-2, algorithm 2). Returns
    dq, dk, dv in the shapes and dtypes of q, k, v.
    """
    scale, heads = _scale(q, scale), (k.shape[1], q.shape[1] // k.shape[1])
    delta = (_wide(dout) * _wide(out)).sum(dim=-1, keepdim=True).unflatten(1, heads)  # (b, h_kv, h/h_kv, sq, 1)
    grouped_q, grouped_dout = _wide(q).unflatten(1, heads), _wide(dout).unflatten(1, heads)
    p = _probabilities(_scores(q, k, mask, scale), lse.unflatten(1, heads))  # (b, h_kv, h/h_kv, sq, sk)
    dv = (p.mT @ grouped_dout).sum(dim=2)
    ds = p * (grouped_dout @ _wide(v).unsqueeze(2).mT - delta)
    dq = scale * (ds @ _wide(k).unsqueeze(2)).flatten(1, 2)
    dk = scale * (ds.mT @ grouped_q).sum(dim=2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scaled scores, -inf where the mask is false: (b, h_kv, h/h_kv, sq, sk)."""
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads: choose a divisor")
    scores = scale * _wide(q).unflatten(1, (k.shape[1], -1)) @ _wide(k).unsqueeze(2).mT
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse); 0 in a row that sees nothing, where -inf - -inf would be NaN."""
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _wide(x: Tensor) -> Tensor:
    """Half precision to float32, as kernels do inside; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def fused_block_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`block_attention` by the kernels of PyTorch that return the log-sum-exp; they never keep the scores.

    The shapes are the same. `causal`: query i sees keys 0 to i; it needs sq = sk. There is no other mask: for a row
    that sees nothing, the kernel for CPU gives lse 0, which would weigh in a merge. On CUDA: half precision (heads a
    multiple of 8) by flash attention, float32 by the memory-efficient kernel.
    """
    _require_square(q, k, causal)
    if q.shape[2] == 0 or k.shape[2] == 0:  # the kernel for CPU divides by zero
        return block_attention(q, k, v, scale=scale)
    aten, rows = torch.ops.aten, q.shape[2]
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., :rows]  # the kernel pads rows to a multiple of 32


def fused_block_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_attention_backward` by the kernels; `out` (in q's dtype) and `lse` are of the whole row, as there."""
    _require_square(q, k, causal)
    if q.shape[2] == 0 or k.shape[2] == 0:
        return block_attention_backward(dout, q, k, v, out, lse, scale=scale)
    aten, rows, heads = torch.ops.aten, q.shape[2], (k.shape[1], q.shape[1] // k.shape[1])
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # of the dropout that there is not
    if q.dtype in (torch.float16, torch.bfloat16):
        backward, tokens = aten._scaled_dot_product_flash_attention_backward, (None, None, rows, k.shape[2])
        dq, dk, dv = backward(dout, q, k, v, out, lse, *tokens, 0.0, causal, seed, seed, scale=scale)
    else:
        backward, wanted = aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
        lse = torch.nn.functional.pad(lse, (0, -rows % 32), value=torch.inf)
        seed = seed[0]
        dq, dk, dv, _ = backward(dout, q, k, v, None, out, lse, seed, seed, 0.0, wanted, causal, scale=scale)
    return dq, dk.unflatten(1, heads).sum(dim=2), dv.unflatten(1, heads).sum(dim=2)


def _require_square(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal attention of {q.shape[2]} queries over {k.shape[2]} keys: give as many of each")


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Key or value heads, each once for every query head that reads it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
