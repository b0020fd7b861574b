"""Wrong planners, each of which leaves something out that an engineer has left out before."""

from autograde.misconception import Misconception

misconceptions = [
    Misconception(
        exercise="cost.pipeline_vs_zero3",
        name="parameters_gathered_once",
        hint="This looks like: ZeRO-3 moves the parameters twice a micro-batch. They are dropped after forward. "
        "What does backward compute with, and what leaves it?",
        old="zero3 = 3 * parameters * (ranks - 1) / ranks * num_microbatches",
        new="zero3 = 2 * parameters * (ranks - 1) / ranks * num_microbatches",
    ),
    Misconception(
        exercise="cost.pipeline_vs_zero3",
        name="once_a_step",
        hint="This looks like: ZeRO-3 gathers once a step, however many micro-batches there are. "
        "What has a rank left of the parameters when the second micro-batch begins?",
        old="zero3 = 3 * parameters * (ranks - 1) / ranks * num_microbatches",
        new="zero3 = 3 * parameters * (ranks - 1) / ranks",
    ),
    Misconception(
        exercise="cost.pipeline_vs_zero3",
        name="only_its_share_of_tokens",
        hint="This looks like: a pipeline rank passes on 1/n of the tokens. Which tokens does a middle stage see?",
        old="pipeline = 2 * tokens * h if ranks > 1 else 0",
        new="pipeline = 2 * tokens * h / ranks if ranks > 1 else 0",
    ),
    Misconception(
        exercise="cost.pipeline_vs_zero3",
        name="one_direction",
        hint="This looks like: the pipeline's bytes are those of forward alone. What does backward send, and how "
        "large?",
        old="pipeline = 2 * tokens * h if ranks > 1 else 0",
        new="pipeline = tokens * h if ranks > 1 else 0",
    ),
    Misconception(
        exercise="plan.place",
        name="every_axis_alone",
        hint="This looks like: an axis of 8 or fewer is always inside a server. "
        "How far from each other do the ranks of a DP group stand when TP is 8?",
        old="span *= degree  # ranks in a row that hold whole groups of this axis",
        new="span = degree",
    ),
    Misconception(
        exercise="plan.place",
        name="the_next_neighbour",
        hint="This looks like: an axis is placed by the distance to the next neighbour. "
        "A ring is as fast as its slowest link: where is the last rank of the group?",
        old="""
        span *= degree  # ranks in a row that hold whole groups of this axis
        if degree > 1:
            found[axis] = link(span)
        """,
        new="""
        if degree > 1:
            found[axis] = link(2 * span)
        span *= degree
        """,
    ),
    Misconception(
        exercise="plan.place",
        name="what_is_small_enough_fits",
        hint="This looks like: groups of as many ranks as a server has GPUs, or fewer, always stay inside. "
        "With TP 6 on servers of 8, where do ranks 6 to 11 stand?",
        old="stays = layout.world_size <= cluster.gpus_per_server or cluster.gpus_per_server % span == 0",
        new="stays = span <= cluster.gpus_per_server",
    ),
    Misconception(
        exercise="plan.place",
        name="data_innermost",
        hint="This looks like: DP is innermost, and TP outermost. Which exchange waits in every layer, and which comes "
        "once a step?",
        old='for axis in ("tp", "cp", "pp", "dp"):',
        new='for axis in ("dp", "pp", "cp", "tp"):',
    ),
    Misconception(
        exercise="plan.place",
        name="experts_beside_tensor",
        hint="This looks like: expert groups are ranks in a row, whatever the pipeline. "
        "They go over DP x CP. What stands between one data-parallel rank and the next?",
        old="if layout.cp % layout.ep == 0 or layout.pp == 1:",
        new="if True:",
    ),
    Misconception(
        exercise="plan.fits",
        name="one_micro_batch_alive",
        hint="This looks like: the activations of one micro-batch. How many have gone forward, and not yet back, on "
        "the first stage?",
        old="alive = cost.peak_activations(plan.schedule, layout.pp, m, plan.chunks)",
        new="alive = 1",
    ),
    Misconception(
        exercise="plan.fits",
        name="all_layers",
        hint="This looks like: every rank keeps the activations of all layers. Which layers does a pipeline rank "
        "compute?",
        old="kept = alive * layers * layer_bytes(model, plan, work, software)",
        new="kept = alive * model.layers * layer_bytes(model, plan, work, software)",
    ),
    Misconception(
        exercise="plan.fits",
        name="zero_over_data_alone",
        hint="This looks like: ZeRO splits over the DP ranks alone. Which other axis leaves its ranks with equal "
        "parameters?",
        old="shards = layout.dp * layout.cp",
        new="shards = layout.dp",
    ),
    Misconception(
        exercise="plan.fits",
        name="stage_2_always_splits",
        hint="This looks like: ZeRO-2 splits gradients however many micro-batches there are. "
        "What does a rank add the second micro-batch's gradients to?",
        old="gradients += software.gradient_bytes * held / (n if plan.zero == 3 or (plan.zero == 2 and m == 1) else 1)",
        new="gradients += software.gradient_bytes * held / (n if plan.zero >= 2 else 1)",
    ),
    Misconception(
        exercise="plan.fits",
        name="experts_split_like_the_rest",
        hint="This looks like: the states of experts are split over all DP x CP ranks. How many of these hold the same "
        "expert?",
        old="for held, n in zip(rank_parameters(model, plan), (shards, shards // layout.ep), strict=True):",
        new="for held, n in zip(rank_parameters(model, plan), (shards, shards), strict=True):",
    ),
    Misconception(
        exercise="plan.fits",
        name="the_gathered_layers_forgotten",
        hint="This looks like: in stage 3 a rank holds its shards and nothing else. What does it compute a layer with?",
        old="parameters += 2 * software.element_bytes * held / layers",
        new="pass",
    ),
    Misconception(
        exercise="plan.fits",
        name="to_the_last_byte",
        hint="This looks like: all of the GPU's memory is yours. Who else needs some of it?",
        old="return Memory(parameters, gradients, optimizer, kept + logits, cluster.gpu.memory * (1 - RESERVE))",
        new="return Memory(parameters, gradients, optimizer, kept + logits, cluster.gpu.memory)",
    ),
    Misconception(
        exercise="plan.step_seconds",
        name="one_micro_batch",
        hint="This looks like: the exchanges of one micro-batch are counted, and the computation of all. How often "
        "does a layer exchange in a step?",
        old="return Seconds(compute + update, *exchanges, m * message, data, bubble)",
        new="return Seconds(compute + update, *stage[1:4], m * message, data, bubble)",
    ),
    Misconception(
        exercise="plan.step_seconds",
        name="bubble_in_every_micro_batch",
        hint="This looks like: the pipeline fills and drains for every micro-batch. When does the second one start?",
        old="return Seconds(compute + update, *exchanges, m * message, data, bubble)",
        new="return Seconds(compute + update, *exchanges, m * message, data, m * bubble)",
    ),
    Misconception(
        exercise="plan.step_seconds",
        name="chunks_forgotten",
        hint="This looks like: the bubble is as long with many chunks as with one. What waits for what in an "
        "interleaved schedule?",
        old="plan.schedule, plan.layout.pp, forward, backward - stage.weight, stage.weight, plan.chunks",
        new="plan.schedule, plan.layout.pp, forward, backward - stage.weight, stage.weight, 1",
    ),
    Misconception(
        exercise="plan.step_seconds",
        name="messages_travel_in_no_time",
        hint="This looks like: filling and draining take computing alone. What does the second stage wait for, before "
        "its first micro-batch?",
        old="forward, backward = stage.forward + message / 2, stage.backward + message / 2",
        new="forward, backward = stage.forward, stage.backward",
    ),
    Misconception(
        exercise="plan.step_seconds",
        name="the_optimizer_forgotten",
        hint="This looks like: a step ends with the last gradient. What has to be read and written before the next "
        "one?",
        old="update = optimizer_seconds(model, plan, cluster, software)",
        new="update = 0.0",
    ),
    Misconception(
        exercise="plan.step_seconds",
        name="data_parallel_every_micro_batch",
        hint="This looks like: gradients are summed over DP in every micro-batch. When are they complete?",
        old="data = data_seconds(model, plan, work, cluster, software)",
        new="data = m * data_seconds(model, plan, work, cluster, software)",
    ),
    Misconception(
        exercise="plan.search",
        name="the_first_that_fits",
        hint="This looks like: the search stops as soon as something fits. Which of the three steps comes after that "
        "one?",
        old="""
        memory = fits(model, plan, work, cluster, software)
        if memory.fits:
            found.append(Choice(plan, memory, step_seconds(model, plan, work, cluster, software)))
        """,
        new="""
        memory = fits(model, plan, work, cluster, software)
        if memory.fits:
            return [Choice(plan, memory, step_seconds(model, plan, work, cluster, software))]
        """,
    ),
    Misconception(
        exercise="plan.search",
        name="fits_or_not",
        hint="This looks like: plans that do not fit are in the list. What happens in the first step of a run with the "
        "first of them?",
        old="if memory.fits:",
        new="if True:",
    ),
    Misconception(
        exercise="plan.search",
        name="the_emptiest_first",
        hint="This looks like: the plan that needs least memory comes first. What is memory for, once a plan fits?",
        old="return sorted(found, key=lambda choice: (choice.seconds.total, choice.memory.total))",
        new="return sorted(found, key=lambda choice: (choice.memory.total, choice.seconds.total))",
    ),
    Misconception(
        exercise="plan.search",
        name="experts_stay_together",
        hint="This looks like: every rank has all experts. Which axis splits them?",
        old="for layout in filled(model, work, gpus, cut):",
        new="for layout in (one for one in filled(model, work, gpus, cut) if one.ep == 1):",
    ),
    Misconception(
        exercise="plan.search",
        name="half_of_the_gpus",
        hint="This looks like: some GPUs are left over. What fills them, when the model fits on a part?",
        old="for layout in filled(model, work, gpus, cut):",
        new="for layout in filled(model, work, gpus // 2, cut):",
    ),
    Misconception(
        exercise="plan.search",
        name="nothing_tuned",
        hint="This looks like: the first tuning of each layout is taken. What do another micro-batch, schedule or "
        "stage change?",
        old="for plan in tunings(model, work, layout, options):",
        new="for plan in list(tunings(model, work, layout, options))[:1]:",
    ),
    Misconception(
        exercise="plan.search",
        name="nothing_computed_again",
        hint="This looks like: plans that compute something again are left out. What fits beside long sequences "
        "without them?",
        old="for plan in tunings(model, work, layout, options):",
        new='for plan in (one for one in tunings(model, work, layout, options) if one.recompute == "none"):',
    ),
    Misconception(
        exercise="plan.search",
        name="the_slowest_first",
        hint="This looks like: the right plans, from the wrong end. Which of them is first in the list?",
        old="return sorted(found, key=lambda choice: (choice.seconds.total, choice.memory.total))",
        new="return sorted(found, key=lambda choice: -choice.seconds.total)",
    ),
    Misconception(
        exercise="plan.search",
        name="the_usual_software",
        hint="This looks like: every program is taken to do what is usual now. Which argument says what this one does?",
        old="memory = fits(model, plan, work, cluster, software)",
        new="""
        software = MODERN
        memory = fits(model, plan, work, cluster, software)
        """,
    ),
    Misconception(
        exercise="plan.search",
        name="whatever_the_options",
        hint="This looks like: the same is tried whatever is asked. Which argument says what may be tried?",
        old="options, found = options or Options(), []",
        new="options, found = Options(), []",
    ),
    Misconception(
        exercise="plan.data_seconds",
        name="hidden_behind_the_whole_step",
        hint="This looks like: the sum of gradients hides behind all micro-batches. When is the first gradient "
        "complete?",
        old="added = _left(gather, forward) if beside_gather else gather",
        new="""
        forward, backward = m * forward, m * backward
        added = _left(gather, forward) if beside_gather else gather
        """,
    ),
    Misconception(
        exercise="plan.data_seconds",
        name="what_is_hidden_is_free",
        hint="This looks like: an exchange that hides costs nothing. What does a collective run on, while the GPU "
        "computes?",
        old="return exchange - hidden + TAKEN * hidden",
        new="return exchange - hidden",
    ),
    Misconception(
        exercise="plan.data_seconds",
        name="gathered_once_a_step",
        hint="This looks like: stage 3 gathers once a step. What has it left when the next micro-batch begins?",
        old='gather *= m * (3 if plan.recompute == "full" else 2)',
        new='gather *= 3 if plan.recompute == "full" else 2',
    ),
    Misconception(
        exercise="plan.data_seconds",
        name="nothing_hides",
        hint="This looks like: every exchange is exposed, whatever the software. Which of them could run beside a "
        "layer's backward?",
        old='return added + (_left(scatter, backward) if software.overlap == "all" else scatter)',
        new="return added + scatter",
    ),
]
