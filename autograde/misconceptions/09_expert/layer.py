"""Misconceptions of lesson 09: the layer, its gradients over ranks, and what it costs."""

from __future__ import annotations

from autograde.misconception import Misconception

ROUTED = "routing = route(x.flatten(0, 1) @ self.router.t(), self.top_k)"
GATES = "gates = self.enter(routing.gates.view(*x.shape[:2], self.top_k), self.tp_group)  # (b, s, top_k)"
OUT = "out = self.leave(combine(y, gates.flatten(0, 1), plan, self.group).view_as(tokens), self.tp_group)"
W_IN = "self.w_in = nn.Parameter(w_in[mine].chunk(tp_group.size(), 1)[tp_group.rank()].clone())  # (E/n, f/t, h)"
W_OUT = "self.w_out = nn.Parameter(w_out[mine].chunk(tp_group.size(), 2)[tp_group.rank()].clone())  # (E/n, h, f/t)"
MINE = "mine = slice(*(len(router) // group.size() * (group.rank() + i) for i in (0, 1)))"

MOE = [
    Misconception(
        exercise="expert.MoE",
        name="gates_do_not_enter",
        hint="This looks like: the gates go into the tensor-parallel region without `enter`. "
        "Each rank has a part of every expert's inner features there. Whose part of the gates' gradient comes back?",
        old=GATES,
        new="gates = routing.gates.view(*x.shape[:2], self.top_k)",
    ),
    Misconception(
        exercise="expert.MoE",
        name="experts_do_not_enter",
        hint="This looks like: the choices stay outside the tensor-parallel region, where the tokens go in. "
        "With an `enter` that gathers tokens, how many tokens are inside, and for how many is there a choice?",
        old="""
        with torch.no_grad():
            experts = self.enter(routing.experts.view(*x.shape[:2], self.top_k), self.tp_group).flatten(0, 1)
        """,
        new="experts = routing.experts",
    ),
    Misconception(
        exercise="expert.MoE",
        name="output_does_not_leave",
        hint="This looks like: the output does not pass `leave`. With some of each expert's inner features, "
        "what has a rank computed: an output, or a part of a sum?",
        old=OUT,
        new="out = combine(y, gates.flatten(0, 1), plan, self.group).view_as(tokens)",
    ),
    Misconception(
        exercise="expert.MoE",
        name="gradients_divided_by_ep",
        hint="This looks like: the gradients of the experts are divided by the number of ranks that the experts are "
        "spread over. Each expert is on one of these ranks, and has seen the tokens of all. What is left to average?",
        old="y = grouped_mlp(rows, counts, self.w_in, self.w_out)",
        new="""
        n = self.group.size()
        w_in, w_out = (w / n + (w - w / n).detach() for w in (self.w_in, self.w_out))
        y = grouped_mlp(rows, counts, w_in, w_out)
        """,
    ),
    Misconception(
        exercise="expert.MoE",
        name="balance_loss_not_learned",
        hint="This looks like: the balance loss is computed, stored, and left out of what backward minimises. "
        "Who in the layer would notice that it exists?",
        old="out = with_loss(out, self.balance_weight * loss)",
        new="",
    ),
    Misconception(
        exercise="expert.MoE",
        name="capacity_of_sequences",
        hint="This looks like: the room of an expert is counted from the number of sequences. "
        "How many tokens does this rank have?",
        old="limit = capacity(len(experts), len(self.router), self.top_k, self.capacity_factor)",
        new="limit = capacity(len(x), len(self.router), self.top_k, self.capacity_factor)",
    ),
    Misconception(
        exercise="expert.MoE",
        name="first_experts_everywhere",
        hint="This looks like: every rank keeps the first experts. Which ones do tokens expect to find there?",
        old=MINE,
        new="mine = slice(0, len(router) // group.size())",
    ),
    Misconception(
        exercise="expert.MoE",
        name="view_of_the_whole",
        hint="This looks like: the experts of all ranks stay in memory, behind a view. What would let them go?",
        old=W_IN,
        new="self.w_in = nn.Parameter(w_in[mine].chunk(tp_group.size(), 1)[tp_group.rank()])",
        also=((W_OUT, "self.w_out = nn.Parameter(w_out[mine].chunk(tp_group.size(), 2)[tp_group.rank()])"),),
    ),
    Misconception(
        exercise="expert.MoE",
        name="every_expert_here",
        hint="This looks like: every rank keeps all experts and sends nothing, as in data parallelism. "
        "Which of the weights does this rank spare the others?",
        source="""
        class MoE(nn.Module):
            def __init__(self, router, w_in, w_out, top_k, group, tp_group, enter=copy_to_ranks, leave=sum_over_ranks,
                         capacity_factor=None, balance_weight=0.0, balance_groups=()):
                super().__init__()
                self.top_k = top_k
                self.router, self.w_in, self.w_out = (nn.Parameter(w.clone()) for w in (router, w_in, w_out))

            def forward(self, x):
                flat = x.flatten(0, 1)
                routing = route(flat @ self.router.t(), self.top_k)
                out = torch.zeros_like(flat)
                for e in range(len(self.router)):
                    gate = (routing.gates * (routing.experts == e)).sum(1, keepdim=True)
                    out = out + gate * (nn.functional.gelu(flat @ self.w_in[e].t()) @ self.w_out[e].t())
                return out.view_as(x)
        """,
    ),
    Misconception(
        exercise="expert.MoE",
        name="balance_keeps_the_graph",
        hint="This looks like: `self.balance` is the loss itself, with all that it was computed from. "
        "How long do the activations of this step live then?",
        old="self.balance = loss.detach()",
        new="self.balance = loss",
    ),
    Misconception(
        exercise="expert.MoE",
        name="balance_without_a_weight",
        hint="This looks like: the balance loss is summed over ranks even where its weight is 0. "
        "Who pays for that, and who learns from it?",
        old="if self.balance_weight:",
        new="if self.balance_groups:",
    ),
    Misconception(
        exercise="expert.MoE",
        name="balance_weight_forgotten",
        hint="This looks like: backward minimises the balance loss as it is. How much of it did the caller ask for?",
        old="out = with_loss(out, self.balance_weight * loss)",
        new="out = with_loss(out, loss)",
    ),
    Misconception(
        exercise="expert.MoE",
        name="router_inside_the_region",
        hint="This looks like: the router stands behind `enter`. "
        "Of how many ranks of `tp_group` is its gradient there, and is that a part or the whole?",
        old=ROUTED,
        new="""
        x = self.enter(x, self.tp_group)
        routing = route(x.flatten(0, 1) @ self.router.t(), self.top_k)
        """,
        also=(
            (GATES, "gates = routing.gates.view(*x.shape[:2], self.top_k)"),
            (
                """
                with torch.no_grad():
                    experts = self.enter(routing.experts.view(*x.shape[:2], self.top_k), self.tp_group).flatten(0, 1)
                tokens = self.enter(x, self.tp_group)  # (b, s, h)
                """,
                "experts, tokens = routing.experts, x",
            ),
        ),
    ),
    Misconception(
        exercise="expert.MoE",
        name="leaves_before_combine",
        hint="This looks like: the experts' rows pass `leave`, and then go back to their tokens. "
        "`leave` ends the region: on which side of it does `combine` multiply by gates that went in through `enter`?",
        old=OUT,
        new="""
        y = self.leave(y[None], self.tp_group)[0]
        out = combine(y, gates.flatten(0, 1), plan, self.group).view_as(tokens)
        """,
    ),
]

SUM = "dist.all_reduce(parameter.grad, group=group)"
GROUPS = "for parameter, group in ((layer.router, everyone), (layer.w_in, copies), (layer.w_out, copies)):"

AVERAGE_GRADIENTS = [
    Misconception(
        exercise="expert.average_gradients",
        name="mean_over_copies",
        hint="This looks like: the gradients of the experts are divided by the number of their copies. "
        "The losses of how many ranks are in their sum?",
        old="parameter.grad /= everyone.size()",
        new="parameter.grad /= group.size()",
    ),
    Misconception(
        exercise="expert.average_gradients",
        name="experts_over_everyone",
        hint="This looks like: the gradients of different experts are added to one another. "
        "The first expert of this rank: which number has it, and which has that of the next rank?",
        old=GROUPS,
        new="for parameter, group in ((layer.router, everyone), (layer.w_in, everyone), (layer.w_out, everyone)):",
    ),
    Misconception(
        exercise="expert.average_gradients",
        name="router_over_copies",
        hint="This looks like: the router's gradient is summed over the ranks with the same experts. "
        "Which ranks have a copy of the router, and tokens that it routed?",
        old=GROUPS,
        new="for parameter, group in ((layer.router, copies), (layer.w_in, copies), (layer.w_out, copies)):",
    ),
    Misconception(
        exercise="expert.average_gradients",
        name="experts_left_alone",
        hint="This looks like: the gradients of the experts stay as they are. "
        "All tokens of an expert group have come here. Is there only one expert group?",
        old=GROUPS,
        new="for parameter, group in ((layer.router, everyone),):",
        also=(
            (
                "parameter.grad /= everyone.size()",
                """
                parameter.grad /= everyone.size()
                layer.w_in.grad /= everyone.size()
                layer.w_out.grad /= everyone.size()
                """,
            ),
        ),
    ),
    Misconception(
        exercise="expert.average_gradients",
        name="sum_for_mean",
        hint="This looks like: the sum of the losses' gradients. Which loss does the docstring want the gradient of?",
        old="parameter.grad /= everyone.size()",
        new="",
    ),
    Misconception(
        exercise="expert.average_gradients",
        name="experts_summed_alone",
        hint="This looks like: the router's gradient is a mean, and those of the experts are sums. "
        "The gradient of which one loss are all three to be?",
        old="parameter.grad /= everyone.size()",
        new="parameter.grad /= everyone.size() if parameter is layer.router else 1",
    ),
    Misconception(
        exercise="expert.average_gradients",
        name="divided_by_the_expert_group",
        hint="This looks like: the gradients of the experts are divided by the number of ranks that share the experts "
        "out. The losses of how many ranks are in their sum, once the copies are added up?",
        old="parameter.grad /= everyone.size()",
        new="parameter.grad /= everyone.size() if parameter is layer.router else everyone.size() // copies.size()",
    ),
]

EXPERT_TRAFFIC = [
    Misconception(
        exercise="cost.expert_traffic",
        name="forward_only",
        hint="This looks like: the way there and the way back, once. What travels when gradients do?",
        old="return 4 * tokens * top_k * h * (ep - 1) / ep",
        new="return 2 * tokens * top_k * h * (ep - 1) / ep",
    ),
    Misconception(
        exercise="cost.expert_traffic",
        name="nobody_stays_at_home",
        hint="This looks like: every row leaves its rank. On how many of the ranks may a token's expert be at home?",
        old="return 4 * tokens * top_k * h * (ep - 1) / ep",
        new="return 4 * tokens * top_k * h",
    ),
    Misconception(
        exercise="cost.expert_traffic",
        name="one_copy_a_token",
        hint="This looks like: a token travels once, however many experts it has. Who makes the second copy?",
        old="return 4 * tokens * top_k * h * (ep - 1) / ep",
        new="return 4 * tokens * h * (ep - 1) / ep",
    ),
    Misconception(
        exercise="cost.expert_traffic",
        name="to_every_rank",
        hint="This looks like: every rank sends all its rows to every other. "
        "How many ranks does one copy of a token visit?",
        old="return 4 * tokens * top_k * h * (ep - 1) / ep",
        new="return 4 * tokens * top_k * h * (ep - 1)",
    ),
]
