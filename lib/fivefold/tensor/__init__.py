"""Tensor parallelism: matrices split over a group of ranks (Shoeybi et al. 2019, Megatron-LM, section 3).

Activations are (b, s, h): batch, tokens, hidden. Where a group has t ranks, each keeps 1/t of a split matrix. Modules
are built from whole matrices and keep their own part; `split` on a module names the parameters that are cut, and along
which dimension. All its other parameters are whole, and equal on all ranks.
"""

from fivefold.tensor.layers import MLP
from fivefold.tensor.linear import ColumnLinear, Exchange, RowLinear, copy_to_ranks, shard, sum_over_ranks

__all__ = ["MLP", "ColumnLinear", "Exchange", "RowLinear", "copy_to_ranks", "shard", "sum_over_ranks"]
