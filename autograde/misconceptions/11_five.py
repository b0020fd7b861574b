"""Named wrong solutions of lesson 11: a gradient, a mean or a norm that is right on one axis and wrong on another."""

from __future__ import annotations

from autograde.misconception import Misconception

gradient_groups = [
    Misconception(
        exercise="train.gradient_groups",
        name="experts_over_dp_cp",
        hint="This looks like: an expert's gradient is summed over all of DP × CP, though not all of these ranks hold "
        "that expert. Which of them do?",
        old="groups = [mesh.ep_dp if role.expert else mesh.dp_cp]",
        new="groups = [mesh.dp_cp]",
    ),
    Misconception(
        exercise="train.gradient_groups",
        name="data_ranks_only",
        hint="This looks like: gradients are summed over DP alone. Which other axis splits the tokens of a step?",
        old="groups = [mesh.ep_dp if role.expert else mesh.dp_cp]",
        new="groups = [mesh.ep_dp if role.expert else mesh.dp]",
    ),
    Misconception(
        exercise="train.gradient_groups",
        name="norms_forgotten",
        hint="This looks like: with sequence parallelism a parameter that is whole on the TP ranks keeps the share of "
        "its own tokens. Who saw the others?",
        old="""
            if sequence_parallel and role.split is None:
                groups.append(mesh.tp)
        """,
        new="",
    ),
    Misconception(
        exercise="train.gradient_groups",
        name="also_without_sequence_parallelism",
        hint="This looks like: whole parameters are summed over TP always. If the TP ranks see the same tokens, how do "
        "their gradients differ?",
        old="if sequence_parallel and role.split is None:",
        new="if role.split is None:",
    ),
    Misconception(
        exercise="train.gradient_groups",
        name="split_ones_over_tp_too",
        hint="This looks like: a split matrix is summed over TP as well. Do two TP ranks hold the same numbers of it?",
        old="if sequence_parallel and role.split is None:",
        new="if sequence_parallel:",
    ),
]

local_batches = [
    Misconception(
        exercise="train.local_batches",
        name="by_rank_of_the_world",
        hint="This looks like: the rank's number in the world decides which sequences it takes, so that the ranks of "
        "one TP group work on different ones. What do they need in common?",
        old="place, dp = mesh.dp.rank(), mesh.dp.size()",
        new="place, dp = mesh.rank % mesh.dp.size(), mesh.dp.size()",
    ),
    Misconception(
        exercise="train.local_batches",
        name="everybody_all_sequences",
        hint="This looks like: every DP rank takes the whole micro-batch. How often is each token counted then?",
        old="return [context.local_tokens(part.chunk(dp)[place], mesh.cp) for part in tokens.chunk(num_microbatches)]",
        new="return [context.local_tokens(part, mesh.cp) for part in tokens.chunk(num_microbatches)]",
    ),
    Misconception(
        exercise="train.local_batches",
        name="whole_sequences",
        hint="This looks like: a CP rank keeps whole sequences. Which tokens of each are its own?",
        old="return [context.local_tokens(part.chunk(dp)[place], mesh.cp) for part in tokens.chunk(num_microbatches)]",
        new="""
            parts = [part.chunk(dp)[place] for part in tokens.chunk(num_microbatches)]
            everything = torch.arange(tokens.shape[1] - 1)
            return [context.LocalTokens(part[:, :-1], part[:, 1:], everything) for part in parts]
        """,
    ),
    Misconception(
        exercise="train.local_batches",
        name="sequences_before_micro_batches",
        hint="This looks like: the batch is cut over DP first, and each part into micro-batches. Each token is still "
        "there once; does micro-batch i hold the sequences that the docstring says?",
        old="return [context.local_tokens(part.chunk(dp)[place], mesh.cp) for part in tokens.chunk(num_microbatches)]",
        new="return [context.local_tokens(part, mesh.cp) for part in tokens.chunk(dp)[place].chunk(num_microbatches)]",
    ),
]

loss_mean = [
    Misconception(
        exercise="train.loss_mean",
        name="mean_of_means",
        hint="This looks like: each micro-batch is averaged over its own tokens, and the averages are averaged. Which "
        "of them weighs a token more, one with many tokens or one with few?",
        old="return tensor.vocab_cross_entropy(logits, labels[i], mesh.tp, ignore_index).sum() / tokens",
        new="""
            parts = len(labels) * mesh.dp_cp.size()
            own = (labels[i] != ignore_index).sum().clamp(min=1)
            return tensor.vocab_cross_entropy(logits, labels[i], mesh.tp, ignore_index).sum() / own / parts
        """,
    ),
    Misconception(
        exercise="train.loss_mean",
        name="own_tokens_only",
        hint="This looks like: the sum is divided by the tokens of this rank. Whose losses is it added to?",
        old="dist.all_reduce(tokens, group=mesh.dp_cp)",
        new="",
    ),
    Misconception(
        exercise="train.loss_mean",
        name="minus_a_hundred",
        hint="This looks like: only labels of −100 count as no token. What does `ignore_index` say?",
        old="tokens = sum((label != ignore_index).sum() for label in labels)",
        new="tokens = sum((label != -100).sum() for label in labels)",
    ),
    Misconception(
        exercise="train.loss_mean",
        name="ignored_ones_count",
        hint="This looks like: labels that are to be ignored count as tokens. Do they add to the loss?",
        old="tokens = sum((label != ignore_index).sum() for label in labels)",
        new="tokens = torch.tensor(sum(label.numel() for label in labels))",
    ),
    Misconception(
        exercise="train.loss_mean",
        name="counted_over_the_world",
        hint="This looks like: tokens are counted over all ranks of the world. How often is each counted, where TP or "
        "PP ranks have the same ones?",
        old="dist.all_reduce(tokens, group=mesh.dp_cp)",
        new="dist.all_reduce(tokens, group=mesh.world)",
    ),
    Misconception(
        exercise="train.loss_mean",
        name="counted_over_dp",
        hint="This looks like: tokens are counted over DP alone. Which other ranks have tokens of this step?",
        old="dist.all_reduce(tokens, group=mesh.dp_cp)",
        new="dist.all_reduce(tokens, group=mesh.dp)",
    ),
]

clip = [
    Misconception(
        exercise="train.clip",
        name="copies_count_each_time",
        hint="This looks like: a gradient that several ranks hold counts once for each of them. Is that the norm of "
        "the model?",
        old="return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world, copies)",
        new="return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world)",
    ),
    Misconception(
        exercise="train.clip",
        name="over_dp_cp",
        hint="This looks like: the squares are summed over DP × CP. Who holds the other stages of the pipeline and the "
        "other columns?",
        old="return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world, copies)",
        new="return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.dp_cp, copies)",
    ),
    Misconception(
        exercise="train.clip",
        name="own_norm",
        hint="This looks like: each rank clips by the norm of its own pieces. Do all ranks scale by the same then?",
        old="return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world, copies)",
        new="""
            gradients = [shard.gradient for shard in shards]
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
            return norm
        """,
    ),
    Misconception(
        exercise="train.clip",
        name="shard_by_shard",
        hint="This looks like: each shard is clipped by a norm of its own. Does the gradient of the model keep its "
        "direction then?",
        old="return zero.clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world, copies)",
        new="""
            norms = [
                zero.clip_grad_norm([shard.gradient], max_norm, mesh.world, [number])
                for shard, number in zip(shards, copies, strict=True)
            ]
            return torch.stack(norms).norm()
        """,
    ),
]

step = [
    Misconception(
        exercise="train.step",
        name="copies_not_added",
        hint="This looks like: the embedding that the first and the last stage share gets two different gradients. "
        "What makes it one weight again?",
        old="sum_copies(trainer.schedule, trainer.stages, mesh.pp, trainer.tied)",
        new="",
    ),
    Misconception(
        exercise="train.step",
        name="norms_not_synchronised",
        hint="This looks like: what is whole on the TP ranks is updated by the tokens of one of them. Which gradients "
        "does sequence parallelism leave in parts?",
        old="sync_replicated_gradients([p for p, over in groups.items() if mesh.tp in over], mesh.tp)",
        new="",
    ),
    Misconception(
        exercise="train.step",
        name="synchronised_without_need",
        hint="This looks like: what is whole on the TP ranks is added up over them in every layout. Which of these "
        "ranks has only a part of such a gradient where tokens are not split over TP?",
        old="groups = {p: gradient_groups(role, mesh, job.sequence_parallel) for p, role in trainer.roles.items()}",
        new="groups = {p: gradient_groups(role, mesh, True) for p, role in trainer.roles.items()}",
    ),
    Misconception(
        exercise="train.step",
        name="not_clipped",
        hint="This looks like: the norm is taken and nothing is scaled. What is the largest norm that may be left?",
        old="norm = clip(trainer.shards, trainer.copies, job.max_norm, mesh)",
        new='norm = clip(trainer.shards, trainer.copies, float("inf"), mesh)',
    ),
    Misconception(
        exercise="train.step",
        name="rate_ignored",
        hint="This looks like: every step takes the job's learning rate. What is the third argument for?",
        old="zero.step1(trainer.shards, job.lr if lr is None else lr)",
        new="zero.step1(trainer.shards, job.lr)",
    ),
    Misconception(
        exercise="train.step",
        name="own_share_of_the_loss",
        hint="This looks like: a rank reports the losses that it has itself. What do the ranks without a last stage "
        "have, and what the other DP ranks?",
        old="return StepReport(trainer.total(losses), norm.item())",
        new="return StepReport(float(sum(losses.values(), torch.zeros(()))), norm.item())",
    ),
]
