"""Context parallelism: the tokens of a sequence split over a group of ranks, and attention that still sees them all.

Shapes: b batch, h query heads, h_kv key and value heads (h_kv divides h), s tokens of the whole sequence, n ranks of
the group, s/n tokens of a rank, d size of a head. `positions` (n, s/n) says where in the sequence the tokens of each
rank stand: row r are those of rank r, in the order in which it holds them. Every rank has the whole table, which is
small, so any order of tokens works, and which rank holds what is never sent. Where a function takes `positions`, a
query sees the keys that do not stand after it; without them, every query sees every key.
"""

from fivefold.context.fast import fast_ring_attention
from fivefold.context.order import (
    LocalTokens,
    block_mask,
    causal_work,
    check_positions,
    local_tokens,
    token_positions,
    unzigzag,
    zigzag,
)
from fivefold.context.ring import pass_on, ring_attention, ring_blocks
from fivefold.context.variants import all_gather_attention, all_to_all_attention

__all__ = [
    "LocalTokens",
    "all_gather_attention",
    "all_to_all_attention",
    "block_mask",
    "causal_work",
    "check_positions",
    "fast_ring_attention",
    "local_tokens",
    "pass_on",
    "ring_attention",
    "ring_blocks",
    "token_positions",
    "unzigzag",
    "zigzag",
]
