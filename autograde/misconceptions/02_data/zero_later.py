"""Wrong solutions of lesson 02: ZeRO, stages 2 and 3, and the norm of a gradient in pieces."""

from __future__ import annotations

from autograde.misconception import Misconception

REDUCE_GRADIENTS = [
    Misconception(
        exercise="zero.reduce_gradients",
        name="last_micro_batch_only",
        hint="This looks like: a piece takes the place of the one before. "
        "With two micro-batches, where is what the first one found?",
        old="shard.add_gradient(piece)",
        new="shard.gradient = piece",
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="averaged",
        hint="This looks like: the pieces are averaged over the ranks. "
        "The loss is a sum over all sequences: what is its gradient?",
        old="shard.add_gradient(piece)",
        new="shard.add_gradient(piece / shard.group.size())",
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="waits_at_once",
        hint="This looks like: each reduce-scatter is waited for where it starts. "
        "What does backward do in the meantime?",
        old="travelling.append((shards[i], piece, work))",
        new="travelling.append((shards[i], piece, work))\narrive()",
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="after_backward",
        hint="This looks like: nothing starts before backward has ended. "
        "How many whole gradients stand in memory at that moment?",
        old="start_rest = start_in_order([shard.parameters for shard in shards], start)",
        new="""
        def start_rest() -> None:
            for i in range(len(shards)):
                start(i)
        """,
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="all_on_their_way",
        hint="This looks like: every reduce-scatter is waited for at the end. "
        "Each needs its bucket of whole gradients until then. How many stand in memory?",
        old="""
        arrive()
        full = shards[i].take_gradients()  # (n·length,)
        """,
        new="""
        full = shards[i].take_gradients()  # (n·length,)
        """,
        also=(("travelling.append((shards[i], piece, work))", "travelling.append((shards[i], piece, work, full))"),)
        + (("shard, piece, work = travelling.pop()", "shard, piece, work, _ = travelling.pop()"),),
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="last_bucket_lost",
        hint="This looks like: the bucket that was started last never arrives. Who waits for it?",
        old="start_rest()\narrive()",
        new="start_rest()",
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="all_reduced",
        hint="This looks like: every rank gets the sums of all gradients, and keeps those of its pieces. "
        "The pieces are right. How many of the sums that came does it throw away?",
        old="""
        piece = full.new_empty(shards[i].length)
        work = reduce_scatter_single(piece, full, group=shards[i].group, async_op=True)
        """,
        new="""
        piece = full.view(shards[i].group.size(), shards[i].length)[shards[i].group.rank()]
        work = dist.all_reduce(full, group=shards[i].group, async_op=True)
        """,
    ),
    Misconception(
        exercise="zero.reduce_gradients",
        name="waited_for_too_late",
        hint="This looks like: the next bucket is taken, and then the one before it is waited for. "
        "How many buckets of whole gradients stand in flat tensors in between?",
        old="""
        arrive()
        full = shards[i].take_gradients()  # (n·length,)
        """,
        new="""
        full = shards[i].take_gradients()  # (n·length,)
        arrive()
        """,
    ),
]

GATHER_PARAMETERS = [
    Misconception(
        exercise="zero.gather_parameters",
        name="kept_until_backward",
        hint="This looks like: parameters are gathered once, and stay until backward has used them. "
        "How much of the model stands in memory when forward ends?",
        old="""
        def before_backward(_: Tensor) -> None:
            gather()
            missing.update(shard.parameters)
        """,
        new="""
        def before_backward(_: Tensor) -> None:
            missing.update(shard.parameters)
        """,
        also=(
            (
                "shard.release()\nif output.requires_grad:\n    output.register_hook(before_backward)",
                "if output.requires_grad:\n    output.register_hook(before_backward)\nelse:\n    shard.release()",
            ),
        ),
    ),
    Misconception(
        exercise="zero.gather_parameters",
        name="stay_after_backward",
        hint="This looks like: after backward the parameters are still whole. "
        "When has the last of them served its purpose?",
        old="if not missing:\n    shard.release()",
        new="pass",
    ),
    Misconception(
        exercise="zero.gather_parameters",
        name="gathered_once",
        hint="This looks like: the parameters are gathered before the first forward, and never again. "
        "After a step each rank has a new piece. Whose pieces does this rank compute with?",
        source="""
        def gather_parameters(module, shard):
            first = [True]

            def gather(*_):
                if first:
                    first.clear()
                    shard.allocate()
                    all_gather_single(shard.full, shard.piece, group=shard.group)

            module.register_forward_pre_hook(gather)
        """,
    ),
    Misconception(
        exercise="zero.gather_parameters",
        name="not_released_after_forward",
        hint="This looks like: what was gathered for forward is still there afterwards. "
        "How many modules are whole when forward ends?",
        old="""
        def after_forward(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            shard.release()
            if output.requires_grad:
        """,
        new="""
        def after_forward(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            if output.requires_grad:
        """,
    ),
    Misconception(
        exercise="zero.gather_parameters",
        name="gathered_a_third_time",
        hint="This looks like: forward gathers the pieces twice. The numbers are right. "
        "Three passes over the parameters were promised: which are they?",
        old="""
        shard.release()
        if output.requires_grad:
        """,
        new="""
        shard.release()
        gather()
        shard.release()
        if output.requires_grad:
        """,
    ),
    Misconception(
        exercise="zero.gather_parameters",
        name="released_too_early",
        hint="This looks like: the parameters are released while backward still needs some of them. "
        "Which gradients are missing at this moment, and was that so at the beginning of every backward?",
        old="""
        def accumulated(p: nn.Parameter) -> None:
            missing.discard(p)
            if not missing:
                shard.release()
        """,
        new="""
        def accumulated(p: nn.Parameter) -> None:
            if p is shard.parameters[0]:
                shard.release()
        """,
    ),
    Misconception(
        exercise="zero.gather_parameters",
        name="whole_world",
        hint="This looks like: pieces are gathered from all ranks, whatever the group. "
        "Which ranks hold a piece of this shard?",
        old="all_gather_single(shard.full, shard.piece, group=shard.group)",
        new="all_gather_single(shard.full, shard.piece)",
    ),
]

CLIP_GRAD_NORM = [
    Misconception(
        exercise="zero.clip_grad_norm",
        name="local_norm",
        hint="This looks like: each rank takes the norm of what it holds itself. "
        "Then ranks scale by unlike numbers. Of what is the gradient a piece?",
        old="dist.all_reduce(squares, group=group)",
        new="pass",
    ),
    Misconception(
        exercise="zero.clip_grad_norm",
        name="norms_added",
        hint="This looks like: the ranks' norms are added. Two pieces, one of norm 3 and one of norm 4: "
        "what is the norm of both together?",
        old="dist.all_reduce(squares, group=group)\nnorm = squares.sqrt()",
        new="norm = squares.sqrt()\ndist.all_reduce(norm, group=group)",
    ),
    Misconception(
        exercise="zero.clip_grad_norm",
        name="copies_counted",
        hint="This looks like: a gradient that several ranks hold counts once for each of them. "
        "In one process, how often is it there?",
        old="squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / number",
        new="squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()",
    ),
    Misconception(
        exercise="zero.clip_grad_norm",
        name="small_ones_grow",
        hint="This looks like: gradients are scaled to the limit, whether they are above it or below. "
        "What is to happen to a gradient that is short enough?",
        old="scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        new="scale = max_norm / (norm + 1e-6)",
    ),
    Misconception(
        exercise="zero.clip_grad_norm",
        name="not_in_place",
        hint="This looks like: scaled gradients are made, and the caller's stay as they were. "
        "Which tensors does the optimizer read?",
        old="gradient.mul_(scale)",
        new="gradient = gradient * scale",
    ),
    Misconception(
        exercise="zero.clip_grad_norm",
        name="largest_rank",
        hint="This looks like: the largest of the ranks' norms is taken for the norm of all. "
        "What do the other pieces add to the length?",
        old="dist.all_reduce(squares, group=group)",
        new="dist.all_reduce(squares, op=dist.ReduceOp.MAX, group=group)",
    ),
]
