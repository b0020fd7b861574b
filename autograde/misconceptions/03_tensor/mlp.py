"""Misconceptions of lesson 03: the MLPs."""

from __future__ import annotations

from autograde.misconception import Misconception

WHOLE_KEPT = (
    "This looks like: the whole weight stays in memory, behind a view or to be cut in every forward. "
    "What would let the rest of it go?"
)

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
