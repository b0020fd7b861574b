"""Wrong solutions of lesson 02: gradients that are summed over ranks and over micro-batches."""

from __future__ import annotations

from autograde.misconception import Misconception

SYNC_GRADIENTS = [
    Misconception(
        exercise="data.sync_gradients",
        name="averaged",
        hint="This looks like: gradients are averaged over the ranks. "
        "The loss here is a sum: what is the gradient of a sum over all sequences?",
        old="p.grad = grad.view_as(p)",
        new="p.grad = grad.view_as(p) / group.size()",
    ),
    Misconception(
        exercise="data.sync_gradients",
        name="waits_at_once",
        hint="This looks like: each all-reduce is waited for where it starts. What does backward do in the meantime?",
        old="started.append((flat, dist.all_reduce(flat, group=group, async_op=True)))",
        new="""
        work = dist.all_reduce(flat, group=group, async_op=True)
        work.wait()
        started.append((flat, work))
        """,
    ),
    Misconception(
        exercise="data.sync_gradients",
        name="after_backward",
        hint="This looks like: nothing starts before backward has ended. "
        "When was the first bucket's last gradient there?",
        old="start_rest = start_in_order(buckets, start)",
        new="""
        def start_rest() -> None:
            for i in range(len(buckets)):
                start(i)
        """,
    ),
    Misconception(
        exercise="data.sync_gradients",
        name="whole_world",
        hint="This looks like: gradients are summed over all ranks, whatever the group. "
        "Which ranks hold copies of this parameter?",
        old="started.append((flat, dist.all_reduce(flat, group=group, async_op=True)))",
        new="started.append((flat, dist.all_reduce(flat, async_op=True)))",
    ),
    Misconception(
        exercise="data.sync_gradients",
        name="one_by_one",
        hint="This looks like: each parameter has an all-reduce of its own. The sums are right. "
        "What does every message cost, however small it is?",
        old="""
        flat = take_gradients(buckets[i])
        started.append((flat, dist.all_reduce(flat, group=group, async_op=True)))
        """,
        new="""
        flat = take_gradients(buckets[i])
        for piece in flat.split([p.numel() for p in buckets[i]]):
            work = dist.all_reduce(piece, group=group, async_op=True)
        started.append((flat, work))
        """,
    ),
    Misconception(
        exercise="data.sync_gradients",
        name="unused_left_out",
        hint="This looks like: a parameter without a gradient is left out of its bucket. "
        "On another rank it has one. Are the two buckets still of one size?",
        old="flat = take_gradients(buckets[i])",
        new="flat = take_gradients([p for p in buckets[i] if p.grad is not None] or buckets[i])",
    ),
    Misconception(
        exercise="data.sync_gradients",
        name="parts_mixed_up",
        hint="This looks like: the sums are right, and stand in the wrong parameters. "
        "In which order were the gradients put into the flat tensor?",
        old="for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):",
        new="for p, grad in zip(bucket[::-1], flat.split([p.numel() for p in bucket[::-1]]), strict=True):",
    ),
]

LOOP = """
for number, micro_batch in enumerate(micro_batches, start=1):
    loss, tokens = loss_sum(micro_batch)
    totals[0] += loss.detach()
    totals[1] += tokens
    if number == len(micro_batches):
        finish = sync_gradients(buckets, group)
    loss.backward()
finish()
"""

ACCUMULATE = [
    Misconception(
        exercise="data.accumulate",
        name="mean_of_means",
        hint="This looks like: each micro-batch is a mean of its own, and these are averaged. "
        "Take one with 1 token and one with 99: how much does each token weigh?",
        old=LOOP
        + """dist.all_reduce(totals, group=group)
for p in (p for bucket in buckets for p in bucket):
    p.grad /= totals[1]
return totals[0] / totals[1]
""",
        new="""
        for number, micro_batch in enumerate(micro_batches, start=1):
            loss, tokens = loss_sum(micro_batch)
            loss = loss / max(tokens, 1)
            totals[0] += loss.detach()
            totals[1] += 1
            if number == len(micro_batches):
                finish = sync_gradients(buckets, group)
            loss.backward()
        finish()
        dist.all_reduce(totals, group=group)
        for p in (p for bucket in buckets for p in bucket):
            p.grad /= totals[1]
        return totals[0] / totals[1]
        """,
    ),
    Misconception(
        exercise="data.accumulate",
        name="every_micro_batch",
        hint="This looks like: ranks meet in unlike collectives. Either gradients travel after every micro-batch, or "
        "the small sum travels before finish. Ranks have unlike many micro-batches, and some leave a layer out: "
        "what does each call, and in which order?",
        old="""
            if number == len(micro_batches):
                finish = sync_gradients(buckets, group)
            loss.backward()
        finish()
        """,
        new="""
            finish = sync_gradients(buckets, group)
            loss.backward()
            finish()
        """,
    ),
    Misconception(
        exercise="data.accumulate",
        name="never_summed",
        hint="This looks like: each rank keeps the gradients of its own micro-batches. "
        "What have the other ranks found?",
        old="finish()\ndist.all_reduce(totals, group=group)",
        new="dist.all_reduce(totals, group=group)",
        also=(
            (
                "if number == len(micro_batches):\n    finish = sync_gradients(buckets, group)\nloss.backward()",
                "loss.backward()",
            ),
        ),
    ),
    Misconception(
        exercise="data.accumulate",
        name="own_tokens",
        hint="This looks like: each rank divides by the number of its own tokens. "
        "The gradients are sums over all ranks. What do the ranks have in common afterwards?",
        old="""
        dist.all_reduce(totals, group=group)
        for p in (p for bucket in buckets for p in bucket):
            p.grad /= totals[1]
        """,
        new="""
        for p in (p for bucket in buckets for p in bucket):
            p.grad /= totals[1]
        dist.all_reduce(totals, group=group)
        """,
    ),
    Misconception(
        exercise="data.accumulate",
        name="averaged_twice",
        hint="This looks like: after the division by all tokens the gradient is divided once more, by the number of "
        "micro-batches. What is the sum over all micro-batches divided by already?",
        old="p.grad /= totals[1]",
        new="p.grad /= totals[1] * len(micro_batches)",
    ),
    Misconception(
        exercise="data.accumulate",
        name="summed_after_backward",
        hint="This looks like: the buckets start when the last backward has ended. The gradients are right. "
        "What could travel while that backward goes on?",
        old=LOOP,
        new="""
        for micro_batch in micro_batches:
            loss, tokens = loss_sum(micro_batch)
            totals[0] += loss.detach()
            totals[1] += tokens
            loss.backward()
        sync_gradients(buckets, group)()
        """,
    ),
    Misconception(
        exercise="data.accumulate",
        name="own_loss",
        hint="This looks like: the loss that comes back is that of the rank's own tokens. "
        "Which tokens are the gradients of?",
        old="""
        dist.all_reduce(totals, group=group)
        for p in (p for bucket in buckets for p in bucket):
            p.grad /= totals[1]
        return totals[0] / totals[1]
        """,
        new="""
        own = totals[0] / totals[1].clamp(min=1)
        dist.all_reduce(totals, group=group)
        for p in (p for bucket in buckets for p in bucket):
            p.grad /= totals[1]
        return own
        """,
    ),
    Misconception(
        exercise="data.accumulate",
        name="graph_kept",
        hint="This looks like: the loss that comes back still has its graph. "
        "Whoever notes the loss of every step: what else do they keep?",
        old="totals[0] += loss.detach()",
        new="totals[0] += loss",
        also=(("p.grad /= totals[1]", "p.grad /= totals[1].item()"),),
    ),
]
