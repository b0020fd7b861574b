"""Misconceptions of lesson 09: tokens on their way to experts and back."""

from __future__ import annotations

from autograde.misconception import Misconception

ALL_TO_ALL = [
    Misconception(
        exercise="expert.all_to_all",
        name="splits_exchanged",
        hint="This looks like: the numbers of rows to send and to receive are given in each other's place. "
        "In which order does `dist.all_to_all_single` take them?",
        old="dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)",
        new="dist.all_to_all_single(out, x.contiguous(), sends, receives, group=group)",
    ),
    Misconception(
        exercise="expert.all_to_all",
        name="nothing_to_do",
        hint="This looks like: a rank that has no row to send or to receive stays away. "
        "What do the others in the group wait for?",
        old="dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)",
        new="""
        if sum(sends) and sum(receives):
            dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
        """,
    ),
    Misconception(
        exercise="expert.all_to_all",
        name="no_way_back",
        hint="This looks like: the rows travel and their gradients do not. "
        "What does autograd know of a tensor that `dist` has filled?",
        old="return _AllToAll.apply(x, sends, receives, group)",
        new="""
        out = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(out, x.detach().contiguous(), receives, sends, group=group)
        return out
        """,
    ),
    Misconception(
        exercise="expert.all_to_all",
        name="same_way_back",
        hint="This looks like: backward sends as many rows to each rank as forward did. "
        "A row's gradient is on the rank that the row came to: how many of them are there?",
        old="return _AllToAll.apply(grad, ctx.receives, ctx.sends, ctx.group), None, None, None",
        new="return _AllToAll.apply(grad, ctx.sends, ctx.receives, ctx.group), None, None, None",
    ),
]

ROWS = "rows = all_to_all(x[sent // experts.shape[1]], sends, receives, group)  # (R, h) by sender, then by expert"
RETURNED = "return rows[regrouped], received.sum(0), Plan(sent, regrouped, sends, receives)"
KEPT = "sent = order if keep is None else order[keep.flatten()[order]]"

COUNTS = (
    "counts = torch.bincount(choices[sent], minlength=num_experts).view(n, -1)"
    "  # (n, E/n) rows for each rank and expert"
)
SIZES = "sends, receives = counts.sum(1).tolist(), received.sum(1).tolist()"

DISPATCH = [
    Misconception(
        exercise="expert.dispatch",
        name="by_sender",
        hint="This looks like: the rows stay in the order in which they came, all of one sender together. "
        "An expert works on a block of rows: where are those of the first one?",
        old=RETURNED,
        new="return rows, received.sum(0), Plan(sent, torch.arange(len(rows)), sends, receives)",
    ),
    Misconception(
        exercise="expert.dispatch",
        name="keep_ignored",
        hint="This looks like: choices that were dropped travel all the same. Who has no room for them?",
        old=KEPT,
        new="sent = order",
    ),
    Misconception(
        exercise="expert.dispatch",
        name="experts_in_turns",
        hint="This looks like: expert e is taken to live on rank e mod n. "
        "Which experts does the docstring give to rank i?",
        old="choices = experts.flatten()  # (T·top_k,)",
        new="choices = (experts % n * (num_experts // n) + experts // n).flatten()",
    ),
    Misconception(
        exercise="expert.dispatch",
        name="positions_turned_round",
        hint="This looks like: among the rows of one expert the later tokens come first. "
        "In which order does a sort leave equals, if it is not told to keep it?",
        old="order = choices.argsort(stable=True)  # by expert, which is by rank too",
        new="order = (len(choices) - 1 - choices.flip(0).argsort(stable=True))",
    ),
    Misconception(
        exercise="expert.dispatch",
        name="rows_without_gradient",
        hint="This looks like: the rows arrive as constants, and x has no gradient. "
        "Which of the two all-to-alls knows its way back?",
        old=ROWS,
        new="""
        rows = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(rows, x.detach()[sent // experts.shape[1]], receives, sends, group=group)
        """,
    ),
    Misconception(
        exercise="expert.dispatch",
        name="empty_rank_stays_away",
        hint="This looks like: a rank without tokens returns at once. Who waits for it, and what for?",
        old="choices = experts.flatten()  # (T·top_k,)",
        new="""
        if not len(x):
            none = experts.new_zeros(0)
            return x, experts.new_zeros(num_experts // n), Plan(none, none, [0] * n, [0] * n)
        choices = experts.flatten()
        """,
    ),
    Misconception(
        exercise="expert.dispatch",
        name="plan_without_the_sorting",
        hint="This looks like: the rows are sorted by expert, and the plan says that they are not. "
        "How will `combine` find out which row belongs to whom?",
        old=RETURNED,
        new="return rows[regrouped], received.sum(0), Plan(sent, torch.arange(len(rows)), sends, receives)",
    ),
    Misconception(
        exercise="expert.dispatch",
        name="takes_any_number_of_experts",
        hint="This looks like: the experts that are left over after an even share belong to nobody. "
        "What happens to a token that chose one of them?",
        old="""
        if num_experts % n:
            raise ValueError(f"{num_experts} experts cannot be spread over ep{n}: make ep a divisor of {num_experts}")
        """,
        new="num_experts = -(-num_experts // n) * n",
    ),
    Misconception(
        exercise="expert.dispatch",
        name="refused_by_the_all_to_all",
        hint="This looks like: a number of experts that does not fit is first noticed by the all-to-all. "
        "Whoever reads its message knows of a tensor's dimension. What does the docstring want them to be told?",
        old="""
        if num_experts % n:
            raise ValueError(f"{num_experts} experts cannot be spread over ep{n}: make ep a divisor of {num_experts}")
        """,
        new="",
        also=(
            (COUNTS, "counts = torch.bincount(choices[sent], minlength=num_experts)"),
            (SIZES, "counts, received = counts.view(n, -1), received.view(n, -1)\n" + SIZES),
        ),
    ),
]

BACK = "back = all_to_all(y[plan.regrouped.argsort()], plan.receives, plan.sends, group)  # (S, h) in the order sent"
ADDED = "return weighted.new_zeros(gates.shape[0], y.shape[1]).index_add(0, plan.sent // gates.shape[1], weighted)"
WEIGHTED = "weighted = back * gates.flatten()[plan.sent, None]"

COMBINE = [
    Misconception(
        exercise="expert.combine",
        name="still_by_expert",
        hint="This looks like: the outputs go back in the order of the experts. "
        "The ranks expect what they sent, in the order in which it came. Which entry of the plan knows that?",
        old=BACK,
        new="back = all_to_all(y, plan.receives, plan.sends, group)",
    ),
    Misconception(
        exercise="expert.combine",
        name="sorted_once_more",
        hint="This looks like: the outputs are put through the sorting of `dispatch` a second time. "
        "That order was made by it: what undoes it?",
        old=BACK,
        new="back = all_to_all(y[plan.regrouped], plan.receives, plan.sends, group)",
    ),
    Misconception(
        exercise="expert.combine",
        name="without_gates",
        hint="This looks like: the outputs of a token's experts are added up as they are. "
        "What says how much the token thinks of each of them?",
        old=WEIGHTED,
        new="weighted = back",
    ),
    Misconception(
        exercise="expert.combine",
        name="last_one_wins",
        hint="This looks like: of a token's experts only one counts, because each writes over the one before. "
        "What is to become of several rows with the same token?",
        old=ADDED,
        new="""
        out = weighted.new_zeros(gates.shape[0], y.shape[1])
        return out.index_put((plan.sent // gates.shape[1],), weighted)
        """,
    ),
    Misconception(
        exercise="expert.combine",
        name="gates_without_gradient",
        hint="This looks like: the gates are constants, and their gradient is missing. "
        "By what is the router to learn which expert was worth it?",
        old=WEIGHTED,
        new="weighted = back * gates.detach().flatten()[plan.sent, None]",
    ),
    Misconception(
        exercise="expert.combine",
        name="splits_as_before",
        hint="This looks like: the way back sends as many rows to each rank as the way there did. "
        "Who has how many rows of whom now?",
        old=BACK,
        new="back = all_to_all(y[plan.regrouped.argsort()], plan.sends, plan.receives, group)",
    ),
]
