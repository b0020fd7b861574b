# %% [markdown]
# # 7 · Pipeline parallelism 2: 1F1B and interleaving
#
# *100 minutes · 4 exercises and 5 questions, 26 points · 4 processes on this machine, no GPU*
#
# In lesson 06 the trays went down the line, and no cook finished one before all had been started: by then the counters
# were full. Now every cook finishes a tray as soon as it can be finished, and only then starts another. The counters
# stay nearly empty, and lunch is ready at the very same minute. Then a second trick: instead of one long turn at each
# tray, every cook takes two short ones. That makes lunch earlier.
#
# ![Two timelines of 4 ranks and 8 micro-batches, equally long. GPipe: all forwards, then all backwards, each rank keeps
# 8. 1F1B: forwards and backwards alternate, the ranks keep 4, 3, 2 and 1.](pictures/07_early.svg)
#
# **What is split**: the layers, as before. With interleaving each rank has v thin stages, *chunks*, instead of a thick
# one.
#
# **What travels**: b·s·h numbers for each micro-batch at each border, each way. Interleaving has p·v−1 borders instead
# of p−1: a little more than v times as many.
#
# **When it hurts**: when both neighbours send first, and nobody receives. That is at the end of this lesson.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). Schedules are executed by `pipeline.run`, which you wrote in lesson
# 06. The launcher is called by its full name, `fivefold.run`.

# %%
from collections.abc import Mapping, Sequence

import fivefold
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import pipeline, plots, text, widgets
from fivefold.pipeline import (
    Receive,
    Schedule,
    Send,
    gpipe,
    in_order,
    looped,
    simulate,
    straight,
    validate,
)
from fivefold.runtime.cluster import cluster
from fivefold.runtime.replay import replay
from torch import Tensor, nn

from autograde import check, mine, own_parts

# %% tags=["parameters"]
world_size = 4  # ranks of the pipeline: 2 or 4

# %% [markdown]
# ## What is split, what travels, when
#
# GPipe keeps every micro-batch until the last forward is done, and it need not. The last rank has the loss of
# micro-batch 0 as soon as its first forward is done, so it can go backward at once. One rank before that, the gradient
# arrives a little later. From then on each rank does **one forward, one backward**, 1F1B, and what it keeps does not
# grow any more.
#
# | | bubble, of ideal time | kept on rank r | messages at a border |
# | --- | --- | --- | --- |
# | GPipe | (p−1)/m | m | m each way |
# | 1F1B | (p−1)/m | p−r | m each way |
# | interleaved, v chunks | (p−1)/(v·m) | rank 0: (v+1)p−1 chunks, of 1/v each | m each way, at p·v−1 borders |
#
# 1F1B is *not* faster. It is smaller, so that m can be large, and it is m that makes the bubble small.

# %% [markdown]
# ## A worked example
#
# Whose executor runs the schedules of this lesson? Yours of lesson 06, if it lies beside this notebook, saved, and
# passes its check. Otherwise the library's; you need not have solved it.

# %%
yours = own_parts(only=["pipeline.run"])
yours

# %% [markdown]
# How much does GPipe keep? Measure it, on real ranks, with more and more micro-batches. A stage is two layers with a
# GELU between them; for each micro-batch it keeps three tensors until its backward.

# %%
h, tokens = 32, 64


def stage_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(h, h), nn.GELU(), nn.Linear(h, h))


def one_step(schedule: Schedule) -> None:
    pp = dist.new_group(group_desc="pp")
    stages = {number: stage_of(number) for number in schedule.stages_of(pp.rank())}
    inputs = [torch.ones(tokens, h) for _ in range(schedule.num_microbatches)]
    pipeline.run(schedule, stages, inputs, lambda y, i: y.sum(), pp, inputs[0])


def measured(schedule: Schedule):
    """The ledger of one step on real ranks."""
    return fivefold.run(one_step, schedule.num_ranks, schedule, measure=True, parts=yours.taken).ledger


kept_by_one = 3 * tokens * h * 4  # bytes that a stage keeps of one micro-batch
for m in (2, 4, 8):
    peaks = [rank.memory.peak_saved / kept_by_one for rank in measured(gpipe(world_size, m)).ranks]
    print(f"GPipe, m = {m:2}: the ranks keep", ", ".join(f"{peak:g}" for peak in peaks), "micro-batches")

# %% [markdown]
# Now by hand, on two ranks. The last rank alternates from the start. The first has to do one forward more before its
# first gradient can come back. Its list is one forward, then pairs, then one backward.

# %%
by_hand = Schedule(
    "by hand",
    4,
    straight(2),
    [in_order("F F B F B F B B".split(), stages=[0]), in_order("F B F B F B F B".split(), stages=[1])],
)
plots.schedule(by_hand)

# %% [markdown]
# As long as GPipe, and rank 0 keeps 2 instead of 4. With p ranks, how many forwards fit in before the first gradient
# comes back?

# %% [markdown]
# ## Exercises
#
# ### `one_f_one_b`
#
# Rank r warms up with some forwards, then alternates one forward and one backward, then does the backwards that are
# left.
#
# - **In**: p and m, which may be smaller than p. **Out**: a `Schedule` with one stage on each rank.
# - **Checked**: no rule is broken; no rank idles for longer than (p−1)(T_F + T_B); rank r keeps at most p−r
#   micro-batches, and never more than there are; executed, its gradients are those of one process.
#
# <details><summary>Hint: the warm-up</summary>
#
# Draw it for p = 3. Rank 2 needs no warm-up. When does the gradient of micro-batch 0 reach rank 1, and what has rank 1
# had time for? (And what if there are not so many micro-batches?)
# </details>

# %% exercise="pipeline.one_f_one_b"
from fivefold.pipeline import one_f_one_b

# %%
plots.schedule_of(one_f_one_b, world_size, 8)

# %%
plots.schedule_of(one_f_one_b, 4, 2, title="Fewer micro-batches than ranks")

# %% check="pipeline.one_f_one_b"
check("pipeline.one_f_one_b", one_f_one_b)

# %% [markdown]
# Executed and measured. The same time, and less memory: the numbers on the right are bytes of a real run, divided by
# what one micro-batch takes.

# %%
my_1f1b = mine("pipeline.one_f_one_b", one_f_one_b)
STEPS = {"F": 1, "B": 2}
m = 8
for make in (gpipe, my_1f1b):
    ledger = measured(make(world_size, m))
    steps = replay(ledger, cluster("h100"), STEPS).makespan
    peaks = [f"{rank.memory.peak_saved / kept_by_one:g}" for rank in ledger.ranks]
    print(f"{make(2, 2).name:6} {steps:5.1f} steps, the ranks keep {', '.join(peaks)} micro-batches")

# %% [markdown]
# ### `interleaved`
#
# The bubble is the time in which the pipe fills and empties: p−1 stages long. So make the stages shorter. Rank r gets v
# chunks of the model, the stages r, p+r, 2p+r and so on, and a micro-batch goes round the ranks v times. The first
# trip round takes 1/v of the time.
#
# - **In**: p, m and v. p has to divide m: micro-batches go in rounds of p. **Out**: a `Schedule` whose stages are
#   `looped(p, v)`.
# - **Order**: p micro-batches through chunk 0, the same p through chunk 1, … then the next p. Backwards the same way,
#   from the last chunk. After the warm-up they alternate, as before.
# - **Checked**: no rule is broken; no rank idles for longer than p−1 forwards and backwards of *a chunk*; at most
#   2(p−r−1) + (v−1)p + 1 chunks are kept; gradients; an m that p does not divide is a ValueError.
#
# <details><summary>Hint: one number for everything</summary>
#
# Number a rank's forwards k = 0, 1, … v·m−1. Which chunk is the k-th? (It changes every p.) The k-th backward has the
# chunk from the other end. In `in_order`, "F1" is the next forward of the second chunk: it counts micro-batches.
#
# The warm-up is longer than in 1F1B: before the first backward, v−1 chunks have to be done with p micro-batches each.
# </details>

# %% exercise="pipeline.interleaved"
from fivefold.pipeline import interleaved

# %% [markdown]
# Drawn with v = 2. A step is the forward of a chunk here, so that it is half as long as those of the drawings above.

# %%
plots.schedule_of(interleaved, world_size, 2 * world_size, 2)

# %% check="pipeline.interleaved"
check("pipeline.interleaved", interleaved)

# %% [markdown]
# The three side by side, each from a run on your ranks. A thick stage is v chunks, so a chunk's forward takes 1/v step,
# and keeps 1/v as much. The formulas are Narayanan's and Korthikanti's: a bubble of (p−1)/(v·m) of ideal time, and
# 1 + (p−1)/(p·v) times the activations of 1F1B on the first rank.

# %%
my_interleaved = mine("pipeline.interleaved", interleaved)
p, m = world_size, 2 * world_size


def row(schedule: Schedule, v: int) -> str:
    ledger = measured(schedule)
    ran = replay(ledger, cluster("h100"), {"F": 1 / v, "B": 2 / v})
    bubble = (ran.makespan - ran.busy(0)) / ran.busy(0)
    kept = ledger[0].memory.peak_saved / kept_by_one / v
    sends = sum(call.op == "send" for rank in ledger.ranks for call in rank.communications)
    most = {"GPipe": m, "1F1B": p}.get(schedule.name, p * (1 + (p - 1) / (p * v)))
    torch.testing.assert_close(bubble, (p - 1) / (v * m), rtol=0.02, atol=0)
    return f"{schedule.name:17}{v:3}{bubble:10.1%}{(p - 1) / (v * m):10.1%}{kept:12.2f}{most:10.2f}{sends:10}"


print(f"\np = {p}, m = {m}    v    bubble   formula    kept by 0   formula  messages")
print(row(gpipe(p, m), 1))
print(row(my_1f1b(p, m), 1))
print(row(my_interleaved(p, m, 2), 2))
print(row(my_interleaved(p, m, 4), 4))

# %% [markdown]
# ### `sum_copies`
#
# Many language models use one matrix twice: as the embedding, and turned round as the last layer. In a pipeline those
# two places are the first and the last stage, on two ranks. Each has a copy, and backward gives each copy the gradient
# of *its own* use. DualPipe, in the next lesson, has two copies of every stage.
#
# - **In**: the schedule, this rank's stages, the group, and the tied parameter on ranks that have it.
# - **Out**: nothing; afterwards `.grad` is the whole gradient, on both ranks. One without a gradient counts as zero.
# - **Travels**: between two ranks that share something, one message each way, all parameters in it. Otherwise nothing.
# - **Checked**: gradients of a tied weight, and of stages that two ranks hold; messages and bytes.
#
# <details><summary>Hint: who holds it</summary>
#
# `schedule.ranks_of(stage)` are the ranks that hold a stage. A tied parameter is held by those of stage 0 and of the
# last one. The same rank may hold both (ZB-V): then there is one parameter, and autograd has added up already.
# </details>

# %% exercise="pipeline.sum_copies"
from fivefold.pipeline import sum_copies

# %% check="pipeline.sum_copies"
check("pipeline.sum_copies", sum_copies)

# %% [markdown]
# ### Your schedule on real text
#
# A network guesses the next byte of English text, and its embedding is tied to its output. Three trainings: in one
# process; on your ranks with your 1F1B and your `sum_copies`; and with the sum forgotten.

# %%
my_sum = mine("pipeline.sum_copies", sum_copies)
TEXT = text.corpus()
width, s, b, m = 48, 32, 4, 8  # features, tokens, sequences in a micro-batch, micro-batches
layers = 2 * world_size


class Block(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Part(nn.Module):
    """Some blocks; the first part looks bytes up in the tied matrix, the last one scores them with it."""

    def __init__(self, blocks: Sequence[int], first: bool, last: bool, tied: nn.Parameter | None):
        super().__init__()
        self.first, self.last, self.tied = first, last, tied
        self.blocks = nn.Sequential(*map(Block, blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.embedding(x, self.tied) if self.first else x)
        return x @ self.tied.T if self.last else x


def tied_matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(256, width, generator=torch.Generator().manual_seed(7)) / 7)


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, labels = text.sequences(TEXT, m * b, s, seed=step)
    return inputs.unflatten(0, (m, b)), labels.unflatten(0, (m, b))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / m


def train(schedule: Schedule, add, steps: int) -> list[float]:
    pp = dist.new_group(group_desc="pp")
    last, each = schedule.num_stages - 1, layers // schedule.num_stages
    mine_here = schedule.stages_of(pp.rank())
    tied = tied_matrix() if {0, last} & set(mine_here) else None
    parts = {
        n: Part(range(n * each, (n + 1) * each), n == 0, n == last, tied if n in (0, last) else None) for n in mine_here
    }
    optimizer = torch.optim.AdamW({p for part in parts.values() for p in part.parameters()}, lr=3e-3)
    losses = []
    for step in range(steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        loss = lambda logits, i, labels=labels: loss_of(logits, labels[i])  # noqa: E731
        found = pipeline.run(schedule, parts, list(inputs), loss, pp, torch.empty(b, s, width))
        if add is not None:
            add(schedule, parts, pp, tied)
        optimizer.step()
        losses.append(sum(float(value) for value in found.values()))
    return losses


def train_alone(steps: int) -> list[float]:
    model = Part(range(layers), True, True, tied_matrix())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        total = sum(loss_of(model(x), y) for x, y in zip(*batch(step), strict=True))
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


steps = 30
schedule = my_1f1b(world_size, m)
alone = fivefold.run(train_alone, 1, steps).results[0]
summed = fivefold.run(train, world_size, schedule, my_sum, steps, parts=yours.taken).results[-1]
forgotten = fivefold.run(train, world_size, schedule, None, steps, parts=yours.taken).results[-1]
print(f"\nstep   1 process   {world_size} ranks, summed   not summed")
for step in (0, 1, 2, 5, 10, steps - 1):
    print(f"{step:4} {alone[step]:11.4f} {summed[step]:17.4f} {forgotten[step]:12.4f}")
torch.testing.assert_close(summed, alone, rtol=1e-2, atol=0)

# %% [markdown]
# The first loss is right either way. Without the sum the model still learns, as two models that disagree about what a
# byte is. Here the wrong one can even end lower: two matrices are more parameters than one. Its loss does not betray
# it; only a comparison does.

# %% [markdown]
# ## See it
#
# One step of that training, measured: the timeline and the memory of your own run, with T_F = 1 and T_B = 2.

# %%
ledger = fivefold.run(train, world_size, schedule, my_sum, 1, measure=True, parts=yours.taken).ledger
replayed = replay(ledger, cluster("h100"), STEPS)
idle = 1 - replayed.busy(0) / replayed.makespan
print(f"idle for {idle:.1%} of the time; (p−1)/(m+p−1) = {(world_size - 1) / (m + world_size - 1):.1%}")
torch.testing.assert_close(idle, (world_size - 1) / (m + world_size - 1), rtol=0.01, atol=0)
plots.timeline(replayed, title=f"1F1B: as long as GPipe, each rank idles for {idle:.1%} of the time")

# %%
plots.memory(ledger, replayed)

# %% [markdown]
# **What the messages cost.** The same two schedules with links that take time. On fast links the chunks win. On slow
# ones v = 4 loses all that it has gained, and more; v = 2 still wins. Here is the share of the time in which a rank
# idles, by the time that a message takes (a forward of a *thick* stage takes 1).

# %%
from fivefold.pipeline import Durations

print("message takes      0    0.1    0.2    0.4    0.8")
for v in (1, 2, 4):
    shares = []
    for message in (0, 0.1, 0.2, 0.4, 0.8):
        made = my_1f1b(4, 8) if v == 1 else my_interleaved(4, 8, v)
        ran = simulate(made, Durations(1 / v, 1 / v, 1 / v, message))
        shares.append(1 - ran.busy[0] / ran.makespan)
    print(f"v = {v}         " + "".join(f"{share:7.1%}" for share in shares))

# %% [markdown]
# **Explore.** Begin with 1F1B and step through it. Then interleaved, with v = 1, 2, 4; then make messages slow. When
# does the warm-up of the library's schedule stop being long enough? (Times are those of a whole stage: a chunk takes
# 1/v of it. Interleaved with v = 1 is not 1F1B: it is as fast, but its warm-up is twice as long, so that rank 0 keeps
# 2p−1 micro-batches and not p.)

# %%
widgets.schedules("1F1B")

# %% [markdown]
# ## Find the bug
#
# A schedule says what to compute. Before it can run, somebody has to put in who sends what to whom, and when. Here is
# an `order_messages` that does what seems natural: a rank receives right before it needs a value, and sends right after
# it has made one.
#
# With the naive schedule and with GPipe all is well. With 1F1B the ranks hang. On some machines they do not: there,
# small messages are put aside until somebody takes them, and the trouble begins with larger ones.

# %% exercise="pipeline.order_messages" bug="each_rank_for_itself"
from fivefold.pipeline import order_messages

# %% [markdown]
# This sends the messages of a schedule, and nothing else, with sends that wait for their receiver:


# %%
def messages_only(schedule: Schedule) -> None:
    for action in schedule.actions[dist.get_rank()]:
        if isinstance(action, Send):
            dist.send(torch.zeros(3), dst=action.peer)
        elif isinstance(action, Receive):
            dist.recv(torch.zeros(3), src=action.peer)


for made in (gpipe(2, 3), my_1f1b(2, 3), my_1f1b(world_size, 6), my_interleaved(2, 4, 2)):
    try:
        fivefold.run(messages_only, made.num_ranks, order_messages(made))
        print(f"{made.name} on {made.num_ranks} ranks: all ranks come to their ends\n")
    except fivefold.runtime.errors.RunError as error:
        print(f"{made.name} on {made.num_ranks} ranks:\n{error}\n")

# %% [markdown]
# Mend `order_messages`. Then run its cell, the cell with the messages, and the check.
#
# - **Rules**: the computation stays as it is. Each value that another rank needs is sent once and received once, in the
#   same order at both ends. Sends that wait for their receiver never deadlock, whatever the schedule, on 2 ranks too.
# - **Checked**: all that, on paper and on real ranks; a schedule that cannot reach its end is a ValueError.
#
# <details><summary>Hint: somebody who sees both lists</summary>
#
# A rank alone cannot know what its neighbour is doing. But you have all lists in your hands. Go through the schedule in
# an order in which it *could* run, one action at a time, whichever can go next. At the moment at which a value is made,
# write the send into one list and the receive into the other. Why can the message that was written first always happen?
# </details>

# %% check="pipeline.order_messages"
check("pipeline.order_messages", order_messages)

# %% [markdown]
# This one has bitten many: see pytorch #109401 on GitHub. Megatron-LM has calls that send and receive at once
# (`send_forward_recv_backward`), and PyTorch puts both into one batch.

# %% [markdown]
# ## The real tool
#
# `torch.distributed.pipelining` has both schedules. Losses and gradients have to equal those of yours.


# %%
def with_torch(kind: str, schedule: Schedule) -> float:
    from torch.distributed import pipelining

    group, m = dist.group.WORLD, schedule.num_microbatches
    numbers, last = schedule.stages_of(group.rank()), schedule.num_stages - 1
    ours, theirs = ({n: stage_of(n) for n in numbers} for _ in range(2))
    x, y = torch.randn(2, m * tokens, h, generator=torch.Generator().manual_seed(0))

    def square(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    stages = [pipelining.PipelineStage(part, n, last + 1, torch.device("cpu")) for n, part in theirs.items()]
    make = getattr(pipelining, kind)
    steps = make(stages if len(stages) > 1 else stages[0], m, loss_fn=square, scale_grads=False)
    steps.step(*([x] if 0 in theirs else []), **({"target": y} if last in theirs else {}))

    parts, targets = x.chunk(m), y.chunk(m)
    pipeline.run(schedule, ours, parts, lambda output, i: square(output, targets[i]), group, parts[0])
    pairs = [pair for n in numbers for pair in zip(ours[n].parameters(), theirs[n].parameters(), strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad)
    return max(float((one.grad - other.grad).abs().max() / other.grad.abs().max()) for one, other in pairs)


pairs = {
    "Schedule1F1B": my_1f1b(world_size, 8),
    "ScheduleInterleaved1F1B": my_interleaved(world_size, 2 * world_size, 2),
}
for kind, made in pairs.items():
    off = fivefold.run(with_torch, world_size, kind, made, parts=yours.taken).results
    print(f"{kind:24} gradients differ by at most {max(off):.0e} of the largest")

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="07.gain"
gain_answer = "b"

# %% check="07.gain"
check("07.gain", gain_answer)

# %% question="07.kept"
kept_answer = 16 - 5

# %% check="07.kept"
check("07.kept", kept_answer)

# %% question="07.chunks"
chunks_answer = 100 * 7 / (4 * 32)

# %% check="07.chunks"
check("07.chunks", chunks_answer)

# %% question="07.price"
price_answer = "d"

# %% check="07.price"
check("07.price", price_answer)

# %% question="07.tied"
tied_answer = "c"

# %% check="07.tied"
check("07.tied", tied_answer)

# %% [markdown]
# ## Where this stands
#
# | here | PyTorch | Megatron-LM | DeepSpeed |
# | --- | --- | --- | --- |
# | `one_f_one_b` | `Schedule1F1B` | `forward_backward_pipelining_without_interleaving` | `TrainSchedule` |
# | `interleaved` | `ScheduleInterleaved1F1B` | `forward_backward_pipelining_with_interleaving` | not there |
# | `order_messages` | sends and receives in one batch | `send_forward_recv_backward` and its kin | in `TrainSchedule` |
# | `sum_copies` | yours to do | an all-reduce in the embedding group | `TiedLayerSpec` |
#
# They are in `torch/distributed/pipelining`, `megatron/core/pipeline_parallel` and `deepspeed/runtime/pipe`. Llama 3's
# report gives the bubble of its interleaved pipeline as (p−1)/(v·m).
#
# **Papers.** [PipeDream](https://arxiv.org/abs/1806.03377) (Harlap et al. 2018) had one forward, one backward; in
# [Memory-Efficient Pipeline-Parallel DNN Training](https://arxiv.org/abs/2006.09503) (Narayanan et al. 2020) it got the
# flush at the end of each step that you have drawn. [Efficient Large-Scale Language Model
# Training](https://arxiv.org/abs/2104.04473) (Narayanan et al. 2021), section 2.2: interleaving.
# [Reducing Activation Recomputation](https://arxiv.org/abs/2205.05198) (Korthikanti et al. 2022): what it keeps.
# [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783) (2024), section 3.3.
