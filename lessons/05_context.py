# %% [markdown]
# # 5 · Context parallelism
#
# *110 minutes · 9 exercises and 5 questions, 40 points · 4 processes on this machine, no GPU*
#
# The school kitchen has an order of one long row: 1,000 sandwiches, each of which has to go with all that stand before
# it. So before a cook makes one, she wants to know them all. Four cooks take 250 each. Every cook writes her recipes on
# a tray. Each looks at the tray in front of her, notes what matters for her own sandwiches, and hands a copy on to her
# neighbour while she is still noting. After three rounds everybody has seen everything, and nobody ever had more than
# two trays of others on her table.
#
# ![Four ranks, each with a quarter of the tokens. The queries of a rank stay; its keys and values go one place on at
# every step, those of the last rank to the first.](pictures/05_ring.svg)
#
# **What is split**: the tokens of a sequence, in every layer, attention included. Each of n ranks has s/n of them.
#
# **What travels**: keys and values. In forward each rank sends n − 1 blocks of 2 · b · s/n · h_kv · d numbers (h_kv key
# heads of size d); in backward these once more, and as many gradients.
#
# **What it buys**: sequences that are too long for one rank. Everything that is kept for backward is split, and
# nobody ever has a score of every token with every other.
#
# **When it hurts**: when blocks are short and links are slow; and under a causal mask, where the last rank has nearly
# all the work. The second can be mended.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). You need nothing of the lessons before. Words of the code:
#
# - `run(f, n, …)` runs f in n processes, the ranks; `done.results` is what each returned.
# - `measure=True` has every operation and message written down, in `done.ledger`.
# - `phase("forward")` gives that name to what is written down inside it.
# - `replay(ledger, cluster("h100"))` computes when each would begin and end on H100s, from their rates. Nothing runs.
# - `mine("id", f)` is your function once it has passed its check, and until then the library's.

# %%
import math
from dataclasses import replace
from functools import partial
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import plots, run
from fivefold.attention import Blocks, block_attention, block_attention_backward, causal_mask
from fivefold.context import LocalTokens, block_mask, check_positions, pass_on, ring_blocks, token_positions
from fivefold.layout import Layout, check_sizes
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import phase
from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single
from fivefold.runtime.replay import replay
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks that share a sequence: 2, 3, 4, 6 or 8

# %% [markdown]
# ## What is split, what travels, when
#
# Most of a transformer looks at one token at a time: embeddings, norms, MLPs, the loss. There a rank works for its own
# tokens and needs nobody. (Every rank has all the weights, and their gradients are summed at the end of a step, as in
# data parallelism.) One place is left: in attention, a query reads the keys and values of other tokens.
#
# $$\mathrm{out}_i = \frac{\sum_j e^{s_{ij}} v_j}{\sum_j e^{s_{ij}}}, \qquad s_{ij} = \frac{q_i \cdot k_j}{\sqrt d}$$
#
# Look at it as two sums over j, over keys. A sum can be taken in parts. So a query need not see all keys at once: it
# can stay where it is and see block after block, whichever rank a block comes from. What has to travel are K and V.
# They are smaller than anything else in the layer where query heads share them (8 key heads for 128 query heads in
# Llama 3 405B), and they need not be in memory all at the same time.
#
# | | stays | travels, from each rank |
# | --- | --- | --- |
# | forward | Q, the two sums | n − 1 blocks of K and V |
# | backward | Q, dQ, the output and its gradient | n − 1 blocks of K and V; n − 1 times the dK and dV of a block |
#
# Together with the n − 1 rounds there is something to hide them behind: while a block is on its way, there is another
# one to compute with. That is **ring attention** (Liu et al. 2023).

# %% [markdown]
# ## A worked example
#
# One sequence, cut over your ranks. Each keeps its queries, and adds block after block to the two sums.

# %%
b, a, d, s = 2, 4, 16, 96  # sequences, heads, numbers in a head, tokens


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    cp = dist.new_group(group_desc="cp")  # all ranks, under the name that figures show
    own = slice(rank * s // n, (rank + 1) * s // n)  # this rank's tokens
    q, block = q[:, :, own], torch.stack((k[:, :, own], v[:, :, own]))  # (b, a, s/n, d), (2, b, a, s/n, d)
    above, below = torch.zeros_like(q), torch.zeros(q.shape[:3])
    with phase("forward"):
        for step in range(n):
            if step:
                arrive = pass_on(block, cp)  # to the next rank; meanwhile, receive from the one before
                block = arrive()  # wait for it
            scores = q @ block[0].mT / d**0.5  # (b, a, s/n, s/n): never s by s
            above += scores.exp() @ block[1]
            below += scores.exp().sum(-1)
    return above / below[..., None]


q, k, v = (random(b, a, s, d, seed=i) for i in range(3))
done = run(by_hand, world_size, q, k, v, measure=True)

whole = F.scaled_dot_product_attention(q, k, v)  # the same in this process
for rank, result in enumerate(done.results):
    print(f"rank {rank} is off by at most {(result - whole.chunk(world_size, dim=2)[rank]).abs().max():.0e}")

# %%
block_bytes = 2 * b * a * (s // world_size) * d * 4
print(f"(n−1) · 2 · b · s/n · h_kv · d · 4 = {(world_size - 1) * block_bytes:,} bytes from each rank")
done.ledger.traffic()

# %% [markdown]
# Replayed on the H100s of one server. `widen=256` makes the sequence 256 times as long: messages grow with the number
# of tokens, operations with its square. Compute, wait, compute, wait.

# %%
h100 = cluster("h100")
waiting = replay(done.ledger, h100, widen=256)
plots.timeline(waiting)

# %% [markdown]
# This program is right, and has three faults. It waits. It cannot go backwards. And here is the third:

# %%
for times in (1, 10, 100):
    results = run(by_hand, world_size, times * q, k, v).results
    scores = (times * q @ k.mT / d**0.5).abs().max()
    print(f"scores up to {scores:6.1f}: {torch.cat(results, 2).isfinite().float().mean():4.0%} of the output is finite")

# %% [markdown]
# The exponential of a score of 89 is more than a float32 can hold. Ordinary softmax takes off the largest score of the
# row first. But in a ring the largest score may be in a block that has not come yet.

# %% [markdown]
# ## Exercises
#
# ### `merge`
#
# Two cooks have looked at different trays for the same sandwich. Each has an *output*, softmax and all, over the keys
# that it has seen, and remembers one more number: the **log-sum-exp** of the row's scores, lse = log Σ exp(s). That is
# all it takes to make one output of the two.
#
# - **Goes in, comes out**: two outputs (…, s, d), each with its lse (…, s); one of each comes out.
# - **The weights**: exp(lse) is the size of a part's sum. So each part weighs exp(its lse − lse of both).
# - **A row that has seen nothing** in a part has lse −∞ there, and output 0. In both parts: the same comes out.
# - **Checked**: output and lse; with lse of ±10,000; with rows that have seen nothing in one part or in both.
#
# <details><summary>Hint: a sum of exponentials whose logarithms are large</summary>
#
# `torch.logaddexp(x, y)` is log(exp(x) + exp(y)), and takes the larger of the two out before it computes. Beware of
# −∞ − (−∞): that is NaN. `masked_fill` replaces numbers where a mask is true.
# </details>

# %% exercise="attention.merge"
from fivefold.attention import merge

# %% check="attention.merge"
check("attention.merge", merge)

# %% [markdown]
# ### `online_softmax`
#
# Now a stream of blocks. Keep three things for each row: the largest score m so far, the sum of exp(score − m), and the
# sum of exp(score − m) · value.
#
# - **Goes in**: `Blocks`, an iterator of pairs (scores (…, sq, sk), values (…, sk, d)). It can be gone through once.
# - **Comes out**: output (…, sq, d) and lse (…, sq). A score of −∞ is a key that the row may not see.
# - **When a block raises m**, what has been added up was measured from the old m. What has to happen to it?
# - **Checked**: output and lse, with blocks of any size in any order; scores that rise and fall through ±10,000; rows
#   that see nothing of a block, or of any; memory: one block at a time.

# %% exercise="attention.online_softmax"
from fivefold.attention import online_softmax

# %% check="attention.online_softmax"
check("attention.online_softmax", online_softmax)

# %% [markdown]
# Your function on the scores that broke the sums, in blocks that come in any order:

# %%
my_softmax = mine("attention.online_softmax", online_softmax)
scores = 100 * q @ k.mT / d**0.5  # (b, a, s, s)
for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
    blocks = ((scores.chunk(6, -1)[i], v.chunk(6, -2)[i]) for i in order)
    out, lse = my_softmax(blocks)
    print(f"blocks {order}: output off by at most {(out - scores.softmax(-1) @ v).abs().max():.0e}")

# %% [markdown]
# ### What the ring is made of
#
# Two tools of the library, whose code is worth a look (`ring_blocks??`):
#
# - `pass_on(x, group)` starts to send x to the next rank and to receive from the one before, and returns at once, with
#   a function: call that to wait, and to get what has come. You have met it above.
# - `ring_blocks(block, group)` yields n pairs (rank it comes from, block), the own one first. It has started to pass a
#   block on *before* it yields it.

# %%


def who_comes_when() -> list[tuple[int, float]]:
    mine = torch.full((1,), float(dist.get_rank()))
    return [(source, block.item()) for source, block in ring_blocks(mine, dist.group.WORLD)]


for rank, seen in enumerate(run(who_comes_when, world_size).results):
    print(f"rank {rank} sees the blocks of ranks {', '.join(str(source) for source, _ in seen)}")

# %% [markdown]
# And the mathematics of one block:
#
# - `block_attention(q, k, v, mask)` → output and lse, over the keys of that block.
# - `block_attention_backward(dout, q, k, v, out, lse, mask)` → dq, dk, dv: one block's share. `out` and `lse` are those
#   of the *whole* row, after all blocks. Then P = exp(s − lse) are the final probabilities, and with D = rowsum(dout ∘
#   out) all is local: dV = Pᵀ dout, dS = P ∘ (dout Vᵀ − D), dQ = dS K/√d, dK = dSᵀ Q/√d. Queries add up the shares of
#   all blocks; a block's dK and dV add up the shares of all queries.
# - `block_mask(positions, rank, source)` → which keys of rank `source` the queries of `rank` see, or None.
#   `positions` (n, s/n) says where the tokens of each rank stand in the sequence. Where it is None, every query
#   sees every key, and None comes back.
#
# ### `ring_attention`
#
# The whole of it, forward and backward.
#
# - **Forward**: n steps of block attention, merged. Save for backward what is this rank's own: q, k, v, out, lse.
# - **Backward**: the blocks go round once more. dQ stays. The dK and dV of a block follow it: a rank adds its share to
#   what has come and sends the sum on, until it is home. The owner's own share need not travel.
# - **The function** calls `check_positions(positions, group, q.shape[2])`, which refuses a wrong table, then `.apply`.
#   The output has q's dtype, whatever that of the lse.
# - **Travels**: n − 1 blocks forward; backward n − 1 blocks and n − 1 gradients; to one neighbour only.
# - **Checked**: output and gradients against one process, with any order of tokens, growing scores, shared heads;
#   bfloat16, a wrong table; traffic (K and V in one message or in two); memory: own tensors, and of others a block in
#   use, one on its way, one that a name still holds, backward two gradients more; overlap: only the last gradient's way
#   home may be waited for.
#
# <details><summary>Hint: the order of things in backward</summary>
#
# At the first step you have your own block, and your share of its gradient. Keep it. At the second step you have the
# block of the rank before you, whose own share is at home: so you are the first to send a gradient on. From then on:
# compute your share of the block that is here, *then* wait for what the rank before has added up for it, add, and pass
# the sum on. After the last step one more gradient comes: whose is it?
# </details>
#
# <details><summary>Hint: a function to wait for, before there is anything</summary>
#
# `arrive = partial(dq.new_zeros, (2, *k.shape))` is a function that gives zeros: nothing has been added yet.
# </details>

# %% exercise="context.ring_attention"
from fivefold.context import ring_attention

# %% check="context.ring_attention"
check("context.ring_attention", ring_attention)

# %% [markdown]
# Once more the sequence from above, with a causal mask and with gradients, on your ranks and in one process. The
# tokens are where they were: rank r has the r-th part.

# %%
ring = mine("context.ring_attention", ring_attention)
grad = random(b, a, s, d, seed=3)  # of the output


def attend(attention, positions: Tensor | None, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """On a rank: output, dq, dk and dv of its tokens, of whole q, k, v and gradient of the output."""
    cp = dist.new_group(group_desc="cp")
    n, rank = cp.size(), cp.rank()
    held = torch.arange(q.shape[2]).view(n, -1) if positions is None else positions
    own = [x[:, :, held[rank]].requires_grad_() for x in (q, k, v)]
    with phase("forward"):
        out = attention(*own, cp, positions)
    with phase("backward"):
        out.backward(grad[:, :, held[rank]])
    return [out.detach(), *(x.grad for x in own)]


def one_process(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def compare(results: list, positions: Tensor, expected: list[Tensor]) -> None:
    """Join what the ranks returned, in the order of the sequence, and hold it against one process."""
    order = positions.flatten().argsort()
    for name, *parts, wanted in zip(("output", "dq", "dk", "dv"), *results, expected, strict=True):
        print(f"{name:6} off by at most {(torch.cat(parts, 2)[:, :, order] - wanted).abs().max():.0e}")


contiguous = torch.arange(s).view(world_size, -1)
done = run(attend, world_size, ring, contiguous, q, k, v, grad)
compare(done.results, contiguous, one_process(q, k, v, grad, causal=True))
formula = 3 * (world_size - 1)
print(f"\n3(n−1) = {formula} blocks of {block_bytes:,} bytes from each rank: {formula * block_bytes:,} bytes")
done.ledger.traffic()

# %% [markdown]
# ### `causal_work`
#
# Right, and unfair. Under a causal mask a token sees the tokens before it and itself. The last rank's tokens see nearly
# everything, the first rank's nearly nothing, and all wait for the last.
#
# - **Goes in**: positions (n, s/n), the places that the tokens of each rank have in the sequence.
# - **Comes out**: for each rank, how many pairs of a query of its own and a key, of whatever rank, the mask leaves (n).
# - **Checked**: contiguous parts; zig-zag and any other order.

# %% exercise="context.causal_work"
from fivefold.context import causal_work

# %% check="context.causal_work"
check("context.causal_work", causal_work)

# %% [markdown]
# ### `zigzag`
#
# Give each rank something early and something late: cut the sequence into 2n chunks, 0 to 2n − 1, and rank i gets
# chunk i and chunk 2n − 1 − i, in this order.
#
# - **Goes in**: whole sequences x, with the s tokens in dimension `dim`.
# - **Comes out**: a tensor of the same shape: rank 0's two chunks, rank 1's, and so on.
# - **A length that 2n does not divide** is a `ValueError`. `check_sizes(Layout(cp=num_ranks), sequence=x.shape[dim])`
#   says it in one line. (One rank takes any length.)
# - **Checked**: the order, in any dimension; that x is left as it is; the error.

# %% exercise="context.zigzag"
from fivefold.context import zigzag

# %% check="context.zigzag"
check("context.zigzag", zigzag)

# %% [markdown]
# ### `unzigzag`
#
# And back, for what the ranks have made: from the ranks' parts, one after the other, to the order of the sequence.
# Not the same function a second time, as you may see with n = 2.
#
# - **Checked**: as above.

# %% exercise="context.unzigzag"
from fivefold.context import unzigzag

# %% check="context.unzigzag"
check("context.unzigzag", unzigzag)

# %%
my_work, my_zigzag = mine("context.causal_work", causal_work), mine("context.zigzag", zigzag)
print("\nranks    contiguous   n/(2n−1)     zig-zag")
for n in (2, 4, 8, 16):
    tokens = torch.arange(65_536)
    tables = tokens.view(n, -1), my_zigzag(tokens, n, 0).view(n, -1)
    shares = [float(work.double().mean() / work.max()) for work in map(my_work, tables)]
    print(f"{n:5} {shares[0]:13.1%} {n / (2 * n - 1):10.1%} {shares[1]:11.1%}     of the ideal speed")

# %% [markdown]
# Attention does not mind in which order it meets its keys, as long as it knows where they stand. So the whole ring
# works under zig-zag as it is, with another table of positions:

# %%
table = my_zigzag(torch.arange(s), world_size, 0).view(world_size, -1)
done = run(attend, world_size, ring, table, q, k, v, grad)
compare(done.results, table, one_process(q, k, v, grad, causal=True))

# %% [markdown]
# ### `all_gather_attention`, the way of Llama 3
#
# A ring is not the only way. Gather all keys and values first, then call ordinary attention once.
#
# - **Forward**: an all-gather of K and V together (one for each carries the same bytes, and passes too), then s/n
#   queries over s keys with a mask that knows the positions.
#   (`causal_mask(q_positions, k_positions)` makes one; `F.scaled_dot_product_attention` takes it as `attn_mask`, and
#   `enable_gqa=True` where heads are shared.)
# - **Backward**: this rank's keys were used by all. One reduce-scatter gives it the sum of their gradients.
# - **Write** the autograd function for the gathering (`all_gather_single(out, x, group=…)` and
#   `reduce_scatter_single(out, x, group=…)` work along the first dimension), and the function, which refuses a wrong
#   table as the ring does.
# - **Checked**: output, gradients, traffic, the refusal.

# %% exercise="context.all_gather_attention"
from fivefold.context import all_gather_attention

# %% check="context.all_gather_attention"
check("context.all_gather_attention", all_gather_attention)

# %% [markdown]
# Forward, the bytes are the ring's. Backward the ring sends K and V once more: it has kept none of the others'.

# %% [markdown]
# ### `all_to_all_attention`, the way of DeepSpeed-Ulysses
#
# Heads do not need each other. So trade: every rank gives away heads of its own tokens, and gets the other ranks'
# tokens for its own heads. Then there is ordinary attention over the whole sequence, for h/n heads.
#
# - **Forward**: an all-to-all each for q, k and v, from (b, h, s/n, d) to (b, h/n, s, d): rank r gets the r-th part of
#   the heads. After attention, one more brings the output back.
# - **The order**: tokens arrive rank by rank. A causal mask needs to know where they stand.
# - **Backward**: an all-to-all is its own way back. Write it as an autograd function.
# - **Refuse**, with a `ValueError`, ranks that do not divide the query heads and the key heads.
# - **Checked**: output, gradients, traffic, the refusal.
#
# <details><summary>Hint: which dimension goes first</summary>
#
# `dist.all_to_all_single(out, x, group=group)` cuts x along its first dimension, piece r for rank r, and puts what
# comes from rank r into piece r. So make the dimension of the ranks first: `x.unflatten(1, (n, -1)).movedim(1, 0)`
# is (n, b, h/n, s/n, d). What comes has the same shape, and there the first dimension says whose *tokens* they are.
# </details>

# %% exercise="context.all_to_all_attention"
from fivefold.context import all_to_all_attention

# %% check="context.all_to_all_attention"
check("context.all_to_all_attention", all_to_all_attention)

# %% [markdown]
# ## See it
#
# **The ring**, step by step. A column is a block, a row a rank; green is the block that it has now. On the right are
# the running maximum and the sum of one row. When is the sum rescaled often: with scores that rise along the sequence,
# or fall? Under the causal mask, who has nothing to do? And what does zig-zag change?

# %%
from fivefold import widgets

widgets.ring_attention()

# %% [markdown]
# **The work.** The same mask, cut into chunks. Begin with the last rank, then press *zig-zag*.

# %%
widgets.causal_work()

# %% [markdown]
# Now measured: 8 ranks, and a ring that computes only what the mask leaves, row by row, with your `merge`. The
# operations are those on the ledger of each rank.

# %%
my_merge = mine("attention.merge", merge)


def only_what_is_seen(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, positions: Tensor) -> Tensor:
    """Forward of ring attention; each row is computed over the keys that it sees, and no others."""
    rank, out, lse = group.rank(), torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for source, (k_block, v_block) in ring_blocks(torch.stack((k, v)), group):
        for row, seen in enumerate(block_mask(positions, rank, source)):
            if seen.any():
                at = slice(row, row + 1)
                part = block_attention(q[:, :, at], k_block[:, :, seen], v_block[:, :, seen])
                out[:, :, at], lse[:, :, at] = my_merge(out[:, :, at], lse[:, :, at], *part)
    return out


def forward_only(attention, positions: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cp = dist.new_group(group_desc="cp")
    held = torch.arange(q.shape[2]).view(cp.size(), -1) if positions is None else positions
    own = [x[:, :, held[cp.rank()]] for x in (q, k, v)]
    with torch.no_grad(), phase("forward"):
        return attention(*own, cp, positions)


eight = {"contiguous": torch.arange(s).view(8, -1), "zig-zag": my_zigzag(torch.arange(s), 8, 0).view(8, -1)}
ledgers = {
    name: run(forward_only, 8, only_what_is_seen, table, q, k, v, measure=True).ledger for name, table in eight.items()
}
counted = {name: [rank.flops for rank in ledger.ranks] for name, ledger in ledgers.items()}
for name, table in eight.items():
    assert counted[name] == (4 * b * a * d * my_work(table)).tolist(), "operations are 4·d for each pair and head"
plots.work_by_rank({name: [flops / 1e6 for flops in own] for name, own in counted.items()})

# %% [markdown]
# (8/15 is 53.3%; a sequence of 96 tokens is not yet a long one.) The same over time, with the library's fast ring,
# whose kernels leave out what the mask hides: who has little to do waits for a block that others still compute with.

# %%
from fivefold.context import fast_ring_attention

fast = {
    name: replay(run(attend, 8, fast_ring_attention, table, q, k, v, grad, measure=True).ledger, h100, widen=2048)
    for name, table in eight.items()
}
slow, quick = (fast[name].makespan for name in eight)
plots.timeline(fast["contiguous"], f"Contiguous: ranks compute for {fast['contiguous'].share('busy'):.0%} of the time")

# %%
share = fast["zig-zag"].share("busy")
plots.timeline(fast["zig-zag"], f"Zig-zag: for {share:.0%}, and a step takes {quick / slow:.0%} of what it took")

# %% [markdown]
# **Overlap.** Your ring with your own eyes. It is the replay from the beginning, forward only: first the program that
# waits for each block, then yours, which has one under way while it computes.

# %%
hidden = replay(run(forward_only, world_size, ring, None, q, k, v, measure=True).ledger, h100, widen=256)
plots.timeline(waiting, f"Without overlap: ranks stand still for {waiting.share('exposed'):.0%} of the time")

# %%
saved = 1 - hidden.makespan / waiting.makespan
plots.timeline(hidden, f"With overlap: for {hidden.share('exposed'):.0%}, and forward takes {saved:.0%} less time")

# %% [markdown]
# **From which length on?** Attention of c queries over c keys is 4dc² operations for each head. The K and V of c tokens
# are 4cd bytes in 16 bits. So the transfer is the shorter of the two from
#
# $$c \ge \frac{\mathrm{FLOPS}}{\mathrm{bandwidth}}$$
#
# tokens on, whatever d, the heads and the ranks. The line is that formula; the squares are what the paper states for
# its machines; the circles are your ring, replayed on A100s with blocks of several lengths, filled where every transfer
# was hidden.

# %%
from fivefold.plots.condition import Published, Tried

halves = [x.bfloat16() for x in (q, k, v)]
measured = run(forward_only, world_size, ring, None, *halves, measure=True).ledger
a100 = cluster("a100")


def tried(bandwidth: float, tokens: float) -> Tried:
    link = replace(a100.inside, alpha=0.0, bandwidth=bandwidth)
    timed = replay(measured, replace(a100, inside=link), widen=tokens / (s / world_size))
    transfers = timed.overlap("send", "cp")
    return Tried(bandwidth, tokens, 1 if all(one.hidden(0.01) for one in transfers) else 0)


least = {bandwidth: 312e12 / bandwidth for bandwidth in (25e9, 50e9, 100e9, 300e9, 600e9)}
published = [
    Published("A100, NVLink", 1_000, 300e9),
    Published("A100, InfiniBand", 24_500, 12.5e9),
    Published("TPU v3", 1_100),
    Published("TPU v4", 1_000),
]
plots.overlap_condition(
    {"A100": 312e12, "H100": 989.4e12},
    published,
    [tried(bandwidth, share * tokens) for bandwidth, tokens in least.items() for share in (0.7, 1.5)],
)

# %% [markdown]
# (The two marks on the right margin are rows of other machines, whose links are not drawn here.) For the tokens that a
# rank needs, the paper multiplies by six, because six such blocks are in its memory: the query's, the output's, K and V
# in use, K and V on their way. That makes 6,200 tokens on NVLink, and 149,500 on the slow network.
#
# **The memory.** What a rank keeps of one attention for backward, in each of the three ways:

# %%
gathered, traded = (
    mine(f"context.{function.__name__}", function) for function in (all_gather_attention, all_to_all_attention)
)
print(f"\n{'kB kept by each rank':20} {'1 rank':>10} {'2 ranks':>10} {'4 ranks':>10}    of what its own tokens take")
own = b * s * a * (4 * d + 1) * 4
for name, function in (("ring", ring), ("all-gather", gathered), ("all-to-all", traded)):
    kept = [
        run(attend, n, function, token_positions(s, n), q, k, v, grad, measure=True).ledger[0].memory.phases["forward"]
        for n in (1, 2, 4)
    ]
    print(
        f"{name:20} " + " ".join(f"{x / 1e3:10.1f}" for x in kept) + f"    {kept[2] / (own / 4):.2f} times, on 4 ranks"
    )

# %% [markdown]
# On the right, 1.00 would be q, k, v, out and lse of the rank's own tokens. The ring keeps these (and the small table
# of positions). All-gather keeps the keys and values of all. All-to-all keeps no more of either, but the kernel that it
# calls here keeps the causal mask, s × s numbers of 4 bytes: 36.9 kB for 96 tokens, whatever the number of ranks. All
# three have to keep something of every layer, so this is multiplied by their number.

# %% [markdown]
# ## Find the bug
#
# Attention knows where its tokens stand. So must everything else that cares: the embedding of positions, and the
# labels. Here is how somebody cut a batch for zig-zag, and a small transformer that is trained with it, on real text.
# (`LocalTokens` is a tuple of three: inputs and labels (b, s/n), positions (s/n,). `token_positions(s, n)` is the
# table of zig-zag, (n, s/n).) Mend the function in the next cell, in place.

# %% exercise="context.local_tokens" bug="shifted_and_counted_in_the_part"
from fivefold.context import local_tokens

# %%
data = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
width = a * d


class NextByte(nn.Module):
    """Guesses the byte after each of this rank's; one layer, with whatever attention it is given."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(s, width)
        self.norm, self.qkv, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.out = nn.Linear(width, 256)

    def forward(self, inputs: Tensor, positions: Tensor, attention) -> Tensor:
        x = self.bytes(inputs) + self.places(positions)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, a, d)).permute(2, 0, 3, 1, 4)  # (b, a, s/n, d) each
        x = x + self.project(attention(q, k, v).transpose(1, 2).flatten(2))
        return self.out(x + self.mlp(x))


def batch(step: int) -> Tensor:
    starts = torch.randint(len(data) - s - 1, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[i : i + s + 1] for i in starts]).long()  # (8, s + 1)


def train(cut, steps: int) -> tuple[list[float], dict]:
    cp = dist.new_group(group_desc="cp")
    torch.manual_seed(0)  # so that the weights, which every rank has, start equal
    model, losses = NextByte(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    attention = partial(ring, group=cp, positions=token_positions(s, cp.size()))
    for step in range(steps):
        inputs, labels, positions = cut(batch(step), cp)
        logits = model(inputs, positions, attention)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (8 * s)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=cp)  # each rank has the gradient of its tokens
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=cp)
        losses.append(total.item())
    return losses, model.state_dict()


def loss_in_one_process(state: dict) -> float:
    """Of text that it was not trained on, whole, with nothing cut."""
    model, text = NextByte(), batch(1000)
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(text[:, :-1], torch.arange(s), partial(F.scaled_dot_product_attention, is_causal=True))
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item()


alone, together = (run(train, n, local_tokens, 60).results for n in (1, world_size))
print(f"step   1 rank   {world_size} ranks")
for step in (0, 1, 10, 30, 59):
    print(f"{step:4} {alone[0][0][step]:8.4f} {together[0][0][step]:9.4f}")
tested = [loss_in_one_process(results[0][1]) for results in (alone, together)]
print(f"\nThen both models are used in one process, on new text: {tested[0]:.4f} {tested[1]:.4f}")

# %% [markdown]
# Nothing fails, and the loss falls on either. On one rank the program is right; on several the model learns something
# that is not quite this text. There are **two** mistakes in it, and the columns agree when both are mended. Mend one,
# and look at the columns again before you mend the other. With one mended, a column may even be lower than the right
# one. Lower is not right. Then the check.
#
# <details><summary>Hint: how to look</summary>
#
# Take the sequence 0 1 2 … 16 (s = 16) and 4 ranks. What has rank 1: which inputs, which labels, which positions? Which
# of its labels is on another rank?
# </details>

# %% check="context.local_tokens"
check("context.local_tokens", local_tokens)

# %% [markdown]
# Labels that are shifted after the sequence was cut are from a real project: transformers #36607 on GitHub. Positions
# that start again in each part are as old as the idea, and as quiet.

# %% [markdown]
# ## The real tool
#
# **PyTorch's ring.** `torch.distributed.tensor.experimental` has `context_parallel`: a `with` block in which
# `scaled_dot_product_attention` is a ring, zig-zag included, for GPUs. What it is made of runs on a CPU too, where it
# is handed the CPU's kernel; it is private, and may move with a new version. Beside it: yours, and the library's
# `fast_ring_attention` (the *fast path* below: the same ring on PyTorch's fused kernels), which the trainer of lesson
# 11 can use. All four results of each have to be equal.


# %%
def torchs_ring(q, k, v, grad, positions: Tensor) -> list[Tensor]:
    """Output, dq, dk, dv of this rank's tokens, by PyTorch's own ring with its load balance."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    options, aten, rank = theirs._cp_options, torch.ops.aten, dist.get_rank()
    options.convert_to_f32, options.enable_load_balance = False, True
    own = [x[:, :, positions[rank]].contiguous() for x in (q, k, v)]
    forward, group = aten._scaled_dot_product_flash_attention_for_cpu, dist.group.WORLD
    out, lse = theirs._templated_ring_attention(group, 2, forward, *own, is_causal=True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    arguments = (group, 2, backward, grad[:, :, positions[rank]].contiguous(), "grad_out", *own, out, lse)
    return [out, *theirs._templated_ring_attention_backward(*arguments, is_causal=True, dropout_p=0.0)]


positions = token_positions(s, world_size)
yours = run(attend, world_size, ring, positions, q, k, v, grad).results
rings = {"the fast path": run(attend, world_size, fast_ring_attention, positions, q, k, v, grad).results}
try:
    rings["PyTorch's ring"] = run(torchs_ring, world_size, q, k, v, grad, positions).results
except Exception as error:
    print(f"PyTorch {torch.__version__} has its ring elsewhere: {error}".splitlines()[0])
for name, theirs in rings.items():
    for rank in range(world_size):
        for one, other in zip(yours[rank], theirs[rank], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    off = max(float((x - y).abs().max()) for r in range(world_size) for x, y in zip(yours[r], theirs[r], strict=True))
    print(f"{name:15} differs from yours by at most {off:.0e}")

# %%
ways = {"yours": ring, "the fast path": fast_ring_attention, "all-gather": gathered}
ways |= {"all-to-all": traded} if a % world_size == 0 else {}  # ranks get whole heads
print("                  operations   bytes sent   calls, on rank 0")
for name, attention in ways.items():
    own = run(attend, world_size, attention, positions, q, k, v, grad, measure=True).ledger[0]
    sends = [call for call in own.communications if call.op != "recv"]
    print(f"{name:15} {own.flops / 1e6:9.2f} M {sum(c.sent for c in sends) / 1e3:9.1f} kB {len(sends):6}")

# %% [markdown]
# The fast path computes what the mask leaves, and yours computes every block and hides half of it. (Whole diagonal
# blocks are counted for both.) All-to-all sends least here, where there are as many key heads as query heads.
#
# **Who chose what, and when each wins.** One attention layer over n ranks, bf16, a sequence of 131,072 tokens, causal
# with zig-zag, on H100s with 50 GB/s between them. The time that is *seen*: a ring hides what fits behind its blocks;
# an all-gather and the all-to-alls are waited for.

# %%
S, FLOPS, LINK = 131_072, 989.4e12, 50e9
layers = {  # query heads and key heads of a rank, before the context is split; all of 128 numbers
    "GPT-3's 96 heads, no sharing": (96, 96),
    "Llama 3 8B: 32 heads, 8 key heads": (32, 8),
    "Llama 3 405B after TP 8: 16 heads, 1 key head": (16, 1),
}
for name, (heads, kv_heads) in layers.items():
    print(f"\n{name}\n ranks   compute | both: MB | ring: seen | all-gather: seen, held | all-to-all: MB, seen")
    for n in (2, 4, 8, 16, 32):
        compute = 4 * heads * 128 * S**2 / 2 / n / FLOPS
        block = 2 * S / n * kv_heads * 128 * 2  # bytes of K and V
        around, trade = (n - 1) * block, (n - 1) / n * 2 * S / n * (heads + kv_heads) * 128 * 2
        seen = (n - 1) * max(0, block / LINK - compute / n)
        last = f"{trade / 1e6:8.0f} {trade / LINK * 1e3:6.2f} ms" if kv_heads % n == 0 else "more ranks than key heads"
        print(
            f"{n:6} {compute * 1e3:6.1f} ms | {around / 1e6:8.0f} | {seen * 1e3:7.2f} ms "
            f"| {around / LINK * 1e3:9.2f} ms {n * block / 1e6:6.0f} MB  | {last}"
        )

# %% [markdown]
# (Modelled by formula, not measured: no latency, and kernels at full rate. *Both*: a ring and an all-gather send the
# same bytes. TP 8 is tensor parallelism over 8 ranks.)
#
# - **DeepSpeed-Ulysses** trades: 4 · s · h · d/n numbers a link (h heads of size d) against 4 · s · h · d for
#   Megatron-LM's sequence parallelism. It wins where all heads have keys of their own, in the table from 8 ranks on:
#   the ring's bytes do not shrink with n, these do. It ends where key heads end.
# - **Llama 3** gathers. After TP 8 there is one key head left, so all-to-all is out. K and V are small. The time that
#   is seen grows with the ranks: at 2 ranks 2% of attention alone, at 16 more than a quarter; but computing grows with
#   the square of s. What a ring would save is that; what it would cost is that every kind of mask (documents that may
#   not see each other) has to be taught to every block.
# - **A ring** wins where K and V of everybody do not fit, and where its transfers hide: blocks as long as the condition
#   above says.
#
# Measured by others, 8 H800s: a ring without zig-zag reaches 52.1% of one GPU's rate in forward (53.3% by your
# formula), with zig-zag 85.2% (ring-flash-attention's README).

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="05.balance"
balance_answer = 100 * 16 / (2 * 16 - 1)

# %% check="05.balance"
check("05.balance", balance_answer)

# %% question="05.block"
block_answer = 312e12 / 50e9

# %% check="05.block"
check("05.block", block_answer)

# %% question="05.bytes"
bytes_answer = 2 * 8192 * 128 * 15 * 2 / 1e6

# %% check="05.bytes"
check("05.bytes", bytes_answer)

# %% question="05.labels"
labels_answer = "c"

# %% check="05.labels"
check("05.labels", labels_answer)

# %% question="05.variant"
variant_answer = "b"

# %% check="05.variant"
check("05.variant", variant_answer)

# %% [markdown]
# ## Where this stands
#
# | here | Megatron-LM | PyTorch (torchtitan) | DeepSpeed |
# | --- | --- | --- | --- |
# | `ring_attention` | `cp_comm_type` p2p, in Transformer Engine | `context_parallel`, passed on by all-to-all | – |
# | `all_gather_attention` | `cp_comm_type` all_gather | `context_parallel`, by all-gather | – |
# | `all_to_all_attention` | `cp_comm_type` a2a | – | `DistributedAttention` |
# | `zigzag` | `get_batch_on_this_cp_rank` | its load balance | – |
#
# **Papers.** [Ring Attention](https://arxiv.org/abs/2310.01889) (Liu et al. 2023): algorithm 1 and the condition of
# section 3. [Online softmax](https://arxiv.org/abs/1805.02867) (Milakov and Gimelshein 2018) and
# [FlashAttention-2](https://arxiv.org/abs/2307.08691) (Dao 2023), whose backward is that of your blocks.
# [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509) (Jacobs et al. 2023). [The Llama 3 Herd of
# Models](https://arxiv.org/abs/2407.21783) (2024), section 3.3.2. [Striped Attention](https://arxiv.org/abs/2311.09431)
# (Brandon et al. 2023) balances token by token. The zig-zag that you wrote is
# [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention)'s too.
