"""The layers of a transformer block, split over a group of ranks: one all-reduce forward and one backward each."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.tensor.linear import ColumnLinear, Exchange, RowLinear


class MLP(nn.Module):
    """Two linear layers with a GELU between them, split over `group` (Megatron-LM, section 3, figure 3a).

    The first is split by columns, so that each rank applies the GELU to its own inner features; the second by rows, so
    that it takes them as they are. One all-reduce forward, after the second; one backward, before the first.
    """

    def __init__(
        self,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        group: dist.ProcessGroup,
        enter: Exchange | None = None,
        leave: Exchange | None = None,
    ):
        """Whole weights and biases: w_in (inner, h), b_in (inner), w_out (h, inner), b_out (h).

        self.column is a `ColumnLinear`, self.row a `RowLinear`; `enter` and `leave` are theirs.
        """
        super().__init__()
        self.column = ColumnLinear(w_in, b_in, group, enter)
        self.row = RowLinear(w_out, b_out, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., h), equal on all ranks -> (..., h), equal on all ranks."""
        return self.row(F.gelu(self.column(x)))
