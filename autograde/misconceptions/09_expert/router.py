"""Misconceptions of lesson 09: which experts a token goes to."""

from __future__ import annotations

from autograde.misconception import Misconception

ROUTE = [
    Misconception(
        exercise="expert.route",
        name="unstable_ties",
        hint="This looks like: `torch.topk` decides between equally likely experts, and promises no order. "
        "Which sort keeps equals in the order in which they stand?",
        old="experts = probs.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]",
        new="experts = probs.detach().topk(top_k, dim=-1).indices",
    ),
    Misconception(
        exercise="expert.route",
        name="gates_sum_to_one",
        hint="This looks like: the gates of a token are rescaled so that their sum is 1. "
        "With top_k = 1 every gate would be 1: what would the router learn from?",
        old="return Routing(probs, experts, probs.gather(-1, experts))",
        new="""
        gates = probs.gather(-1, experts)
        return Routing(probs, experts, gates / gates.sum(-1, keepdim=True))
        """,
    ),
    Misconception(
        exercise="expert.route",
        name="gates_without_gradient",
        hint="This looks like: the gates are constants, and no gradient passes through them. "
        "Choosing experts has no gradient either. By what is the router to learn which expert was worth it?",
        old="return Routing(probs, experts, probs.gather(-1, experts))",
        new="return Routing(probs, experts, probs.detach().gather(-1, experts))",
    ),
    Misconception(
        exercise="expert.route",
        name="by_number",
        hint="This looks like: a token's experts are in the order of their numbers. "
        "Which choice will be dropped first where an expert is full, and how will anybody know?",
        old="experts = probs.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]",
        new="""
        experts = probs.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        experts = experts.sort(dim=-1).values
        """,
    ),
    Misconception(
        exercise="expert.route",
        name="softmax_over_tokens",
        hint="This looks like: the softmax runs along the tokens. A row belongs to a token: what adds up to 1 in it?",
        old="probs = logits.softmax(dim=-1)",
        new="probs = logits.softmax(dim=0)",
    ),
    Misconception(
        exercise="expert.route",
        name="takes_any_top_k",
        hint="This looks like: any top_k is taken. What would a token with no expert get from the layer?",
        old="""
        if not 1 <= top_k <= logits.shape[-1]:
            raise ValueError(f"top_k is {top_k}: choose 1 to {logits.shape[-1]}, the number of experts")
        """,
        new="",
    ),
]

ROUTE_WITHIN_SERVERS = [
    Misconception(
        exercise="expert.route_within_servers",
        name="closed_as_good_as_hopeless",
        hint="This looks like: the experts of closed servers have the score 0. "
        "A probability of e⁻⁹⁰⁰ is 0 in every dtype: which of two zeros comes first?",
        old="scores = by_server.masked_fill(closed[..., None], -1.0).flatten(1)",
        new="scores = by_server.masked_fill(closed[..., None], 0.0).flatten(1)",
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="no_limit",
        hint="This looks like: the likeliest experts are taken wherever they stand. "
        "On how many servers may a token's experts be?",
        old="scores = by_server.masked_fill(closed[..., None], -1.0).flatten(1)",
        new="scores = probs.detach()",
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="servers_by_their_best_expert",
        hint="This looks like: servers are ranked by their one likeliest expert. "
        "Of how many experts does the docstring add up the probabilities?",
        old="best = by_server.sort(dim=-1, descending=True).values[..., : math.ceil(top_k / most)]",
        new="best = by_server.sort(dim=-1, descending=True).values[..., :1]",
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="servers_by_all_their_experts",
        hint="This looks like: servers are ranked by the probabilities of all their experts together. "
        "How many of these experts can a token get?",
        old="best = by_server.sort(dim=-1, descending=True).values[..., : math.ceil(top_k / most)]",
        new="best = by_server",
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="closed_before_the_softmax",
        hint="This looks like: the experts of closed servers have the probability 0, and the others share the rest. "
        "Over which experts is the softmax taken?",
        old="return Routing(probs, experts, probs.gather(-1, experts))",
        new="""
        shut = closed.repeat_interleave(each, dim=1)
        probs = logits.masked_fill(shut, float("-inf")).softmax(dim=-1)
        return Routing(probs, experts, probs.gather(-1, experts))
        """,
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="experts_in_turns",
        hint="This looks like: expert e is taken to stand on server e mod S. "
        "In which order does the docstring put the experts on servers?",
        old="by_server = probs.detach().unflatten(-1, (servers, each))  # (T, servers, E/servers)",
        new="by_server = probs.detach().unflatten(-1, (each, servers)).transpose(1, 2)",
        also=(
            (
                "scores = by_server.masked_fill(closed[..., None], -1.0).flatten(1)",
                "scores = by_server.masked_fill(closed[..., None], -1.0).transpose(1, 2).flatten(1)",
            ),
        ),
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="unstable_ties",
        hint="This looks like: `torch.topk` decides between equals, and promises no order. "
        "Which sort keeps equals in the order in which they stand?",
        old="experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]",
        new="experts = scores.topk(top_k, dim=-1).indices",
    ),
    Misconception(
        exercise="expert.route_within_servers",
        name="takes_no_expert",
        hint="This looks like: a top_k of 0 is taken. What would a token with no expert get from the layer?",
        old="if logits.shape[-1] % servers or not 1 <= most <= servers or not 1 <= top_k <= most * each:",
        new="if logits.shape[-1] % servers or not 1 <= most <= servers or top_k > most * each:",
    ),
]
