"""Wrong solutions of lesson 02: ZeRO, stage 1."""

from __future__ import annotations

from autograde.misconception import Misconception

PARTITION = [
    Misconception(
        exercise="zero.partition",
        name="rest_to_the_last",
        hint="This looks like: the size is divided and rounded down, and the last rank takes what is left. "
        "How long must all pieces be made by padding, then?",
        old="""
        length = -(-size // ranks)
        return [range(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]
        """,
        new="""
        length = size // ranks
        return [range(r * length, size if r == ranks - 1 else (r + 1) * length) for r in range(ranks)]
        """,
    ),
    Misconception(
        exercise="zero.partition",
        name="spread_evenly",
        hint="This looks like: what does not divide is spread over the first ranks, one element each. "
        "A collective wants pieces of one length, with the padding at the very end. Where would it stand here?",
        old="""
        length = -(-size // ranks)
        return [range(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]
        """,
        new="""
        length, more = divmod(size, ranks)
        begins = [r * length + min(r, more) for r in range(ranks + 1)]
        return [range(begins[r], begins[r + 1]) for r in range(ranks)]
        """,
    ),
    Misconception(
        exercise="zero.partition",
        name="past_the_end",
        hint="This looks like: all pieces have the same length, whether or not so many elements are left. "
        "Which elements would the last rank own?",
        old="return [range(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]",
        new="return [range(r * length, (r + 1) * length) for r in range(ranks)]",
    ),
    Misconception(
        exercise="zero.partition",
        name="no_empty_pieces",
        hint="This looks like: there are only as many pieces as have something in them. "
        "What does a rank find that has nothing to own, and still takes part?",
        old="return [range(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]",
        new="return [range(begin, min(begin + length, size)) for begin in range(0, size, max(length, 1))]",
    ),
]

REDUCED = """
        if shard.gradient is None:
            full = shard.take_gradients()  # (n·length,)
            piece = full.new_empty(shard.length)
            reduce_scatter_single(piece, full, group=shard.group)
            shard.add_gradient(piece)
"""

STEP1 = [
    Misconception(
        exercise="zero.step1",
        name="averaged",
        hint="This looks like: the gradients are averaged over the ranks, not summed. "
        "Who has divided the loss already, and by what?",
        old="shard.add_gradient(piece)",
        new="shard.add_gradient(piece / shard.group.size())",
    ),
    Misconception(
        exercise="zero.step1",
        name="all_reduced",
        hint="This looks like: every rank gets the sums of all gradients, and then uses those of its piece. "
        "The weights are right. Which of the sums did it have no use for?",
        old="reduce_scatter_single(piece, full, group=shard.group)",
        new="""
        dist.all_reduce(full, group=shard.group)
        piece.copy_(full.view(shard.group.size(), shard.length)[shard.group.rank()])
        """,
    ),
    Misconception(
        exercise="zero.step1",
        name="own_gradients",
        hint="This looks like: a rank updates its piece with its own gradients alone. "
        "What have the others found out about that piece?",
        old="reduce_scatter_single(piece, full, group=shard.group)",
        new="piece.copy_(full.view(shard.group.size(), shard.length)[shard.group.rank()])",
    ),
    Misconception(
        exercise="zero.step1",
        name="never_gathered",
        hint="This looks like: each rank has its own new piece, and the old ones of the others. "
        "How do they learn of it?",
        old="all_gather_single(shard.full, shard.piece, group=shard.group)",
        new="pass",
    ),
    Misconception(
        exercise="zero.step1",
        name="gathered_too_early",
        hint="This looks like: the pieces are gathered, and then updated. Which values did the others get?",
        old="""
        shard.update(lr)
        all_gather_single(shard.full, shard.piece, group=shard.group)
        """,
        new="""
        all_gather_single(shard.full, shard.piece, group=shard.group)
        shard.update(lr)
        """,
    ),
    Misconception(
        exercise="zero.step1",
        name="reduced_twice",
        hint="This looks like: a shard is reduced again that has its gradient already. "
        "In stage 2 that was done during backward. What is in p.grad now, and what travels?",
        old=REDUCED,
        new="""
        full = shard.take_gradients()  # (n·length,)
        piece = full.new_empty(shard.length)
        reduce_scatter_single(piece, full, group=shard.group)
        shard.add_gradient(piece)
        """,
    ),
    Misconception(
        exercise="zero.step1",
        name="nothing_sharded",
        hint="This looks like: all ranks update everything, each with a whole optimizer. The weights are right. "
        "Who keeps which part of its state?",
        source="""
        def step1(shards, lr):
            for shard in shards:
                if not hasattr(shard, "whole"):
                    options = {"betas": shard.betas, "eps": shard.eps, "weight_decay": shard.weight_decay}
                    shard.whole = torch.optim.AdamW(shard.parameters, **options)
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in shard.parameters]
                whole = torch.cat([grad.flatten() for grad in grads])
                dist.all_reduce(whole, group=shard.group)
                for p, grad in zip(shard.parameters, whole.split([p.numel() for p in shard.parameters])):
                    p.grad = grad.view_as(p)
                shard.whole.param_groups[0]["lr"] = lr
                shard.whole.step()
                for p in shard.parameters:
                    p.grad = None
                shard.gradient = None
        """,
    ),
]
