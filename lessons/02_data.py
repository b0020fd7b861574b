# %% [markdown]
# # 2 · Data parallelism and ZeRO
#
# *120 minutes · 12 exercises and 5 questions, 60 points · 4 processes on this machine, no GPU*
#
# The school kitchen has 1,000 sandwiches to make. Each cook has the whole recipe book and makes sandwiches of their
# own. At noon they hold one meeting: everybody's remarks on every recipe are added up, and all write the same change
# into their books. That meeting is data parallelism. It can begin while the last sandwiches are still being made.
#
# Now look at the shelf. Every cook keeps the same book, the same remarks and the same long diary on how each recipe has
# changed before. Why write the diary four times? Each can look after a quarter of the recipes: their diary, then their
# remarks, in the end the very pages. That is ZeRO.
#
# ![Four ranks. Without ZeRO each holds all parameters, all gradients and all of the optimizer's states. Stage 1 leaves
# each a quarter of the states, stage 2 a quarter of the gradients too, stage 3 a quarter of
# everything.](pictures/02_zero.svg)
#
# **What is split**: the batch. Each of n ranks (processes, one a GPU) trains the whole model on its own sequences. With
# ZeRO, the states of training as well.
#
# **What travels**: gradients, once a step. An all-reduce of Ψ numbers, one for each parameter, makes every rank send
# 2(n−1)/n · Ψ of them.
#
# **When it hurts**: when a rank's own sequence fills its memory, when there are more ranks than sequences, or when the
# meeting takes longer than the work.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). `run(function, 4)` calls a function on four ranks: four processes
# on this machine that talk through `torch.distributed`. An exercise is a piece of the course's library with its body
# taken out; the cell below it checks what you write, on real ranks.

# %%
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import plots, run
from fivefold.cost import DataParallelLimits, activation_bytes, gpt_parameters, step_flops, zero_traffic
from fivefold.data import start_in_order, take_gradients
from fivefold.runtime.cluster import H100, Cluster, Link
from fivefold.runtime.ledger import keep, phase
from fivefold.runtime.renamed import all_gather_single, reduce_scatter_single
from fivefold.runtime.replay import replay
from fivefold.text import corpus, sequences
from fivefold.zero import Shard
from torch import Tensor, nn
from torch.nn import Parameter

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks, each with sequences of its own: 2, 3, 4 or 5

# %% [markdown]
# ## What is split, what travels, when
#
# The loss of a step is a mean over all tokens of the batch, so its gradient is a sum over sequences. Each rank can
# compute its own sequences' part, with a whole copy of the model. When the parts are added up, every rank has the
# gradient of the whole batch, takes the same optimizer step, and the copies stay copies.
#
# An all-reduce is two things, one after the other: a *reduce-scatter*, after which each rank has the sums of its n-th
# part, and an *all-gather*, after which each has all of them. Between the two nobody holds everything. That is where
# ZeRO (Rajbhandari et al. 2020) begins. Mixed-precision Adam keeps 16 bytes a parameter:
#
# | bytes a parameter | no ZeRO | stage 1 | stage 2 | stage 3 |
# | --- | --- | --- | --- | --- |
# | parameter, half precision | 2 | 2 | 2 | **2/n** |
# | gradient, half precision | 2 | 2 | **2/n** | **2/n** |
# | float32 copy, momentum, variance: K = 12 | 12 | **12/n** | **12/n** | **12/n** |
# | *numbers sent, times (n−1)/n* | 2Ψ | 2Ψ | 2Ψ | 3Ψ |
#
# A rank that has the sums of its part can update that part, and needs Adam's states for nothing else (stage 1). The
# sums of other parts are of no use to it (stage 2). All-gather then hands out new *parameters* where plain data
# parallelism hands out gradients: as many bytes. Only stage 3 costs more. It gathers parameters when a layer needs
# them, once forward and once backward.

# %% [markdown]
# ## A worked example
#
# A small transformer guesses the next byte of English text: the language reference that ships inside Python. Ten
# sequences make a batch, which is no multiple of four, and nothing else here divides well either.

# %%
h, heads, s, batch = 30, 3, 32, 10  # features, heads, tokens in a sequence, sequences in a batch


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, h), nn.Embedding(s, h)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.places.weight  # (b, s) -> (b, s, h)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in range(2))
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def make_modules(dtype: torch.dtype) -> Iterator[nn.Module]:
    """One after the other, the same on whichever rank asks for them."""
    torch.manual_seed(0)
    for make in (Embedding, Layer, Layer, Layer, lambda: nn.Linear(h, 256)):
        yield make().to(dtype)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(*make_modules(dtype))


def loss_of(model: nn.Module, step: int, rank: int, n: int) -> Tensor:
    """This rank's part of the mean over the batch's tokens: its own sequences, ⌈batch/n⌉ of them or what is left."""
    inputs, labels = sequences(corpus(), batch, s, seed=step)
    own = slice(rank * -(-batch // n), (rank + 1) * -(-batch // n))
    logits = model(inputs[own])
    return F.cross_entropy(logits.flatten(0, 1), labels[own].flatten(), reduction="sum") / (batch * s)


psi = sum(p.numel() for p in make_model().parameters())
tensors = len(list(make_model().parameters()))
print(f"Ψ = {psi:,} parameters in {tensors} tensors")

# %% [markdown]
# Data parallelism by hand: backward on each rank, then one all-reduce for each parameter.


# %%
def by_hand(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """One parameter's gradient, before and after the sum."""
    dp = dist.new_group(group_desc="dp")  # all ranks, under the name that figures show
    model = make_model(dtype)
    with phase("forward"):  # the name that tables and timelines give to what happens inside
        loss = loss_of(model, 0, dp.rank(), dp.size())
    with phase("backward"):
        loss.backward()
        own = model[1].up.weight.grad.clone()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)
    return own, model[1].up.weight.grad


whole = make_model()
loss_of(whole, 0, 0, 1).backward()  # the same in this process: all sequences
expected = whole[1].up.weight.grad
for rank, (own, summed) in enumerate(run(by_hand, world_size).results):
    off = [(one - expected).abs().max() / expected.abs().max() for one in (own, summed)]
    print(f"rank {rank}: its own gradient is off by {off[0]:.0%}, the sum by {off[1]:.0e}")

# %% [markdown]
# The sum is right. Two things are not good. There is an all-reduce for each of the small tensors (with `measure=True`
# the ledger has what ranks compute and keep, too):

# %%
measured = run(by_hand, world_size, torch.bfloat16, measure=True).ledger
print(f"2(n−1)/n · Ψ · 2 bytes = {2 * (world_size - 1) / world_size * psi * 2:,.0f} bytes")
measured.traffic()

# %% [markdown]
# And all of them come after the work. Here is this very program, replayed on H100s, one in each server, with a 400 Gb/s
# card. (Computing is timed as for 8,192 tokens on a rank, at 40% of the GPU's peak; both computing and bytes grow with
# Ψ, so their ratio is that of a large model. What a message costs by itself is left out, because messages here are so
# small. The last rank may have fewer sequences than the others, and then waits for them.)

# %%
machines = Cluster(H100, between=Link("400 Gb/s", 0.0, 50e9), gpus_per_server=1, efficiency=0.4)
many_tokens = 8192 / (-(-batch // world_size) * s)


def timed(ledger: Any) -> Any:
    return replay(ledger, machines, compute=lambda work: machines.compute_seconds(work.flops * many_tokens))


late = timed(measured)
plots.timeline(late, title=f"All-reduces after backward: ranks stand still for {late.share('exposed'):.0%} of the step")

# %% [markdown]
# Backward goes through the model from its end. The last layer's gradient is whole long before the first layer's, and
# could be on its way. PyTorch tells you when a gradient is there:

# %%
order = []
model = make_model()
for name, p in model.named_parameters():
    p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
loss_of(model, 0, 0, 1).backward()
print("first:", ", ".join(order[:3]), "\nlast: ", ", ".join(order[-3:]))

# %% [markdown]
# ## Exercises
#
# ### `make_buckets`
#
# Few messages, large enough, and filled in the order in which backward finishes their gradients: back to front.
#
# - **In**: parameters (maybe a generator, which can be gone through once), and a limit in bytes (`p.nbytes` are one's).
# - **Out**: a list of lists. The last parameter comes first. A bucket takes the next one while it stays within the
#   limit, and is of one dtype; a parameter larger than the limit has a bucket of its own.
# - **Left out**: what needs no gradient (`p.requires_grad`), with its bytes; a shared parameter's second place. Which
#   is second is said by the order in which they are given; then they are reversed.
# - **Checked**: order, sizes, dtypes and what is left out.
#
# <details><summary>Hint: each parameter once</summary>
#
# `dict.fromkeys(parameters)` keeps each where it comes first. Parameters can be keys; `==` on them is no yes or no.
# </details>

# %% exercise="data.make_buckets"
from fivefold.data import make_buckets

# %% check="data.make_buckets"
check("data.make_buckets", make_buckets)

# %%
bucketed = mine("data.make_buckets", make_buckets)
buckets = bucketed(make_model(torch.bfloat16).parameters(), 20_000)
print([sum(p.nbytes for p in bucket) for bucket in buckets], "bytes in", len(buckets), "buckets")

# %% [markdown]
# ### `sync_gradients`
#
# Sum gradients over ranks while backward goes on. It is called *before* backward, and returns what is to be called
# *after* it.
#
# - **Given**: `start_in_order(buckets, start)` hangs hooks on the parameters. It calls your `start(0)`, `start(1)`, …
#   in this order, each as soon as backward allows; what it returns starts the rest. `take_gradients(bucket)` moves a
#   bucket's gradients into one flat tensor; each `p.grad` is None afterwards.
# - **Start**: one all-reduce of the flat tensor, with `async_op=True`. It returns at once, with a *work*; its `wait()`
#   ends it.
# - **Finish**: start the rest, wait for all, and give each parameter its part of the sum as `p.grad`, in its shape.
# - **Checked**: gradients, in groups of some ranks, with layers that some do not use, and in a second backward; one
#   all-reduce a bucket; **overlap**: replayed where an all-reduce takes as long as one layer's backward, only the last
#   one may be exposed.
#
# <details><summary>Hint: taking a flat tensor apart</summary>
#
# `flat.split([p.numel() for p in bucket])` gives the parts in order, and `part.view_as(p)` the shape.
# </details>

# %% exercise="data.sync_gradients"
from fivefold.data import sync_gradients

# %% check="data.sync_gradients"
check("data.sync_gradients", sync_gradients)

# %% [markdown]
# The same step as above, with your buckets and your overlap:

# %%
sync = mine("data.sync_gradients", sync_gradients)


def overlapped(dtype: torch.dtype = torch.bfloat16) -> None:
    dp = dist.new_group(group_desc="dp")
    model = make_model(dtype)
    with phase("forward"):
        loss = loss_of(model, 0, dp.rank(), dp.size())
    with phase("backward"):
        finish = sync(bucketed(model.parameters(), 20_000), dp)
        loss.backward()
        finish()


early = timed(run(overlapped, world_size, measure=True).ledger)
share, faster = early.exposed(0) / early.makespan, late.makespan / early.makespan
title = f"Started in backward: rank 0 stands still for {share:.0%}, and the step is {faster:.2f} times as fast"
plots.timeline(early, title=title)

# %% [markdown]
# ### `accumulate`
#
# A rank's sequences may not fit into memory at once. So it takes them in micro-batches, one backward each, and PyTorch
# adds up the gradients in `p.grad`.
#
# - **In**: `loss_sum(micro_batch)` runs forward, and gives the *sum* of the losses and the number of tokens, which may
#   differ each time and may be 0 (call backward there all the same). Ranks may have different numbers of micro-batches,
#   and use different layers; each has at least one.
# - **Out**: the mean loss over all tokens of all ranks, without a graph; its gradient is in `p.grad`.
# - **Travels**: nothing before the last micro-batch. There the buckets, by `sync_gradients`, while backward goes on;
#   after `finish()` one small all-reduce, of the sums of losses and tokens together (in float64).
# - **Checked**: loss, gradients, a second step; what travels, and when.
#
# <details><summary>Hint: what to divide, and when</summary>
#
# Three tokens of loss 1 and one token of loss 5: the mean of all four is 8/4 = 2, the mean of the two means is 3. Add
# up sums, of losses, of gradients and of tokens, and divide once, at the very end.
# </details>

# %% exercise="data.accumulate"
from fivefold.data import accumulate

# %% check="data.accumulate"
check("data.accumulate", accumulate)

# %% [markdown]
# ### `partition`
#
# From here on it is ZeRO. A bucket of Ψ' elements is cut into n pieces, and nothing promises that n divides Ψ'.
#
# - **Out**: a `range` of elements for each rank. All have ⌈size/ranks⌉ elements as long as there are so many left; the
#   next is shorter, and those after it are empty.
# - **Checked**: sizes that divide, that do not, fewer elements than ranks, none.

# %% exercise="zero.partition"
from fivefold.zero import partition

# %% check="zero.partition"
check("zero.partition", partition)

# %% [markdown]
# With padding at the very end, the pieces are all of one length, as collectives want them. This is what a `Shard` of
# the library looks after: one rank's piece of a bucket, with AdamW's states for it.
#
# | of a shard | what it is |
# | --- | --- |
# | `parameters`, `group` | the bucket, and the ranks that share it |
# | `full` (n·length) | the bucket's values and the padding; the parameters are views of it |
# | `length`, `piece` (length) | the elements of a piece, with padding; this rank's piece of `full`, a view |
# | `own`, `padding` | the range of the bucket's elements in this rank's piece; the zeros at the end of `full` |
# | `gradient` (length), or None | the sum over ranks of the piece's gradient |
# | `take_gradients()` | moves all of the bucket's gradients into one tensor (n·length) |
# | `add_gradient(piece)` | adds to `gradient` |
# | `update(lr)` | AdamW on `piece`, with `gradient`, which is used up |
# | `allocate()`, `release()` | give `full` its memory back; free it |

# %%
one_layer = Layer()


def show_shards() -> str:
    shard = Shard(list(one_layer.parameters()), dist.group.WORLD)
    return f"elements {shard.own.start:6,} to {shard.own.stop:6,}, and {shard.length - len(shard.own)} of padding"


for rank, words in enumerate(run(show_shards, world_size).results):
    print(f"rank {rank} owns {words}")

# %% [markdown]
# ### `step1`: stage 1
#
# Backward has run; each rank has its own gradients in `p.grad`. Now the step, for every shard:
#
# - Take the gradients; **reduce-scatter** them, which leaves each rank the sum of its piece; `add_gradient`; `update`;
#   **all-gather** the new pieces into `shard.full`. Use `reduce_scatter_single(out, x, group=…)` and
#   `all_gather_single(out, x, group=…)`, over `shard.group`.
# - A shard whose gradient is there already (not None) is not reduced again: that is stage 2, below.
# - **Checked**: the weights of one process with torch's AdamW, after two steps, also in half precision; traffic;
#   memory: states for one's own pieces only, and no gradient left over; stage 2.

# %% exercise="zero.step1"
from fivefold.zero import step1

# %% check="zero.step1"
check("zero.step1", step1)

# %% [markdown]
# ### `reduce_gradients`: stage 2
#
# As `sync_gradients`, for shards: called before backward, returns what is to be called after it.
#
# - **Start** (`start_in_order`, on the shards' parameters): take a shard's gradients, begin a reduce-scatter of them:
#   `reduce_scatter_single(piece, full, group=…, async_op=True)` returns a work, as `all_reduce` does.
# - **Wait** for it when the *next* one is about to start, before its gradients are taken, so that one bucket of whole
#   gradients travels at most; then `add_gradient`. Finish starts the rest, and waits for the last.
# - With several micro-batches each backward gets its own call, and pieces add up. Called without a backward in between,
#   it reduces what is there.
# - **Checked**: pieces, traffic, **overlap** as before, **memory**: the pieces and two whole buckets at the peak.
#
# <details><summary>Hint: what is on its way</summary>
#
# Keep a list with at most one entry: the shard, the piece that will hold its sum, the work. A function that empties it
# is called in two places.
# </details>

# %% exercise="zero.reduce_gradients"
from fivefold.zero import reduce_gradients

# %% check="zero.reduce_gradients"
check("zero.reduce_gradients", reduce_gradients)

# %% [markdown]
# ### `gather_parameters`: stage 3
#
# A module has its parameters only while it runs. Register hooks that see to it; return nothing.
#
# In stage 3 `piece` is a tensor of its own, which stays.
#
# - **Before forward** (`module.register_forward_pre_hook`): `allocate`, all-gather the pieces into `shard.full`.
# - **After forward** (`module.register_forward_hook`): `release`. If the output needs a gradient, its `register_hook`
#   tells when that has been computed: the module's backward is next. Gather again there.
# - **In backward**: `release` when the last of the shard's parameters has its gradient
#   (`p.register_post_accumulate_grad_hook`).
# - **Checked**: outputs and gradients, also after a step, and where a backward leaves a parameter out; **traffic**: one
#   all-gather forward, one backward; **memory**: nothing is whole before, between and after.
#
# <details><summary>Hint: which gradients are still missing</summary>
#
# A set of parameters: filled when backward of the module begins, emptied by the hooks. A hook of a module is called
# with (module, inputs), or (module, inputs, output) after forward; one of a tensor with its gradient.
# </details>

# %% exercise="zero.gather_parameters"
from fivefold.zero import gather_parameters

# %% check="zero.gather_parameters"
check("zero.gather_parameters", gather_parameters)

# %% [markdown]
# ### Your stages on real text
#
# One loop for all. Stage 0 is no ZeRO: its shards are over a group of one rank, so that each has everything. In stage 3
# each module is a shard, in the others each bucket.

# %%
step_1, reduce = mine("zero.step1", step1), mine("zero.reduce_gradients", reduce_gradients)
gather = mine("zero.gather_parameters", gather_parameters)


def build(stage: int, dp: dist.ProcessGroup, dtype: torch.dtype) -> tuple[nn.Sequential, list[Shard]]:
    """In stage 3 each module is sharded as soon as it is made: the model never stands there whole."""
    alone = [dist.new_group([rank]) for rank in range(dp.size())][dp.rank()]
    if stage < 3:
        model = make_model(dtype)
        return model, [Shard(bucket, dp if stage else alone) for bucket in bucketed(model.parameters(), 20_000)]
    model, shards = nn.Sequential(), []
    for module in make_modules(dtype):
        shards.insert(0, Shard(list(module.parameters()), dp, stage=3))  # backward comes to the last one first
        gather(module, shards[0])
        model.append(module)
    return model, shards


def train(stage: int, steps: int, dtype: torch.dtype = torch.float64, clip: Callable | None = None) -> list[float]:
    """The losses of some steps, or with `clip` the norms before clipping; then all weights, in double precision."""
    dp = dist.new_group(group_desc="dp")
    (model, shards), history = build(stage, dp, dtype), []
    for step in range(steps):
        with phase("forward"):
            loss = loss_of(model, step, dp.rank(), dp.size())
        with phase("backward"):
            finish = None
            if stage == 0:
                finish = sync([shard.parameters for shard in shards], dp)
            if stage > 1:
                finish = reduce(shards)
            loss.backward()
            if finish:
                finish()
            finish = None  # it holds what has travelled
        history.append(loss.item())
        if clip:
            if stage < 2:
                reduce(shards)()
            history[-1] = clip([shard.gradient for shard in shards], 1.0, shards[0].group).item()
        if stage < 3:
            step_1(shards, lr=3e-3)
        for shard in shards if stage == 3 else []:
            shard.update(lr=3e-3)
    return [history, *(weights(model, shards) if dtype == torch.float64 else [])]


def weights(model: nn.Module, shards: list[Shard]) -> list[Tensor]:
    """All of them, also where they are released."""
    for shard in shards:
        shard.allocate()
        all_gather_single(shard.full, shard.piece, group=shard.group)
    return [p.detach().clone() for p in model.parameters()]


# %% [markdown]
# Beside it, one process: plain PyTorch, all sequences, no shards. In double precision a mistake cannot hide behind
# rounding, so the tolerance is small: after 40 steps every weight has to agree to 10⁻⁹.

# %%
TOLERANCE = 1e-9  # sums in another order round in another way, and AdamW divides by small numbers


def train_alone(steps: int, clip: bool = False) -> list:
    model, history = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, 0, 1)
        loss.backward()
        history.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() if clip else loss.item())
        optimizer.step()
    return [history, *(p.detach() for p in model.parameters())]


def farthest(many: list, one: list) -> float:
    """The largest difference of two sets of weights, as a share of the largest weight."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(many[1:], one[1:], strict=True))


steps = 40
one = run(train_alone, 1, steps).results[0]
print(f"\none process           loss {one[0][0]:.4f} → {one[0][-1]:.4f}")
for stage in range(4):
    results = run(train, world_size, stage, steps).results
    losses = [sum(rank[0][step] for rank in results) for step in (0, -1)]
    off = max(farthest(rank, one) for rank in results)
    print(f"stage {stage} on {world_size} ranks    loss {losses[0]:.4f} → {losses[1]:.4f}   weights off by {off:.0e}")
    assert off < TOLERANCE, f"stage {stage} ends with other weights than one process"

# %% [markdown]
# The same on 3 and on 5 ranks, where other things do not divide:

# %%
few = run(train_alone, 1, 5).results[0]
for n in (3, 5):
    off = [farthest(run(train, n, stage, 5).results[-1], few) for stage in range(4)]
    print(f"{n} ranks: stages 0 to 3 off by {', '.join(f'{one:.0e}' for one in off)}")
    assert max(off) < TOLERANCE

# %% [markdown]
# ### `clip_grad_norm`
#
# Long gradients are shortened before the step, so that one bad batch does no harm. How long is a gradient of which
# each rank has a piece?
#
# - **In**: this rank's gradients, of any shapes, some maybe empty. `copies`, where it is given, says for each how many
#   ranks of the group hold this very gradient: it counts once, not so many times.
# - **Out**: the norm over all ranks, before, as a scalar tensor in float64. The gradients are scaled in place, on all
#   ranks by the same number: max_norm/(norm + 10⁻⁶), where that is below 1.
# - **Travels**: one all-reduce of one number.
# - **Checked**: norm and gradients, with unequal, empty and replicated pieces, above and below the limit; traffic.

# %% exercise="zero.clip_grad_norm"
from fivefold.zero import clip_grad_norm

# %% check="zero.clip_grad_norm"
check("zero.clip_grad_norm", clip_grad_norm)

# %% [markdown]
# With pieces or with all of it, the norm is that of one process:

# %%
clip = mine("zero.clip_grad_norm", clip_grad_norm)
one = run(train_alone, 1, 5, True).results[0]
print(f"\none process  norms {', '.join(f'{norm:.4f}' for norm in one[0])}")
for stage in range(4):
    many = run(train, world_size, stage, 5, torch.float64, clip).results[0]
    norms = ", ".join(f"{norm:.4f}" for norm in many[0])
    print(f"stage {stage}      norms {norms}   weights off by {farthest(many, one):.0e}")
    assert farthest(many, one) < TOLERANCE

# %% [markdown]
# ### `zero_bytes`
#
# The paper's table: what a rank keeps for Ψ parameters on N ranks, in each stage. Activations are not in it.
#
# - Half-precision parameters and gradients have 2 bytes each; `optimizer_bytes` (K) are the optimizer's. Shares are
#   averages over the ranks: nothing is rounded.
# - Another stage than 0, 1, 2, 3 is a `ValueError`.
# - **Checked**: each stage, for several Ψ, N and K.

# %% exercise="cost.zero_bytes"
from fivefold.cost import zero_bytes

# %% check="cost.zero_bytes"
check("cost.zero_bytes", zero_bytes)

# %% [markdown]
# A model of 7.5 billion parameters, in GB on each rank. The paper's table 1 has the columns 4, 16, 64 and 1,024.

# %%
kept_bytes = mine("cost.zero_bytes", zero_bytes)
ranks = (1, 4, 16, 64, 256, 1024)
print(f"\n{'ranks':8}" + "".join(f"{n:>9,}" for n in ranks))
for stage in range(4):
    print(f"stage {stage} " + "".join(f"{kept_bytes(7.5e9, n, stage) / 1e9:9.2f}" for n in ranks))

# %% [markdown]
# ### `data_parallel_limits`
#
# What data parallelism alone cannot get past, with any stage of ZeRO:
#
# - **Activations** are not split: a rank keeps those of one whole sequence at least.
# - **The batch** is one sequence a rank at least. A batch of fewer than `ranks` is a `ValueError`.
# - **The sync** grows against the work. A ring all-reduce of 2 bytes a parameter takes 2(n−1) rounds, of a message of
#   1/n each: α + β · (2Ψ/n) seconds a round. A rank computes batch/n sequences. Give the first over the second.
# - **Out**: a `DataParallelLimits` with these three, in this order.
# - **Checked**: each, for several trainings.

# %% exercise="cost.data_parallel_limits"
from fivefold.cost import data_parallel_limits

# %% check="cost.data_parallel_limits"
check("cost.data_parallel_limits", data_parallel_limits)

# %% [markdown]
# ## See it
#
# One step of each stage, in half precision, measured.

# %%
ledgers = {stage: run(train, world_size, stage, 1, torch.bfloat16, measure=True).ledger for stage in range(4)}

# %% [markdown]
# **The bytes.** The formula is (n−1)/n of 2Ψ, 2Ψ, 2Ψ and 3Ψ numbers. What is a little more is padding.

# %%
print("          measured     formula")
for stage, ledger in ledgers.items():
    sent = max(sum(call.sent for call in own.communications) for own in ledger.ranks)
    formula = 2 * zero_traffic(psi, world_size, stage)
    print(f"stage {stage} {sent:9,.0f} B {formula:9,.0f} B  {sent / formula - 1:+.2%}")
    assert 0 <= sent / formula - 1 < 0.01

# %%
sizes = [sum(p.numel() for p in module.parameters()) for module in make_model()]
padded = sum(world_size * -(-size // world_size) for size in sizes)  # each module is a shard
pass_bytes = 2 * padded * (world_size - 1) / world_size
formulas = {
    ("all_gather", "dp"): (2 * pass_bytes, "2 · (n−1)/n · Ψ · 2"),
    ("reduce_scatter", "dp"): (pass_bytes, "(n−1)/n · Ψ · 2"),
}
plots.traffic_by_axis(ledgers[3], formulas)

# %% [markdown]
# **The memory**: at its peak, beside your `zero_bytes`. What sticks out is what is whole for a moment. Stages 0 and 1
# take a bucket's gradients out of `p.grad` (in stage 0, over a group of one rank, the "piece" of it is a whole bucket
# more); stages 2 and 3 have a bucket that travels and one that backward is making; stage 3 has a module or two that are
# gathered. In this small model one of five modules is a large part; in a large
# model a bucket is nothing.

# %%
held = {}
for stage, ledger in ledgers.items():
    memory = ledger[0].memory
    held[f"stage {stage}"] = {name: getattr(memory, name) for name in ("parameters", "gradients", "optimizer")}
formula = {f"stage {stage}": kept_bytes(psi, world_size, stage) for stage in range(4)}
for name, parts in held.items():
    kept = ", ".join(f"{part} {amount / 1e3:5.0f} kB" for part, amount in parts.items())
    total = sum(parts.values())
    print(f"{name}: {kept}; together {total / 1e3:4.0f} kB, formula {formula[name] / 1e3:4.0f} kB")
least = sum(held["stage 3"].values()) / sum(held["stage 0"].values())
plots.kept_by_stage(
    held, formula, f"Stage 3 holds {least:.0%} of what a rank holds without ZeRO, on {world_size} ranks"
)

# %% [markdown]
# **The rhythm.** Stage 3 on the machines from above: gather, compute, let go; backward gathers again, and sends its
# gradients. Your `gather_parameters` waits for what it gathers, so that is exposed. Real ones gather the next module
# while this one computes.

# %%
third = timed(ledgers[3])
plots.timeline(third, title=f"Stage 3 stands still for {third.share('exposed'):.0%} of the step: nobody gathers ahead")

# %% [markdown]
# **A real model.** Begin with stage 2 on 64 ranks, and go through the stages. Then take the 175B model: which is the
# first combination that fits into 80 GB? And with K = 6?

# %%
from fivefold import widgets

widgets.zero_memory(ranks=64)

# %% [markdown]
# **The three limits.** A GPT of 7.5 billion parameters, from the Megatron-LM paper: 36 layers, h = 4,096, 32 heads,
# 2,048 tokens, 512 sequences a step. Stage 3, on H100s at 40% of their peak, with one 400 Gb/s card each.

# %%
limits_of = mine("cost.data_parallel_limits", data_parallel_limits)
layers, width, length, vocabulary, sequences_a_step = 36, 4096, 2048, 51200, 512
parameters = gpt_parameters(layers, width, vocabulary, length)
activations = layers * activation_bytes(1, length, width, 32)
seconds = machines.compute_seconds(step_flops(1, length, layers, width, vocabulary, recompute="none"))
ranks = [1, 8, 16, 32, 64, 128, 256, 512]
limits = [limits_of(n, sequences_a_step, parameters, activations, seconds, alpha=4e-6, beta=1 / 50e9) for n in ranks]
print(f"Ψ = {parameters / 1e9:.2f} billion; a sequence takes {seconds:.2f} s and keeps {activations / 1e9:.1f} GB")
print("ranks   states, stage 3   activations   smallest batch   sync over computing")
states = [kept_bytes(parameters, n, 3) for n in ranks]
for n, state, limit in zip(ranks, states, limits, strict=True):
    kept = f"{state / 1e9:14.2f} GB {limit.activation_bytes / 1e9:10.1f} GB"
    print(f"{n:5} {kept} {limit.smallest_batch:16} {limit.sync_over_compute:21.2f}")
over = next(n for n, limit in zip(ranks, limits, strict=True) if limit.sync_over_compute > 1)
columns = zip(*limits, strict=True)
title = "ZeRO takes the states away. Activations stay, the batch ends at 512 ranks, and "
title += f"from {over} ranks on the sync takes longer than the work"
plots.data_parallel_limits(ranks, states, *columns, sequences_a_step, 80e9, title)

# %% [markdown]
# Each limit has a way out in a later lesson: split the layers' matrices (3), their tokens (4, 5), or the layers
# themselves (6 to 8), and one sequence is no longer the work of one rank.

# %% [markdown]
# ## Find the bug
#
# ### The buckets that start in order
#
# This is how somebody wrote `start_in_order`. It starts each bucket at the earliest moment there is. Every model whose
# layers run in the same order on all ranks is trained right.

# %% exercise="data.start_in_order" bug="as_they_come"
from fivefold.data import start_in_order

# %% [markdown]
# Now a model whose layers do not: each rank goes through them in an order of its own. (Models with branches do so, and
# a rank may skip a layer.) The gradients of all layers, summed over the ranks, beside those of one process:


# %%
def in_my_order(layers: nn.ModuleList, rank: int, n: int) -> Tensor:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for i in range(n):
        x = torch.tanh(layers[(rank + i) % n](x))
    return x.square().sum()


def some_layers(n: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(6, 6) for _ in range(n))


def branches(start_in_order: Callable) -> list[Tensor]:
    dp, under_way = dist.new_group(group_desc="dp"), {}
    rank, n = dp.rank(), dp.size()
    layers = some_layers(n)
    buckets = [list(layer.parameters()) for layer in reversed(layers)]

    def start(i: int) -> None:
        flat = torch.cat([p.grad.flatten() for p in buckets[i]])
        under_way[i] = flat, dist.all_reduce(flat, group=dp, async_op=True)

    finish = start_in_order(buckets, start)
    in_my_order(layers, rank, n).backward()
    finish()
    for _, work in under_way.values():
        work.wait()
    return [under_way[i][0] for i in range(n)]


layers = some_layers(world_size)
for rank in range(world_size):
    in_my_order(layers, rank, world_size).backward()
right = [torch.cat([p.grad.flatten() for p in layer.parameters()]) for layer in reversed(layers)]
found = run(branches, world_size, start_in_order).results[0]
for i, (got, wanted) in enumerate(zip(found, right, strict=True)):
    print(f"bucket {i} is off by {(got - wanted).abs().max() / wanted.abs().max():.0e}")

# %% [markdown]
# No error, no hang: the buckets have one size, so that any two of them can be added. Mend it, run the cell above again,
# then the check.
#
# <details><summary>Hint: how to look</summary>
#
# Take two ranks, and write down which all-reduce each calls first. A group pairs the k-th call of one rank with the
# k-th of every other.
# </details>

# %% check="data.start_in_order"
check("data.start_in_order", start_in_order)

# %% [markdown]
# PyTorch's DDP holds to the same rule: buckets are reduced in order, whichever is ready first (Li et al. 2020, section
# 3.2.3 has the deadlock and the wrong sum that follow otherwise).
#
# ### The gradients that were taken
#
# `take_gradients` lays a bucket's gradients one after the other. This one gives the right tensor, and stage 2 trains as
# it should. Then somebody looks at the memory. And somebody else takes two micro-batches.

# %% exercise="data.take_gradients" bug="gradients_stay"
from fivefold.data import take_gradients


# %%
def two_micro_batches(take_gradients: Callable, number: int) -> float:
    """The norm of the gradient of some micro-batches' sum, reduced after each of them, as in stage 2."""
    dp = dist.new_group(group_desc="dp")
    model, shards = build(2, dp, torch.float64)
    for micro_batch in range(number):
        loss_of(model, micro_batch, dp.rank(), dp.size()).backward()
        for shard in shards:
            full = take_gradients(shard.parameters, shard.padding)
            piece = full.new_empty(shard.length)
            reduce_scatter_single(piece, full, group=dp)
            shard.add_gradient(piece)
            full = None
    return clip([shard.gradient for shard in shards], 1e9, dp).item()


whole = make_model()
for number in (1, 2):
    loss_of(whole, number - 1, 0, 1).backward()
    norm = torch.cat([p.grad.flatten() for p in whole.parameters()]).norm().item()
    done = run(two_micro_batches, world_size, take_gradients, number, measure=True)
    print(f"{number} micro-batch{'es' * (number > 1)}: norm {done.results[0]:.4f}, in one process {norm:.4f}")

# %% [markdown]
# The gradient of two micro-batches is too long, and it points elsewhere. Mend the function, run the cell above again,
# then the check.
#
# <details><summary>Hint: how to look</summary>
#
# Backward *adds* to `p.grad`. Write down what is in it after the first backward, after the first reduction, and after
# the second backward.
# </details>

# %% check="data.take_gradients"
check("data.take_gradients", take_gradients)

# %% [markdown]
# ## The real tool
#
# PyTorch has all of this: `DistributedDataParallel` (buckets and overlap), `ZeroRedundancyOptimizer` (stage 1), and
# `fully_shard`, known as FSDP2 (stage 3). Each averages gradients over ranks where your functions sum, so the loss is
# taken n times. Five steps; the weights have to be those of the stages above, with what you wrote in them.


# %%
def with_torch(tool: str, steps: int) -> list[Tensor]:
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, n = dist.get_rank(), dist.get_world_size()
    plain = model = make_model()
    if tool == "FSDP2":
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of outputs changed in place, which nobody does here
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
        for module in [*model, model]:
            fully_shard(module, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    if tool == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        (n * loss_of(model, step, rank, n)).backward()
        optimizer.step()
    return [[], *(p.full_tensor() if tool == "FSDP2" else p.detach() for p in plain.parameters())]


sync = mine("data.sync_gradients", sync_gradients)  # again: they may use what you mended above
reduce = mine("zero.reduce_gradients", reduce_gradients)
print()
for tool, stage in (("DDP", 0), ("ZeroRedundancyOptimizer", 1), ("FSDP2", 3)):
    theirs, yours = run(with_torch, world_size, tool, 5).results[0], run(train, world_size, stage, 5).results[0]
    print(f"{tool:24} and stage {stage} differ by at most {farthest(yours, theirs):.0e}")
    assert farthest(yours, theirs) < TOLERANCE

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="02.bytes"
bytes_answer = 2 * 63 / 64 * 7.5e9 * 2 / 1e9

# %% check="02.bytes"
check("02.bytes", bytes_answer)

# %% question="02.mean"
mean_answer = (100 * 3 + 300 * 2) / 400

# %% check="02.mean"
check("02.mean", mean_answer)

# %% question="02.fits"
fits_answer = 16 * 70 / 80

# %% check="02.fits"
check("02.fits", fits_answer)

# %% question="02.order"
order_answer = "c"

# %% check="02.order"
check("02.order", order_answer)

# %% question="02.floor"
floor_answer = "d"

# %% check="02.floor"
check("02.floor", floor_answer)

# %% [markdown]
# ## Where this stands
#
# | here | PyTorch | Megatron-LM | DeepSpeed |
# | --- | --- | --- | --- |
# | `make_buckets`, `sync_gradients` | `DistributedDataParallel` | `DistributedDataParallel` of its own | stage 0 |
# | `accumulate` | `no_sync()`, and your own loss | `calculate_per_token_loss` | in the engine |
# | `step1` | `ZeroRedundancyOptimizer` | `--use-distributed-optimizer` | `"stage": 1` |
# | `reduce_gradients` | `fully_shard`, not resharded | – | `"stage": 2` |
# | `gather_parameters` | `fully_shard` | its own FSDP | `"stage": 3` |
# | `clip_grad_norm` | `clip_grad_norm_` on DTensors | `get_grad_norm_fp32` | inside the engine |
#
# Llama 3 was trained with FSDP as the outermost of its axes, because its bytes are the easiest to hide; DeepSeek-V3
# with ZeRO-1. Both have other axes inside: the three limits say why.
#
# A mean of means over unlike many tokens has happened to well-known projects: see torchtitan #1733 on GitHub, and
# transformers #35203. So has clipping by a rank's own norm: torchtitan #766.
#
# **Papers.** [ZeRO](https://arxiv.org/abs/1910.02054) (Rajbhandari et al. 2020): section 5 has the three stages,
# section 7 their traffic, table 1 is yours. [PyTorch Distributed](https://arxiv.org/abs/2006.15704) (Li et al. 2020):
# buckets, hooks, and the order. [PyTorch FSDP](https://arxiv.org/abs/2304.11277) (Zhao et al. 2023) gathers ahead.
# [Ring all-reduce](https://doi.org/10.1016/j.jpdc.2008.09.002) (Patarasuk and Yuan 2009) is why n ranks do not cost n
# times as much. [AdamW](https://arxiv.org/abs/1711.05101) (Loshchilov and Hutter 2019) is what a shard's `update` does.
