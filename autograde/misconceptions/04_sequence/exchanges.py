"""Misconceptions of lesson 04: the two exchanges of tokens."""

from __future__ import annotations

from autograde.misconception import Misconception

GATHER_TOKENS = [
    Misconception(
        exercise="sequence.gather_tokens",
        name="outside_autograd",
        hint="This looks like: the tokens are gathered, and autograd knows nothing of it, so x gets no gradient. "
        "What tells autograd how to go back through an exchange?",
        source="""
        def gather_tokens(x, group):
            return all_gather_tokens(x, group)
        """,
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="own_piece_backward",
        hint="This looks like: backward cuts this rank's tokens out of its own gradient. The other ranks used the same "
        "tokens in their parts of the matrices. Where does what they found go?",
        old="return reduce_scatter_tokens(grad, ctx.group), None",
        new="return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None",
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="sequences_mixed",
        hint="This looks like: the ranks' pieces are taken as they come, one after the other along the first "
        "dimension. With one sequence that is right. Where do the second sequence's tokens of rank 0 stand?",
        old="return all_gather_tokens(x, group)",
        new="""
        t, rows = group.size(), x.contiguous()
        pieces = [torch.empty_like(rows) for _ in range(t)]
        dist.all_gather(pieces, rows, group=group)
        return torch.stack(pieces).view(x.shape[0], t * x.shape[1], *x.shape[2:])
        """,
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="all_reduced_backward",
        hint="This looks like: backward adds up the gradients of all tokens on every rank, and then keeps its own. "
        "The numbers are right. How many of the sums that have travelled does a rank throw away?",
        old="return reduce_scatter_tokens(grad, ctx.group), None",
        new="""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None
        """,
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="averaged_backward",
        hint="This looks like: the gradients are averaged over the ranks. "
        "A token that is used in four places has four gradients. What is the gradient of the token?",
        old="return reduce_scatter_tokens(grad, ctx.group), None",
        new="return reduce_scatter_tokens(grad, ctx.group) / ctx.group.size(), None",
    ),
    Misconception(
        exercise="sequence.gather_tokens",
        name="whole_world",
        hint="This looks like: the tokens of all ranks are gathered, whatever the group. "
        "Which ranks share these sequences?",
        old="ctx.group = group",
        new="ctx.group = group = dist.group.WORLD",
    ),
]

SCATTER_TOKENS = [
    Misconception(
        exercise="sequence.scatter_tokens",
        name="cut_without_a_sum",
        hint="This looks like: each rank keeps its tokens of its own part, and nobody adds the parts up. "
        "What did the second layer of the pair leave on each rank: results, or parts of a sum?",
        old="return reduce_scatter_tokens(x, group)",
        new="""
        if x.shape[1] % group.size():
            raise ValueError("cannot be split")
        return x.chunk(group.size(), 1)[group.rank()].clone()
        """,
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="all_reduce_then_cut",
        hint="This looks like: every rank gets the sums of all tokens, and then keeps its own. "
        "The numbers are right. What does a rank do with the sums of the others' tokens?",
        old="return reduce_scatter_tokens(x, group)",
        new="""
        if x.shape[1] % group.size():
            raise ValueError("cannot be split")
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.chunk(group.size(), 1)[group.rank()].clone()
        """,
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="zeros_for_the_others",
        hint="This looks like: backward puts the gradient of this rank's tokens in its place, with zeros around it. "
        "That undoes a cut. But this rank's numbers for the others' tokens: did they not go into a sum as well?",
        old="return all_gather_tokens(grad, ctx.group), None",
        new="""
        t, r = ctx.group.size(), ctx.group.rank()
        empty = torch.zeros_like(grad)
        return torch.cat([grad if piece == r else empty for piece in range(t)], 1), None
        """,
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="divided_backward",
        hint="This looks like: the gradient is divided by the number of ranks. "
        "Each part goes into the sum as it is: by how much does the sum change when one part does?",
        old="return all_gather_tokens(grad, ctx.group), None",
        new="return all_gather_tokens(grad, ctx.group) / ctx.group.size(), None",
    ),
    Misconception(
        exercise="sequence.scatter_tokens",
        name="averaged",
        hint="This looks like: the parts are averaged over the ranks. "
        "A matrix product split in pieces is the sum of the pieces. What does the division do to it?",
        old="return reduce_scatter_tokens(x, group)",
        new="return reduce_scatter_tokens(x, group) / group.size()",
    ),
]
