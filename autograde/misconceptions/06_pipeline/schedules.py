"""Misconceptions of lesson 06 about schedules, cuts and bubbles."""

from __future__ import annotations

from autograde.misconception import Misconception

NAIVE = [
    Misconception(
        exercise="pipeline.naive",
        name="all_forwards_first",
        hint="This looks like: each rank does all forwards before its first backward. "
        "How many micro-batches does a rank keep then, and how many should it keep here?",
        old='words = ["F", "B"] * num_microbatches',
        new='words = ["F"] * num_microbatches + ["B"] * num_microbatches',
    ),
    Misconception(
        exercise="pipeline.naive",
        name="stage_zero_everywhere",
        hint="This looks like: every rank does the work of stage 0. Which stage is on rank r?",
        old="lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]",
        new="lists = [in_order(words, stages=[0]) for rank in range(num_ranks)]",
    ),
    Misconception(
        exercise="pipeline.naive",
        name="one_micro_batch_only",
        hint="This looks like: each rank does one micro-batch and stops. How many are there?",
        old='words = ["F", "B"] * num_microbatches',
        new='words = ["F", "B"]',
    ),
    Misconception(
        exercise="pipeline.naive",
        name="a_micro_batch_a_rank",
        hint="This looks like: as many micro-batches as there are ranks. Do the two numbers have to be equal?",
        old='words = ["F", "B"] * num_microbatches',
        new='words = ["F", "B"] * num_ranks',
        also=(
            (
                'return Schedule("naive", num_microbatches, straight(num_ranks), lists)',
                'return Schedule("naive", num_ranks, straight(num_ranks), lists)',
            ),
        ),
    ),
    Misconception(
        exercise="pipeline.naive",
        name="backward_first",
        hint="This looks like: each micro-batch begins with its backward. What does a backward need?",
        old='words = ["F", "B"] * num_microbatches',
        new='words = ["B", "F"] * num_microbatches',
    ),
]

GPIPE = [
    Misconception(
        exercise="pipeline.gpipe",
        name="naive_again",
        hint="This looks like: each micro-batch goes forward and backward before the next one starts. "
        "What could rank 0 do while rank 1 computes?",
        old='words = ["F"] * num_microbatches + ["B"] * num_microbatches',
        new='words = ["F", "B"] * num_microbatches',
    ),
    Misconception(
        exercise="pipeline.gpipe",
        name="one_forward_one_backward",
        hint="This looks like: backwards start before all forwards are done, as in the next lesson. "
        "What does GPipe do first?",
        old="""
        words = ["F"] * num_microbatches + ["B"] * num_microbatches
        lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]
        """,
        new="""
        lists = []
        for rank in range(num_ranks):
            early = min(num_ranks - 1 - rank, num_microbatches)
            words = ["F"] * early + ["F", "B"] * (num_microbatches - early) + ["B"] * early
            lists.append(in_order(words, stages=[rank]))
        """,
    ),
    Misconception(
        exercise="pipeline.gpipe",
        name="ranks_go_backward_in_unlike_orders",
        hint="This looks like: some ranks go backward from the first micro-batch, and some from the last. "
        "Which gradient does a rank wait for, and when does the rank after it send that one?",
        old="lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]",
        new="""
        lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]
        lists = [
            actions[:num_microbatches] + (actions[num_microbatches:][::-1] if rank % 2 else actions[num_microbatches:])
            for rank, actions in enumerate(lists)
        ]
        """,
    ),
    Misconception(
        exercise="pipeline.gpipe",
        name="a_backward_short",
        hint="This looks like: the last micro-batch never goes backward. What becomes of its gradient?",
        old='words = ["F"] * num_microbatches + ["B"] * num_microbatches',
        new='words = ["F"] * num_microbatches + ["B"] * (num_microbatches - 1)',
    ),
]

PARTITION = [
    Misconception(
        exercise="pipeline.partition_layers",
        name="equal_numbers",
        hint="This looks like: every stage has the same number of layers. Do they all cost the same?",
        source="""
        def partition_layers(costs, num_stages):
            if not 1 <= num_stages <= len(costs):
                raise ValueError("no such cut")
            n = len(costs)
            edges = [n * k // num_stages for k in range(num_stages + 1)]
            return [range(a, b) for a, b in zip(edges, edges[1:])]
        """,
    ),
    Misconception(
        exercise="pipeline.partition_layers",
        name="filled_to_the_mean",
        hint="This looks like: a stage takes layers until it has its share of the sum, then the next one begins. "
        "What if the layer that goes over the share is a large one?",
        source="""
        def partition_layers(costs, num_stages):
            if not 1 <= num_stages <= len(costs):
                raise ValueError("no such cut")
            share, cut, start, total = sum(costs) / num_stages, [], 0, 0
            for k, cost in enumerate(costs):
                total += cost
                left = num_stages - len(cut) - 1
                full = total >= share or len(costs) - k - 1 == left
                if left and full:
                    cut.append(range(start, k + 1))
                    start, total = k + 1, 0
            cut.append(range(start, len(costs)))
            return cut
        """,
    ),
    Misconception(
        exercise="pipeline.partition_layers",
        name="empty_stages",
        hint="This looks like: a stage may be empty. What would its rank do all day?",
        old="starts = range(stages - 1, end)",
        new="starts = range(0, end + 1)",
        also=(
            (
                """
                if stages == 1:
                    return up_to[end], 0
                """,
                """
                if stages == 1 or end == 0:
                    return up_to[end], 0
                """,
            ),
        ),
    ),
    Misconception(
        exercise="pipeline.partition_layers",
        name="smallest_difference_of_neighbours",
        hint="This looks like: two stages at a time are made equal, from the front. "
        "Does the best first stage of the best cut have to be half of what is left?",
        source="""
        def partition_layers(costs, num_stages):
            if not 1 <= num_stages <= len(costs):
                raise ValueError("no such cut")
            cut, start = [], 0
            for left in range(num_stages, 1, -1):
                rest = sum(costs[start:])
                ends = range(start + 1, len(costs) - left + 2)
                end = min(ends, key=lambda e: abs(sum(costs[start:e]) - rest / left))
                cut.append(range(start, end))
                start = end
            return [*cut, range(start, len(costs))]
        """,
    ),
    Misconception(
        exercise="pipeline.partition_layers",
        name="layers_dealt_out",
        hint="This looks like: layers are dealt to the stages like cards. "
        "How often would an activation have to cross from rank to rank?",
        source="""
        def partition_layers(costs, num_stages):
            if not 1 <= num_stages <= len(costs):
                raise ValueError("no such cut")
            return [range(k, len(costs), num_stages) for k in range(num_stages)]
        """,
    ),
]

BUBBLE = [
    Misconception(
        exercise="cost.bubble",
        name="ideal_always",
        hint="This looks like: the idle time is divided by the work whatever is asked. What is the total made of?",
        old='return (p - 1) / (v * m if of == "ideal" else v * m + p - 1)',
        new="return (p - 1) / (v * m)",
    ),
    Misconception(
        exercise="cost.bubble",
        name="denominators_exchanged",
        hint="This looks like: the two denominators have changed places. "
        "Which of the two times has the idle time in it?",
        old='return (p - 1) / (v * m if of == "ideal" else v * m + p - 1)',
        new='return (p - 1) / (v * m if of == "total" else v * m + p - 1)',
    ),
    Misconception(
        exercise="cost.bubble",
        name="p_ranks_wait",
        hint="This looks like: the pipeline fills for p micro-batches. How long does the last rank wait for its first?",
        old='return (p - 1) / (v * m if of == "ideal" else v * m + p - 1)',
        new='return p / (v * m if of == "ideal" else v * m + p)',
    ),
    Misconception(
        exercise="cost.bubble",
        name="chunks_make_it_longer",
        hint="This looks like: with v chunks the bubble is v times as long. "
        "How long is a forward of a stage that is v times thinner?",
        old='return (p - 1) / (v * m if of == "ideal" else v * m + p - 1)',
        new='return v * (p - 1) / (m if of == "ideal" else m + v * (p - 1))',
    ),
    Misconception(
        exercise="cost.bubble",
        name="chunks_in_the_share_alone",
        hint="This looks like: the share of total time is divided by v. "
        "If the idle time shrinks, what happens to the total?",
        old='return (p - 1) / (v * m if of == "ideal" else v * m + p - 1)',
        new='return (p - 1) / v / (m if of == "ideal" else m + p - 1)',
    ),
]
