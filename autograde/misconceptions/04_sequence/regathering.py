"""Misconceptions of lesson 04: the layer that gathers again."""

from __future__ import annotations

from autograde.misconception import Misconception

REGATHERING_COLUMN_LINEAR = [
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="own_tokens_only",
        hint="This looks like: the gradient of the weight is made of this rank's tokens alone. "
        "These rows of the weight are on no other rank. How many tokens did they work for?",
        old="weight_grad = grad_rows.T @ all_gather_tokens(x, ctx.group).flatten(0, -2)",
        new="""
        own_rows = grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].flatten(0, -2)  # (b·s/t, out/t)
        weight_grad = own_rows.T @ x.flatten(0, -2)
        """,
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="input_gradient_not_summed",
        hint="This looks like: the gradient of x is this rank's part of it. "
        "Every rank multiplied these tokens with rows of its own. Who adds up what they found?",
        old="x_grad = reduce_scatter_tokens(grad @ weight, ctx.group)",
        new="x_grad = (grad @ weight).chunk(ctx.group.size(), 1)[ctx.group.rank()]",
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="gathered_tokens_kept",
        hint="This looks like: the gathered tokens are kept until backward. The numbers are right. "
        "What is this layer for, if not to keep 1/t of them?",
        old="""
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather_tokens(x, group), weight, bias)
        """,
        new="""
        whole = all_gather_tokens(x, group)
        ctx.save_for_backward(whole, weight)
        return F.linear(whole, weight, bias)
        """,
        also=(
            (
                "weight_grad = grad_rows.T @ all_gather_tokens(x, ctx.group).flatten(0, -2)",
                "weight_grad = grad_rows.T @ x.flatten(0, -2)",
            ),
        ),
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="bias_of_own_tokens",
        hint="This looks like: the gradient of the bias counts this rank's tokens alone. "
        "To how many tokens was it added?",
        old="bias_grad = grad_rows.sum(0) if ctx.needs_input_grad[2] else None",
        new="""
        own = grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()]
        bias_grad = own.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        """,
    ),
    Misconception(
        exercise="sequence.RegatheringColumnLinear",
        name="sequences_mixed_in_backward",
        hint="This looks like: in backward the ranks' pieces are put one after the other along the first dimension. "
        "With one sequence that is right. With which gradient does a token of the second sequence meet?",
        old="weight_grad = grad_rows.T @ all_gather_tokens(x, ctx.group).flatten(0, -2)",
        new="""
        pieces = [torch.empty_like(x) for _ in range(ctx.group.size())]
        dist.all_gather(pieces, x.contiguous(), group=ctx.group)
        weight_grad = grad_rows.T @ torch.cat(pieces).flatten(0, -2)
        """,
    ),
]
