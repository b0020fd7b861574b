"""Wrong solutions of lesson 02: formulas."""

from __future__ import annotations

from autograde.misconception import Misconception

STAGES = "split_by_stage = {0: 0, 1: optimizer_bytes, 2: 2 + optimizer_bytes, 3: 4 + optimizer_bytes}"
SYNC = "sync = 2 * (ranks - 1) * (alpha + beta * 2 * parameters / ranks)"

ZERO_BYTES = [
    Misconception(
        exercise="cost.zero_bytes",
        name="one_stage_early",
        hint="This looks like: stage 1 splits the gradients too, and stage 2 everything. "
        "What does each stage add to the one before?",
        old=STAGES,
        new="split_by_stage = {0: 0, 1: 2 + optimizer_bytes, 2: 4 + optimizer_bytes, 3: 4 + optimizer_bytes}",
    ),
    Misconception(
        exercise="cost.zero_bytes",
        name="adam_always",
        hint="This looks like: the optimizer takes 12 bytes a parameter, whatever it is. What is optimizer_bytes for?",
        old=STAGES,
        new="""
        optimizer_bytes = 12
        split_by_stage = {0: 0, 1: optimizer_bytes, 2: 2 + optimizer_bytes, 3: 4 + optimizer_bytes}
        """,
    ),
    Misconception(
        exercise="cost.zero_bytes",
        name="whole_numbers",
        hint="This looks like: parameters and gradients are counted with 4 bytes each. "
        "In which precision does forward compute, and where is the float32 copy counted?",
        old="return parameters * (4 + optimizer_bytes - split + split / ranks)",
        new="return parameters * (8 + optimizer_bytes - split + split / ranks)",
    ),
    Misconception(
        exercise="cost.zero_bytes",
        name="unknown_is_none",
        hint="This looks like: a stage that there is not is taken for no ZeRO at all. "
        "Somebody types 4: what should they learn?",
        old="""
        if stage not in split_by_stage:
            raise ValueError(f"ZeRO has no stage {stage}: choose 0, 1, 2 or 3")
        split = split_by_stage[stage]
        """,
        new="split = split_by_stage.get(stage, 0)",
    ),
    Misconception(
        exercise="cost.zero_bytes",
        name="split_forgotten",
        hint="This looks like: what is split over the ranks is counted as gone. "
        "How much of it does each of N ranks still keep?",
        old="return parameters * (4 + optimizer_bytes - split + split / ranks)",
        new="return parameters * (4 + optimizer_bytes - split)",
    ),
    Misconception(
        exercise="cost.zero_bytes",
        name="rounded_down",
        hint="This looks like: the share of a rank is rounded down to whole bytes. "
        "Do the shares of all ranks add up to the whole?",
        old="return parameters * (4 + optimizer_bytes - split + split / ranks)",
        new="return parameters * (4 + optimizer_bytes - split) + parameters * split // ranks",
    ),
    Misconception(
        exercise="cost.zero_bytes",
        name="with_padding",
        hint="This looks like: a rank's share is rounded up to whole parameters, as with padding. "
        "The paper's formula is an average over the ranks: what does it give where N does not divide Ψ?",
        old="return parameters * (4 + optimizer_bytes - split + split / ranks)",
        new="return parameters * (4 + optimizer_bytes - split) + -(-parameters // ranks) * split",
    ),
]

DATA_PARALLEL_LIMITS = [
    Misconception(
        exercise="cost.data_parallel_limits",
        name="activations_shared",
        hint="This looks like: the activations of a sequence are divided by the number of ranks. "
        "A sequence is on one rank. Who else keeps a part of them?",
        old="return DataParallelLimits(sequence_activation_bytes, ranks, sync / compute)",
        new="return DataParallelLimits(sequence_activation_bytes / ranks, ranks, sync / compute)",
    ),
    Misconception(
        exercise="cost.data_parallel_limits",
        name="once_round_the_ring",
        hint="This looks like: the gradients go once round the ring. "
        "What has each rank after one round: all the sums, or one piece of them?",
        old=SYNC,
        new="sync = (ranks - 1) * (alpha + beta * 2 * parameters / ranks)",
    ),
    Misconception(
        exercise="cost.data_parallel_limits",
        name="whole_gradient_each_round",
        hint="This looks like: every message of the ring holds the whole gradient. "
        "Into how many pieces does a ring cut it?",
        old=SYNC,
        new="sync = 2 * (ranks - 1) * (alpha + beta * 2 * parameters)",
    ),
    Misconception(
        exercise="cost.data_parallel_limits",
        name="whole_batch_computed",
        hint="This looks like: each rank computes the whole batch. How many of its sequences are a rank's own?",
        old="compute = batch / ranks * sequence_seconds",
        new="compute = batch * sequence_seconds",
    ),
    Misconception(
        exercise="cost.data_parallel_limits",
        name="idle_ranks_allowed",
        hint="This looks like: a batch with fewer sequences than ranks goes through. "
        "What do the ranks do that have no sequence?",
        old="if batch < ranks:",
        new="if batch < 1:",
    ),
    Misconception(
        exercise="cost.data_parallel_limits",
        name="elements_not_bytes",
        hint="This looks like: parameters are taken for bytes. How many bytes has a gradient in half precision?",
        old=SYNC,
        new="sync = 2 * (ranks - 1) * (alpha + beta * parameters / ranks)",
    ),
]
