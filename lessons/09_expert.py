# %% [markdown]
# # 9 · Expert parallelism
#
# *120 minutes · 11 exercises and 5 questions, 59 points · 4 processes on this machine, no GPU*
#
# The kitchen has hired specialists. One only toasts, one only fries, one knows about cheese. A clerk reads every
# sandwich and writes on it which two of them it needs most. Then the trays set out: every cook sends each sandwich to
# its specialists, works on what arrives, and sends it back to the table that it came from.
#
# The kitchen now knows eight times as many recipes, and a sandwich takes no longer to make. But everybody waits for
# the trays, twice. And if all sandwiches want to be fried, one cook is worked off their feet and seven stand around.
#
# ![Two ranks with four tokens and two experts each. An all-to-all takes every token to the expert that it chose: some
# stay on their rank, some cross over, and one finds no room. A second all-to-all takes the results back to where the
# tokens came from.](pictures/09_experts.svg)
#
# **What is split**: the experts. Each of n ranks holds E/n of the E experts of a layer, and tokens of its own.
#
# **What travels**: tokens, to their experts and back. Two all-to-alls forward, two backward; each moves
# T · k · h · (n−1)/n numbers from a rank with T tokens of h numbers that go to k experts each, if the load is even.
#
# **When it hurts**: when the load is not even, and when the all-to-all leaves the server.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). The mesh of lesson 01 and the exchanges of lesson 03 come from the
# library here.

# %%
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import expert, mesh, plots, run
from fivefold.expert import Plan, Routing, grouped_mlp, with_loss
from fivefold.layout import Layout
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import phase
from fivefold.runtime.marks import forget
from fivefold.runtime.replay import replay
from fivefold.tensor import copy_to_ranks, sum_over_ranks
from torch import Tensor, nn

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks that share the experts: 2, 4 or 8

# %% [markdown]
# ## What is split, what travels, when
#
# MLPs hold most of a transformer's weights, and every token pays for all of them. A **mixture of experts** puts E MLPs
# in the place of one, the experts, and lets every token pay for k of them:
#
# $$y = \sum_{e \,\in\, \text{top } k} g_e \cdot \mathrm{MLP}_e(x), \qquad g = \mathrm{softmax}(x R^\top)$$
#
# The **router** R is one small matrix, E × h. Its softmax says how likely each expert is for this token. The k
# likeliest get the token, and their probabilities, the **gates**, weigh what they make of it. Weights grow with E, work
# with k.
#
# In training, ranks of data and context parallelism have tokens of their own, and copies of the same weights. **Expert
# parallelism needs no more ranks than those.** It is folded over them: instead of copies of all experts, every n ranks
# in a row share them out. Then a token's expert is often on another rank, and somebody has to travel. Weights are
# large, and every rank would need all of them. So the tokens travel:
#
# | | forward | backward |
# | --- | --- | --- |
# | **dispatch**: tokens to their experts | all-to-all | all-to-all of gradients, the other way |
# | **combine**: results to their tokens | all-to-all | all-to-all of gradients, the other way |
#
# An all-to-all is many messages at once: every rank has some rows for each other. How many is decided by the text, new
# in every step and every layer. Nobody knows in advance how much will come. So the ranks tell each other first: a
# small all-to-all of counts goes ahead.
#
# Two things follow from "decided by the text":
#
# - **Load.** Everybody waits for the busiest rank. An expert may have a limit, its **capacity**; what is beyond it is
#   dropped. And a **balance loss** teaches the router to spread the tokens.
# - **Gradients.** An expert on this rank has seen tokens of its whole group. Its gradient is a sum over more than this
#   rank's loss, in contrast to the gradient of everything else. That is the bug of this lesson.

# %% [markdown]
# ## A worked example
#
# The text is Python's language reference again, and the task to guess the next byte. A token is the last 8 bytes, of 8
# numbers each: h = 64. There are 8 experts.

# %%
from pydoc_data.topics import topics

data = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
context, h, inner, E = 8, 64, 128, 8  # bytes of a token, features, inner features of an expert, experts
b, s = 16, 32  # sequences of all ranks together, and tokens in each


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def weights(num_experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """router (E, h), w_in (E, inner, h), w_out (E, h, inner): whole."""
    return (
        random(num_experts, h, seed=1), random(num_experts, inner, h, seed=2), random(num_experts, h, inner, seed=3)
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Windows (b, s, context) of the text and the byte (b, s) that follows each; the same on every rank."""
    starts = torch.randint(len(data) - s - context, (b,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([data[i : i + s + context] for i in starts]).long()
    return pieces.unfold(1, context, 1)[:, :-1], pieces[:, context:]


embedded = F.layer_norm(random(256, h // context, seed=4)[batch(0)[0]].flatten(2), (h,))  # (b, s, h): real text
print(f"{b * s} tokens, {b * s // world_size} on each of {world_size} ranks; for example {bytes(batch(0)[0][0, 0])!r}")

# %% [markdown]
# By hand, with one expert on each rank and one expert for each token. Sorted by expert, a rank's rows are sorted by
# rank as well: that is what `all_to_all_single` wants, together with how many go to each rank and come from each.


# %%
def by_hand(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    ep = dist.new_group(group_desc="ep")  # all ranks, under the name that figures show
    router, w_in, w_out = weights(n)
    own = x.chunk(n)[rank].flatten(0, 1)  # (T, h): this rank's tokens
    with phase("forward"):
        gate, chosen = (own @ router.T).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sends = torch.bincount(chosen, minlength=n)  # how many rows go to each rank
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=ep)  # how many come from each
        sends, receives = sends.tolist(), receives.tolist()

        rows = own.new_empty(sum(receives), h)
        dist.all_to_all_single(rows, own[order], receives, sends, group=ep)  # there
        y = F.gelu(rows @ w_in[rank].T) @ w_out[rank].T
        back = torch.empty_like(own)
        dist.all_to_all_single(back, y, sends, receives, group=ep)  # and back

        out = torch.empty_like(own)
        out[order] = back  # the order in which they were
    return gate[:, None] * out


def every_expert(x: Tensor, num_experts: int, top_k: int) -> Tensor:
    """The same in one process: all experts work on every token, and what was not chosen counts 0."""
    router, w_in, w_out = weights(num_experts)
    probs = (x @ router.T).softmax(-1)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, -1).indices, 1)
    made = torch.stack([F.gelu(x @ a.T) @ c.T for a, c in zip(w_in, w_out, strict=True)], -2)
    return ((probs * chosen)[..., None] * made).sum(-2)


done = run(by_hand, world_size, embedded, measure=True)
for rank, (part, whole) in enumerate(
    zip(done.results, every_expert(embedded, world_size, 1).chunk(world_size), strict=True)
):
    print(f"rank {rank} is off by at most {(part - whole.flatten(0, 1)).abs().max():.0e}")

# %% [markdown]
# On the ledger stand three all-to-alls: the counts, the rows there, the rows back. "At most" says that the ranks
# differ: the text decides how much they send.

# %%
done.ledger.traffic()

# %% [markdown]
# Replayed on H100s in one server, with h = 4,096: every rank works on what came to it, and all wait for the one to
# which most came.

# %%
plots.timeline(replay(done.ledger, cluster("h100"), widen=64))

# %% [markdown]
# ## Exercises
#
# ### `route`
#
# From scores to choices. A `Routing` has three fields: `probs` (T, E), `experts` and `gates` (T, top_k).
#
# - **probs**: the softmax over all E experts.
# - **experts**: the top_k likeliest of each token, the likeliest first. Of equals the smaller number comes first:
#   every rank must come to the same result, and `torch.topk` promises no order of equals.
# - **gates**: the probabilities of these experts, as they are. They carry the only gradient that tells the router
#   whether a choice was good.
# - **Checked**: the three, the gradient, ties, and a `top_k` that cannot be.
#
# <details><summary>Hint: a sort that keeps the order</summary>
#
# `tensor.sort(dim=-1, descending=True, stable=True)` returns values and indices. `probs.gather(-1, experts)` picks.
# </details>

# %% exercise="expert.route"
from fivefold.expert import route

# %% check="expert.route"
check("expert.route", route)

# %% [markdown]
# ### `capacity`
#
# With an even load, each of E experts gets T · top_k / E of a rank's choices. The capacity is `factor` times that,
# rounded up, as a whole number.
#
# - **Checked**: values, and the rounding.

# %% exercise="expert.capacity"
from fivefold.expert import capacity

# %% check="expert.capacity"
check("expert.capacity", capacity)

# %% [markdown]
# ### `within_capacity`
#
# Who gets the places? First choices before second choices, whoever made them; among equals the earlier token.
#
# - **In, out**: `experts` (T, top_k), and a mask of the same shape: True where the expert takes the token.
# - **The order** must not depend on a sort that may turn equals round, and a second choice never pushes out a first.
# - **Checked**: one choice a token, several, and the edges: no room, no token, room for all.
#
# <details><summary>Hint: count who came before</summary>
#
# Put all choices in one line: first choices, then second ones. As rows of 0 and 1, one column for each expert
# (`F.one_hot`), `cumsum(0)` counts how often each expert was chosen up to here.
# </details>

# %% exercise="expert.within_capacity"
from fivefold.expert import within_capacity

# %% check="expert.within_capacity"
check("expert.within_capacity", within_capacity)

# %% [markdown]
# ### `balance_loss`
#
# $L = E \sum_e f_e P_e$: f is the share of all choices that fell on expert e, P its mean probability. An even load
# gives 1. f is a count and has no gradient; P has one, and it is largest for the experts that are too busy.
#
# - **Over all ranks**: f and P are those of the tokens of all ranks in all `groups`, one group after the other. Ranks
#   may have different numbers of tokens. A loss for each rank, averaged, is another loss.
# - **Travels**: two numbers an expert in each group, forward. Nothing backward: each rank's gradient is that for its
#   own tokens, and somebody will add up the gradients of the router.
# - **Precision**: count in float32 at least. In bfloat16, 256 + 1 is 256.
# - **Checked**: the loss, however tokens are split; the gradient; traffic; probabilities in bfloat16.
#
# <details><summary>Hint: a sum with a gradient</summary>
#
# `sum_over_ranks` of lesson 03 sums forward, and hands the gradient through backward.
# </details>

# %% exercise="expert.balance_loss"
from fivefold.expert import balance_loss

# %% check="expert.balance_loss"
check("expert.balance_loss", balance_loss)

# %% [markdown]
# ### `all_to_all`
#
# `dist.all_to_all_single` fills a tensor, and autograd knows nothing of it. Give it a way back.
#
# - **Forward**: the first `sends[0]` rows of x go to the group's rank 0, and so on. The result has `receives[0]` rows
#   from rank 0, and so on. x may be non-contiguous; the call wants it contiguous.
# - **Backward**: the gradient of a row is where the row went. It goes back to where the row came from.
# - **Travels**: one all-to-all each way, also for a rank that sends or receives nothing.
# - **Checked**: output, gradient, traffic; in groups of all ranks and of some; with zeros.

# %% exercise="expert.all_to_all"
from fivefold.expert import all_to_all

# %% check="expert.all_to_all"
check("expert.all_to_all", all_to_all)

# %% [markdown]
# ### `dispatch`
#
# Every choice that is kept becomes a row: a copy of the token, sent to the rank that holds the expert. Rank i holds
# the experts i·E/n to (i + 1)·E/n − 1.
#
# - **Counts first**: how many rows for each of *its* experts a rank gets from each other. Then the rows.
# - **Returned**: the rows sorted by expert, then by sender, then by position; how many each expert got; and a `Plan`
#   for the way back: `sent`, which of the T · top_k choices each sent row is; `regrouped`, which received row stands
#   at each place after the sorting; `sends` and `receives`, the rows to and from each rank (lists of int).
#   `Plan(sent, regrouped, sends, receives)`.
# - **Travels**: two all-to-alls forward, one backward. Dropped choices stay at home.
# - **Checked**: all of it; ranks that get or send nothing; a number of experts that n does not divide.
#
# <details><summary>Hint: two sorts</summary>
#
# Choice number c, in `experts.flatten()`, belongs to token c // top_k. A stable `argsort` by expert puts the choices in
# the order in which they travel. What arrives is sorted by sender, and within a sender by expert: label each row with
# its expert (`repeat_interleave` of the counts), and sort once more.
# </details>

# %% exercise="expert.dispatch"
from fivefold.expert import dispatch

# %% check="expert.dispatch"
check("expert.dispatch", dispatch)

# %% [markdown]
# ### `combine`
#
# The way back. y (R, h) is what the experts made, in the order in which `dispatch` handed out the rows.
#
# - **Undo**: the sorting first, then the all-to-all. What arrives is in the order of `plan.sent`.
# - **Add up**: a token's output is the sum over its choices of gate · row. A dropped choice adds nothing.
# - **Travels**: one all-to-all each way.
# - **Checked**: output; gradients of y and of the gates; traffic; dropped choices; ranks with nothing.
#
# <details><summary>Hint: undoing an order</summary>
#
# If `sorted = rows[order]`, then `rows = sorted[order.argsort()]`. `index_add` adds rows to the places that it is told,
# also several to one.
# </details>

# %% exercise="expert.combine"
from fivefold.expert import combine

# %% check="expert.combine"
check("expert.combine", combine)

# %% [markdown]
# There and back on your functions, with 8 experts and two for each token. `grouped_mlp(rows, counts, w_in, w_out)` is
# the library's: it sends each block of rows through its own expert.

# %%
my_route, my_dispatch = mine("expert.route", route), mine("expert.dispatch", dispatch)
my_combine = mine("expert.combine", combine)


def there_and_back(x: Tensor) -> tuple[Tensor, list[int]]:
    at, ep = mesh.make_mesh(Layout(dp=world_size, ep=world_size)).expert_rank, dist.group.WORLD
    router, w_in, w_out = weights()
    each = E // ep.size()
    own = x.chunk(ep.size())[at].flatten(0, 1)
    routing = my_route(own @ router.T, 2)
    rows, counts, plan = my_dispatch(own, routing.experts, E, ep)
    y = grouped_mlp(rows, counts, w_in[at * each : (at + 1) * each], w_out[at * each : (at + 1) * each])
    return my_combine(y, routing.gates, plan, ep), counts.tolist()


done = run(there_and_back, world_size, embedded)
for rank, ((part, counts), whole) in enumerate(
    zip(done.results, every_expert(embedded, E, 2).chunk(world_size), strict=True)
):
    off = (part - whole.flatten(0, 1)).abs().max()
    print(f"rank {rank} is off by at most {off:.0e}; its experts got {', '.join(map(str, counts))} rows")

# %% [markdown]
# ### `MoE`
#
# The layer. Inside each expert, tensor parallelism splits the inner features as in lesson 03: tokens pass `enter`, the
# output passes `leave`. (With `tp_group` of one rank, both do nothing.)
#
# - **Built from** whole weights. A rank keeps the router, its E/n experts, and of each its f/t inner features.
# - **Forward**: route, enter, drop, dispatch, `grouped_mlp`, combine, leave. The router stands before `enter`, so its
#   gradient is whole on every rank of `tp_group`. What goes into the region passes `enter`: tokens, gates, and the
#   experts too, which have no gradient. Hand `enter` tensors of (b, s, …), and flatten inside the region: lesson 04's
#   `enter` gathers along dimension 1.
# - **Capacity**: where a factor is given, from the number of tokens inside the region.
# - **Balance**: where it has a weight, add it with `with_loss(out, loss)`, which returns `out` and makes backward
#   minimise `loss` as well. Keep the loss without its weight, detached, as `self.balance` (a scalar tensor).
# - **Gradients of experts**: of all tokens that came here, unscaled.
# - **Checked**: output and all gradients against every expert in one process, two steps, with EP 4 over DP 2 × CP 2
#   beside TP 2; traffic; memory; capacity; balance; other arguments.

# %% exercise="expert.MoE"
from fivefold.expert import MoE

# %% check="expert.MoE"
check("expert.MoE", MoE)

# %% [markdown]
# ### `expert_traffic`
#
# How many numbers a rank sends for one such layer, forward and backward, if the load is even: T tokens, top_k rows of
# h numbers for each, and one in ep of them has its expert at home. The counts are too small to matter.
#
# - **Checked**: several sizes, and one rank alone.

# %% exercise="cost.expert_traffic"
from fivefold.cost import expert_traffic

# %% check="cost.expert_traffic"
check("cost.expert_traffic", expert_traffic)

# %% [markdown]
# ### Your layer on real text
#
# A small network around it, copied on every rank. Its gradients are averaged over all ranks; those of the layer by a
# function that you will meet below.


# %%
class NextByte(nn.Module):
    """Logits for the next byte, from the `context` bytes before it."""

    def __init__(self, moe: nn.Module):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, h // context), nn.LayerNorm(h)
        self.moe, self.out = moe, nn.Linear(h, 256)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embedding(windows).flatten(2)  # (b, s, context) -> (b, s, h)
        self.seen = self.norm(x)
        return self.out(x + self.moe(self.seen))  # (b, s, 256)


my_MoE = mine("expert.MoE", MoE)
my_traffic = mine("cost.expert_traffic", expert_traffic)
average = expert.average_gradients


def train(
    layout: Layout,
    steps: int,
    balance: float,
    average: Callable = average,
    optimizer: str = "AdamW",
    rate: float = 4e-3,
) -> dict:
    """Train with one expert a token. Returns losses, the load of each expert by step, and what the router sees."""
    ranks = mesh.make_mesh(layout)
    everyone = ranks.dp_cp
    torch.set_default_dtype(torch.float64)  # a choice is a jump: rounding in another order could tip it
    torch.manual_seed(0)  # so that what is copied starts equal on every rank
    share = (
        balance * everyone.size()
    )  # gradients are divided by the number of ranks below, and this one's should not be
    moe = my_MoE(*weights(), 1, ranks.ep, ranks.tp, balance_weight=share, balance_groups=(everyone,))
    model = NextByte(moe)
    update = getattr(torch.optim, optimizer)(model.parameters(), lr=rate)
    copied = [parameter for name, parameter in model.named_parameters() if not name.startswith("moe.")]
    losses, loads = [], []
    for step in range(steps):
        windows, following = (part.chunk(everyone.size())[everyone.rank()] for part in batch(step))
        loss = F.cross_entropy(model(windows).flatten(0, 1), following.flatten())
        update.zero_grad()
        loss.backward()
        average(moe, everyone, ranks.ep_dp)
        for parameter in copied:
            dist.all_reduce(parameter.grad, group=everyone)
            parameter.grad /= everyone.size()
        with torch.no_grad():
            chosen = my_route(model.seen.flatten(0, 1) @ moe.router.T, 1).experts.flatten()
            both = torch.cat([loss.detach()[None], torch.bincount(chosen, minlength=E)])
            dist.all_reduce(both, group=everyone)
        losses.append(both[0].item() / everyone.size())
        loads.append(both[1:].tolist())
        update.step()
        forget()  # the ledger of a long training would fill the memory
    with torch.no_grad():
        model(batch(10_000)[0].chunk(everyone.size())[everyone.rank()])  # a text that it was not trained on
        seen = model.seen.flatten(0, 1).float()
    whole = {name: tensor.detach().float() for name, tensor in moe.named_parameters()}
    return {"losses": losses, "loads": loads, "seen": seen, "logits": seen @ whole["router"].T, "weights": whole}


# %% [markdown]
# Three trainings of 100 steps, in about half a minute: on one rank, on all of them with the experts spread out, and
# there without a balance loss. The first two must have the same losses but for the last digits.

# %%
spread = Layout(dp=world_size, ep=world_size)
alone = run(train, 1, Layout(), 100, 0.3).results[0]
even = run(train, world_size, spread, 100, 0.3).results
free = run(train, world_size, spread, 100, 0.0).results

print(f"\nstep   1 rank   {world_size} ranks, ep{world_size}   without a balance loss")
for step in (0, 1, 10, 50, 99):
    print(f"{step:4} {alone['losses'][step]:8.4f} {even[0]['losses'][step]:13.4f} {free[0]['losses'][step]:21.4f}")
torch.testing.assert_close(even[0]["losses"], alone["losses"], rtol=1e-3, atol=0)

# %% [markdown]
# ### An extra: `route_within_servers`
#
# Between servers links are slow. DeepSeek-V3 lets a token go to `most` servers at most. It chooses servers first, by
# how good their best experts are for it, and then experts among those that are open.
#
# - **In, out**: as `route`; the E experts stand on `servers` servers, in order.
# - **Checked**: the choices, that no token needs more servers, the gradient, ties, numbers that do not fit.
#
# <details><summary>Hint: close servers</summary>
#
# `probs.unflatten(-1, (servers, E // servers))` has a row for each server. Give the experts of closed servers a score
# below all probabilities, and then go on as in `route`.
# </details>

# %% exercise="expert.route_within_servers"
from fivefold.expert import route_within_servers

# %% check="expert.route_within_servers"
check("expert.route_within_servers", route_within_servers)

# %% [markdown]
# ## See it
#
# **The load**, expert by expert and step by step, as the two trainings on all ranks went on. Without a balance loss the
# router falls in love: an expert that gets more tokens learns more, becomes better, and gets more tokens.

# %%
plots.expert_load({"without a balance loss": free[0]["loads"], "with it": even[0]["loads"]})

# %% [markdown]
# (Papers give the loss a weight of about 0.01, and train for many thousands of steps. With 0.3 it shows in a hundred.
# It is not free: look at the last losses in the table above.)
#
# **What is dropped**, if experts have a capacity. The trained routers see a text that is new to them; your `capacity`
# and `within_capacity` decide on each rank.

# %%
my_capacity = mine("expert.capacity", capacity)
my_within = mine("expert.within_capacity", within_capacity)
factors = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]


def dropped(results: list[dict], factor: float) -> float:
    """The share of all choices that find no room, over all ranks."""
    masks = []
    for rank in results:
        experts = my_route(rank["logits"], 1).experts
        masks.append(my_within(experts, E, my_capacity(len(experts), E, 1, factor)))
    return 1 - torch.cat(masks).float().mean().item()


lines = {"without a balance loss": free, "with it": even}
plots.dropped_choices(factors, {name: [dropped(results, f) for f in factors] for name, results in lines.items()})

# %% [markdown]
# A dropped token is not lost: the layer adds 0 to it, and it goes on unchanged, past the experts. Room costs as well.
# Frameworks that pad every expert to its capacity compute and send the empty places too.
#
# **The traffic.** One step of the layer alone on that new text, forward and backward, measured; first with the router
# that went its own way. What goes out comes back, so a pair of ranks exchanges as much one way as the other. Rows and
# columns of a popular rank are dark.


# %%
def one_step(results: list[dict]) -> None:
    """Forward and backward of the trained layer."""
    ranks = mesh.make_mesh(spread)
    own = results[ranks.rank]
    router, w_in, w_out = (own["weights"][name] for name in ("router", "w_in", "w_out"))
    layer = my_MoE(*weights(), 1, ranks.ep, ranks.tp)
    with torch.no_grad():
        for name, tensor in (("router", router), ("w_in", w_in), ("w_out", w_out)):
            getattr(layer, name).copy_(tensor)
    x = own["seen"].view(-1, s, h).clone().requires_grad_()
    with phase("forward"):
        y = layer(x)
    with phase("backward"):
        y.backward(torch.ones_like(y))


def apart(ledger) -> float:
    """How many times as much the busiest pair exchanges as the quietest."""
    pairs = {}
    for own in ledger.ranks:
        for call in own.communications:
            for other, size in zip(call.ranks, call.splits, strict=True):
                if other != own.rank and call.dtype == "float32":
                    pairs[own.rank, other] = pairs.get((own.rank, other), 0) + size
    return max(pairs.values()) / max(min(pairs.values()), 1)


steps = {name: run(one_step, world_size, results, measure=True).ledger for name, results in lines.items()}
uneven, evened = (apart(ledger) for ledger in steps.values())
title = f"Without a balance loss, the busiest pair exchanges {uneven:.1f} times as much as the quietest"
plots.traffic(steps["without a balance loss"], title=title)

# %%
plots.traffic(steps["with it"], title=f"With a balance loss, {evened:.1f} times as much")

# %% [markdown]
# The sum of all that is sent hardly changes, a few percent; the busiest rank sends far less. Beside it the formula for
# an even load:

# %%
tokens = b * s // world_size
formula = my_traffic(tokens, h, 1, world_size) * 4
print(f"4 · T · k · h · (n−1)/n · 4 bytes = {formula:,.0f} bytes")
for name, ledger in steps.items():
    sent = [sum(call.sent for call in rank.communications if call.dtype == "float32") for rank in ledger.ranks]
    print(f"{name:22}  ranks send {', '.join(f'{number:,.0f}' for number in sent)} bytes")

# %% [markdown]
# **The time**, replayed with h = 4,096, on H100s: all ranks in one server, and each in a server of its own. First the
# pictures of the even load.

# %%
near = replay(steps["with it"], cluster("h100"), widen=64)
plots.timeline(near, title=f"In one server, all-to-alls take {near.share('exposed'):.0%} of the time")

# %%
far = replay(steps["with it"], cluster("h100", gpus_per_server=1), widen=64)
share, slower = far.share("exposed"), far.makespan / near.makespan
plots.timeline(far, title=f"One GPU a server: they take {share:.0%}, and the step is {slower:.1f} times as long")

# %%
print(f"{'':24} {'all-to-alls':>14} {'the step':>12}")
for name, ledger in steps.items():
    for words, gpus in (("one server", 8), ("one GPU a server", 1)):
        timed = replay(ledger, cluster("h100", gpus_per_server=gpus), widen=64)
        moving = sum(operation.seconds for operation in timed.operations)
        print(f"{name:24} {moving * 1e6:11.0f} µs {timed.makespan * 1e6:9.0f} µs   {words}")

# %% [markdown]
# An all-to-all ends when the busiest link is done, and the experts when the busiest rank is.
#
# **The memory.** A rank holds E/n experts. With more experts there are more weights, and a token needs as many
# operations as before, but for the router: 2 · (4 · h · inner) + 2 · h · E. Measured with two experts a token:


# %%
def sized(num_experts: int) -> None:
    ranks = mesh.make_mesh(spread)
    layer = my_MoE(*weights(num_experts), 2, ranks.ep, ranks.tp)
    with phase("forward"):
        layer(embedded.chunk(world_size)[ranks.rank])


print("experts   weights in all   on a rank   operations a token needs   measured")
for num_experts in (E, 2 * E, 4 * E):
    done = run(sized, world_size, num_experts, measure=True).ledger
    kept, operations = done[0].memory.parameters, sum(rank.flops for rank in done.ranks) / (b * s)
    whole, needed = 4 * sum(tensor.numel() for tensor in weights(num_experts)), 8 * h * inner + 2 * h * num_experts
    print(f"{num_experts:7} {whole / 1e6:13.2f} MB {kept / 1e6:8.2f} MB {needed:26,} {operations:10,.0f}")

# %% [markdown]
# Where a rank has several experts, more is measured than is needed: `grouped_mlp` pads each expert's rows to the most
# that one on this rank has, and the more experts, the more uneven they are. Kernels for this, *grouped* products, do
# without padding.
#
# **Fewer servers.** Say that each rank is a server with its own experts, and that every token goes to 4 experts. Your
# `dispatch` sends a row for each. DeepSeek-V3 sends a token once to each server, where it is handed on over the fast
# links; then the limit on servers is a limit on what crosses the network. What it costs is what the closed experts
# were worth to the token: the sum of its gates. (With 8 ranks a server has one expert. Then 4 experts are on 4 servers
# in any case, and all rows below are alike.)

# %%
my_limited = mine("expert.route_within_servers", route_within_servers)
each = E // world_size
print("servers at most   servers a token   rows to others, each choice   one copy a server   sum of gates")
for most in range(math.ceil(4 / each), world_size + 1):
    used, rows, copies, gates = [], [], [], []
    for rank, own in enumerate(even):
        routing = my_limited(own["logits"], 4, world_size, most)
        on = F.one_hot(routing.experts // each, world_size)  # (T, 4, servers)
        away = torch.arange(world_size) != rank
        used.append((on.sum(1) > 0).sum(1).float())
        rows.append(on.sum(1)[:, away].sum(1).float())
        copies.append((on.sum(1) > 0)[:, away].sum(1).float())
        gates.append(routing.gates.sum(1))
    numbers = [torch.cat(part).mean().item() for part in (used, rows, copies, gates)]
    print("{:15} {:17.2f} {:29.2f} {:19.2f} {:14.2f}".format(most, *numbers))

# %% [markdown]
# **Token by token.** Begin with the scores, and go through the stages from left to right. Orange leaves its rank. Then
# take the skewed router, and make room until nothing is dropped: how much of it stays empty? Then set the ranks to 1:
# what is left to send?

# %%
from fivefold import widgets

widgets.tokens_to_experts()

# %% [markdown]
# ## Find the bug
#
# After backward, gradients are averaged over the ranks, so that they are those of the mean of all losses. A copied
# weight, such as the router, is summed over `everyone` and divided by how many they are. An expert has fewer copies. So
# somebody wrote what follows, and it is what data parallelism does when it is told which ranks hold a copy.
#
# It is right for a model without expert parallelism. It hangs nowhere, and the loss goes down.

# %% exercise="expert.average_gradients" bug="mean_over_copies"
from fivefold.expert import average_gradients

# %% [markdown]
# The same 40 steps on one rank; on all ranks with a copy of every expert on each, ep1; and with the experts spread out.
# Once with plain gradient descent, once with AdamW:

# %%
layouts = [Layout(), Layout(dp=world_size), spread]
for optimizer, rate in (("SGD", 0.5), ("AdamW", 4e-3)):
    runs = [
        run(train, layout.world_size, layout, 40, 0.3, average_gradients, optimizer, rate).results[0]["losses"]
        for layout in layouts
    ]
    print(f"\n{optimizer:5}  step   1 rank   {world_size} ranks, ep1   {world_size} ranks, ep{world_size}")
    for step in (0, 1, 5, 20, 39):
        print("{:11} {:8.4f} {:14.4f} {:14.4f}".format(step, *(losses[step] for losses in runs)))

# %% [markdown]
# AdamW divides a gradient by its own size, so a factor does not show. With gradient descent the last column goes
# another way from the first step on; so does anything that compares gradients with one another, such as clipping by
# the norm of all of them. Mend the function, so that the columns agree.
#
# <details><summary>Hint: how to look</summary>
#
# Take 4 ranks with ep4, and one expert. Tokens of how many ranks came to it? The losses of how many ranks are in its
# gradient, before anything is summed? And the gradient of which loss is wanted?
# </details>

# %% check="expert.average_gradients"
check("expert.average_gradients", average_gradients)

# %% [markdown]
# This one is real: see PyTorch #160285 and DeepSpeed #6546 on GitHub. Its twin sums experts over *all* ranks; then
# different experts get the same gradient, and all become alike.

# %% [markdown]
# ## The real tool
#
# PyTorch has a differentiable all-to-all, and torchtitan dispatches with it. Around it stands the same order of things
# as in yours: counts, rows, sorted by expert; back, unsorted. Output and gradients have to equal those of your layer.


# %%
def with_torch(x: Tensor, y_grad: Tensor) -> dict[str, float]:
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

    ranks = mesh.make_mesh(spread)
    ep, n = ranks.ep, ranks.ep.size()
    own, own_grad = (part.chunk(n)[ranks.rank] for part in (x, y_grad))
    router, w_in, w_out = (nn.Parameter(w.clone()) for w in weights())

    def theirs(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gates, experts = (flat @ router.T).softmax(-1).topk(2, -1)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=E)
        came = all_to_all_single(counts, None, None, ep).wait().view(n, -1)  # (n, E/n)
        sends, receives = counts.view(n, -1).sum(1).tolist(), came.sum(1).tolist()
        rows = all_to_all_single_autograd(flat[order // 2], receives, sends, ep)
        labels = torch.arange(E // n).repeat(n).repeat_interleave(came.flatten())
        made = torch.zeros_like(rows + 0)
        for e in range(E // n):
            number, mine = ranks.rank * (E // n) + e, labels == e
            made[mine] = F.gelu(rows[mine] @ w_in[number].T) @ w_out[number].T
        back = all_to_all_single_autograd(made, sends, receives, ep)
        return flat.new_zeros(flat.shape).index_add(0, order // 2, back * gates.flatten()[order, None]).view_as(x)

    yours = my_MoE(*weights(), 2, ep, ranks.tp)
    results = []
    for layer in (theirs, yours):
        tokens = own.clone().requires_grad_()
        y = layer(tokens)
        y.backward(own_grad)
        results.append([y.detach() + 0, tokens.grad])
    held = slice(ranks.rank * (E // n), (ranks.rank + 1) * (E // n))
    results[0] += [router.grad, w_in.grad[held], w_out.grad[held]]
    results[1] += [yours.router.grad, yours.w_in.grad, yours.w_out.grad]
    names = "output", "x.grad", "router.grad", "w_in.grad", "w_out.grad"
    for name, one, other in zip(names, *results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    return {name: (one - other).abs().max().item() for name, one, other in zip(names, *results, strict=True)}


for name, off in run(with_torch, world_size, embedded, random(b, s, h, seed=6)).results[0].items():
    print(f"{name:11} differs by at most {off:.0e}")

# %% [markdown]
# ### How others dispatch
#
# - **torchtitan** does what you did, with `all_to_all_single_autograd`, and drops nothing. DeepEP's kernels can do the
#   same work instead.
# - **Megatron-LM** lets you choose a *token dispatcher*: `alltoall` is yours; `allgather` gives every rank all tokens;
#   `flex` hands the work to kernels such as DeepEP. Capacity and dropping are options.
# - **DeepSpeed** follows GShard: every expert gets exactly its capacity of rows from each rank, empty ones as zeros.
#   So all pieces of its all-to-all are equal, no counts have to go ahead, and padding travels.
#
# ### DeepSeek-V3's layout, as numbers
#
# From its report: 2,048 H800 GPUs in servers of 8; pipeline 16, expert 64 over 8 servers, ZeRO-1 data parallelism, no
# tensor parallelism. 58 of 61 layers have 256 experts of three matrices 7,168 × 2,048, and a shared one for every
# token. A token goes to 8 experts, on 4 servers at most. The rest is arithmetic:

# %%
gpus, pp, ep, experts, width, f, top_k, servers = 2048, 16, 64, 256, 7168, 2048, 8, 4
one_expert, here = 3 * width * f, experts // ep  # weights; experts of a layer on a GPU
ib, nvlink = 50e9, 160e9  # bytes a second, as the report states them
rows = my_traffic(4096, width, top_k, ep) / 4 * 2  # bytes of one all-to-all, 2 a number
copies = 4096 * width * servers * 7 / 8 * 2  # a copy for each server, one in 8 of which is its own

for words, value in (
    ("ranks of a pipeline stage", f"{gpus // pp}: {gpus // pp // ep} copies of each expert"),
    ("experts of a layer on a GPU", f"{here}, in a server {8 * here}"),
    (
        "weights of a layer's experts",
        f"{experts * one_expert / 1e9:.1f} billion, on a GPU {here * one_expert / 1e6:.0f} million",
    ),
    (
        "of which a token meets",
        f"{top_k} of {experts} and the shared one, {(top_k + 1) * one_expert / 1e6:.0f} million",
    ),
    ("in all of the 58 layers", f"{58 * (experts + 1) * one_expert / 1e9:.0f} billion, of 671 in the model"),
    ("one all-to-all, 4,096 tokens", f"{rows / 1e6:.0f} MB from a GPU, a row for each expert"),
    ("if all of it crossed servers", f"{rows / ib * 1e3:.1f} ms at 50 GB/s"),
    ("with one copy a server", f"{copies / ib * 1e3:.1f} ms, if servers are chosen evenly"),
    ("NVLink is faster by", f"{nvlink / ib:.1f}: as many are handed on inside while one copy comes in"),
):
    print(f"{words:30} {value}")

# %% [markdown]
# So a limit of 4 servers lets a token reach 4 · 3.2, about 13 experts, for the price of 4 copies on the network. They
# use 8.

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="09.room"
room_answer = 4096 * 6 / 64 * 1.25

# %% check="09.room"
check("09.room", room_answer)

# %% question="09.balance"
balance_answer = 8 * (0.5 * 0.5 + 0.5 * 0.5)

# %% check="09.balance"
check("09.balance", balance_answer)

# %% question="09.nothing"
nothing_answer = "d"

# %% check="09.nothing"
check("09.nothing", nothing_answer)

# %% question="09.bytes"
bytes_answer = 4 * 4096 * 8 * 7168 * 63 / 64 * 2 / 1e9

# %% check="09.bytes"
check("09.bytes", bytes_answer)

# %% question="09.copies"
copies_answer = 8 * 2 / 4

# %% check="09.copies"
check("09.copies", copies_answer)

# %% [markdown]
# ## Where this stands
#
# | here | Megatron-LM | torchtitan | DeepSpeed |
# | --- | --- | --- | --- |
# | `route`, `balance_loss` | `TopKRouter` | `TokenChoiceTopKRouter` | `TopKGate` |
# | `capacity`, `within_capacity` | an option of the router | – | in `top1gating` and its like |
# | `all_to_all` | `all_to_all` in `mappings.py` | `all_to_all_single_autograd` | `_AllToAll` |
# | `dispatch`, `combine` | `MoEAlltoAllTokenDispatcher` | `ExpertParallel` | in `MOELayer` |
# | `MoE` | `MoELayer` | `MoE` | `MoE` |
# | `route_within_servers` | `--moe-router-num-groups`, `--moe-router-group-topk` | an option of the router | – |
# | `with_loss` | `MoEAuxLossAutoScaler` | – | the loss is returned |
#
# They are in `megatron/core/transformer/moe`, in `torchtitan/distributed/expert_parallel.py` and the models' MoE
# modules, and in `deepspeed/moe/sharded_moe.py`. In lesson 11 this layer stands in a transformer, under all five axes.
#
# **Papers.** [Sparsely-gated mixture of experts](https://arxiv.org/abs/1701.06538) (Shazeer et al. 2017) had the
# layer. [GShard](https://arxiv.org/abs/2006.16668) (Lepikhin et al. 2020) has the two all-to-alls and the order of
# drops. [Switch Transformers](https://arxiv.org/abs/2101.03961) (Fedus et al. 2021) has capacity and this balance loss,
# with one expert a token. [DeepSeek-V3](https://arxiv.org/abs/2412.19437) (2024) has the limit on servers, and balances
# by a bias on the scores in the place of most of that loss.
