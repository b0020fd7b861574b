# %% [markdown]
# # 6 · Pipeline parallelism 1: naive and GPipe
#
# *110 minutes · 6 exercises and 5 questions, 34 points · 4 processes on this machine, no GPU*
#
# The school kitchen makes 1,000 sandwiches in a line: one cook cuts, one butters, one fills, one wraps. If all 1,000
# go down the line as one tray, three cooks stand and watch the fourth. So they send ten trays of 100. Now everybody
# works, but for a while at the start, when the last cook has nothing yet, and at the end, when the first has nothing
# left. That while is this lesson.
#
# ![Four ranks in a row, each with a quarter of the layers. Activations go to the right, gradients to the left. Below,
# time: four micro-batches go forward as a staircase from rank 0 to rank 3, then backward from rank 3 to rank 0. Between
# its forwards and its backwards each rank stands idle.](pictures/06_line.svg)
#
# **What is split**: the layers. Each of p ranks has one *stage*, some layers that follow each other, and nothing of
# the rest. The batch is cut into m *micro-batches*.
#
# **What travels**: what one stage hands to the next, b·s·h numbers for each micro-batch at each border, and their
# gradients on the way back. No all-reduce anywhere.
#
# **When it hurts**: when there are few micro-batches. Ranks idle for (p−1)/(m+p−1) of the time.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). An exercise is a piece of the course's library with its body taken
# out; the cell below it checks what you write. One of them is called `run`, so here the launcher keeps its full name:
# `fivefold.run(function, 4)` calls a function on four ranks.

# %%
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate

import fivefold
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import plots, widgets
from fivefold.pipeline import (
    Action,
    Backward,
    Durations,
    Forward,
    InputGradient,
    Receive,
    Schedule,
    Send,
    Value,
    Values,
    WeightGradient,
    in_order,
    simulate,
    split_backward,
    straight,
    with_messages,
)
from fivefold.pipeline.execute import Loss
from fivefold.runtime.ledger import work
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks of the pipeline: 2, 3, 4 or 6

# %% [markdown]
# ## What is split, what travels, when
#
# A model of 16 layers on 4 ranks: rank 0 has layers 0 to 3, rank 1 has 4 to 7, and so on. That is the whole idea, and
# it is cheap: a rank holds 1/p of the weights, of their gradients and of the optimizer's state, and all that leaves it
# is one activation for each border. For a micro-batch of b sequences of s tokens with h features that is
#
# $$b \cdot s \cdot h \text{ numbers forward, and as many backward, at each of the } p-1 \text{ borders.}$$
#
# Compare lesson 03, where *every layer* all-reduced that much twice. This is why pipelines cross from server to server
# and tensor parallelism stays inside one.
#
# The price is time. Stage r cannot start before stage r−1 has handed something on, and in backward it is the other
# way round. Let a forward of one micro-batch on one stage take T_F, and a backward T_B. (A backward makes two
# gradients, that of the input and that of the weights, so T_B is about 2·T_F.)
#
# | | what a rank does | time of a step |
# | --- | --- | --- |
# | one process | everything | p·m·(T_F + T_B) |
# | **naive** pipeline | one micro-batch at a time, all others wait | p·m·(T_F + T_B) |
# | **GPipe** | all forwards, then all backwards | (m + p − 1)·(T_F + T_B) |
#
# A perfect pipeline would take m·(T_F + T_B). What GPipe takes longer, (p−1)·(T_F + T_B), is the **bubble**.

# %% [markdown]
# ## A worked example
#
# One micro-batch, by hand. Every rank has one small stage. Forward, it receives an activation, runs its stage, and
# sends what comes out. Backward, it receives the gradient of that output, and sends the gradient of its input.
#
# Look at two lines. `requires_grad_()` makes the received tensor a leaf of *this rank's* graph, so that autograd will
# compute its gradient. And `y.backward(grad)` goes on where the next rank's backward has ended. The graph of the whole
# model exists nowhere: each rank has its own piece, and messages are the glue.

# %%
b, h = 8, 16


def small_stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(h, h), nn.Tanh())


def by_hand(x: Tensor, target: Tensor) -> Tensor:
    rank, p = dist.get_rank(), dist.get_world_size()
    pp = dist.new_group(group_desc="pp")  # all ranks, under the name that figures show
    stage = small_stage(rank)
    if rank > 0:
        x = torch.empty(b, h)
        dist.recv(x, src=rank - 1, group=pp)
        x.requires_grad_()
    with work("F", microbatch=0):  # for the timeline: this is the forward of micro-batch 0
        y = stage(x)
    if rank < p - 1:
        dist.send(y.detach(), dst=rank + 1, group=pp)
        grad = torch.empty(b, h)
        dist.recv(grad, src=rank + 1, group=pp)
    else:
        y, grad = (y - target).square().sum(), None  # the last rank has the loss
    with work("B", microbatch=0):
        y.backward(grad)
    if rank > 0:
        dist.send(x.grad, dst=rank - 1, group=pp)
    return stage[0].weight.grad


x, target = torch.randn(2, b, h, generator=torch.Generator().manual_seed(0))
done = fivefold.run(by_hand, world_size, x, target, measure=True)

whole = nn.Sequential(*map(small_stage, range(world_size)))
(whole(x) - target).square().sum().backward()
for rank, grad in enumerate(done.results):
    print(
        f"rank {rank}: gradient of the weight is off by at most {(grad - whole[rank][0].weight.grad).abs().max():.0e}"
    )

# %% [markdown]
# Right, and slow. Replayed with T_F = 1 and T_B = 2, and links that cost next to nothing:

# %%
from fivefold.runtime.cluster import cluster
from fivefold.runtime.replay import replay

STEPS = {"F": 1, "B": 2}  # what a forward and a backward cost, in steps
replayed = replay(done.ledger, cluster("h100"), STEPS)
plots.timeline(replayed, title=f"One micro-batch: {world_size} ranks, of which one works at a time")

# %% [markdown]
# More micro-batches fill the gaps, if every rank knows what to do next. That list of what to do is a **schedule**: for
# each rank, actions in order. It runs nothing. It is data, to be printed, drawn, judged, and later executed.
#
# `Forward(stage, microbatch)` and `Backward(stage, microbatch)` are actions. `in_order` writes a rank's list in short:
# micro-batches are numbered as they come.

# %%
print(in_order(["F", "F", "B", "B"], stages=[2]))
print()
two_ranks = Schedule(
    "by hand",
    2,  # micro-batches
    straight(2),  # stage r is on rank r
    [in_order(["F", "F", "B", "B"], stages=[0]), in_order(["F", "B", "F", "B"], stages=[1])],
)
print(two_ranks)
plots.schedule(two_ranks)

# %% [markdown]
# Under each rank stands what it *keeps*: a forward leaves activations behind that its backward will need. A schedule
# that cannot be run is drawn too, as far as it goes. Here rank 1 wants to go backward before it has been forward:

# %%
wrong = Schedule(
    "wrong",
    2,
    straight(2),
    [in_order(["F", "F", "B", "B"], stages=[0]), [Forward(1, 0), Backward(1, 1), Forward(1, 1), Backward(1, 0)]],
)
plots.schedule(wrong)

# %% [markdown]
# ## Exercises
#
# ### `naive`
#
# The schedule of one micro-batch at a time: forward through all ranks, backward through all ranks, then the next.
#
# - **In**: the number of ranks p, and of micro-batches m. **Out**: a `Schedule` with one stage on each rank.
# - **Checked**: no rule is broken; a rank never keeps more than one micro-batch; executed on real ranks, its gradients
#   are those of one process. Many sizes, p = 1 among them.

# %% exercise="pipeline.naive"
from fivefold.pipeline import naive

# %% [markdown]
# This draws whatever your function gives, right or wrong:

# %%
plots.schedule_of(naive, world_size, 3)

# %% check="pipeline.naive"
check("pipeline.naive", naive)

# %% [markdown]
# ### `gpipe`
#
# All forwards, then all backwards.
#
# - **In, out**: as above.
# - **Checked**: no rule is broken; every forward of a rank comes before its first backward; no rank idles for longer
#   than (p−1)(T_F + T_B), at equal and at unequal durations; at most m micro-batches are kept; gradients.
# - In which order the backwards come is yours to choose, as long as the bubble stays what it is.

# %% exercise="pipeline.gpipe"
from fivefold.pipeline import gpipe

# %%
plots.schedule_of(gpipe, world_size, 6)

# %% check="pipeline.gpipe"
check("pipeline.gpipe", gpipe)

# %% [markdown]
# ### `bubble`
#
# The bubble as a share. Of what? GPipe's paper divides the idle time by the *total* time, Megatron-LM's by the *ideal*
# time, that of the work alone. Both call it the bubble.
#
# - **In**: p, m, v, and `of`, "total" or "ideal". v is for the next lesson: with v thinner stages on each rank, the
#   idle time is that of (p−1)/v micro-batches instead of p−1. **Out**: a number, 0.2 for 20%.
# - **Checked** against simulated schedules, at v = 1 and above; another `of` is a ValueError.

# %% exercise="cost.bubble"
from fivefold.cost import bubble

# %% check="cost.bubble"
check("cost.bubble", bubble)

# %% [markdown]
# The two denominators side by side, from simulated schedules and from your formula. Where a paper says "the bubble is
# 21.9%", ask of what.

# %%
my_gpipe, my_bubble = mine("pipeline.gpipe", gpipe), mine("cost.bubble", bubble)

print("\n             simulated, share of       your formula")
print("  p    m     total      ideal        total      ideal")
for p, m in [(4, 1), (4, 4), (4, 8), (4, 16), (8, 32), (16, 32)]:
    ran = simulate(my_gpipe(p, m), Durations(forward=1, input_gradient=1, weight_gradient=1))
    idle, work_time = ran.idle_by_makespan[0], ran.busy[0]
    print(
        f"{p:3} {m:4} {idle / ran.makespan:9.1%} {idle / work_time:10.1%}"
        f"   {my_bubble(p, m):10.1%} {my_bubble(p, m, of='ideal'):10.1%}"
    )

# %% [markdown]
# ### `partition_layers`
#
# Layers do not all cost the same: an embedding is nearly free, the last matrix over the vocabulary is not. A pipeline
# is as slow as its slowest stage.
#
# - **In**: what each layer costs, and how many stages. **Out**: one `range` of layers for each stage, in order.
# - **Checked**: each layer is in one stage, in order, none empty; the most expensive stage is as cheap as can be (any
#   cut that reaches this is right); too many stages, or none, are a ValueError.
#
# <details><summary>Hint: a smaller question</summary>
#
# Where does the last stage start? Try every place. To its left there is the same task with one stage less. Layers and
# stages are few, so each smaller task can be remembered (`functools.cache`).
# </details>

# %% exercise="pipeline.partition_layers"
from fivefold.pipeline import partition_layers

# %% check="pipeline.partition_layers"
check("pipeline.partition_layers", partition_layers)

# %% [markdown]
# One piece is missing before a schedule can run: its messages. `with_messages` puts them into the lists, as entries of
# their own, `Send` and `Receive`. Here is what they look like, printed and as data:

# %%
print(with_messages(two_ranks))
for action in with_messages(two_ranks).actions[1]:
    print(f"{action!s:7}", repr(action))

# %% [markdown]
# `0F1` is the forward of stage 0, micro-batch 1. `0a1>1` sends the *activation* that it made to rank 1, and `0a1<0`, in
# the list of rank 1, receives it from rank 0. `1g0>0` and `1g0<1` do the same with the *gradient* that stage 1 made for
# micro-batch 0. `action.value` is a `Value("activation" or "gradient", stage, micro-batch)`, named after the stage that
# made it; `action.peer` is the other rank, by its place in the group. `schedule.num_stages` counts the stages.

# %% [markdown]
# ### `run`, the executor
#
# Now run a schedule: any schedule, also those of the next two lessons. It is your by-hand example with a list in its
# hand, and the largest exercise of this lesson.
#
# - **Each rank** goes through its list, `schedule.actions[r]`, in order. An entry that is not a `Send` or a `Receive`
#   holds one or more pieces of work, `action.steps` (DualPipe, lesson 08, puts two in one entry); do them one after
#   the other, as by hand, each in a `work` block of its letter, `step.letter`.
# - **Messages**: `with_messages(schedule)` also refuses a schedule that breaks a rule. `Values(group, template)` does
#   them: `put`, `take`, `receive`, `send`, and `sent` at the very end. Its code is in *Find the bug* below.
# - **Checked**: losses; gradients, also of a second run, in groups that are not all ranks, with several stages on a
#   rank; messages and their bytes; the order of the work, and its `work` blocks; what does not fit is refused.
# - **Halves**: an `InputGradient` ("I") is the first half of a backward and a `WeightGradient` ("W") the second. Given:
#   `split_backward(y, x, grad)` returns the input's gradient, and a function to call for the second half.
#
# <details><summary>Hint: what to keep, and from when to when</summary>
#
# Between the forward and the backward of a micro-batch on a stage: its input and its output, by (stage, micro-batch).
# An output can be kept as `get_gradient_edge(y)`, which holds its graph and not its numbers. Then:
#
# forward: take the activation of stage − 1, or the input; run; at the last stage call the loss; put the activation.
# backward: take the gradient of stage + 1, or None; run; put the gradient of the input, unless this is stage 0.
#
# `schedule.needs(step)` and `schedule.makes(step)` say the same as data.
# </details>

# %% exercise="pipeline.run"
from fivefold.pipeline import run

# %% check="pipeline.run"
check("pipeline.run", run)

# %% [markdown]
# ### Your pipeline on real text
#
# A network guesses the next byte of English text, the language reference that ships inside Python. An embedding, seven
# blocks, and a matrix over the vocabulary: nine layers that do not cost the same. Your `partition_layers` cuts them.

# %%
from fivefold import text

my_run, my_partition = mine("pipeline.run", run), mine("pipeline.partition_layers", partition_layers)
s, h, blocks, m = 32, 48, 7, 8  # tokens, features, blocks, micro-batches
b = 4  # sequences in a micro-batch


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, h), nn.Parameter(torch.randn(s, h) / 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.places


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in range(2))
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def layer(number: int) -> nn.Module:
    """The same layer on whichever rank asks for it."""
    torch.manual_seed(number)
    return Embedding() if number == 0 else nn.Linear(h, 256) if number == blocks + 1 else Block()


costs = [0, *[12 * h * h] * blocks, 256 * h]  # multiplications a token
cut = my_partition(costs, world_size)
for rank, part in enumerate(cut):
    print(f"rank {rank}: layers {part.start} to {part.stop - 1}, {sum(costs[k] for k in part):7,} multiplications")

# %% [markdown]
# The training loop knows nothing of messages: it hands the schedule, the stages and the micro-batches to `run`, and
# each rank's optimizer looks after its own stage. Beside it, the same in one process, without a pipeline.

# %%
TEXT = text.corpus()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The micro-batches of a step and their labels, (m, b, s) each; the same on every rank."""
    inputs, labels = text.sequences(TEXT, m * b, s, seed=step)
    return inputs.unflatten(0, (m, b)), labels.unflatten(0, (m, b))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / m  # the mean over all of the batch


def stages_of(schedule: Schedule, rank: int, cut: list[range]) -> dict[int, nn.Module]:
    return {stage: nn.Sequential(*map(layer, cut[stage])) for stage in schedule.stages_of(rank)}


def train(execute, schedule: Schedule, cut: list[range], steps: int) -> list[float]:
    pp = dist.new_group(group_desc="pp")
    stages = stages_of(schedule, pp.rank(), cut)
    optimizer = torch.optim.AdamW([p for stage in stages.values() for p in stage.parameters()], lr=3e-3)
    losses = []
    for step in range(steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        loss = lambda logits, i, labels=labels: loss_of(logits, labels[i])  # noqa: E731
        found = execute(schedule, stages, list(inputs), loss, pp, torch.empty(b, s, h))
        optimizer.step()
        losses.append(sum(float(value) for value in found.values()))
    return losses


def train_alone(steps: int) -> list[float]:
    model = nn.Sequential(*map(layer, range(blocks + 2)))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        total = sum(loss_of(model(x), y) for x, y in zip(*batch(step), strict=True))
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


steps = 40
together = fivefold.run(train, world_size, my_run, my_gpipe(world_size, m), cut, steps).results[-1]
alone = fivefold.run(train_alone, 1, steps).results[0]
print(f"\nstep   1 process   {world_size} ranks   difference")
for step in (0, 1, 5, 10, 20, steps - 1):
    one, many = alone[step], together[step]
    print(f"{step:4} {one:11.4f} {many:9.4f} {abs(one - many):12.0e}")
torch.testing.assert_close(together, alone, rtol=1e-2, atol=0)

# %% [markdown]
# ## See it
#
# One step of that training, measured, with two schedules. First the naive one. The timeline comes from the ledger of
# your own run, with T_F = 1 and T_B = 2.

# %%
my_naive = mine("pipeline.naive", naive)


def measured(schedule: Schedule):
    return fivefold.run(train, world_size, my_run, schedule, cut, 1, measure=True).ledger


slow = measured(my_naive(world_size, m))
slow_replay = replay(slow, cluster("h100"), STEPS)
plots.timeline(slow_replay, title=f"Naive: each rank works for {slow_replay.share('busy'):.0%} of the time")

# %%
ledger = measured(my_gpipe(world_size, m))
replayed = replay(ledger, cluster("h100"), STEPS)
idle = 1 - replayed.busy(0) / replayed.makespan
print(f"the measured ledger, replayed: idle for {idle:.2%} of {replayed.makespan:.1f} steps")
print(f"the formula, of total time:    {my_bubble(world_size, m):.2%} of {(m + world_size - 1) * 3} steps")
torch.testing.assert_close(idle, my_bubble(world_size, m), rtol=0.01, atol=0)
plots.timeline(replayed, title=f"GPipe: each rank idles for {idle:.1%} of the time, and the formula says so")

# %% [markdown]
# **The memory.** That is what GPipe pays for its speed: by the end of the forwards, a rank keeps activations of *all*
# micro-batches. The naive schedule keeps those of one. (GPipe's authors kept the inputs of the stages only, and ran
# each forward again before its backward.)

# %%
peaks = {name: [rank.memory.peak_saved for rank in one.ranks] for name, one in (("naive", slow), ("GPipe", ledger))}
print("kept for backward, at most, in kB")
for name, kept in peaks.items():
    print(f"  {name:6}" + "".join(f"   rank {rank} {size / 1e3:7.0f}" for rank, size in enumerate(kept)))
plots.memory(ledger, replayed)

# %% [markdown]
# **The bytes.** Each border is crossed by m activations one way, and by m gradients the other way.

# %%
print(f"m · b·s·h · 4 bytes = {m * b * s * h * 4:,} bytes")
plots.traffic(ledger)

# %% [markdown]
# **More micro-batches?** The explorer has every schedule of the course. Begin with GPipe, and watch the memory curves
# as you take more micro-batches. Press play to see it step by step. Then let messages take time.

# %%
widgets.schedules("GPipe")

# %% [markdown]
# ## Find the bug
#
# Receiving a tensor needs memory for it. Somebody thought: a rank gets its messages one after the other, so one piece
# of memory for each neighbour is enough. They changed `Values`, the class that your executor hands its messages to.
# They tried it with the naive schedule, and every gradient was right. The losses are right with GPipe, too.

# %% exercise="pipeline.Values" bug="a_buffer_for_each_rank"
from fivefold.pipeline import Values

# %% [markdown]
# Here is what they did not look at. The library's executor, with this class in it:


# %%
def largest_error(Values: type, kind: str, m: int) -> float:
    """The largest error of a gradient on this rank, relative to the largest gradient."""
    import fivefold.pipeline as pipeline
    from fivefold.pipeline import execute

    execute.Values = Values
    group, rank = dist.group.WORLD, dist.get_rank()
    schedule = getattr(pipeline, kind)(group.size(), m)
    inputs = torch.randn(m, b, h, generator=torch.Generator().manual_seed(0))
    whole = [nn.Sequential(nn.Linear(h, h), nn.Tanh()) for _ in range(group.size())]
    for number, stage in enumerate(whole):
        for i, parameter in enumerate(stage.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9 * number + i)) / 7
    pipeline.run(schedule, {rank: whole[rank]}, list(inputs), lambda y, i: y.square().sum(), group, inputs[0])
    found = [p.grad.clone() for p in whole[rank].parameters()]
    for stage in whole:
        stage.zero_grad()
    nn.Sequential(*whole)(inputs).square().sum().backward()
    wanted = [p.grad for p in whole[rank].parameters()]
    return max(float((a - c).abs().max() / c.abs().max()) for a, c in zip(found, wanted, strict=True))


for kind, many in (("naive", 4), ("gpipe", 1), ("gpipe", 4)):
    errors = fivefold.run(largest_error, world_size, Values, kind, many).results
    print(f"{kind:5} with m = {many}: gradients are off by", ", ".join(f"{error:.0e}" for error in errors))

# %% [markdown]
# Mend the class, so that the gradients are right with every schedule. Then run its cell, the cell with the errors, and
# the check. No more memory than needed: what was taken or sent is let go, and one message at a time is under way to
# each rank.
#
# <details><summary>Hint: how to look</summary>
#
# Which ranks are right, and what do they never receive while something else waits? A linear layer's weight gradient is
# made of the output's gradient and of something else. When is that something read?
# </details>

# %% check="pipeline.Values"
check("pipeline.Values", Values)

# %% [markdown]
# A buffer that is used again too early is an old friend of everyone who overlaps communication with work. Autograd
# notices when *you* change a tensor that it has saved. It does not see a message arrive in it.

# %% [markdown]
# ## The real tool
#
# PyTorch has this in `torch.distributed.pipelining`: a `PipelineStage` around your module, and a class for each
# schedule. Losses and gradients have to equal yours.


# %%
def with_torch(execute, schedule: Schedule, cut: list[range]) -> float:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    group, rank = dist.group.WORLD, dist.get_rank()
    last = group.size() - 1
    inputs, labels = batch(0)
    ours, theirs = (nn.Sequential(*map(layer, cut[rank])) for _ in range(2))

    stage = PipelineStage(theirs, rank, group.size(), torch.device("cpu"))
    steps = ScheduleGPipe(stage, m, loss_fn=loss_of, scale_grads=False)
    their_losses = []
    arguments = {"target": labels.flatten(0, 1), "losses": their_losses} if rank == last else {}
    steps.step(*([inputs.flatten(0, 1)] if rank == 0 else []), **arguments)

    template = torch.empty(b, s, h)
    losses = execute(schedule, {rank: ours}, list(inputs), lambda y, i: loss_of(y, labels[i]), group, template)
    if rank == last:
        torch.testing.assert_close([losses[i] for i in range(m)], [loss.detach() for loss in their_losses])
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad)
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)


Values = mine("pipeline.Values", Values)
my_run = mine("pipeline.run", run)
for rank, off in enumerate(fivefold.run(with_torch, world_size, my_run, my_gpipe(world_size, m), cut).results):
    print(f"rank {rank}: gradients differ from PyTorch's by at most {off:.0e}")

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="06.share"
share_answer = 100 * 7 / (32 + 7)

# %% check="06.share"
check("06.share", share_answer)

# %% question="06.papers"
papers_answer = "b"

# %% check="06.papers"
check("06.papers", papers_answer)

# %% question="06.enough"
enough_answer = 9 * 15

# %% check="06.enough"
check("06.enough", enough_answer)

# %% question="06.memory"
memory_answer = "c"

# %% check="06.memory"
check("06.memory", memory_answer)

# %% question="06.slowest"
slowest_answer = 60

# %% check="06.slowest"
check("06.slowest", slowest_answer)

# %% [markdown]
# ## Where this stands
#
# | here | PyTorch | Megatron-LM | DeepSpeed |
# | --- | --- | --- | --- |
# | `Schedule` | `_Action` lists of a schedule class | loops in `schedules.py` | `TrainSchedule` |
# | `gpipe` | `ScheduleGPipe` | not there: it starts with lesson 07's 1F1B | not there |
# | `run` | `PipelineStage`, `_PipelineScheduleRuntime` | `forward_backward_pipelining_…` | `PipelineEngine` |
# | `Values` | inside `PipelineStage` | `p2p_communication.py` | `p2p.py` |
# | `partition_layers` | yours to do | equal numbers of layers, or given by hand | `partition_method` |
#
# They are in `torch/distributed/pipelining`, `megatron/core/pipeline_parallel` and `deepspeed/runtime/pipe`.
#
# **Papers.** [GPipe](https://arxiv.org/abs/1811.06965) (Huang et al. 2019): section 2.3 has the bubble of this lesson.
# [PipeDream](https://arxiv.org/abs/1806.03377) (Harlap et al. 2018) keeps the pipeline full across steps, and pays with
# old weights. [torchgpipe](https://arxiv.org/abs/2004.09910) (Kim et al. 2020) brought GPipe to PyTorch.
# [Efficient Large-Scale Language Model Training](https://arxiv.org/abs/2104.04473) (Narayanan et al. 2021): section 2.2
# has the other denominator, and the schedules of the next lesson.
