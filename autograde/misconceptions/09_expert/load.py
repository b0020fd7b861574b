"""Misconceptions of lesson 09: how many tokens an expert takes, which ones, and what keeps the load even."""

from __future__ import annotations

from autograde.misconception import Misconception

BEFORE = "before = (chosen.cumsum(0) - chosen).gather(1, by_choice[:, None])[:, 0]"
BEFORE += "  # earlier choices of the same expert"

CAPACITY = [
    Misconception(
        exercise="expert.capacity",
        name="rounded_down",
        hint="This looks like: the fraction is cut off. With 10 tokens, 4 experts and factor 1, is there room for all?",
        old="return math.ceil(num_tokens * top_k * factor / num_experts)",
        new="return math.floor(num_tokens * top_k * factor / num_experts)",
    ),
    Misconception(
        exercise="expert.capacity",
        name="without_top_k",
        hint="This looks like: every token is counted once. How many places does a token with two experts take?",
        old="return math.ceil(num_tokens * top_k * factor / num_experts)",
        new="return math.ceil(num_tokens * factor / num_experts)",
    ),
    Misconception(
        exercise="expert.capacity",
        name="rounded_before_the_factor",
        hint="This looks like: the even share is rounded up first, and then multiplied. "
        "To what does the formula apply the rounding?",
        old="return math.ceil(num_tokens * top_k * factor / num_experts)",
        new="return math.ceil(math.ceil(num_tokens * top_k / num_experts) * factor)",
    ),
    Misconception(
        exercise="expert.capacity",
        name="rounded_to_the_nearest",
        hint="This looks like: the number is rounded to the nearest whole one. "
        "When the load is even and the factor is 1, may a token be dropped?",
        old="return math.ceil(num_tokens * top_k * factor / num_experts)",
        new="return round(num_tokens * top_k * factor / num_experts)",
    ),
]

WITHIN_CAPACITY = [
    Misconception(
        exercise="expert.within_capacity",
        name="token_by_token",
        hint="This looks like: places are given away token by token, a token's second choice right after its first. "
        "Whose first choice may then be pushed out, and by what?",
        old="by_choice = experts.t().reshape(-1)  # (top_k·T,) all first choices, then all second ones",
        new="by_choice = experts.reshape(-1)",
        also=(
            (
                "return (before < limit).view(experts.shape[1], experts.shape[0]).t()",
                "return (before < limit).view(experts.shape)",
            ),
        ),
    ),
    Misconception(
        exercise="expert.within_capacity",
        name="one_too_many",
        hint="This looks like: an expert takes one token more than it has room for. "
        "How many came before the last one that still fits?",
        old="return (before < limit).view(experts.shape[1], experts.shape[0]).t()",
        new="return (before <= limit).view(experts.shape[1], experts.shape[0]).t()",
    ),
    Misconception(
        exercise="expert.within_capacity",
        name="last_come_first_served",
        hint="This looks like: the tokens at the end get the places. "
        "Of two tokens with the same choice, which position does the docstring prefer?",
        old=BEFORE,
        new="before = (chosen.flip(0).cumsum(0).flip(0) - chosen).gather(1, by_choice[:, None])[:, 0]",
    ),
    Misconception(
        exercise="expert.within_capacity",
        name="all_choices_or_none",
        hint="This looks like: a token whose one choice is dropped loses the others too. Are there places for these?",
        old="return (before < limit).view(experts.shape[1], experts.shape[0]).t()",
        new="""
        mask = (before < limit).view(experts.shape[1], experts.shape[0]).t()
        return mask.all(1, keepdim=True).expand(experts.shape)
        """,
    ),
    Misconception(
        exercise="expert.within_capacity",
        name="room_for_each_choice",
        hint="This looks like: first choices and second ones are counted apart, so an expert takes `limit` of each. "
        "How many tokens can it have in the end?",
        old="""
        before = (chosen.cumsum(0) - chosen).gather(1, by_choice[:, None])[:, 0]  # earlier choices of the same expert
        return (before < limit).view(experts.shape[1], experts.shape[0]).t()
        """,
        new="""
        apart = chosen.view(experts.shape[1], experts.shape[0], num_experts)  # (top_k, T, E)
        before = (apart.cumsum(1) - apart).gather(2, experts.t()[..., None])[..., 0]
        return (before < limit).t()
        """,
    ),
]

BALANCE_LOSS = [
    Misconception(
        exercise="expert.balance_loss",
        name="own_counts",
        hint="This looks like: f is counted over this rank's tokens, and P over all. "
        "Who else sends tokens to the same experts?",
        old="counts, total = sum_over_ranks(counts, group), sum_over_ranks(total, group)",
        new="total = sum_over_ranks(total, group)",
        also=(
            ("tokens = counts.sum() / top_k", "tokens = total.sum()"),
            (
                "return num_experts * (counts / (tokens * top_k) * total / tokens).sum()",
                "return num_experts * (counts / counts.sum() * total / tokens).sum()",
            ),
        ),
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="mean_of_losses",
        hint="This looks like: every rank computes a loss of its own tokens, and these are averaged. "
        "If one rank's tokens are all nouns and another's all verbs, is each rank's load to be even, or that of all?",
        source="""
        def balance_loss(probs, experts, groups):
            num_experts, wide = probs.shape[1], torch.promote_types(probs.dtype, torch.float32)
            counts = torch.bincount(experts.flatten(), minlength=num_experts).to(wide)
            share, mean = counts / max(experts.numel(), 1), probs.sum(0, dtype=wide) / max(len(probs), 1)
            loss = num_experts * (share * mean).sum()
            for group in groups:
                loss = sum_over_ranks(loss, group) / group.size()
            return loss
        """,
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="means_averaged",
        hint="This looks like: P is the mean of the ranks' means. With 5 tokens on one rank and 2 on another, "
        "does every token count alike?",
        old="""
        total = probs.sum(0, dtype=wide)  # (E,)
        for group in groups:
            counts, total = sum_over_ranks(counts, group), sum_over_ranks(total, group)
        """,
        new="""
        total = probs.sum(0, dtype=wide) / max(len(probs), 1)
        for group in groups:
            counts, total = sum_over_ranks(counts, group), sum_over_ranks(total, group) / group.size()
        """,
        also=(
            (
                "return num_experts * (counts / (tokens * top_k) * total / tokens).sum()",
                "return num_experts * (counts / (tokens * top_k) * total).sum()",
            ),
        ),
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="gradient_summed_again",
        hint="This looks like: the gradient is added up over the ranks once more on its way back. "
        "Every rank has the same loss, and the gradients of the router are summed later. How often would that be?",
        old="counts, total = sum_over_ranks(counts, group), sum_over_ranks(total, group)",
        new="counts, total = sum_over_ranks(counts, group), sum_over_ranks(copy_to_ranks(total, group), group)",
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="out_of_the_graph",
        hint="This looks like: the sums over ranks are made behind autograd's back, and the loss has no gradient. "
        "It can be printed. Can it also be learned from?",
        old="counts, total = sum_over_ranks(counts, group), sum_over_ranks(total, group)",
        new="""
        counts, total = counts.clone(), total.detach().clone()
        dist.all_reduce(counts, group=group)
        dist.all_reduce(total, group=group)
        """,
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="first_choices_only",
        hint="This looks like: f counts first choices alone. Does a token's second expert have no work with it?",
        old="counts = torch.bincount(experts.flatten(), minlength=num_experts).to(wide)  # bfloat16 counts to 256 only",
        new="counts = torch.bincount(experts[:, 0], minlength=num_experts).to(wide) * experts.shape[1]",
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="without_the_number_of_experts",
        hint="This looks like: the sum of f·P as it is, which is smaller the more experts there are. "
        "What should it be where the load is even?",
        old="return num_experts * (counts / (tokens * top_k) * total / tokens).sum()",
        new="return (counts / (tokens * top_k) * total / tokens).sum()",
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="whole_world",
        hint="This looks like: the sums run over all ranks, whatever the groups. "
        "Whose tokens does the caller want counted together?",
        old="for group in groups:",
        new="for group in [dist.group.WORLD]:",
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="counted_in_half_precision",
        hint="This looks like: tokens are counted in the dtype of the probabilities. What is 256 + 1 in bfloat16?",
        old="num_experts, wide = probs.shape[1], torch.promote_types(probs.dtype, torch.float32)",
        new="num_experts, wide = probs.shape[1], probs.dtype",
    ),
    Misconception(
        exercise="expert.balance_loss",
        name="tokens_counted_too",
        hint="This looks like: the ranks also tell each other how many tokens they have. "
        "What do the counts of all experts add up to?",
        old="tokens = counts.sum() / top_k",
        new="""
        tokens = counts.new_tensor([len(probs)])
        for group in groups:
            tokens = sum_over_ranks(tokens, group)
        """,
    ),
]
