"""Misconceptions of lesson 03: linear layers."""

from __future__ import annotations

from autograde.misconception import Misconception

WHOLE_KEPT = (
    "This looks like: the whole weight stays in memory, behind a view or to be cut in every forward. "
    "What would let the rest of it go?"
)

COLUMN_LINEAR = [
    Misconception(
        exercise="tensor.ColumnLinear",
        name="own_exchange_ignored",
        hint="This looks like: the layer always calls copy_to_ranks, also where it was given another `enter`. "
        "Lesson 04 builds the same layer with gather_tokens: how will it get in?",
        old="self.group, self.enter = group, enter or copy_to_ranks",
        new="self.group, self.enter = group, copy_to_ranks",
    ),
    Misconception(
        exercise="tensor.ColumnLinear",
        name="without_f",
        hint="This looks like: the input goes straight into the product, so its gradient is that of this rank's "
        "columns alone. Whose columns did the same input also meet?",
        old="return F.linear(self.enter(x, self.group), self.weight, self.bias)",
        new="return F.linear(x, self.weight, self.bias)",
    ),
    Misconception(
        exercise="tensor.ColumnLinear",
        name="cut_over_the_world",
        hint="This looks like: the weight is cut into as many pieces as there are ranks in the world. "
        "Which ranks share this layer, and which number does a rank have among them?",
        old="self.weight = nn.Parameter(shard(weight, group))",
        new="self.weight = nn.Parameter(shard(weight, dist.group.WORLD))",
        also=(
            (
                "self.bias = None if bias is None else nn.Parameter(shard(bias, group))",
                "self.bias = None if bias is None else nn.Parameter(shard(bias, dist.group.WORLD))",
            ),
        ),
    ),
    Misconception(
        exercise="tensor.ColumnLinear",
        name="view_of_the_whole",
        hint=WHOLE_KEPT,
        old="self.weight = nn.Parameter(shard(weight, group))",
        new="""
        if len(weight) % group.size():
            raise ValueError("cannot be split")
        self.weight = nn.Parameter(weight.detach().chunk(group.size())[group.rank()])
        """,
    ),
    Misconception(
        exercise="tensor.ColumnLinear",
        name="whole_output",
        hint="This looks like: the pieces of the output are put together again on every rank. "
        "What does the next layer of the pair want to have: the whole, or its piece?",
        old="return F.linear(self.enter(x, self.group), self.weight, self.bias)",
        new="""
        piece = F.linear(self.enter(x, self.group), self.weight, self.bias)
        t, r, width = self.group.size(), self.group.rank(), piece.shape[-1]
        return sum_over_ranks(F.pad(piece, (r * width, (t - 1 - r) * width)), self.group)
        """,
    ),
]

ROW_LINEAR = [
    Misconception(
        exercise="tensor.RowLinear",
        name="bias_on_every_rank",
        hint="This looks like: the bias is added on every rank before the sum, which then adds it up t times. "
        "Who should add it, and when?",
        old="""
        total = self.leave(F.linear(x, self.weight), self.group)  # (..., out)
        return total if self.bias is None else total + self.bias
        """,
        new="return self.leave(F.linear(x, self.weight, self.bias), self.group)",
    ),
    Misconception(
        exercise="tensor.RowLinear",
        name="bias_divided",
        hint="This looks like: each rank adds 1/t of the bias before the sum. The output is right. "
        "How much of the gradient does each rank's bias get then?",
        old="""
        total = self.leave(F.linear(x, self.weight), self.group)  # (..., out)
        return total if self.bias is None else total + self.bias
        """,
        new="""
        part = None if self.bias is None else self.bias / self.group.size()
        return self.leave(F.linear(x, self.weight, part), self.group)
        """,
    ),
    Misconception(
        exercise="tensor.RowLinear",
        name="bias_on_first_rank",
        hint="This looks like: the bias is in the output, but there are ranks whose own copy has no part in that. "
        "What do these copies learn?",
        old="""
        total = self.leave(F.linear(x, self.weight), self.group)  # (..., out)
        return total if self.bias is None else total + self.bias
        """,
        new="""
        part = self.bias if self.group.rank() == 0 else None
        return self.leave(F.linear(x, self.weight, part), self.group)
        """,
    ),
    Misconception(
        exercise="tensor.RowLinear",
        name="without_g",
        hint="This looks like: each rank goes on with the product of its own piece. "
        "The layer's output is a sum of t products: where is the sum taken?",
        old="total = self.leave(F.linear(x, self.weight), self.group)  # (..., out)",
        new="total = F.linear(x, self.weight)",
    ),
    Misconception(
        exercise="tensor.RowLinear",
        name="summed_backward_too",
        hint="This looks like: the gradient is added up over the ranks on its way back, as it is in a ColumnLinear. "
        "Each rank has the gradient of the whole output already: what does the sum make of it?",
        old="total = self.leave(F.linear(x, self.weight), self.group)  # (..., out)",
        new="total = copy_to_ranks(self.leave(F.linear(x, self.weight), self.group), self.group)",
    ),
    Misconception(
        exercise="tensor.RowLinear",
        name="view_of_the_whole",
        hint=WHOLE_KEPT,
        old="self.weight = nn.Parameter(shard(weight, group, dim=1))",
        new="""
        if weight.shape[1] % group.size():
            raise ValueError("cannot be split")
        self.weight = nn.Parameter(weight.detach().chunk(group.size(), 1)[group.rank()])
        """,
    ),
]
