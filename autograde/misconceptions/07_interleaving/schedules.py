"""Misconceptions of lesson 07 about 1F1B and interleaving."""

from __future__ import annotations

from autograde.misconception import Misconception

WARMUP = "warmup = min(num_ranks - 1 - rank, num_microbatches)"

ONE_F_ONE_B = [
    Misconception(
        exercise="pipeline.one_f_one_b",
        name="warm_up_one_short",
        hint="This looks like: each rank but the last begins to alternate one forward too early. "
        "How many forwards fit in before the first gradient can come back?",
        old=WARMUP,
        new="warmup = min(max(num_ranks - 2 - rank, 0), num_microbatches)",
    ),
    Misconception(
        exercise="pipeline.one_f_one_b",
        name="warm_up_one_long",
        hint="This looks like: each rank does one forward too many before it alternates. "
        "How many micro-batches may the last rank keep?",
        old=WARMUP,
        new="warmup = min(num_ranks - rank, num_microbatches)",
    ),
    Misconception(
        exercise="pipeline.one_f_one_b",
        name="warm_up_not_limited",
        hint="This looks like: a rank warms up with p − 1 − r forwards, whatever m is. "
        "Where do they come from if there are fewer micro-batches than ranks?",
        old=WARMUP,
        new="warmup = num_ranks - 1 - rank",
    ),
    Misconception(
        exercise="pipeline.one_f_one_b",
        name="the_same_warm_up_everywhere",
        hint="This looks like: all ranks warm up with as many forwards as the first. "
        "Which rank waits longest for its first gradient, and which not at all?",
        old=WARMUP,
        new="warmup = min(num_ranks - 1, num_microbatches)",
    ),
    Misconception(
        exercise="pipeline.one_f_one_b",
        name="warm_up_from_the_wrong_end",
        hint="This looks like: the last rank warms up longest. How far is a gradient's way to the first rank?",
        old=WARMUP,
        new="warmup = min(rank, num_microbatches)",
    ),
    Misconception(
        exercise="pipeline.one_f_one_b",
        name="gpipe_again",
        hint="This looks like: GPipe, all forwards before the first backward. What could be let go earlier?",
        old=WARMUP,
        new="warmup = num_microbatches",
    ),
]

INTERLEAVED = [
    Misconception(
        exercise="pipeline.interleaved",
        name="warm_up_of_plain_1f1b",
        hint="This looks like: a rank warms up as in plain 1F1B. "
        "A micro-batch now comes by v times before its loss is known: how long is it on its way?",
        old="warmup = min(2 * (p - rank - 1) + (v - 1) * p, m * v)",
        new="warmup = min(p - rank - 1, m * v)",
    ),
    Misconception(
        exercise="pipeline.interleaved",
        name="warm_up_one_long",
        hint="This looks like: each rank does one forward more than it needs before it alternates. "
        "What does it keep for that?",
        old="warmup = min(2 * (p - rank - 1) + (v - 1) * p, m * v)",
        new="warmup = min(2 * (p - rank) - 1 + (v - 1) * p, m * v)",
    ),
    Misconception(
        exercise="pipeline.interleaved",
        name="backward_from_the_first_chunk",
        hint="This looks like: backwards take the chunks in the order of the forwards. "
        "Which chunk of the model knows the loss first?",
        old='backwards = [f"B{v - 1 - k // p % v}" for k in range(m * v)]',
        new='backwards = [f"B{k // p % v}" for k in range(m * v)]',
    ),
    Misconception(
        exercise="pipeline.interleaved",
        name="all_micro_batches_through_a_chunk",
        hint="This looks like: every micro-batch goes through the first chunk before any goes through the second. "
        "When could the last stage of the model start?",
        old='forwards = [f"F{k // p % v}" for k in range(m * v)]',
        new='forwards = [f"F{k // m}" for k in range(m * v)]',
    ),
    Misconception(
        exercise="pipeline.interleaved",
        name="neighbouring_stages_on_a_rank",
        hint="This looks like: a rank has v stages that follow each other, which is one thick stage. "
        "How long does the second rank wait for its first input then?",
        old="lists.append(in_order(words, stages=range(rank, v * p, p)))",
        new="lists.append(in_order(words, stages=range(rank * v, (rank + 1) * v)))",
        also=(
            (
                'return Schedule("interleaved 1F1B", m, routes, lists)',
                """
                routes = (tuple(stage // v for stage in range(p * v)),)
                return Schedule("interleaved 1F1B", m, routes, lists)
                """,
            ),
        ),
    ),
    Misconception(
        exercise="pipeline.interleaved",
        name="any_number_of_micro_batches",
        hint="This looks like: a number of micro-batches that p does not divide is scheduled without a word. "
        "Micro-batches go round in groups of p: what happens to the last group?",
        old="if m % p:",
        new="if False:",
    ),
]
