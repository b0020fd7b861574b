"""Tensor parallelism: matrices split over a group of ranks (Shoeybi et al. 2019, Megatron-LM, section 3).

Activations are (b, s, h): batch, tokens, hidden. Where a group has t ranks, each keeps 1/t of a split matrix. Modules
are built from whole matrices and keep their own part; `split` on a module names the parameters that are cut, and along
which dimension. All its other parameters are whole, and equal on all ranks.

`enter` and `leave` are the exchanges between ranks before and after a pair of split layers: `copy_to_ranks` and
`sum_over_ranks`, or those of sequence parallelism, `gather_tokens` and `scatter_tokens`.
"""

from fivefold.tensor.layers import MLP, Attention, Core, GatedMLP, Rotate, causal_attention, check_heads
from fivefold.tensor.linear import (
    ColumnLinear,
    Exchange,
    OverlappedColumnLinear,
    RowLinear,
    copy_to_ranks,
    shard,
    split_dimensions,
    sum_over_ranks,
)
from fivefold.tensor.vocabulary import VocabEmbedding, VocabLogits, vocab_cross_entropy

__all__ = [
    "MLP",
    "Attention",
    "ColumnLinear",
    "Core",
    "Exchange",
    "GatedMLP",
    "OverlappedColumnLinear",
    "Rotate",
    "RowLinear",
    "VocabEmbedding",
    "VocabLogits",
    "causal_attention",
    "check_heads",
    "copy_to_ranks",
    "shard",
    "split_dimensions",
    "sum_over_ranks",
    "vocab_cross_entropy",
]
