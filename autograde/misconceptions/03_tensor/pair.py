"""Misconceptions of lesson 03: the conjugate pair f and g."""

from __future__ import annotations

from autograde.misconception import Misconception

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
        name="one_group_for_all_calls",
        hint="This looks like: every backward sums over the group of the last call. "
        "Where can a call keep its own group until its backward?",
        old="""
        ctx.group = group
        return x.view_as(x)
        """,
        new="""
        _CopyToRanks.group = group
        return x.view_as(x)
        """,
        also=(("dist.all_reduce(grad, group=ctx.group)", "dist.all_reduce(grad, group=_CopyToRanks.group)"),),
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
        hint="This looks like: the gradient that comes in is overwritten by the sum, or more than f's part is summed. "
        "In x + f(x), x's gradient comes on two ways: what should happen on the one that passes f by?",
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
