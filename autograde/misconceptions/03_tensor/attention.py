"""Misconceptions of lesson 03: attention."""

from __future__ import annotations

from autograde.misconception import Misconception

CUT_BY_HEAD = """
qkv = self.qkv(x).unflatten(-1, (self.kv_heads, self.per_group + 2, -1))  # (b, s, kv_heads/t, per_group + 2, d)
parts = qkv.permute(0, 2, 3, 1, 4).split([self.per_group, 1, 1], dim=2)
"""

ATTENTION = [
    Misconception(
        exercise="tensor.Attention",
        name="all_queries_first",
        hint="This looks like: what comes out of the product is taken as all queries, then all keys, then all values. "
        "The rows of the weight are laid out by key head: which numbers come after the first head's queries?",
        old=CUT_BY_HEAD,
        new="""
        qkv, g = self.qkv(x), self.kv_heads
        size = qkv.shape[-1] // (g * (self.per_group + 2))
        whole = qkv.split([g * self.per_group * size, g * size, g * size], dim=-1)
        parts = [part.unflatten(-1, (g, -1, size)).permute(0, 2, 3, 1, 4) for part in whole]
        """,
    ),
    Misconception(
        exercise="tensor.Attention",
        name="queries_dealt_in_turns",
        hint="This looks like: the first query heads go to different key heads, in turns. With as many key heads as "
        "query heads nobody can tell. Which queries does the core pair with the first key head?",
        old="q, k, v = (part.flatten(1, 2).contiguous() for part in parts)  # (b, heads, s, d)",
        new="q, k, v = (part.transpose(1, 2).flatten(1, 2).contiguous() for part in parts)",
    ),
    Misconception(
        exercise="tensor.Attention",
        name="keys_are_values",
        hint="This looks like: keys and values are exchanged. Which of the two comes first in each head's rows?",
        old="q, k, v = (part.flatten(1, 2).contiguous() for part in parts)  # (b, heads, s, d)",
        new="q, v, k = (part.flatten(1, 2).contiguous() for part in parts)",
    ),
    Misconception(
        exercise="tensor.Attention",
        name="heads_not_put_back",
        hint="This looks like: the core's result (b, heads, s, d) is poured into (b, s, heads·d) as it lies in memory. "
        "Are the numbers of a token's heads beside each other there?",
        old="return self.out(heads.transpose(1, 2).flatten(2))",
        new="return self.out(heads.reshape(*x.shape[:2], -1))",
    ),
    Misconception(
        exercise="tensor.Attention",
        name="rotate_left_out",
        hint="This looks like: queries and keys reach the core without having passed `rotate`. "
        "How does the core know then which token stands where?",
        old="q, k = rotate(q, k)",
        new="pass",
    ),
    Misconception(
        exercise="tensor.Attention",
        name="core_left_out",
        hint="This looks like: the attention core is always the library's, also where another was given. "
        "Lesson 04 brings one that computes itself again: how will it get in?",
        old="self.core = core or causal_attention",
        new="self.core = causal_attention",
    ),
    Misconception(
        exercise="tensor.Attention",
        name="exchanges_not_passed_on",
        hint="This looks like: the two layers are built without the `enter` and `leave` that the attention was given. "
        "What do they use then?",
        old="self.qkv = ColumnLinear(qkv_weight, qkv_bias, group, enter)",
        new="self.qkv = ColumnLinear(qkv_weight, qkv_bias, group)",
        also=(("self.out = RowLinear(out_weight, out_bias, group, leave)",
               "self.out = RowLinear(out_weight, out_bias, group)"),),
    ),
    Misconception(
        exercise="tensor.Attention",
        name="heads_gathered",
        hint="This looks like: the heads' results are put together on every rank, and cut again for the output "
        "projection. Which of them does a rank use in the end, and who has had them before?",
        old="return self.out(heads.transpose(1, 2).flatten(2))",
        new="""
        piece, group = heads.transpose(1, 2).flatten(2), self.out.group
        t, r, width = group.size(), group.rank(), piece.shape[-1]
        whole = self.out.leave(F.pad(piece, (r * width, (t - 1 - r) * width)), group)
        return self.out(whole.chunk(t, dim=-1)[r])
        """,
    ),
]  # fmt: skip
