"""Right solutions of lesson 03 that are written in another way than the library's: attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fivefold.tensor import ColumnLinear, RowLinear, causal_attention
from torch import nn


class Attention__head_by_head(nn.Module):  # noqa: N801
    """Rows counted out for each key head; queries, keys and values collected in lists."""

    def __init__(self, qkv_weight, qkv_bias, out_weight, out_bias, num_heads, num_kv_heads, group,
                 core=None, enter=None, leave=None):  # fmt: skip
        super().__init__()
        if num_heads % num_kv_heads or num_kv_heads % group.size():
            raise ValueError("choose other heads")
        self.qkv = ColumnLinear(qkv_weight, qkv_bias, group, enter)
        self.out = RowLinear(out_weight, out_bias, group, leave)
        self.size = out_weight.shape[1] // num_heads
        self.per_group, self.core = num_heads // num_kv_heads, causal_attention if core is None else core

    def forward(self, x, rotate=None):
        q, k, v = [], [], []
        for own in self.qkv(x).split((self.per_group + 2) * self.size, -1):
            *queries, key, value = own.split(self.size, -1)
            q += queries
            k.append(key)
            v.append(value)
        q, k, v = (torch.stack(heads, 1) for heads in (q, k, v))
        if rotate:
            q, k = rotate(q, k)
        return self.out(torch.cat(self.core(q, k, v).unbind(1), -1))


class Attention__torchs_core(nn.Module):  # noqa: N801
    """torch's fused attention, with key heads repeated for their query heads; dimensions moved by einsum-like views."""

    def __init__(self, qkv_weight, qkv_bias, out_weight, out_bias, num_heads, num_kv_heads, group,
                 core=None, enter=None, leave=None):  # fmt: skip
        super().__init__()
        t = group.size()
        if num_heads % num_kv_heads or num_kv_heads % t:
            raise ValueError("choose other heads")
        self.heads, self.kv = num_heads // t, num_kv_heads // t
        self.qkv, self.out = (
            ColumnLinear(qkv_weight, qkv_bias, group, enter),
            RowLinear(out_weight, out_bias, group, leave),
        )
        self.core = core or self.fused

    def fused(self, q, k, v):
        k, v = (heads.repeat_interleave(self.heads // self.kv, 1) for heads in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x, rotate=None):
        b, s, _ = x.shape
        n = self.heads // self.kv
        qkv = self.qkv(x).view(b, s, self.kv, n + 2, -1)
        q = qkv[:, :, :, :n].reshape(b, s, self.heads, -1).transpose(1, 2)
        k, v = qkv[:, :, :, n].transpose(1, 2), qkv[:, :, :, n + 1].transpose(1, 2)
        q, k = (q, k) if rotate is None else rotate(q, k)
        return self.out(self.core(q, k, v).permute(0, 2, 1, 3).reshape(b, s, -1))
