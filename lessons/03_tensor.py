# %% [markdown]
# # 3 · Tensor parallelism
#
# *120 minutes · 11 exercises and 5 questions, 65 points · 4 processes on this machine, no GPU*
#
# The school kitchen has 1,000 sandwiches to make by noon. Two cooks make every one of them together: each prepares a
# whole sandwich with half of the fillings, and before it leaves the table the two are stacked, every single time. That
# stacking is this lesson.
#
# ![Two ranks, each with all of X. Rank 0 has the left columns of A and the upper rows of B, rank 1 the rest. Each gets
# a part of Y; one arrow between the ranks adds the parts up.](pictures/03_column_row.svg)
#
# **What is split**: the matrices, those of the layers and those of the vocabulary. Each of t ranks (processes, one a
# GPU) sees every token, and holds 1/t of each matrix.
#
# **What travels**: activations, the numbers that layers hand on. One all-reduce forward and one backward for each pair
# of matrices: it adds up a tensor over the ranks and leaves the sum on all of them. With b sequences of s tokens of h
# numbers, that is 2(t−1)/t · b·s·h numbers from every rank, each time.
#
# **When it hurts**: the moment that arrow leaves the server.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). `run(function, 4)` calls a function on four ranks: four processes
# on this machine that talk through `torch.distributed`, as GPUs would. An exercise is a piece of the course's library
# with its body taken out. The cell below it checks what you write, on real ranks, and says what it saw. For two
# sittings, stop after *Your layer on real text*.

# %%
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import plots, run
from fivefold.runtime.errors import Deadlock
from fivefold.tensor import Core, Exchange, Rotate, causal_attention, check_heads, shard
from torch import Tensor, nn

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks that share a layer: 2, 3, 4, 6 or 8

# %% [markdown]
# ## What is split, what travels, when
#
# Two thirds of the weights in a transformer's layers sit in MLPs: pairs of matrices with something cheap in between.
#
# $$Y = \mathrm{GELU}(X A)\, B$$
#
# X has a row for each of the b·s tokens and h columns; A is h × 4h, B is 4h × h.
#
# **Cut A into columns.** A rank with the columns $A_i$ computes $X A_i$: some of the inner features, finished, for
# every token. The GELU looks at one number at a time, so it can be applied right there.
#
# **Cut B into rows.** The rows $B_i$ are those that these very features are multiplied with. What comes out has the
# full shape, and is one part of a sum: $Y = \sum_i \mathrm{GELU}(X A_i)\, B_i$. Taking that sum is the only moment at
# which a rank needs the others.
#
# The other way round it fails: rows of A would give parts of sums *before* the GELU, and
# $\mathrm{GELU}(u + v) \neq \mathrm{GELU}(u) + \mathrm{GELU}(v)$.
#
# The same pair is in every layer twice. In attention, queries, keys and values are cut by columns, so that a rank has
# whole heads, which work alone like the inner features; the output projection takes them, cut by rows.
#
# So there are two places to look after, one on either side of a pair. Megatron-LM, the paper behind this lesson,
# calls them *f* and *g*:
#
# | | forward | backward |
# | --- | --- | --- |
# | *f*, where X enters | nothing travels | all-reduce of X's gradient: b·s·h numbers |
# | *g*, where Y leaves | all-reduce of Y: b·s·h numbers | nothing travels |
#
# Going round a ring, an all-reduce of M bytes makes each of t ranks send 2(t−1)/t · M: 1.5 M with 4 ranks, 1.75 M with
# 8. More ranks mean less work and fewer weights for each, and *not* fewer bytes to send. That is the price.

# %% [markdown]
# ## A worked example
#
# A network guesses the next byte of English text. The text is real and already on your disk: the language reference
# that ships inside Python.

# %%
from pydoc_data.topics import topics

text = "\n".join(topics[name] for name in sorted(topics))
data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
print(f"{len(data):,} bytes, for example:\n\n{topics['pass']}")

# %% [markdown]
# The network sees the last 8 bytes. Each becomes 12 numbers, so a token has h = 96 features. Its MLP is the part that
# we split; here are the whole matrices, the same on whichever rank asks for them.
#
# One trap before any code: PyTorch stores a weight as (out, in), so a **column** of A is a **row** of `w_in`.

# %%
context, h = 8, 96
b, s = 16, 32  # sequences, and tokens in each


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w_in (4h, h), b_in (4h), w_out (h, 4h), b_out (h): whole."""
    return random(4 * h, h, seed=1), random(4 * h, seed=2), random(h, 4 * h, seed=3), random(h, seed=4)


# %% [markdown]
# Now split them by hand. Each rank cuts its piece, computes its part, and one `all_reduce` adds the parts up. (Biases
# have to wait: there is a trap in them too.)
#
# It adds up over a *group*: some of the ranks, or all of them, called the *world*. `dist.new_group` makes a group,
# of the whole world where it is given no list of ranks. `group_desc` is a name for it, which tables and figures show:
# "tp", for tensor parallelism. (A model that is split in several ways has several groups.)

# %%
from fivefold.runtime.ledger import phase


def by_hand(x: Tensor) -> Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    tp = dist.new_group(group_desc="tp")
    w_in, _, w_out, _ = weights()
    with phase("forward"):  # the name that a timeline gives to what happens inside
        columns = w_in.chunk(t, dim=0)[rank]  # (4h/t, h)
        inner = F.gelu(F.linear(x, columns))  # (b, s, 4h/t): finished features
        rows = w_out.chunk(t, dim=1)[rank]  # (h, 4h/t)
        y = F.linear(inner, rows)  # (b, s, h): one part of a sum
        dist.all_reduce(y, group=tp)
    return y


x = random(b, s, h, seed=5)
done = run(by_hand, world_size, x, measure=True)  # measured: what ranks compute and keep, too

w_in, _, w_out, _ = weights()
y = F.linear(F.gelu(F.linear(x, w_in)), w_out)  # the same in this process, whole
for rank, result in enumerate(done.results):
    print(f"rank {rank} is off by at most {(result - y).abs().max():.0e}")

# %% [markdown]
# Every call of `torch.distributed` is on the run's *ledger*, the list of all that its ranks did, and the bytes are what
# the formula says:

# %%
print(f"2(t−1)/t · b·s·h · 4 bytes = {2 * (world_size - 1) / world_size * b * s * h * 4:,.0f} bytes")
done.ledger.traffic()

# %% [markdown]
# A ledger can also be *replayed* on machines that you do not have. Here each rank is an H100, a GPU of 2022, all in one
# server, and h is 128 times as large: 12,288, as in GPT-3. Every rank computes, then every rank stands still for the
# all-reduce. (The thin strip below a rank is its link: what goes over it, and when.)

# %%
from fivefold.runtime.cluster import cluster
from fivefold.runtime.replay import replay

plots.timeline(replay(done.ledger, cluster("h100"), widen=128))

# %% [markdown]
# Forward is done. Backward has a surprise. Ask each rank for the gradient of x:


# %%
def gradient_by_hand(x: Tensor, y_grad: Tensor) -> Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    w_in, _, w_out, _ = weights()
    x = x.clone().requires_grad_()
    part = F.linear(F.gelu(F.linear(x, w_in.chunk(t, dim=0)[rank])), w_out.chunk(t, dim=1)[rank])
    part.backward(y_grad)  # y is the sum of the parts, so each part has the gradient of y
    return x.grad


y_grad = random(b, s, h, seed=6)
x_whole = x.clone().requires_grad_()
F.linear(F.gelu(F.linear(x_whole, w_in)), w_out).backward(y_grad)

parts = run(gradient_by_hand, world_size, x, y_grad).results
for rank, part in enumerate(parts):
    print(f"rank {rank} is off by at most {(part - x_whole.grad).abs().max():.0e}")
print(f"their sum is off by at most {(sum(parts) - x_whole.grad).abs().max():.0e}")

# %% [markdown]
# Each rank knows what *its* columns want of x, and that is only a part. No error, no hang: a number that looks like a
# gradient. So backward needs an all-reduce as well, at the other end of the pair. These two are your first exercises.

# %% [markdown]
# ## Exercises
#
# ### `copy_to_ranks`, the function *f*
#
# Stands where x enters the pair. Every rank of `group` holds the same x, and goes on with it.
#
# - **Forward** returns x as it is. Nothing travels.
# - **Backward** gets this rank's part of x's gradient, and returns the sum over the group: one all-reduce. The tensor
#   that comes in belongs to autograd: leave it as it is.
# - **The function itself** hands both arguments to `_CopyToRanks.apply`.
# - **Checked**: output, gradient, traffic, in groups of some ranks and of all; also the gradient in x + *f*(x), and of
#   two groups in one graph.
#
# <details><summary>Hint: an autograd function, if it is your first</summary>
#
# PyTorch calls `forward(ctx, x, group)` when you call `.apply(x, group)`. Keep on `ctx` what backward will need.
# `backward(ctx, grad)` returns one gradient for each argument of forward: x has one, a group has none.
# `dist.all_reduce(tensor, group=group)` overwrites its tensor; on GPUs it must be contiguous.
# </details>

# %% exercise="tensor.copy_to_ranks"
from fivefold.tensor import copy_to_ranks

# %% check="tensor.copy_to_ranks"
check("tensor.copy_to_ranks", copy_to_ranks)

# %% [markdown]
# ### `sum_over_ranks`, the function *g*
#
# Stands where y leaves the pair. Each rank of `group` holds one part of a sum.
#
# - **Forward** returns the sum: one all-reduce. The part itself stays as it was.
# - **Backward** sends nothing. Every rank has the gradient of the sum: what is that of its part?
# - **Checked**: output, gradient, traffic, and that x is not overwritten (`all_reduce` overwrites its tensor).

# %% exercise="tensor.sum_over_ranks"
from fivefold.tensor import sum_over_ranks

# %% check="tensor.sum_over_ranks"
check("tensor.sum_over_ranks", sum_over_ranks)

# %% [markdown]
# *f* sends nothing forward and sums backward, *g* the reverse: they are called conjugate. Put them on either side of
# the pair that was split by hand, and the gradient is whole on every rank. (`mine` takes your function where it has
# passed its check, and the library's where not, so that the lesson goes on either way.)

# %%
f = mine("tensor.copy_to_ranks", copy_to_ranks)
g = mine("tensor.sum_over_ranks", sum_over_ranks)


def with_f_and_g(x: Tensor, y_grad: Tensor) -> tuple[Tensor, Tensor]:
    rank, t = dist.get_rank(), dist.get_world_size()
    tp = dist.new_group(group_desc="tp")
    w_in, _, w_out, _ = weights()
    x = x.clone().requires_grad_()
    inner = F.gelu(F.linear(f(x, tp), w_in.chunk(t, dim=0)[rank]))
    y = g(F.linear(inner, w_out.chunk(t, dim=1)[rank]), tp)
    y.backward(y_grad)
    return y.detach(), x.grad


done = run(with_f_and_g, world_size, x, y_grad)
for rank, (output, gradient) in enumerate(done.results):
    off = [(output - y).abs().max(), (gradient - x_whole.grad).abs().max()]
    print(f"rank {rank}: output off by at most {off[0]:.0e}, gradient by {off[1]:.0e}")
done.ledger.traffic()

# %% [markdown]
# ### `ColumnLinear`
#
# The first layer of the pair.
#
# - **Built from** the *whole* weight and bias; this rank's part of each becomes a parameter. `shard(full, group, dim)`
#   is there for you: it cuts, copies this rank's piece, and refuses a size that the ranks cannot share.
# - **In, out**: x (…, in), whole on every rank; the output (…, out/t) is this rank's piece.
# - **Travels**: nothing of its own. x passes `enter(x, group)` first, which is *f* where nothing else is given. (Such a
#   function of a tensor and a group is an `Exchange` in the signature. Lesson 04 gives others.)
# - **Checked**: output; gradients of x and of both parameters, also after an optimizer step; traffic; memory (a rank
#   keeps its part of the weights, not the whole); no bias, another `enter`, a size that t does not divide.

# %% exercise="tensor.ColumnLinear"
from fivefold.tensor import ColumnLinear

# %% check="tensor.ColumnLinear"
check("tensor.ColumnLinear", ColumnLinear)

# %% [markdown]
# ### `RowLinear`
#
# The second layer. It takes what a `ColumnLinear` gives.
#
# - **Built from** the whole weight, of which a rank keeps its part, and the bias, of which it keeps a whole copy.
# - **In, out**: x (…, in/t) is this rank's piece of the features; the output (…, out) is whole on every rank.
# - **Travels**: nothing of its own. The product passes `leave(product, group)`, which is *g* if nothing else is given.
# - **The bias** belongs to the output, and not to its parts: decide where it goes.
# - **Checked**: what is checked of a `ColumnLinear`, with another `leave`.
#
# <details><summary>Hint: the bias</summary>
#
# Suppose that there are 4 ranks, and each adds the bias to its part. How often is it in the sum? And if each added a
# quarter of it, what would its gradient be?
# </details>

# %% exercise="tensor.RowLinear"
from fivefold.tensor import RowLinear

# %% check="tensor.RowLinear"
check("tensor.RowLinear", RowLinear)

# %% [markdown]
# ### `MLP`
#
# The pair: a `ColumnLinear` as `self.column`, a GELU, a `RowLinear` as `self.row`.
#
# - **In, out**: x and the output (…, h), both whole on every rank.
# - **Travels**: one all-reduce forward, one backward, nothing in between. `enter` and `leave` are for the two layers.
# - **Checked**: output; gradients, also after an optimizer step; traffic; memory; other arguments, as above.

# %% exercise="tensor.MLP"
from fivefold.tensor import MLP

# %% check="tensor.MLP"
check("tensor.MLP", MLP)

# %% [markdown]
# ### Your layer on real text
#
# Around the MLP stands the rest of the network, small and not split: every rank has all of it. `train` is an ordinary
# training loop. Nothing in it knows of ranks but the group that it hands to the MLP.


# %%
class NextByte(nn.Module):
    """Logits for the next byte, from the `context` bytes before it."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, h // context), nn.LayerNorm(h)
        self.mlp, self.out = mlp, nn.Linear(h, 256)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embedding(windows).flatten(2)  # (b, s, context) -> (b, s, h)
        return self.out(x + self.mlp(self.norm(x)))  # (b, s, 256)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Windows (b, s, context) of the text and the byte (b, s) that follows each; the same on every rank."""
    starts = torch.randint(len(data) - s - context, (b,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([data[i : i + s + context] for i in starts]).long()
    return pieces.unfold(1, context, 1)[:, :-1], pieces[:, context:]


def loss_of(model: NextByte, step: int) -> Tensor:
    windows, following = batch(step)
    return F.cross_entropy(model(windows).flatten(0, 1), following.flatten())


def write(model: NextByte, start: str, length: int) -> str:
    """Let the model go on from `start`, byte by byte, drawing each from its softmax at temperature 0.5."""
    written, draw = list(start.encode()), torch.Generator().manual_seed(1)
    for _ in range(length):
        logits = model(torch.tensor([[written[-context:]]]))[0, 0]
        written.append(int(torch.multinomial((logits / 0.5).softmax(0), 1, generator=draw)))
    return bytes(written).decode(errors="replace")


def train(Layer: type, matrices: tuple[Tensor, ...], steps: int = 300) -> dict:
    tp = dist.new_group(group_desc="tp")
    torch.manual_seed(0)  # so that what is not split starts equal on every rank
    model = NextByte(Layer(*matrices, tp))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return {"losses": losses, "text": write(model, "The following ", 150), "state": model.state_dict()}


# %% [markdown]
# Train it twice, in about 20 seconds: in one process with the whole MLP in plain PyTorch, and on your ranks with yours.
# The losses have to be the same, step by step, but for the last digits: a sum in another order rounds in another way.
# (Each is the loss of one batch, and some batches are harder than others: it does not fall with every step.)


# %%
class WholeMLP(nn.Module):
    """The same MLP in plain PyTorch, for one process."""

    def __init__(self, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, group: dist.ProcessGroup):
        super().__init__()
        self.w_in, self.b_in, self.w_out, self.b_out = (nn.Parameter(w) for w in (w_in, b_in, w_out, b_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.w_in, self.b_in)), self.w_out, self.b_out)


my_MLP = mine("tensor.MLP", MLP)
alone = run(train, 1, WholeMLP, weights()).results[0]
together = run(train, world_size, my_MLP, weights()).results

print(f"\nstep   1 process   {world_size} ranks   difference")
for step in (0, 1, 10, 100, 200, 299):
    one, many = alone["losses"][step], together[0]["losses"][step]
    print(f"{step:4} {one:11.4f} {many:9.4f} {abs(one - many):12.0e}")
torch.testing.assert_close(together[0]["losses"], alone["losses"], rtol=1e-2, atol=0)
assert all(rank["losses"] == together[0]["losses"] for rank in together), "ranks disagree about the loss"

# %% [markdown]
# And this is how they write after 300 steps. Every letter took all the ranks: none of them could have computed one
# alone.

# %%
print(together[0]["text"])

# %% [markdown]
# ### `Attention`
#
# The other half of a transformer's layer is such a pair too. Its heads know nothing of each other: what computes
# queries, keys and values is cut by columns, *head by head*, each rank attends with its own heads, and the output
# projection is cut by rows. Several query heads may read the same key and value head, which saves memory.
#
# ![Two ranks. The rows of the fused weight lie by key head: the queries q0 and q1 that read it, k0, v0, then q2, q3,
# k1, v1. The upper half is rank 0's. Each query head reads its key head; the columns of the output projection give one
# part of Y each, and one arrow adds the parts up.](pictures/03_heads.svg)
#
# - **Built from** whole weights: `qkv_weight` makes queries, keys and values in one product; its rows lie as in the
#   picture, for any number of query heads to a key head. `check_heads(num_heads, num_kv_heads, group)`, ready made,
#   raises the error where heads do not fit.
# - **Made of** `self.qkv`, a `ColumnLinear`, and `self.out`, a `RowLinear`. `enter` and `leave` are for these two.
# - **In between**: queries, keys, values as (b, heads of this rank, s, d), with heads of size d; then `rotate`, if one
#   is given; then the core, softmax(q kᵀ/√d) v with a mask: `causal_attention`, or the one that was given. (d is what
#   the output projection says: it takes `num_heads` · d features.)
# - **Travels**: one all-reduce forward, one backward.
# - **Checked**: output; gradients, also after an optimizer step; traffic; memory; other arguments, as above.
#
# <details><summary>Hint: from (b, s, …) to heads</summary>
#
# What `self.qkv(x)` gives has b · s rows. Each is a list of this rank's key heads, each of these a list of its queries,
# a key, a value, and each of these d numbers: `unflatten(-1, (…, …, …))` says just that. Then move and cut dimensions:
# `permute`, `split`, `flatten`.
# </details>

# %% exercise="tensor.Attention"
from fivefold.tensor import Attention

# %% check="tensor.Attention"
check("tensor.Attention", Attention)

# %% [markdown]
# ### The two ends: `VocabEmbedding`, which hangs
#
# Left and right of the layers stand two large matrices more, with a row for each word of the vocabulary. They are cut
# by words: each rank has V/t of them. To embed a token, the rank that has its row looks it up, and the others give
# zeros. The sum over ranks is the embedding: one all-reduce, forward only.
#
# Below is how somebody wrote it. Their test, with random words, is green. Training on text, with 4 ranks, goes well for
# a while, and then stands still. Mend it where it stands (the `try` below it is the grader's: leave it). Then run its
# cell, the cell with the batches, and the check.

# %% exercise="tensor.VocabEmbedding" bug="skips_its_turn"
from fivefold.tensor import VocabEmbedding

# %% [markdown]
# Words are bytes here, 256 of them. First random ones, then the text, batch by batch:

# %%
sum_over_ranks = mine("tensor.sum_over_ranks", sum_over_ranks)
V = 256


def embedded(Layer: type, tokens: Tensor) -> Tensor:
    tp = dist.new_group(group_desc="tp")
    return Layer(random(V, h, seed=10), tp)(tokens).detach()


inputs = {"random bytes": torch.randint(V, (b, s), generator=torch.Generator().manual_seed(0))}
inputs |= {f"batch {step} of the text": batch(step)[1] for step in range(5)}
try:
    for words, tokens in inputs.items():
        result = run(embedded, world_size, VocabEmbedding, tokens).results[0]
        print(f"{words}: off by at most {(result - random(V, h, seed=10)[tokens]).abs().max():.0e}")
except Deadlock as report:  # without this the cell would stop here
    print(f"\n{words}:\n{report}")

# %% [markdown]
# The report names the ranks that wait, and for whom. Why did somebody not come, in this batch and in none before? In a
# whole model it is worse: a rank that goes home early comes to the *next* all-reduce, of the same size, and the ranks
# add up numbers that have nothing to do with each other. The hang comes at the end of the step, far from the mistake.
#
# *Checked*: output, the weight's gradient, traffic, memory, another `leave`; with words that only some ranks have, and
# a vocabulary that t does not divide.
#
# <details><summary>Hint: how to look</summary>
#
# In this text 0.4% of the bytes are above 127: dashes and quotation marks. Which ranks have a row for such bytes?
# Follow one of them line by line, in a batch without any.
# </details>

# %% check="tensor.VocabEmbedding"
check("tensor.VocabEmbedding", VocabEmbedding)

# %% [markdown]
# ### `vocab_cross_entropy`
#
# At the other end a rank computes the logits of its own words, z (b, s, V/t): the library's `VocabLogits` is a
# `ColumnLinear` for that. The loss of a token needs them all, $\log \sum_j e^{z_j} - z_{\mathrm{target}}$. Putting the
# logits together would undo everything: with 8,192 tokens and 128,256 words they are 4.2 GB in 32-bit numbers, on each
# rank. But the loss needs three *numbers* of a token, and each can be had from the ranks' parts of it:
#
# | | a rank knows | over all ranks |
# | --- | --- | --- |
# | the largest logit m, so that no exponential overflows | the largest of its own | the maximum |
# | $\sum_j e^{z_j - m}$ | the sum over its words | the sum |
# | $z_{\mathrm{target}}$ | its own, where it has that word; else nothing | the sum |
#
# - **In, out**: z (…, V/t); `targets` (…), words of the whole vocabulary, equal on all ranks; one loss a token.
# - **Travels**: at most three all-reduces of one number a token, forward. Nothing backward.
# - **A target** that is `ignore_index` has loss 0, and gives no gradient. z is −∞ where a column belongs to no word
#   (the vocabulary was padded); on the last rank that can be *all* columns.
# - **bfloat16** is computed in float32, and float64 stays: `torch.promote_types(z.dtype, torch.float32)`.
# - **Checked**: losses; the gradient of *each* rank's logits; traffic; memory. Logits can be in the thousands. Neither
#   argument is changed.
#
# <details><summary>Hint: which of them need a gradient</summary>
#
# m is taken away and added again: the loss does not depend on it. For a maximum over ranks there is
# `dist.all_reduce(…, op=dist.ReduceOp.MAX)`, and it may stay outside of autograd (`detach`). The two sums must not: you
# have a function that sums over ranks and knows its gradient. The gradient of z is softmax minus one-hot, *also* on the
# ranks that do not have the target. If you write the loss down as above, autograd finds it.
# </details>
#
# <details><summary>Hint: words of other ranks</summary>
#
# `VocabEmbedding` above has the same question, and answers it with `local` and `mine`.
# </details>

# %% exercise="tensor.vocab_cross_entropy"
from fivefold.tensor import vocab_cross_entropy

# %% check="tensor.vocab_cross_entropy"
check("tensor.vocab_cross_entropy", vocab_cross_entropy)

# %% [markdown]
# What it buys, with 8,192 words, beside a loss for which the logits are put together first:

# %%
my_loss = mine("tensor.vocab_cross_entropy", vocab_cross_entropy)


def all_logits_together(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(pieces, logits.detach(), group=group)
    pieces[group.rank()] = logits  # its own piece is the one with a gradient
    return F.cross_entropy(torch.cat(pieces, -1).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def one_loss(loss: Callable, words: int = 8192) -> tuple[Tensor, Tensor]:
    tp = dist.new_group(group_desc="tp")
    logits = random(b, s, -(-words // tp.size()), seed=tp.rank()).requires_grad_()
    each = loss(logits, batch(0)[1], tp)
    each.mean().backward()
    return each.detach(), logits.grad


gathered, apart = (
    run(one_loss, world_size, all_logits_together, measure=True),
    run(one_loss, world_size, my_loss, measure=True),
)
torch.testing.assert_close(apart.results, gathered.results)
for words, ledger in (("together", gathered.ledger), ("in pieces", apart.ledger)):
    sent = sum(call.sent for call in ledger[0].communications)
    kept = ledger[0].memory.peak_saved
    print(f"{f'logits {words}:':17} each rank sends {sent / 1e3:8,.1f} kB, and keeps {kept / 1e6:5.1f} MB for backward")
print(f"3 · 2(t−1)/t · b·s · 4 bytes =      {3 * 2 * (world_size - 1) / world_size * b * s * 4 / 1e3:8,.1f} kB")

# %% [markdown]
# ### Your model on real text
#
# Everything is split now. A small transformer, made of what you wrote: no rank has a whole matrix, nor the logits of
# all words. What is left whole is small: norms, and a number for each place in the sequence.

# %%
from fivefold.tensor import VocabLogits

MyEmbedding, MyAttention = mine("tensor.VocabEmbedding", VocabEmbedding), mine("tensor.Attention", Attention)
heads = 24  # so that 2, 3, 4, 6 and 8 ranks can share them


def layers_of(number: int, group: dist.ProcessGroup) -> list[nn.Module]:
    """An attention and an MLP for each layer."""
    qkv = random(3 * h, h, seed=11), random(3 * h, seed=12)
    out = random(h, h, seed=13), random(h, seed=14)
    return [
        pair
        for _ in range(number)
        for pair in (MyAttention(*qkv, *out, heads, heads, group), my_MLP(*weights(), group))
    ]


class Transformer(nn.Module):
    """Logits (b, s, V/t) of this rank's words, for the byte after each token."""

    def __init__(self, layers: int, group: dist.ProcessGroup):
        super().__init__()
        self.embedding, self.places = MyEmbedding(random(V, h, seed=10), group), nn.Parameter(torch.zeros(s, h))
        self.pairs = nn.ModuleList(layers_of(layers, group))
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in self.pairs)
        self.logits = VocabLogits(random(V, h, seed=15), group)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        for norm, pair in zip(self.norms, self.pairs, strict=True):
            x = x + pair(norm(x))
        return self.logits(x)


def sequences(step: int) -> tuple[Tensor, Tensor]:
    """Tokens (b, s) and the byte after each."""
    windows, following = batch(step)
    return windows[..., -1], following


def train_transformer(steps: int) -> list[float]:
    tp = dist.new_group(group_desc="tp")
    torch.manual_seed(0)
    model, losses = Transformer(2, tp), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        tokens, following = sequences(step)
        loss = my_loss(model(tokens), following, tp).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


alone, together = run(train_transformer, 1, 60).results[0], run(train_transformer, world_size, 60).results
print(f"\nstep   1 process   {world_size} ranks   difference")
for step in (0, 1, 10, 59):
    print(f"{step:4} {alone[step]:11.4f} {together[0][step]:9.4f} {abs(alone[step] - together[0][step]):12.0e}")
torch.testing.assert_close(together[0], alone, rtol=1e-2, atol=0)
assert all(losses == together[0] for losses in together), "ranks disagree about the loss"

# %% [markdown]
# ### `tensor_traffic`
#
# The bill, as a formula that lesson 10 will plan clusters with: how many *numbers* does a rank send in a step for one
# layer, an attention and an MLP, forward and backward? Arguments b, s, h and t. *Checked*: several sizes, and one rank.

# %% exercise="cost.tensor_traffic"
from fivefold.cost import tensor_traffic

# %% check="cost.tensor_traffic"
check("cost.tensor_traffic", tensor_traffic)

# %% [markdown]
# ### Extra: `OverlappedColumnLinear`
#
# *You can leave this one out: nothing after it needs it. It takes 20 minutes more.*
#
# In a `ColumnLinear`, backward has two products: the gradient of x, which is to be summed over the ranks, and that of
# the weight, which is this rank's own. Autograd computes both, and only then comes to *f*, whose all-reduce everybody
# stands still for. But the weight's gradient does not need that sum. Write the layer with a backward of its own:
#
# - **Backward** computes the gradient of x, *starts* its all-reduce, computes the gradients of weight and bias, waits.
# - **Where x needs no gradient** nothing travels: `ctx.needs_input_grad` has a bool for each argument of forward.
# - **Built from, in, out**: as a `ColumnLinear`, without `enter`.
# - **Checked**: output, gradients, traffic, memory (of the weights), and the *overlap*: your run is replayed on H100s
#   with large matrices, and at most 5% of the all-reduce's time may be left in which a rank stands still for it.
#
# <details><summary>Hint: to start something</summary>
#
# `work = dist.all_reduce(tensor, group=group, async_op=True)` returns at once. After `work.wait()` the sum is there.
# Until then leave the tensor alone.
# </details>
#
# <details><summary>Hint: the gradients of y = x wᵀ + bias</summary>
#
# That of x is `grad @ w`. For those of w and bias all leading dimensions of x and `grad` are rows: `flatten(0, -2)`.
# Keep tensors with `ctx.save_for_backward`.
# </details>

# %% exercise="tensor.OverlappedColumnLinear"
from fivefold.tensor import OverlappedColumnLinear

# %% check="tensor.OverlappedColumnLinear"
check("tensor.OverlappedColumnLinear", OverlappedColumnLinear)

# %% [markdown]
# Two MLPs, forward and backward, on H100s in one server (h = 12,288): first with a `ColumnLinear`, then with yours, on
# one scale of time. Compare backward, the dark part.

# %%
MyOverlapped = mine("tensor.OverlappedColumnLinear", OverlappedColumnLinear)


def two_mlps(overlapped: bool) -> None:
    tp = dist.new_group(group_desc="tp")
    stack = [my_MLP(*weights(), tp) for _ in range(2)]
    for mlp in stack if overlapped else ():
        mlp.column = MyOverlapped(*weights()[:2], tp)
    x = random(b, s, h, seed=7).requires_grad_()
    with phase("forward"):
        y = x * 1
        for mlp in stack:
            y = y + mlp(y)
    with phase("backward"):
        y.backward(random(b, s, h, seed=8))


before, after = (
    replay(run(two_mlps, world_size, way, measure=True).ledger, cluster("h100"), widen=128) for way in (False, True)
)
plots.timeline(before, title=f"Everybody stands still for every all-reduce: {before.share('exposed'):.0%} of the time")

# %%
faster = 1 - after.makespan / before.makespan
still = f"{after.share('exposed'):.0%}"
title = f"Started early, backward's are hidden: ranks stand still for {still}, and the step is {faster:.0%} shorter"
plots.timeline(after, title=title, until=before.makespan)

# %% [markdown]
# Forward stays as it was: there the next product needs the very sum that is on its way.

# %% [markdown]
# ## See it
#
# One step of your model with two layers, measured, with its ends and its loss:

# %%
layers = 2


def one_step() -> None:
    tp = dist.new_group(group_desc="tp")
    torch.manual_seed(0)
    model, (tokens, following) = Transformer(layers, tp), sequences(0)
    with phase("forward"):
        loss = my_loss(model(tokens), following, tp).mean()
    with phase("backward"):
        loss.backward()


measured = run(one_step, world_size, measure=True).ledger

# %% [markdown]
# **The rhythm.** Compute, add up, compute, add up. First with all ranks in one server of H100s, then with the same
# GPUs, one in each server (h = 12,288 again, and 32,768 words). Nothing else is different: the program, the bytes and
# the work are the same. What is short, in the middle, is the loss. (The two have scales of their own.)

# %%
near = replay(measured, cluster("h100"), widen=128)
plots.timeline(near, title=f"In one server, all-reduces take {near.share('exposed'):.0%} of the time")

# %%
far = replay(measured, cluster("h100", gpus_per_server=1), widen=128)
share, slower = far.share("exposed"), far.makespan / near.makespan
plots.timeline(far, title=f"One GPU a server: they take {share:.0%}, and the step is {slower:.1f} times as long")

# %% [markdown]
# This is why tensor parallelism stays inside a server, 8 GPUs in most clusters, and other ways to split go between
# servers.
#
# **The bytes.** Your formula for each layer; one all-reduce of b·s·h numbers for the embedding, forward, and one for
# the logits, backward; and the loss, which hardly shows.

# %%
my_traffic = mine("cost.tensor_traffic", tensor_traffic)
t, once = world_size, 2 * (world_size - 1) / world_size * b * s
numbers = {
    f"{layers} · tensor_traffic": layers * my_traffic(b, s, h, t),
    "the two ends: 2 · 2(t−1)/t · b·s·h": 2 * once * h,
    "the loss: 3 · 2(t−1)/t · b·s": 3 * once,
}
for words, number in numbers.items():
    print(f"{words:36} {4 * number / 1e3:8.1f} kB")
plots.traffic_by_axis(
    measured, {("all_reduce", "tp"): (4 * sum(numbers.values()), "all three together, times 4 bytes")}
)

# %% [markdown]
# **The memory.** Of your layers, without norms and ends, so that the formula is short. Weights shrink to 1/t, and so
# does what waits for backward inside the pairs. The input of each pair does not: every rank keeps every token of it.
# Below, a is the number of heads; a·s/h are the probabilities, s for each token and head, and s² is the mask, one byte
# a pair.


# %%
def layers_alone() -> None:
    tp = dist.new_group(group_desc="tp")
    pairs, x = layers_of(layers, tp), random(b, s, h, seed=7).requires_grad_()
    with phase("forward"):
        for pair in pairs:
            x = x + pair(x)
    with phase("backward"):
        x.backward(random(b, s, h, seed=8))


by_one, by_all = (run(layers_alone, ranks, measure=True).ledger for ranks in (1, world_size))
of_one, of_each = by_one[0].memory, by_all[0].memory
weights_formula = layers * ((12 * h * h + 7 * h) / t + 2 * h) * 4
kept_formula = layers * (b * s * h * (2 + (12 + heads * s / h) / t) * 4 + s * s)
print(f"                    1 rank   one of {t}    formula")
for name, held, each, formula, words in (
    ("weights", of_one.parameters, of_each.parameters, weights_formula, "2 · ((12h² + 7h)/t + 2h) · 4"),
    (
        "kept for backward",
        of_one.peak_saved,
        of_each.peak_saved,
        kept_formula,
        "2 · (bsh · (2 + (12 + a·s/h)/t) · 4 + s²)",
    ),
):
    print(f"{name:17} {held / 1e6:5.2f} MB {each / 1e6:7.2f} MB {formula / 1e6:7.2f} MB = {words}")
plots.memory(by_all)

# %% [markdown]
# **More ranks?** Move the controls. Begin with h = 1,024 and look at 8 ranks; then make h larger. Then put 2 GPUs
# into a server instead of 8. When is it worth a rank more?

# %%
from fivefold import widgets

widgets.column_row_pair(t=4)

# %% [markdown]
# ## Find the bug
#
# Newer models have a *gated* MLP, with three matrices: $Y = (\mathrm{SiLU}(X G) \odot X U)\, D$, called SwiGLU. SiLU is
# u · sigmoid(u), and ⊙ multiplies number by number. Checkpoints keep gate and up in one matrix `w_in` (2·inner, h),
# gates first, because one large product is faster than two.
#
# Somebody has split it over ranks. It runs, it sends what it should, and on one rank it is exactly right. It also
# trains: the loss goes down on 4 ranks as it does on 1. Then a checkpoint that was trained on one GPU is loaded onto
# four.

# %% exercise="tensor.GatedMLP" bug="fused_cut_in_a_row"
from fivefold.tensor import GatedMLP

# %% [markdown]
# Here is what happened to them, on your machine:

# %%
copy_to_ranks, RowLinear = mine("tensor.copy_to_ranks", copy_to_ranks), mine("tensor.RowLinear", RowLinear)


def loss_after_loading(Layer: type, state: dict[str, Tensor]) -> float:
    tp = dist.new_group(group_desc="tp")
    layer = Layer(state["mlp.w_in"].flatten(0, 1), state["mlp.row.weight"], tp)
    model = NextByte(layer)
    model.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("mlp")}, strict=False)
    with torch.no_grad():
        return loss_of(model, step=1000).item()


gated = random(2 * 4 * h, h, seed=1), random(h, 4 * h, seed=3)
trained = run(train, 1, GatedMLP, gated, 100).results[0]["state"]
for t in sorted({1, 2, world_size}):
    print(f"trained on 1 rank, loaded on {t}: loss {run(loss_after_loading, t, GatedMLP, trained).results[0]:.3f}")

# %% [markdown]
# Mend the class `GatedMLP` where it stands, so that the loss is the same on any number of ranks. (The `try` below it is
# the grader's: leave it.) Then run its cell, the cell with the losses, and the check. What a rank keeps as `self.w_in`
# has the shape that the docstring says: keep that, and the traffic, and no more memory than needed.
#
# <details><summary>Hint: how to look</summary>
#
# Take inner = 4 and 2 ranks. Write down the eight rows of `w_in` by name, g0 … g3, u0 … u3, and then those that rank 0
# holds. Which pairs does it multiply?
# </details>

# %% check="tensor.GatedMLP"
check("tensor.GatedMLP", GatedMLP)

# %% [markdown]
# This one is real, and recent: see NeMo Automodel #1324 and Megatron-LM #7161 on GitHub. It passes every check that
# looks at shapes, at traffic, or at whether the loss goes down. Attention has the same trap where a checkpoint has all
# queries first, then all keys, then all values (vLLM #36242): yours lie by head, and can be cut in a row.

# %% [markdown]
# ## The real tool
#
# PyTorch does all of this with `DTensor`: a tensor that knows how it is spread over ranks. Name each layer's cut, and
# `parallelize_module` replaces its parameters. (`0` and `2` are names in the `nn.Sequential`.) Output and gradients
# have to equal yours. First the MLP:


# %%
def with_dtensor(Layer: type) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    theirs = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))
    for parameter, whole in zip(theirs.parameters(), weights(), strict=True):
        parameter.data.copy_(whole)
    parallelize_module(theirs, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    yours = Layer(*weights(), mesh.get_group("tp"))
    results = []
    for model in (theirs, yours):
        x = random(b, s, h, seed=5).requires_grad_()
        y = model(x)
        y.backward(random(b, s, h, seed=6))
        gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
        results.append([y.detach() + 0, x.grad, *gradients])
    names = "output", "x.grad", "w_in.grad", "b_in.grad", "w_out.grad", "b_out.grad"
    for name, one, other in zip(names, *results, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    return {name: (one - other).abs().max().item() for name, one, other in zip(names, *results, strict=True)}


done = run(with_dtensor, world_size, my_MLP)
for name, off in done.results[0].items():
    print(f"{name:10} differs by at most {off:.0e}")

# %% [markdown]
# **Attention.** PyTorch has no fused layout: queries, keys and values are three layers, cut by columns. Each rank then
# has whole heads, and its own code attends with them.


# %%
class TheirAttention(nn.Module):
    """Three layers in the place of one, with the numbers of your fused weight (3h, h)."""

    def __init__(self, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor, out_bias: Tensor):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))
        rows, biases = qkv_weight.view(heads, 3, -1, h), qkv_bias.view(heads, 3, -1)
        for i, layer in enumerate((self.q, self.k, self.v)):
            layer.weight.data, layer.bias.data = rows[:, i].flatten(0, 1), biases[:, i].flatten()
        self.out.weight.data, self.out.bias.data = out_weight.clone(), out_bias.clone()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, h // heads)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        own = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # one fused kernel
        return self.out(own.transpose(1, 2).flatten(2))


def attention_with_dtensor(Layer: type) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = random(3 * h, h, seed=11), random(3 * h, seed=12), random(h, h, seed=13), random(h, seed=14)
    cut = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    theirs = parallelize_module(TheirAttention(*whole), mesh, cut)
    yours, results = Layer(*whole, heads, heads, mesh.get_group("tp")), []
    for model in (theirs, yours):
        x = random(b, s, h, seed=5).requires_grad_()
        y = model(x)
        y.backward(random(b, s, h, seed=6))
        results.append([y.detach() + 0, x.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    names = "output", "x.grad"
    return {name: (one - other).abs().max().item() for name, one, other in zip(names, *results, strict=True)}


for name, off in run(attention_with_dtensor, world_size, MyAttention).results[0].items():
    print(f"{name:10} differs by at most {off:.0e}")

# %% [markdown]
# **The loss.** Inside `loss_parallel()`, `F.cross_entropy` takes logits that are a DTensor cut along the vocabulary,
# and does what yours does. (`Shard(1)`: cut along dimension 1; `Replicate`: whole on every rank.)


# %%
def with_loss_parallel(loss: Callable) -> tuple[Tensor, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    tp, targets = mesh.get_group("tp"), batch(0)[1].flatten()
    own = random(b * s, -(-V // tp.size()), seed=tp.rank())
    theirs, yours = own.clone().requires_grad_(), own.clone().requires_grad_()
    with phase("theirs"), loss_parallel():
        logits = DTensor.from_local(theirs, mesh, [Shard(1)])
        their_loss = F.cross_entropy(logits, DTensor.from_local(targets, mesh, [Replicate()]))
        their_loss.backward()
    with phase("yours"):
        your_loss = loss(yours, targets, tp).mean()
        your_loss.backward()
    return their_loss.to_local().detach(), your_loss.detach(), theirs.grad, yours.grad


done = run(with_loss_parallel, world_size, my_loss)
for their_loss, your_loss, their_grad, your_grad in done.results:
    torch.testing.assert_close(your_loss, their_loss)
    torch.testing.assert_close(your_grad, their_grad)
print(f"loss {your_loss:.4f}; the last rank's gradients differ by at most {(your_grad - their_grad).abs().max():.0e}")
for name in ("theirs", "yours"):
    calls = [f"{call.op} of {call.bytes:,} bytes" for call in done.ledger[0].communications if call.phase == name]
    print(f"{name:6}  {', '.join(calls)}")

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="03.bytes"
bytes_answer = 2 * 2 * 7 / 8 * 2048 * 4096 * 2 / 1e6

# %% check="03.bytes"
check("03.bytes", bytes_answer)

# %% question="03.without_f"
without_f_answer = "c"

# %% check="03.without_f"
check("03.without_f", without_f_answer)

# %% question="03.heads"
heads_answer = 8

# %% check="03.heads"
check("03.heads", heads_answer)

# %% question="03.logits"
logits_answer = 3 * 2 * 7 / 8 * 8192 * 4 / 1e3

# %% check="03.logits"
check("03.logits", logits_answer)

# %% question="03.server"
server_answer = 450 / 50

# %% check="03.server"
check("03.server", server_answer)

# %% [markdown]
# ## Where this stands
#
# | here | Megatron-LM | PyTorch (torchtitan) | DeepSpeed |
# | --- | --- | --- | --- |
# | `copy_to_ranks` | `copy_to_tensor_model_parallel_region` | inside DTensor | inside the layers |
# | `sum_over_ranks` | `reduce_from_tensor_model_parallel_region` | inside DTensor | inside the layers |
# | `ColumnLinear` | `ColumnParallelLinear` | `ColwiseParallel` | `LinearLayer` |
# | `RowLinear` | `RowParallelLinear` | `RowwiseParallel` | `LinearAllreduce` |
# | `Attention` | `SelfAttention`, with `linear_qkv` | `ColwiseParallel` for each of q, k, v | – |
# | `VocabEmbedding` | `VocabParallelEmbedding` | `RowwiseParallel` for an `nn.Embedding` | – |
# | `vocab_cross_entropy` | `vocab_parallel_cross_entropy` | `loss_parallel` | – |
# | `OverlappedColumnLinear` | `LinearWithGradAccumulationAndAsyncCommunication` | – | – |
#
# They are in `megatron/core/tensor_parallel` (`mappings.py`, `layers.py`, `cross_entropy.py`), in
# `torch.distributed.tensor.parallel`, and in `deepspeed/module_inject/layers.py`. torchtitan names the cut of every
# layer of a model in one file, its `parallelize.py`. Megatron-LM makes the vocabulary larger until it divides
# (`--make-vocab-size-divisible-by`), and lays out its fused weight by key head, as you did.
#
# **Papers.** [Megatron-LM](https://arxiv.org/abs/1909.08053) (Shoeybi et al. 2019): section 3 and figure 3 are this
# lesson, with *f* and *g*. [Efficient Large-Scale Language Model Training](https://arxiv.org/abs/2104.04473)
# (Narayanan et al. 2021): section 3.2 says why it stays inside a server.
# [Mesh-TensorFlow](https://arxiv.org/abs/1811.02084) (Shazeer et al. 2018) had the idea of splitting named dimensions
# before. [GLU variants](https://arxiv.org/abs/2002.05202) (Shazeer 2020) has the gated MLP,
# [GQA](https://arxiv.org/abs/2305.13245) (Ainslie et al. 2023) the key heads that query heads share.
