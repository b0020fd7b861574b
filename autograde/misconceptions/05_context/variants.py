"""Misconceptions of lesson 05: keys and values gathered, and tokens traded for heads."""

from __future__ import annotations

from autograde.misconception import Misconception

ALL_GATHER_ATTENTION = [
    Misconception(
        exercise="context.all_gather_attention",
        name="own_piece_backward",
        hint="This looks like: backward takes this rank's piece out of its own gradient of all keys and values. "
        "Other ranks' queries have read the same keys. Where does what they found go?",
        old="""
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_single(mine, grad.contiguous(), group=ctx.group)
        return mine, None
        """,
        new="return grad.chunk(ctx.group.size())[ctx.group.rank()], None",
    ),
    Misconception(
        exercise="context.all_gather_attention",
        name="all_reduced_backward",
        hint="This looks like: the gradients of all keys are added up on every rank, and each keeps its own. "
        "The numbers are right. How many of the sums that have travelled does a rank throw away?",
        old="""
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        reduce_scatter_single(mine, grad.contiguous(), group=ctx.group)
        return mine, None
        """,
        new="""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None
        """,
    ),
    Misconception(
        exercise="context.all_gather_attention",
        name="outside_autograd",
        hint="This looks like: keys and values are gathered, and autograd knows nothing of it, so they get no "
        "gradient. What tells autograd how to go back through an exchange?",
        old="gathered = _GatherFromRanks.apply(torch.stack((k, v)), group)  # (n·2, b, h_kv, s/n, d)",
        new="gathered = _GatherFromRanks.apply(torch.stack((k, v)).detach(), group)",
    ),
    Misconception(
        exercise="context.all_gather_attention",
        name="mask_in_the_order_of_arrival",
        hint="This looks like: the mask counts keys in the order in which they were gathered. With contiguous parts "
        "that is right. Under zig-zag, which key comes last?",
        old="mask = causal_mask(positions[group.rank()], positions.flatten())  # (s/n, s)",
        new="""
        arrived = torch.arange(positions.numel(), device=q.device)
        mask = causal_mask(arrived.view_as(positions)[group.rank()], arrived)
        """,
    ),
    Misconception(
        exercise="context.all_gather_attention",
        name="table_not_checked",
        hint="This looks like: any table of positions is taken, be it of another number of ranks or of tokens. "
        "Who tells the caller which shape it should have?",
        old="check_positions(positions, group, q.shape[2])",
        new="",
    ),
    Misconception(
        exercise="context.all_gather_attention",
        name="keys_and_values_mixed",
        hint="This looks like: what the ranks sent is taken apart in another order than it was put together. "
        "Each rank's keys come before its values. Where do rank 1's keys stand?",
        old="k, v = gathered.unflatten(0, (-1, 2)).movedim(0, 3).flatten(3, 4)  # (b, h_kv, s, d) each",
        new="k, v = gathered.unflatten(0, (2, -1)).movedim(1, 3).flatten(3, 4)",
    ),
]

ALL_TO_ALL_ATTENTION = [
    Misconception(
        exercise="context.all_to_all_attention",
        name="causal_in_the_order_of_arrival",
        hint="This looks like: the causal mask counts tokens in the order in which they arrived. With contiguous parts "
        "that is the order of the sequence. In which order do they come under zig-zag?",
        old="order = positions.flatten().argsort().to(q.device)  # in the order of the sequence, causal needs no mask",
        new="order = torch.arange(positions.numel(), device=q.device)",
    ),
    Misconception(
        exercise="context.all_to_all_attention",
        name="order_not_undone",
        hint="This looks like: the output goes back in the order of the sequence. "
        "In which order does each rank hold its tokens?",
        old="out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, order.argsort()]",
        new="out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)",
    ),
    Misconception(
        exercise="context.all_to_all_attention",
        name="key_heads_repeated_first",
        hint="This looks like: key and value heads are copied for each query head before they travel. The numbers are "
        "right. Does the rank that gets them not know how to share a head?",
        old="q, k, v = (_tokens_for_heads(x, group) for x in (q, k, v))",
        new="""
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        q, k, v = (_tokens_for_heads(x, group) for x in (q, k, v))
        """,
    ),
    Misconception(
        exercise="context.all_to_all_attention",
        name="outside_autograd",
        hint="This looks like: the exchange is made beside autograd, so no gradient finds its way back. "
        "What is the way back of an all-to-all?",
        old="return _Exchange.apply(pieces, group).movedim(0, 2).flatten(2, 3)",
        new="return _Exchange.apply(pieces.detach(), group).movedim(0, 2).flatten(2, 3)",
    ),
    Misconception(
        exercise="context.all_to_all_attention",
        name="gradient_not_sent_back",
        hint="This looks like: backward hands on the gradient as it is, without an exchange. "
        "Of whose tokens and heads is it the gradient at that moment?",
        old="return _Exchange.apply(grad, ctx.group), None",
        new="return grad, None",
    ),
    Misconception(
        exercise="context.all_to_all_attention",
        name="pieces_joined_wrongly",
        hint="This looks like: the pieces that came from the ranks are joined along the heads. "
        "Each brings the same heads. What does each bring others of?",
        old="return _Exchange.apply(pieces, group).movedim(0, 2).flatten(2, 3)",
        new="""
        exchanged = _Exchange.apply(pieces, group)  # (n, b, h/n, s/n, d)
        return exchanged.movedim(0, 3).flatten(2, 3).unflatten(2, (exchanged.shape[2], -1))
        """,
    ),
    Misconception(
        exercise="context.all_to_all_attention",
        name="heads_not_checked",
        hint="This looks like: nobody looks whether the ranks divide the key heads. "
        "With 2 key heads on 3 ranks, what has the third?",
        old="if math.gcd(heads, kv_heads) % group.size():",
        new="if heads % group.size():",
    ),
]
