"""Misconceptions of lesson 03: the embedding and the loss with the vocabulary split, and the formula for traffic."""

from __future__ import annotations

from autograde.misconception import Misconception

KEPT_ROWS = "self.weight = nn.Parameter(shard(F.pad(weight, (0, 0, 0, -len(weight) % group.size())), group))"

VOCAB_EMBEDDING = [
    Misconception(
        exercise="tensor.VocabEmbedding",
        name="skips_its_turn",
        hint="This looks like: a rank that has none of these tokens goes home early. "
        "The others then call the all-reduce: for whom do they wait?",
        old="return self.leave(rows.masked_fill(~mine[..., None], 0), self.group)",
        new="""
        rows = rows.masked_fill(~mine[..., None], 0)
        if not mine.any():  # zeros everywhere: this rank has nothing to add
            return rows
        return self.leave(rows, self.group)
        """,
    ),
    Misconception(
        exercise="tensor.VocabEmbedding",
        name="rows_of_others_not_zero",
        hint="This looks like: where a token is another rank's, this rank adds a row of its own. "
        "How many rows is the sum of a token made of, and how many should it be?",
        old="return self.leave(rows.masked_fill(~mine[..., None], 0), self.group)",
        new="return self.leave(rows, self.group)",
    ),
    Misconception(
        exercise="tensor.VocabEmbedding",
        name="own_exchange_ignored",
        hint="This looks like: the rows always pass sum_over_ranks, also where another `leave` was given. "
        "Lesson 04 leaves with scatter_tokens: how will it get in?",
        old="self.group, self.leave = group, leave or sum_over_ranks",
        new="self.group, self.leave = group, sum_over_ranks",
    ),
    Misconception(
        exercise="tensor.VocabEmbedding",
        name="own_exchange_skipped",
        hint="This looks like: a rank that has none of these tokens takes part in an all-reduce of its own making, "
        "also where another `leave` was given. What do the other ranks of its group take part in?",
        old="return self.leave(rows.masked_fill(~mine[..., None], 0), self.group)",
        new="""
        rows = rows.masked_fill(~mine[..., None], 0)
        if not mine.any():
            dist.all_reduce(rows, group=self.group)
            return rows
        return self.leave(rows, self.group)
        """,
    ),
    Misconception(
        exercise="tensor.VocabEmbedding",
        name="place_in_the_world",
        hint="This looks like: a rank finds its rows by its number in the world. "
        "Which number does it have among those that share this vocabulary?",
        old="local = tokens - self.group.rank() * len(self.weight)",
        new="local = tokens - dist.get_rank() * len(self.weight)",
    ),
    Misconception(
        exercise="tensor.VocabEmbedding",
        name="view_of_the_whole",
        hint="This looks like: the whole weight stays in memory, behind a view. What would let the rest of it go?",
        old=KEPT_ROWS,
        new="""
        padded = F.pad(weight.detach(), (0, 0, 0, -len(weight) % group.size())).clone()
        self.weight = nn.Parameter(padded.chunk(group.size())[group.rank()])
        """,
    ),
]

VOCAB_CROSS_ENTROPY = [
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="logits_gathered",
        hint="This looks like: the logits of all ranks are put together, and then it is an ordinary loss. The numbers "
        "are right. How many numbers of a token travel, and how many would do?",
        source="""
        def vocab_cross_entropy(logits, targets, group, ignore_index=-100):
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            t, r, width = group.size(), group.rank(), logits.shape[-1]
            filled = logits.clamp_min(torch.finfo(logits.dtype).min / 4)
            whole = sum_over_ranks(F.pad(filled, (r * width, (t - 1 - r) * width)), group)
            return F.cross_entropy(whole.flatten(0, -2), targets.flatten(), reduction="none",
                                   ignore_index=ignore_index).view_as(targets)
        """,
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="only_the_owner_computes",
        hint="This looks like: the rank that has a token's target computes its loss, and the others hand in 0. The "
        "loss is right. But the others' logits are in the sum of exponentials: which gradient do they get?",
        old="""
        target_logit = sum_over_ranks(own.masked_fill(~mine, 0), group)
        return (total.log() - target_logit).masked_fill(targets == ignore_index, 0)
        """,
        new="return sum_over_ranks((total.log() - own).masked_fill(~mine | (targets == ignore_index), 0), group)",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="largest_of_its_own",
        hint="This looks like: each rank takes the largest of its own logits away, and then the sums of exponentials "
        "are added up. Are exponentials that were scaled by different numbers parts of one sum?",
        old="dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)",
        new="",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="largest_with_a_gradient",
        hint="This looks like: the largest logit has a part in the gradient, on the rank that has it. In one process "
        "its two parts cancel out. Does autograd know both of them here, where the ranks' sums are apart?",
        old="largest = logits.detach().amax(dim=-1)  # (...)",
        new="largest = logits.amax(dim=-1)",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="nothing_taken_away",
        hint="This looks like: the exponentials are those of the logits as they are. "
        "What is exp(1000), and which number could be taken away from all of a token's logits without any harm?",
        old="""
        largest = logits.detach().amax(dim=-1)  # (...)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]
        """,
        new="",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="targets_of_rank_0",
        hint="This looks like: every rank looks the target up as if its piece began with the first word. "
        "With which word does rank 1's piece begin?",
        old="local = targets - group.rank() * logits.shape[-1]",
        new="local = targets",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="everyone_has_the_target",
        hint="This looks like: ranks that do not have the target add a logit of theirs all the same. "
        "What should they add to the sum over ranks?",
        old="target_logit = sum_over_ranks(own.masked_fill(~mine, 0), group)",
        new="target_logit = sum_over_ranks(own, group)",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="ignored_tokens_counted",
        hint="This looks like: a token whose target is to be ignored has a loss. "
        "What does a token of padding teach the model?",
        old="return (total.log() - target_logit).masked_fill(targets == ignore_index, 0)",
        new="return total.log() - target_logit",
    ),
    Misconception(
        exercise="tensor.vocab_cross_entropy",
        name="in_half_precision",
        hint="This looks like: the loss is computed in the precision of the logits. bfloat16 has 8 bits: "
        "how well can it tell a sum of exponentials from its neighbour?",
        old="logits = logits.to(torch.promote_types(logits.dtype, torch.float32))",
        new="",
    ),
]

TENSOR_TRAFFIC = [
    Misconception(
        exercise="cost.tensor_traffic",
        name="forward_alone",
        hint="This looks like: two all-reduces a layer, or each one without its factor 2. In which pass are there two, "
        "what happens in the other, and how often does an all-reduce send its tensor?",
        old="return 8 * b * s * h * (t - 1) / t",
        new="return 4 * b * s * h * (t - 1) / t",
    ),
    Misconception(
        exercise="cost.tensor_traffic",
        name="whole_tensor_each_way",
        hint="This looks like: each all-reduce sends the tensor twice, whatever t. "
        "Which piece of the sum does a rank already have at the end of each trip round the ring?",
        old="return 8 * b * s * h * (t - 1) / t",
        new="return 8 * b * s * h",
    ),
    Misconception(
        exercise="cost.tensor_traffic",
        name="activations_split",
        hint="This looks like: what travels is 1/t of the activations. "
        "Which size has the tensor that leaves a row layer on each rank?",
        old="return 8 * b * s * h * (t - 1) / t",
        new="return 8 * b * s * h * (t - 1) / t**2",
    ),
    Misconception(
        exercise="cost.tensor_traffic",
        name="bytes_for_elements",
        hint="This looks like: bytes, with 2 for each number. What does the docstring ask for?",
        old="return 8 * b * s * h * (t - 1) / t",
        new="return 16 * b * s * h * (t - 1) / t",
    ),
]
