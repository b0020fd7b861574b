"""Misconceptions of lesson 03: tensor parallelism."""

from __future__ import annotations

from autograde.misconception import Misconception

WHOLE_KEPT = (
    "This looks like: the whole weight stays in memory, behind a view or to be cut in every forward. "
    "What would let the rest of it go?"
)

COPY_TO_RANKS = [
    Misconception(
        exercise="tensor.copy_to_ranks",
        name="no_sum_backward",
        hint="This looks like: the gradient goes back to each rank's own x only. "
        "Every rank used a copy of the same x. How does x learn about the other copies?",
        old="dist.all_reduce(grad, group=ctx.group)",
        new="",
    ),
    Misconception(
        exercise="tensor.copy_to_ranks",
        name="summed_forward_too",
        hint="This looks like: x itself is added up over the ranks. "
        "All ranks hold the same x before the call. What should they hold after it?",
        source="""
        class _CopyToRanks(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, group):
                ctx.group = group
                x = x.clone()
                dist.all_reduce(x, group=group)
                return x

            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad, group=ctx.group)
                return grad, None


        def copy_to_ranks(x, group):
            return _CopyToRanks.apply(x, group)
        """,
    ),
    Misconception(
        exercise="tensor.copy_to_ranks",
        name="averaged_backward",
        hint="This looks like: the gradients are averaged over the ranks. "
        "If one x feeds four copies, is its gradient the mean of theirs, or something larger?",
        old="dist.all_reduce(grad, group=ctx.group)",
        new="dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=ctx.group)",
    ),
    Misconception(
        exercise="tensor.copy_to_ranks",
        name="whole_world",
        hint="This looks like: the all-reduce runs over all ranks, whatever the group. "
        "Which ranks hold copies of this x?",
        old="dist.all_reduce(grad, group=ctx.group)",
        new="dist.all_reduce(grad)",
    ),
    Misconception(
        exercise="tensor.copy_to_ranks",
        name="in_place_backward",
        hint="This looks like: the gradient that comes in is overwritten with the sum. "
        "In x + f(x), to whom does autograd hand the same tensor?",
        old="grad = grad.clone(memory_format=torch.contiguous_format)",
        new="",
    ),
]

SUM_OVER_RANKS = [
    Misconception(
        exercise="tensor.sum_over_ranks",
        name="summed_backward_too",
        hint="This looks like: the gradient is added up again on its way back. "
        "Every rank computes the loss from the same sum. How many times would that gradient be counted?",
        old="""
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None
        """,
        new="""
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
            return grad, None
        """,
        also=(("total = x.clone(memory_format=torch.contiguous_format)", "ctx.group = group\ntotal = x.clone()"),),
    ),
    Misconception(
        exercise="tensor.sum_over_ranks",
        name="in_place",
        hint="This looks like: x is overwritten with the sum. "
        "Somebody may still need this rank's own part. Where should the sum go?",
        old="total = x.clone(memory_format=torch.contiguous_format)",
        new="total = x.detach()",
    ),
    Misconception(
        exercise="tensor.sum_over_ranks",
        name="averaged",
        hint="This looks like: the parts are averaged over the ranks. "
        "A matrix product split in pieces is the sum of the pieces. What does the division do to it?",
        old="dist.all_reduce(total, group=group)",
        new="dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)",
    ),
    Misconception(
        exercise="tensor.sum_over_ranks",
        name="whole_world",
        hint="This looks like: the all-reduce runs over all ranks, whatever the group. "
        "Which ranks hold parts of this sum?",
        old="dist.all_reduce(total, group=group)",
        new="dist.all_reduce(total)",
    ),
]

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
        hint="This looks like: rank 0 of the group adds its bias before the sum, and the others do not use theirs. "
        "What do their copies of the bias learn?",
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

TWO_LAYERS = [
    Misconception(
        exercise="tensor.MLP",
        name="activation_after_the_sum",
        hint="This looks like: the GELU stands after the second matrix. "
        "Which features is it meant for, the inner ones or those that leave the layer?",
        old="return self.row(F.gelu(self.column(x)))",
        new="return F.gelu(self.row(self.column(x)))",
    ),
    Misconception(
        exercise="tensor.MLP",
        name="sum_before_the_activation",
        hint="This looks like: the ranks add up their inner features before the GELU. "
        "Are these parts of one sum, or different features of the same tokens?",
        old="return self.row(F.gelu(self.column(x)))",
        new="return self.row(F.gelu(self.row.leave(self.column(x), self.row.group)))",
    ),
    Misconception(
        exercise="tensor.MLP",
        name="gathered_and_cut_again",
        hint="This looks like: the inner features are put together on every rank, and then cut again for the second "
        "matrix. Which of them does a rank use in the end, and who has had them before?",
        old="return self.row(F.gelu(self.column(x)))",
        new="""
        piece, group = F.gelu(self.column(x)), self.column.group
        t, r, width = group.size(), group.rank(), piece.shape[-1]
        whole = self.row.leave(F.pad(piece, (r * width, (t - 1 - r) * width)), group)
        return self.row(whole.chunk(t, dim=-1)[r])
        """,
    ),
    Misconception(
        exercise="tensor.MLP",
        name="exchanges_not_passed_on",
        hint="This looks like: the two layers are built without the `enter` and `leave` that the MLP was given. "
        "What do they use then?",
        old="self.column = ColumnLinear(w_in, b_in, group, enter)",
        new="self.column = ColumnLinear(w_in, b_in, group)",
        also=(("self.row = RowLinear(w_out, b_out, group, leave)", "self.row = RowLinear(w_out, b_out, group)"),),
    ),
    Misconception(
        exercise="tensor.MLP",
        name="whole_matrices",
        hint="This looks like: every rank keeps both matrices whole and computes everything, as in data parallelism. "
        "Which part of the work does this rank spare the others?",
        source="""
        class MLP(nn.Module):
            def __init__(self, w_in, b_in, w_out, b_out, group, enter=None, leave=None):
                super().__init__()
                self.column, self.row = nn.Linear(*w_in.T.shape), nn.Linear(*w_out.T.shape)
                for layer, weight, bias in ((self.column, w_in, b_in), (self.row, w_out, b_out)):
                    layer.weight = nn.Parameter(weight.clone())
                    layer.bias = None if bias is None else nn.Parameter(bias.clone())

            def forward(self, x):
                return self.row(F.gelu(self.column(x)))
        """,
    ),
]

GATED_MLP = [
    Misconception(
        exercise="tensor.GatedMLP",
        name="view_of_the_whole",
        hint=WHOLE_KEPT,
        old="self.w_in = nn.Parameter(shard(w_in.unflatten(0, (2, -1)), group, dim=1))",
        new="self.w_in = nn.Parameter(w_in.detach().unflatten(0, (2, -1)).chunk(group.size(), 1)[group.rank()])",
    ),
    Misconception(
        exercise="tensor.GatedMLP",
        name="fused_cut_in_a_row",
        hint="This looks like: the rows of w_in are cut into t pieces, one after the other. "
        "The first half of the rows are gates, the second half are ups: which of them does rank 0 get?",
        old="self.w_in = nn.Parameter(shard(w_in.unflatten(0, (2, -1)), group, dim=1))",
        new="self.w_in = nn.Parameter(shard(w_in, group).unflatten(0, (2, -1)))",
        also=(('split = {"w_in": 1}\n\ndef __init__(', "def __init__("),),  # it would tell how to cut
    ),
    Misconception(
        exercise="tensor.GatedMLP",
        name="rows_in_turns",
        hint="This looks like: gate and up are taken to lie in turns, a row of one after a row of the other. "
        "In which order does the docstring say that w_in has them?",
        old="self.w_in = nn.Parameter(shard(w_in.unflatten(0, (2, -1)), group, dim=1))",
        new="self.w_in = nn.Parameter(shard(w_in.unflatten(0, (-1, 2)).transpose(0, 1), group, dim=1))",
    ),
    Misconception(
        exercise="tensor.GatedMLP",
        name="up_is_gated",
        hint="This looks like: the SiLU is applied to up instead of gate. Which of the two comes first in w_in?",
        old="gate, up = both.chunk(2, dim=-1)",
        new="up, gate = both.chunk(2, dim=-1)",
    ),
    Misconception(
        exercise="tensor.GatedMLP",
        name="gathered_before_the_gate",
        hint="This looks like: the ranks put gates and ups together before they multiply them. The numbers are right. "
        "What does that exchange cost, and who could do without it if the matrix were cut another way?",
        old="""
        both = F.linear(self.enter(x, self.group), self.w_in.flatten(0, 1))  # (..., 2·inner/t)
        gate, up = both.chunk(2, dim=-1)
        return self.row(F.silu(gate) * up)
        """,
        new="""
        part = F.linear(self.enter(x, self.group), self.w_in.flatten(0, 1))
        t, r, width = self.group.size(), self.group.rank(), part.shape[-1]
        both = self.row.leave(F.pad(part, (r * width, (t - 1 - r) * width)), self.group)
        gate, up = both.unflatten(-1, (t, 2, -1)).movedim(-2, 0).flatten(-2).chunk(t, dim=-1)[r]
        return self.row(F.silu(gate) * up)
        """,
    ),
]
