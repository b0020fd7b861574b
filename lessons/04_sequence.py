# %% [markdown]
# # 4 · Sequence parallelism and recomputation
#
# *90 minutes · 9 exercises and 5 questions, 45 points · 4 processes on this machine, no GPU*
#
# The two cooks of lesson 03 push the halves of every sandwich together. Between two pushes there is small work: salt,
# a leaf, and a line in the kitchen's diary, so that at night everything can be put back where it was. There they
# share nothing: both salt every sandwich, and both diaries say the same.
#
# From now on each salts half of the sandwiches, and writes about those. At the push, halves are dealt out instead of
# copied. Nobody walks a step further, and the diaries are thinner. Their thickest chapter is not written at all: it
# can be worked out again from a single line.
#
# ![Two ranks. Before the pair of split matrices each holds half of the tokens, and norms them; an all-gather gives
# both all tokens. Inside the pair each has all tokens and half of the features. A reduce-scatter adds the parts up
# and leaves each its half of the tokens, for dropout and sum.](pictures/04_tokens.svg)
#
# **What is split**: the tokens, wherever no matrix is. Each of t ranks norms and drops out s/t of the s tokens.
#
# **What travels**: what travelled before. An all-reduce is cut in two, a reduce-scatter and an all-gather, with the
# small work in between: 2(t−1)/t · b·s·h numbers from every rank, for each pair and each way.
#
# **What it buys**: memory. A layer of GPT-3 over 8 ranks keeps 579 MB on each for backward. By the end of this lesson
# it is less than a fifth of that, for hardly more computing; its last bit costs a few more messages.
#
# **When it hurts**: what is whole on every rank now sees its tokens only, and what is random must know where it
# stands.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). Lesson 03's layers come from the library here; you need not have
# solved it.

# %%
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import plots, run
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import phase
from fivefold.runtime.replay import replay
from fivefold.sequence import all_gather_tokens, dropout, reduce_scatter_tokens
from fivefold.tensor import MLP, Attention, Core, causal_attention, shard, split_dimensions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks that share a layer: 2, 3, 4 or 6

# %% [markdown]
# ## What is split, what travels, when
#
# Backward needs what forward had: the input of a norm, the mask of a dropout. It waits in memory, for every layer.
# Korthikanti et al. (2022) counted it for one layer of a transformer with b sequences of s tokens, h features and a
# heads. Numbers have 2 bytes and masks 1; the table is in units of s·b·h, with and without tensor parallelism over t
# ranks:
#
# | bytes / sbh | one rank | each of t ranks |
# | --- | --- | --- |
# | inputs of the two norms | 4 | **4** |
# | inputs of the two pairs of matrices | 4 | **4** |
# | masks of the two dropouts | 2 | **2** |
# | inside the pairs: q, k, v, the projection's input; before and after the GELU | 24 | 24/t |
# | attention core (scores, softmax and its dropout) | 5as/h | 5as/(ht) |
#
# The first three rows do not know t. With 8 ranks of GPT-3, where 5as/h is 80, they are 10 of 23: nearly half.
#
# They belong to work that looks at one token at a time: a norm, a dropout, a sum. So each rank does it for its own
# tokens, s/t of them. At two places the ranks have to meet, and there they met before:
#
# | | forward | backward |
# | --- | --- | --- |
# | *g*, where x enters a pair: all tokens for everyone | all-gather | reduce-scatter of the gradient |
# | *ḡ*, where y leaves it: sums, to each its own tokens | reduce-scatter | all-gather of the gradient |
#
# Each of the four moves (t−1)/t · b·s·h numbers from every rank. A layer has two pairs, so that is 8 times as much in
# a step: what its four all-reduces moved.

# %% [markdown]
# ## A worked example
#
# Half a layer as lesson 03 left it: a norm, an MLP, a dropout, a sum. How much does it keep?

# %%
h, a = 96, 12  # features, heads
b, s = 4, 96  # sequences, and tokens in each


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def mlp_weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w_in (4h, h), b_in (4h), w_out (h, 4h), b_out (h): whole."""
    return random(4 * h, h, seed=1), random(4 * h, seed=2), random(h, 4 * h, seed=3), random(h, seed=4)


def half_a_layer() -> None:
    tp = dist.new_group(group_desc="tp")  # all ranks, under the name that figures show
    torch.manual_seed(0)
    norm, mlp = nn.LayerNorm(h), MLP(*mlp_weights(), tp)
    norm, mlp, x = norm.bfloat16(), mlp.bfloat16(), random(b, s, h, seed=5).bfloat16()
    with phase("forward"):
        x + dropout(mlp(norm(x)), 0.1, tp, split=False)


for t in (1, world_size):
    kept = run(half_a_layer, t, measure=True).ledger[0].memory.phases["forward"]
    print(f"each of {t}: {kept / (s * b * h):5.2f} bytes for each of s·b·h;  5 + 16/t = {5 + 16 / t:.2f}")

# %% [markdown]
# Five of the 21 bytes stay, whatever t: the norm's input, what it gives to the MLP, and the mask. (The small rest is
# the norm's: a mean and a deviation for each token.)
#
# Now the same by hand (without the dropout), with tokens split. One trap: torch's collectives put the ranks' pieces
# one after the other along the *first* dimension, and the tokens are the second. With one sequence you would not
# notice.

# %%
from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single


def by_hand(x: Tensor) -> Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    tp = dist.new_group(group_desc="tp")
    w_in, b_in, w_out, b_out = mlp_weights()
    own = x.chunk(t, dim=1)[rank]  # (b, s/t, h): this rank's tokens
    y = F.layer_norm(own, (h,))

    pieces = y.new_empty(t * b, s // t, h)
    all_gather_single(pieces, y, group=tp)
    y = pieces.unflatten(0, (t, b)).transpose(0, 1).flatten(1, 2)  # (b, s, h): all tokens, in their order

    y = F.gelu(F.linear(y, w_in.chunk(t)[rank], b_in.chunk(t)[rank]))  # (b, s, 4h/t)
    y = F.linear(y, w_out.chunk(t, dim=1)[rank])  # (b, s, h): one part of a sum

    pieces = y.unflatten(1, (t, s // t)).transpose(0, 1).flatten(0, 1).contiguous()  # (t·b, s/t, h)
    y = y.new_empty(b, s // t, h)
    reduce_scatter_single(y, pieces, group=tp)
    return own + y + b_out  # (b, s/t, h): the sum, for this rank's tokens


x = random(b, s, h, seed=5)
done = run(by_hand, world_size, x)

w_in, b_in, w_out, b_out = mlp_weights()
y = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (h,)), w_in, b_in)), w_out, b_out)  # in this process, whole
for rank, result in enumerate(done.results):
    print(f"rank {rank}: its tokens are off by at most {(result - y.chunk(world_size, dim=1)[rank]).abs().max():.0e}")

# %%
print(f"an all-reduce would send 2(t−1)/t · b·s·h · 4 = {2 * (world_size - 1) / world_size * b * s * h * 4:,.0f} bytes")
done.ledger.traffic()

# %% [markdown]
# Half the bytes each: an all-reduce *is* a reduce-scatter and an all-gather. What is new is that something stands
# between the two.
#
# The moving of dimensions is the same every time. The library has it, without a gradient: `all_gather_tokens(x,
# group)` from (b, s/t, h) to (b, s, h), and `reduce_scatter_tokens(x, group)` back.

# %% [markdown]
# ## Exercises
#
# ### `gather_tokens`, the function *g*
#
# It stands where x enters a pair (in Korthikanti et al. 2022, figure 5, as *g*). Forward gives every rank all tokens.
# Then each uses them with its own part of the matrices. Backward therefore gets, on every rank, this rank's part of
# the gradient of *all* tokens; hand back the whole gradient of this rank's tokens. One all-gather forward, one
# reduce-scatter backward. The two functions above may be used.
#
# *Checked*: the output, the gradient, the traffic; with several sequences, and in groups that are not the whole
# world.

# %% exercise="sequence.gather_tokens"
from fivefold.sequence import gather_tokens

# %% check="sequence.gather_tokens"
check("sequence.gather_tokens", gather_tokens)

# %% [markdown]
# ### `scatter_tokens`, the function *ḡ*
#
# Stands where y leaves a pair. x (b, s, h) is one part of a sum. Forward adds the parts up and gives each rank the
# sums of its tokens (b, s/t, h). Backward gets the gradient of those; what gradient has x, which went into the sums
# of all tokens? One reduce-scatter forward, one all-gather backward. A number of tokens that t does not divide is a
# `ValueError`.
#
# *Checked*: the output, the gradient, the traffic.

# %% exercise="sequence.scatter_tokens"
from fivefold.sequence import scatter_tokens

# %% check="sequence.scatter_tokens"
check("sequence.scatter_tokens", scatter_tokens)

# %% [markdown]
# Lesson 03 built its layers with an `enter` and a `leave`, and said that they would come in handy. Hand yours to the
# same MLP:

# %%
gather = mine("sequence.gather_tokens", gather_tokens)
scatter = mine("sequence.scatter_tokens", scatter_tokens)
y_grad = random(b, s, h, seed=6)


def one_mlp(split: bool) -> tuple[Tensor, Tensor]:
    rank, t = dist.get_rank(), dist.get_world_size()
    tp = dist.new_group(group_desc="tp")
    mlp = MLP(*mlp_weights(), tp, gather, scatter) if split else MLP(*mlp_weights(), tp)
    own, own_grad = (whole.chunk(t, dim=1)[rank] if split else whole for whole in (x, y_grad))
    own = own.clone().requires_grad_()
    y = mlp(own)
    y.backward(own_grad)
    return y.detach(), own.grad


before, now = run(one_mlp, world_size, False), run(one_mlp, world_size, True)
for i, name in enumerate(("output", "x.grad")):
    joined = torch.cat([result[i] for result in now.results], dim=1)
    print(f"{name}: off by at most {(joined - before.results[0][i]).abs().max():.0e}")
print(before.ledger.traffic())
now.ledger.traffic()

# %% [markdown]
# ### `region_rng`: random numbers that know where they are
#
# A dropout's mask is random, and the ranks' masks must fit together:
#
# - where each holds **pieces**: **different** masks, or rank 1's tokens lose the same features as rank 0's, in every
#   step of training;
# - where all hold **the same**, as after an all-reduce: **equal** masks, or the copies are copies no more.
#
# No message may be needed for that. What the ranks have in common is torch's random state: it is equal on all of
# them, and must be so again when a region is left. Both mistakes were made in earnest: Megatron-LM #1256 and #206.
#
# Write a context manager. `torch.random.fork_rng([])` puts the random state back when it is left;
# `torch.manual_seed(number)` sets it. (The empty list says: no GPUs.)
#
# *Checked*: numbers of one's own or equal ones, as `split` says; new ones in each region and pass; the same again
# where the state outside is put back; nothing noticed outside, after an error neither. No traffic.
#
# <details><summary>Hint: where a seed comes from</summary>
#
# It has to be equal on all ranks, and new at each call. Torch's random state is the one thing that is both: draw a
# number from it, before you leave it. Then only the rank is missing.
# </details>

# %% exercise="sequence.region_rng"
from fivefold.sequence import region_rng

# %% check="sequence.region_rng"
check("sequence.region_rng", region_rng)

# %%
region = mine("sequence.region_rng", region_rng)


def masks(split: bool) -> Tensor:
    torch.manual_seed(0)
    with region(dist.group.WORLD, split):
        return torch.rand(10_000) < 0.9


for split, words in ((True, "0.9² + 0.1² = 82.0%"), (False, "100%")):
    first, second, *_ = run(masks, world_size, split).results
    print(f"split={split}: masks of ranks 0 and 1 agree in {(first == second).float().mean():.1%}, expected {words}")

# %% [markdown]
# The library's `dropout(x, p, group, split)` draws its mask in such a region, and keeps one byte a number for
# backward.
#
# ### `Block`
#
# Put a layer together: x + attention(norm(x)), then the same with the MLP, with a dropout on what each of the two
# gives. `attention(x, *context)` and `mlp(x)` are the parts; `attention_norm` and `mlp_norm` stand before them. Your
# exchanges are in the parts: the block itself sends nothing, and x is (b, s/t, h) from end to end. `split` is False
# where the block is used without sequence parallelism; it is for the dropouts to know. All that comes after x, such as
# a rotation of positions, is handed on to the attention. `block.eval()` switches dropout off.
#
# *Checked*: output, gradients, traffic (2 + 2 exchanges each way), what is kept outside the pairs, the masks.

# %% exercise="sequence.Block"
from fivefold.sequence import Block

# %% check="sequence.Block"
check("sequence.Block", Block)

# %% [markdown]
# ### `sync_replicated_gradients`
#
# A norm's weight is whole on every rank. Until now every rank saw all tokens, so its gradient was whole too. Now a
# rank has the gradient of its own tokens. The loss is a sum over tokens: what is the gradient over all of them?
# `parameters` may be a generator, which can be gone through once. Some have no gradient: leave these out. Write into
# the tensors that `.grad` is. One all-reduce for all of them together, none if there is nothing to add up.
#
# *Checked*: the gradients, the traffic.
#
# <details><summary>Hint: many tensors, one message</summary>
#
# `torch.cat` of flattened tensors is one; `split` takes it apart, `view_as` gives a part its shape back.
# </details>

# %% exercise="sequence.sync_replicated_gradients"
from fivefold.sequence import sync_replicated_gradients

# %% check="sequence.sync_replicated_gradients"
check("sequence.sync_replicated_gradients", sync_replicated_gradients)

# %% [markdown]
# ### Your layers on real text
#
# A small transformer guesses the next byte of Python's language reference. Its norms, its embedding and its output
# layer are whole on every rank, and work for the rank's own tokens.

# %%
from pydoc_data.topics import topics

MyBlock = mine("sequence.Block", Block)
sync = mine("sequence.sync_replicated_gradients", sync_replicated_gradients)
data = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def layer(
    tp: dist.ProcessGroup, p: float = 0.0, split: bool = True, core: Core = causal_attention, Column: type | None = None
) -> nn.Module:
    """A transformer layer; `Column`, where given, takes the place of the first layer of each pair."""
    ways = {"enter": gather, "leave": scatter} if split else {}
    qkv = random(3 * h, h, seed=11), random(3 * h, seed=12)
    attention = Attention(*qkv, random(h, h, seed=13), random(h, seed=14), a, a, tp, core, **ways)
    mlp = MLP(*mlp_weights(), tp, **ways)
    if Column:
        attention.qkv, mlp.column = Column(*qkv, tp), Column(*mlp_weights()[:2], tp)
    return MyBlock(attention, mlp, nn.LayerNorm(h), nn.LayerNorm(h), tp, p, split)


class NextByte(nn.Module):
    """Logits for the next byte after each of this rank's tokens."""

    def __init__(self, layers: list[nn.Module], wrap: Callable = lambda block: block):
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, h), nn.Parameter(torch.zeros(s, h))
        self.layers, self.norm, self.out = nn.ModuleList(layers), nn.LayerNorm(h), nn.Linear(h, 256)
        self.wrap = wrap

    def forward(self, tokens: Tensor, own: slice) -> Tensor:
        x = self.embedding(tokens[:, own]) + self.places[own]  # (b, s/t, h)
        for block in self.layers:
            x = self.wrap(block)(x)
        return self.out(self.norm(x))  # (b, s/t, 256)


def train(steps: int, sync: Callable, wrap: Callable = lambda block: block, **options: Any) -> tuple[list, Tensor]:
    tp = dist.new_group(group_desc="tp")
    torch.manual_seed(0)  # so that what is whole starts equal on every rank
    model = NextByte([layer(tp, **options) for _ in range(2)], wrap)
    whole = [p for name, p in model.named_parameters() if name not in split_dimensions(model)]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    own = slice(tp.rank() * s // tp.size(), (tp.rank() + 1) * s // tp.size())  # this rank's tokens
    for step in range(steps):
        starts = torch.randint(len(data) - s - 1, (b,), generator=torch.Generator().manual_seed(step))
        text = torch.stack([data[i : i + s + 1] for i in starts]).long()
        logits = model(text[:, :-1], own)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:][:, own].flatten(), reduction="sum") / (b * s)
        optimizer.zero_grad()
        loss.backward()
        sync(whole, tp)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=tp)
        losses.append(total.item())
    return losses, model.norm.weight.detach()


def nothing(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """In the place of `sync_replicated_gradients`."""


alone = run(train, 1, 40, sync).results
together, without = (run(train, world_size, 40, f).results for f in (sync, nothing))
print(f"\nstep   1 rank   {world_size} ranks   {world_size} ranks, gradients not summed")
for step in (0, 1, 10, 39):
    print(f"{step:4} {alone[0][0][step]:8.4f} {together[0][0][step]:9.4f} {without[0][0][step]:9.4f}")
torch.testing.assert_close(together[0][0], alone[0][0], rtol=1e-2, atol=0)
for words, results in (("summed", together), ("not summed", without)):
    apart = (results[0][1] - results[-1][1]).abs().max()
    print(f"{words}: the last norm's weights on ranks 0 and {world_size - 1} differ by at most {apart:.0e}")

# %% [markdown]
# Look at the last two lines: the losses alone would not have told you.
#
# ### What is still whole
#
# Count again what a rank keeps. The norms' inputs and the masks are split now. But the first layer of a pair still
# keeps *its* input, and that is what `gather_tokens` made: all tokens. With two pairs, 4 of the 10 bytes are as they
# were. The library's `RegatheringColumnLinear` keeps the rank's own tokens instead, and gathers them once more in
# backward. Everything is split only with it, sbh(34 + 5as/h)/t; with `gather_tokens` alone a rank keeps 4sbh(1 − 1/t)
# more than that. The price is one all-gather in each pair. (It returns in *Find the bug*.)
#
# What is left is the largest part, the attention core: scores and probabilities, s numbers for each token and head.
# It is made of q, k and v, in few operations.
#
# ### `selective`
#
# Takes an attention core, and returns one that does the same and keeps q, k and v only. Forward runs the core and
# lets everything inside it go. Backward runs it again from q, k and v, and then backwards. The dropout in it must
# draw the same mask, so the second run starts from the random state of the first; what others draw is not disturbed.
# Write the autograd function's two methods, and the function that uses it. One run more in backward, not three (one
# for each of q, k, v).
#
# *Checked*: output, gradients, random numbers afterwards, memory (q, k, v and nothing of the core's), operations.
#
# <details><summary>Hint: forward</summary>
#
# Inside `forward` of an autograd function no graph is built, so the core leaves nothing behind. Keep on `ctx` what is
# needed: tensors with `ctx.save_for_backward`, and `torch.get_rng_state()`, which moves on with each number drawn.
# (`get_device_states` and `set_device_states`, imported above, do the same for GPUs. You can leave them out.)
# </details>
#
# <details><summary>Hint: backward</summary>
#
# `x.detach().requires_grad_()` is a fresh start for a graph. Inside `torch.enable_grad()` the core builds one; then
# `torch.autograd.backward(out, grad)` fills the `.grad` of those inputs. `torch.random.fork_rng([])` as in
# `region_rng`.
# </details>

# %% exercise="recompute.selective"
from fivefold.recompute import selective

# %% check="recompute.selective"
check("recompute.selective", selective)

# %% [markdown]
# ### `activation_bytes`
#
# The paper's table 2, as a function: the bytes that one layer keeps on each of t ranks, from the rows that you have
# seen, with `recompute` "none" or "selective". With `sequence_parallel` all of a layer is split: inputs are gathered
# again in backward, as the next exercise does it. With "full" the whole layer is computed again, and only its
# input is kept, 2sbh, whole on every rank either way. Any other word is a `ValueError`.
#
# *Checked*: each row of the table, for several sizes.

# %% exercise="cost.activation_bytes"
from fivefold.cost import activation_bytes

# %% check="cost.activation_bytes"
check("cost.activation_bytes", activation_bytes)

# %% [markdown]
# ## See it
#
# Three of your layers, one on the other, one step, in 16-bit numbers with dropout everywhere: five ways to keep less
# and less. (What computes a whole layer again is one line, from PyTorch; you will meet it below.)

# %%
from fivefold import recompute, sequence

select, my_bytes = mine("recompute.selective", selective), mine("cost.activation_bytes", activation_bytes)
layers, t, sbh, core = 3, world_size, s * b * h, 5 * a * s / h

ways = {  # split, gathered again, computed again; bytes by the formula; the paper's table
    "tensor parallelism alone": (False, False, "none", 10 + (24 + core) / t, my_bytes(b, s, h, a, t)),
    "tokens split": (True, False, "none", 4 + (30 + core) / t, my_bytes(b, s, h, a, t, True)),
    "… gathered again": (True, True, "none", (34 + core) / t, my_bytes(b, s, h, a, t, True)),
    "… core computed again": (True, True, "selective", 34 / t, my_bytes(b, s, h, a, t, True, "selective")),
    "… layer computed again": (True, True, "full", 2 / t, my_bytes(b, s, h, a, t, True, "full")),
}


def one_step(split: bool, regather: bool, again: str) -> None:
    tp = dist.new_group(group_desc="tp")
    torch.manual_seed(0)
    core = partial(causal_attention, drop=partial(dropout, p=0.1, group=tp, split=True))
    core = select(core) if again == "selective" else core
    Column = sequence.RegatheringColumnLinear if regather else None
    stack = [layer(tp, 0.1, split, core, Column).bfloat16() for _ in range(layers)]
    x = random(b, s // tp.size() if split else s, h, seed=15).bfloat16().requires_grad_()
    with phase("forward"):
        y = x * 1
        for block in stack:
            y = (recompute.full(block) if again == "full" else block)(y)
    with phase("backward"):
        y.backward(torch.ones_like(y))


ledgers = {name: run(one_step, world_size, *way[:3], measure=True).ledger for name, way in ways.items()}

# %% [markdown]
# **The memory**, measured, beside the formula for what this program does, and beside the paper's table.

# %%
print(f"{'for each layer, on each rank':30}     kept   formula     off   paper's table     off")
for name, (*_, formula, paper) in ways.items():
    kept, formula = ledgers[name][0].memory.phases["forward"] / layers, formula * sbh
    print(
        f"{name:30} {kept / 1e3:5.0f} kB  {formula / 1e3:5.0f} kB {kept / formula - 1:+7.1%}"
        f"        {paper / 1e3:5.0f} kB {kept / paper - 1:+7.1%}"
    )

# %% [markdown]
# What is off, and why:
#
# - **about 1%** in most rows: the causal mask (one byte for each pair of tokens) and the norms' mean and deviation. The
#   paper leaves small things out, and here everything is small.
# - **tokens split**: the table has the row that gathers again. Without that, 4sbh(1 − 1/t) more are kept.
# - **layer computed again**: the table says 2sbh. With split tokens this program keeps its own tokens' input: 2sbh/t.
#
# The same over time, as on H100s with h = 12,288. What is computed again is there for a moment, one core or one layer
# at a time. The last way takes longest: it does one forward more.

# %%
from fivefold.plots.curves import spread

timed = {name: replay(ledger, cluster("h100"), widen=128) for name, ledger in ledgers.items()}
curves = {name: spread(ledgers[name][0].memory.timeline, timed[name].times[0]) for name in ways}
first, *_, last = ways
title = f"Kept for backward, as a step goes on: {ledgers[first][0].memory.peak_saved / 1e6:.1f} MB become "
title += f"{ledgers[last][0].memory.peak_saved / 1e6:.1f} MB at the peak"
plots.memory(curves, timed[last], title)

# %% [markdown]
# **The price.** Operations and bytes of the whole step, beside those of tensor parallelism alone:

# %%
base = ledgers[first][0]
extra = {"none": 0, "selective": 4 * b * s * s * h / t, "full": (24 * b * s * h * h + 4 * b * s * s * h) / t}
step_flops = (72 * b * s * h * h + 12 * b * s * s * h) / t
print(f"{'':26} more operations   by formula   bytes sent   step on H100s")
for name, (_, _, again, *_) in ways.items():
    own = ledgers[name][0]
    more, sent = (own.flops - base.flops) / base.flops, sum(c.sent for c in own.communications)
    times = sent / sum(c.sent for c in base.communications)
    formula = extra[again] / step_flops
    print(f"{name:26} {more:15.2%} {formula:12.2%}   {times:5.2f} times   {timed[name].makespan * 1e3:9.2f} ms")

# %% [markdown]
# Computing the core again costs 4bs²h of a step's 72bsh² + 12bs²h. Here the sequence is as long as h is wide; in
# GPT-3 it is a sixth of h, and the same formula gives 0.9%. The paper states **2.7%**. That is the core's share of
# one *forward*, (s/6h)/(1 + s/6h), and the core is computed again once in a step, which is as long as three forwards.
# So what you measure is a third of it:

# %%
for words, s_, h_ in (("this lesson", s, h), ("GPT-3", 2048, 12288), ("MT-NLG 530B", 2048, 20480)):
    forward, step = 4 * s_ / (24 * h_ + 4 * s_), 4 * s_ / (72 * h_ + 12 * s_)
    print(f"{words:12}  of a forward {forward:6.2%}   of a step {step:6.2%}   difference {step / forward - 1:+.0%}")

# %% [markdown]
# **The bytes.** Two pairs in each layer. Each gathers once forward, once for the weights' gradients and once for the
# gradient of what left; each scatters twice.

# %%
one_pass = 2 * layers * (t - 1) / t * sbh * 2
plots.traffic_by_axis(
    ledgers["… gathered again"],
    {
        ("all_gather", "tp"): (3 * one_pass, f"{2 * layers} · 3 · (t−1)/t · b·s·h · 2"),
        ("reduce_scatter", "tp"): (2 * one_pass, f"{2 * layers} · 2 · (t−1)/t · b·s·h · 2"),
    },
)

# %% [markdown]
# **The rhythm.** Compute, push, compute, push, as before. A push is now a scatter and a gather. Between the two, too
# short to be seen, dropout, sum and norm work on 1/t of the tokens.

# %%
plots.timeline(timed["tokens split"])

# %% [markdown]
# **A real model.** Outlined is tensor parallelism alone. Begin with 8 ranks of GPT-3 and press *split*, then
# *gathered again*, then *selective*. Then take 32,768 tokens: what is left to save now? (The core is gone. The other 34
# bytes grow with the tokens, and *full* takes most of those away as well. Lesson 05 has another way.)

# %%
from fivefold import widgets

widgets.activation_memory(t=8)

# %% [markdown]
# ## Find the bug
#
# ### The layer that gathers again
#
# This is how somebody wrote `RegatheringColumnLinear`. It keeps 1/t of its input. Its output is right, and the
# gradient that it hands back is right. And it trains.

# %% exercise="sequence.RegatheringColumnLinear" bug="own_tokens_only"
from fivefold.sequence import RegatheringColumnLinear

# %% [markdown]
# On one rank, and on several:

# %%
regathered = partial(train, 40, sync, Column=RegatheringColumnLinear)
results = [run(regathered, ranks).results[0][0] for ranks in (1, world_size)]
print(f"\nstep   1 rank   {world_size} ranks")
for step in (0, 1, 10, 39):
    print(f"{step:4} {results[0][step]:8.4f} {results[1][step]:9.4f}")

# %% [markdown]
# The second loss is another one already. (AdamW divides a gradient by its own size, so too small a one hardly shows.)
# Mend the program above until the columns agree, and keep what it keeps. Run the cell above again, then the check.
#
# <details><summary>Hint: how to look</summary>
#
# It sends less than you were told: one all-gather, and not two. Take s = 4, t = 2 and one weight w, which is on rank
# 0 alone. Which of the four tokens did w work for in forward? Which of them are in its gradient?
# </details>

# %% check="sequence.RegatheringColumnLinear"
check("sequence.RegatheringColumnLinear", RegatheringColumnLinear)

# %% [markdown]
# ### The layer that is computed again
#
# `full` takes any block and computes it again in backward: all of it, its communication too. This one, written by
# hand, remembers a random state, as your `selective` does. It keeps the input alone, and its output is right to the
# last bit.

# %% exercise="recompute.full" bug="state_taken_too_late"
from fivefold.recompute import full

# %% [markdown]
# Without dropout, and with it; in each case beside training that keeps everything:

# %%
print("\nstep   p = 0: kept   again     p = 0.2: kept   again")
runs = [partial(train, 20, sync, p=p, **wrap) for p in (0.0, 0.2) for wrap in ({}, {"wrap": full})]
losses = [run(one, world_size).results[0][0] for one in runs]
for step in (0, 1, 5, 19):
    print("{:4} {:12.4f} {:8.4f} {:14.4f} {:8.4f}".format(step, *(own[step] for own in losses)))

# %% [markdown]
# Nothing fails, and nobody who trains without dropout will ever know. Mend it, so that the last two columns agree.
#
# <details><summary>Hint: how to look</summary>
#
# In backward, print a few elements of `out` where the first run had zeros. Where did the first run's random numbers
# start, and where do the second's?
# </details>

# %% check="recompute.full"
check("recompute.full", full)

# %% [markdown]
# ## The real tool
#
# **Sequence parallelism** in PyTorch: `Shard(1)` says that a tensor is split along its tokens. Each layer states what
# it takes and gives, and DTensor finds the exchanges. Your half a layer beside it:


# %%
def with_dtensor() -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rank, t = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (t,), mesh_dim_names=("tp",))
    tp = mesh.get_group("tp")
    theirs = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
    for parameter, whole in zip(list(theirs.parameters())[2:], mlp_weights(), strict=True):
        parameter.data.copy_(whole)
    column, row = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(theirs, mesh, {"0": SequenceParallel(), "1": column, "3": row})
    yours = nn.Sequential(nn.LayerNorm(h), MLP(*mlp_weights(), tp, gather, scatter))

    results = []
    for model in (theirs, yours):
        own = x.chunk(t, dim=1)[rank].clone().requires_grad_()
        y = model(own)
        y.backward(y_grad.chunk(t, dim=1)[rank])
        if model is yours:
            sync([*yours[0].parameters(), yours[1].row.bias], tp)
        weights = dict(model.named_parameters())
        norm, bias = weights["0.weight"].grad, weights["3.bias" if model is theirs else "1.row.bias"].grad
        whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in (norm, bias)]
        results.append([y.detach() + 0, own.grad, *whole])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    names = "output", "x.grad", "norm.grad", "last bias.grad"
    return {name: (one - other).abs().max().item() for name, one, other in zip(names, *results, strict=True)}


for name, off in run(with_dtensor, world_size).results[0].items():
    print(f"{name:14} differs by at most {off:.0e}")

# %% [markdown]
# DTensor knows that the norm's gradient is a part: its placement is `Partial`, and `full_tensor()` adds the parts up.
#
# **Recomputation** is `torch.utils.checkpoint`, for a core as for a whole block. The same numbers as yours:


# %%
def with_checkpoint(way: str) -> list[Tensor]:
    torch.manual_seed(0)
    core = partial(causal_attention, drop=partial(F.dropout, p=0.1))
    yours, theirs = select(core), partial(checkpoint, core, use_reentrant=False)
    q, k, v = (random(b, a, s, h // a, seed=20 + i).requires_grad_() for i in range(3))
    with phase("forward"):
        out = {"all kept": core, "checkpoint": theirs, "yours": yours}[way](q, k, v)
    with phase("backward"):
        out.backward(random(*out.shape, seed=23))
    return [out.detach(), q.grad, k.grad, v.grad]


base = None
for way in ("all kept", "checkpoint", "yours"):
    done = run(with_checkpoint, 1, way, measure=True)
    own = done.ledger[0]
    base = base or done.results[0]
    torch.testing.assert_close(done.results[0], base)
    print(f"{way:10}  keeps {own.memory.phases['forward'] / 1e6:5.2f} MB   {own.flops / 1e6:6.1f} million operations")

# %% [markdown]
# `checkpoint` computes half of the core again, where yours computes all of it: it stops as soon as it has everything
# that was to be kept, before the core's second product.

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="04.kept"
kept_answer = 34 * 4096 * 12288 / 4 / 1e6

# %% check="04.kept"
check("04.kept", kept_answer)

# %% question="04.bytes"
bytes_answer = 10 / 8

# %% check="04.bytes"
check("04.bytes", bytes_answer)

# %% question="04.norms"
norms_answer = "b"

# %% check="04.norms"
check("04.norms", norms_answer)

# %% question="04.masks"
masks_answer = "c"

# %% check="04.masks"
check("04.masks", masks_answer)

# %% question="04.flops"
flops_answer = 100 * 4 * 8192 / (72 * 12288 + 12 * 8192)

# %% check="04.flops"
check("04.flops", flops_answer)

# %% [markdown]
# ## Where this stands
#
# | here | Megatron-LM | PyTorch |
# | --- | --- | --- |
# | `gather_tokens` | `gather_from_sequence_parallel_region` | `ColwiseParallel(input_layouts=Shard(1))` |
# | `scatter_tokens` | `reduce_scatter_to_sequence_parallel_region` | `RowwiseParallel(output_layouts=Shard(1))` |
# | `region_rng` | `get_cuda_rng_tracker().fork()` | DTensor's random operators, by placement |
# | `sync_replicated_gradients` | in `finalize_model_grads` | `Partial` gradients of `SequenceParallel` |
# | `RegatheringColumnLinear` | every `ColumnParallelLinear` with `sequence_parallel` | – |
# | `selective`, `full` | `--recompute-granularity selective` or `full` | `torch.utils.checkpoint` |
#
# In torchtitan tensor parallelism always comes with it; in Megatron-LM it is `--sequence-parallel`. Megatron-LM keeps
# tokens in the *first* dimension, (s, b, h), so its pieces need no reordering.
#
# The core needs no `selective` any more where attention is one fused kernel, as FlashAttention is: it never writes
# the probabilities down, and computes them again in backward. The idea has moved into the kernel.
#
# A warning about the name. DeepSpeed's *sequence parallelism* (Ulysses) is another thing, and so is *context
# parallelism*: with both, matrices are whole on every rank and see its tokens only. Lesson 05 has both.
#
# **Papers.** [Reducing activation recomputation](https://arxiv.org/abs/2205.05198) (Korthikanti et al. 2022): section
# 4.2.2 and figure 5 are *g* and *ḡ*, section 5 is selective recomputation, table 2 is your function.
# [Sublinear memory cost](https://arxiv.org/abs/1604.06174) (Chen et al. 2016) had the idea of computing again.
# [FlashAttention](https://arxiv.org/abs/2205.14135) (Dao et al. 2022) took it into the kernel.
