# %% [markdown]
# # 8 · Pipeline parallelism 3: zero bubble and DualPipe
#
# *110 minutes · 7 exercises and 5 questions, 44 points · 4 processes on this machine, no GPU*
#
# The line of cooks again, each with one step of the recipe. The last one tastes, and a note goes back along the line:
# more salt, less bread. A cook does two things with a note. They tell the cook before them what it says, and they
# correct their own recipe card. Until now both came at once, and the whole line waited for the writing.
#
# But nobody waits for a recipe card. So hand the note on first, and write when there is nothing else to do. That is
# this lesson.
#
# ![On the left each of three ranks does a whole backward, and the next begins when it is done. On the right each does
# its input gradient I alone and hands it on, so the next begins sooner; all weight gradients W come
# later.](pictures/08_halves.svg)
#
# **What is split**: the backward of a stage, into I, the gradient of its input, and W, those of its weights.
#
# **What travels**: what travelled before, b·s·h numbers for each micro-batch, boundary and direction. A V of two
# stages a rank crosses twice as many boundaries. DualPipe holds all parameters twice, and adds up their gradients once
# a step.
#
# **What it buys**: the bubble. With 4 ranks and equal times each of them idles for 9 steps under 1F1B; you will bring
# that to 3 in the same memory, and, by another clock, to 0.
#
# **When it hurts**: what W needs is kept until W is done; and a zero is a zero by one clock and not by another.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). Lesson 07's 1F1B comes from the library here; you need not have
# solved it.

# %%
import tempfile
from collections.abc import Callable, Sequence

import fivefold
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import cost, pipeline, plots
from fivefold.pipeline import Durations, Schedule, both_ways, in_order, simulate, straight, v_shaped
from fivefold.pipeline.graph import Entrance, Parts, can_be_split, follow, release, take_apart
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.replay import Replay, replay
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autograde import check, mine, own_parts

# %% tags=["parameters"]
world_size = 4  # ranks of the pipeline, an even number: 2, 4 or 6

# %% [markdown]
# ## What is split, what travels, when
#
# Take one linear layer, $Y = X W^\top$, and the gradient $\partial Y$ that has come to it. Backward is two products:
#
# $$\partial X = \partial Y\; W \qquad\qquad \partial W = \partial Y^\top X$$
#
# They are as large as the one product of forward, each of them, so with $T$ for the time of a stage and one
# micro-batch, $T_F \approx T_I \approx T_W$. Neither needs the other. The rank before waits for ∂X. For ∂W waits the
# optimizer, and it waits for *all* micro-batches. Until then X and ∂Y are kept: that is what W costs.
#
# A word on letters. Here F is a forward, I an input gradient, W a weight gradient, and B a whole backward, both halves.
# The zero-bubble paper writes B for what is I here. DeepSeek-V3's B is the whole one.
#
# **Three clocks.** Papers state bubbles, and do not all mean the same:
#
# | a rank's idle time … | … is the time in which it does not work | stated of |
# | --- | --- | --- |
# | by **makespan** | from the first action of all ranks to the last | 1F1B, ZB-H1, DualPipe |
# | in its **window** | from its own first action to its own last | ZB-H2, ZB-V |
# | **marginal** | in one more iteration, where no iteration waits for the one before to end everywhere | – |
#
# The first is what you have where every step ends with a *flush*: all ranks meet before anybody goes on. Whoever says
# "zero bubble" must say by which clock. `simulate(schedule)` has the first two, and the third is your first exercise.

# %% [markdown]
# ## A worked example
#
# The network is a stack of layers, twice as many as there are ranks, so that a rank has two, as one stage or as two.

# %%
p, m = world_size, 2 * world_size  # ranks, micro-batches
layers, h = 2 * p, 32
b, s = 2, 8  # sequences in a micro-batch, and tokens in each


class Layer(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)  # the same weights on whichever rank holds the layer
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stages_of(schedule: Schedule, rank: int, Layer: type = Layer) -> dict[int, nn.Module]:
    """The stages of a rank, each of as many layers as the others."""
    each = layers // schedule.num_stages
    return {stage: nn.Sequential(*(Layer(stage * each + k) for k in range(each))) for stage in schedule.stages_of(rank)}


def batch(m: int) -> Tensor:
    return torch.randn(m, b, s, h, generator=torch.Generator().manual_seed(7))


def loss(y: Tensor, i: int | Tensor) -> Tensor:
    return (y * (1 + i)).square().mean()


def one_step(schedule: Schedule, iterations: int = 1, Layer: type = Layer) -> list[list[Tensor]]:
    """Forward and backward on this rank, as the schedule says: the gradients of its stages, in their order."""
    group = dist.new_group(group_desc="pp")  # all ranks, under the name that figures show
    stages, x = stages_of(schedule, group.rank(), Layer), batch(schedule.num_microbatches)
    for _ in range(iterations):
        for stage in stages.values():
            stage.zero_grad()
        inputs = [one.clone() for one in x]
        pipeline.run(schedule, stages, inputs, loss, group, inputs[0])
    pipeline.sum_copies(schedule, stages, group)  # where two ranks hold a stage
    return [[parameter.grad for parameter in stages[number].parameters()] for number in sorted(stages)]


def alone(m: int, Layer: type = Layer) -> list[list[Tensor]]:
    """The gradients of all layers in this process."""
    model = nn.Sequential(*(Layer(number) for number in range(layers)))
    for i, x in enumerate(batch(m)):
        loss(model(x), i).backward()
    return [[parameter.grad for parameter in layer.parameters()] for layer in model]


def largest_difference(schedule: Schedule, results: list, Layer: type = Layer) -> float:
    """Between the gradients that the ranks have and those of one process, as a share of the largest of each."""
    whole, each, worst = alone(schedule.num_microbatches, Layer), layers // schedule.num_stages, 0.0
    for rank, mine_ in enumerate(results):
        for stage, found in zip(schedule.stages_of(rank), mine_, strict=True):
            wanted = [grad for layer in whole[stage * each : (stage + 1) * each] for grad in layer]
            for one, other in zip(found, wanted, strict=True):
                worst = max(worst, ((one - other).abs().max() / other.abs().max()).item())
    return worst


# %% [markdown]
# Schedules are executed by your `pipeline.run` of lesson 06, if that notebook lies beside this one, saved, and passes
# its check; otherwise by the library's:

# %%
yours = own_parts(only=["pipeline.run"])
yours

# %% [markdown]
# Lesson 07's schedule first, on real ranks, and what a replay of its ledger takes where each F takes one step and each
# B two, one for either half. (`simulate` says the same without running anything.)

# %%
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}


def replayed(schedule: Schedule, iterations: int = 1, **parts: Callable) -> tuple[Replay, list, Ledger]:
    """A run on real ranks: its replay with unit costs, what the ranks returned, its ledger."""
    units = UNITS if schedule.num_stages == p else {kind: time / 2 for kind, time in UNITS.items()}  # half stages
    given = yours.taken | {f"pipeline.{name}": part for name, part in parts.items()}
    done = fivefold.run(one_step, p, schedule, iterations, measure=True, parts=given)
    return replay(done.ledger, cluster("h100"), units), done.results, done.ledger


as_before = pipeline.one_f_one_b(p, m)
timed, results, ledger = replayed(as_before)
print(f"gradients differ from those of one process by at most {largest_difference(as_before, results):.0e}")
print(f"rank 0 works for {timed.busy(0):.1f} steps and idles for {timed.idle(0):.1f}")
plots.timeline(timed, "1F1B: the dark backwards come back one rank at a time, each as long as two forwards")

# %% [markdown]
# Now cut every B where it stands: the input gradient, and right after it the weight gradient. The order of the work is
# as it was. But the gradient of the input is handed on *one step sooner*, at every rank.


# %%
def cut(schedule: Schedule) -> Schedule:
    """The same lists, with an I and a W in the place of each B."""
    halves = {"B": (pipeline.InputGradient, pipeline.WeightGradient), "F": (pipeline.Forward,)}
    lists = [
        [kind(a.stage, a.microbatch) for a in actions for kind in halves[a.letter]] for actions in schedule.actions
    ]
    return Schedule("1F1B, cut", schedule.num_microbatches, schedule.routes, lists)


in_halves = cut(as_before)
timed, results, ledger = replayed(in_halves)
print(f"gradients differ from those of one process by at most {largest_difference(in_halves, results):.0e}")
print(f"rank 0 works for {timed.busy(0):.1f} steps and idles for {timed.idle(0):.1f}")
plots.timeline(timed, "Cut in two: a third of the bubble is gone, and nothing has been moved yet")

# %% [markdown]
# The messages are those of before, in number and in size; there is no W among them:

# %%
per_boundary = m * b * s * h * 4
print(f"each way {p - 1} boundaries · m · b·s·h · 4 bytes = {(p - 1) * per_boundary:,} bytes, from all ranks together")
ledger.traffic()

# %% [markdown]
# A schedule is written in the papers' words: `in_order(["F", "F", "I", "W"], stages=[rank])` makes one rank's list of
# actions, micro-batches in order; `straight(p)` says that rank r has stage r. A Schedule is made of its name, m, the
# places of the stages, and a list for each rank. `plots.schedule_of(function, p, m)` draws what a function of yours
# gives. What breaks a rule is drawn too:


# %%
def hasty(num_ranks: int, num_microbatches: int) -> Schedule:
    words = ["F", "I", "W"] * num_microbatches
    lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]
    lists[1][3], lists[1][4] = lists[1][4], lists[1][3]
    return Schedule("hasty", num_microbatches, straight(num_ranks), lists)


plots.schedule_of(hasty, p, 3)

# %% [markdown]
# ## Exercises
#
# ### `marginal_idle`, the third clock
#
# Iterations follow each other with no flush: a rank begins the next one while others are still busy with the last.
# How long does each rank idle in **one more** iteration, the third after two, say?
#
# - **In, out**: a schedule and durations; one number for each rank.
# - `simulate(schedule, durations, iterations)` runs the lists so many times. It has `.makespan`, `.busy` (a number for
#   each rank, of all iterations), and `.waiting`, which is not empty where ranks wait for ever.
# - **Checked**: the numbers, with equal and unequal times; a schedule that cannot end is a ValueError.

# %% exercise="pipeline.marginal_idle"
from fivefold.pipeline import marginal_idle

# %% check="pipeline.marginal_idle"
check("pipeline.marginal_idle", marginal_idle)

# %% [markdown]
# ### `zb_h1`: a third of the bubble is left, in the same memory
#
# Look at the end of the second timeline: rank 0 idles between its last gradients, and the last rank after its own.
# Keep a few W back for that time.
#
# - **Rank r** has as many forwards under way before its first I as in 1F1B, and its W come **r** micro-batches behind
#   its I. Those that are left come last. m may be smaller than p.
# - **Checked**: valid whatever the durations; idle at most (p−1)(T_F + T_I − T_W) by *makespan*, for m ≥ p and T_W no
#   longer than T_F and T_I; at most p activations alive on a rank, from F to W; gradients on real ranks.
#
# Any schedule that keeps to this is right.
#
# <details><summary>Hint: a staircase</summary>
#
# Think of m + p − 1 steps. In each step a rank does an F, an I and a W, as far as there are any: its I is p−1−r
# micro-batches behind its F. How far is its W behind its F? Begin with p = 2.
# </details>

# %% exercise="pipeline.zb_h1"
from fivefold.pipeline import zb_h1

# %% check="pipeline.zb_h1"
check("pipeline.zb_h1", zb_h1)

# %%
plots.schedule_of(zb_h1, p, m)

# %% [markdown]
# ### `split_backward`
#
# Until now the executor has cut backwards for you. Autograd does not: `backward` computes everything. Your turn.
#
# - `take_apart(output, input)` has followed the graph and found the **entrances**, operations where weights enter.
#   `entrance.results` are gradient edges: places in the graph that `torch.autograd.grad` and `backward` take like
#   tensors. `entrance.weights` are its weights. `parts.early` are weights that cannot wait (*Find the bug* tells why).
# - **First half**, now: the gradient of the input, and those that arrive at `entrance.results`, in *one* walk; early
#   weights get theirs. Then `release(node)` each of `parts.passed`, operations that have nothing left to do.
# - **Second half**, a function that is called later: from each entrance *by itself*, its weights' gradients, no
#   further. (One walk from all of them would pass through operations that have been released.)
# - **Checked**: gradients, on top of what is in `.grad`; what waits; nothing computed or sent twice; what is kept.
#
# <details><summary>Hint: which calls</summary>
#
# `torch.autograd.grad(output, wanted, grad, retain_graph=True, allow_unused=True)` gives a gradient for each of
# `wanted`, or None, and leaves every `.grad` alone. `torch.autograd.backward(edges, gradients, inputs=weights)` adds to
# the `.grad` of these weights and of no others. On the first stage the input is None, or needs no gradient.
# </details>

# %% exercise="pipeline.split_backward"
from fivefold.pipeline import split_backward

# %% check="pipeline.split_backward"
check("pipeline.split_backward", split_backward)

# %% [markdown]
# Your schedule, executed on real ranks with your split. The gradients are those of one process, and the ledger,
# replayed, has the bubble of the formula:

# %%
my_idle, my_split, my_h1 = (
    mine("pipeline.marginal_idle", marginal_idle),
    mine("pipeline.split_backward", split_backward),
    mine("pipeline.zb_h1", zb_h1),
)
h1 = my_h1(p, m)
timed, results, ledger = replayed(h1, split_backward=my_split)
off = largest_difference(h1, results)
assert off < 1e-4, f"gradients are off by {off}"
print(f"\ngradients differ from those of one process by at most {off:.0e}")
print(f"replayed, rank 0 idles for {timed.idle(0):.2f}; (p−1)(T_F + T_I − T_W) = {p - 1}")
plots.timeline(timed, "ZB-H1, measured and replayed: weight gradients fill the end")

# %% [markdown]
# ### `zb_h2`: no bubble, for twice the memory
#
# One gap is left: between a rank's warm-up and its first I. More forwards would fill it.
#
# - **Rank r** warms up with twice as many forwards, 2(p−1−r), and its W come 2r micro-batches behind its I.
# - **Checked**: valid; idle at most (p−1)(T_F + T_I − 2T_W) in a rank's own *window*, for m ≥ 2p−1 and T_W no longer
#   than T_F and T_I; at most 2p−1 activations alive; gradients on real ranks; m smaller than that as well.

# %% exercise="pipeline.zb_h2"
from fivefold.pipeline import zb_h2

# %% check="pipeline.zb_h2"
check("pipeline.zb_h2", zb_h2)

# %%
plots.schedule_of(zb_h2, p, m)

# %% [markdown]
# Each row is a block without a gap, and the blocks stand askew: rank 0 begins first and ends first. By makespan that is
# no gain over ZB-H1. It is one where the next iteration follows at once, as in two in a row:

# %%
h2 = mine("pipeline.zb_h2", zb_h2)(p, m)
plots.timeline(plots.timeline_of_schedule(simulate(h2, iterations=2)), "ZB-H2 twice: the second fits into the first")

# %% [markdown]
# So there must be no flush between two steps, and an optimizer likes to have one: the norm of *all* gradients is needed
# before anybody may clip. The paper's answer is to step first and check afterwards, and to take a step back in the rare
# case that the check fails.
#
# ### `zb_v`: no bubble, in the memory of 1F1B
#
# Two half stages a rank, in a V: rank r has stage r (chunk 0) on the way down and stage 2p−1−r (chunk 1) on the way up.
# The last stage is on rank 0, so the first gradient is back at once, and activations live shorter.
#
# - The docstring has each rank's list, phase by phase; `in_order(words, stages=[r, 2p−1−r])` reads "F0", "I1", "W".
# - **Checked**: valid; idle 0 in a rank's own *window* at equal times; at most 2p half stages alive, which are the p
#   activations of 1F1B; gradients on real ranks; fewer than 2p−1 micro-batches are a ValueError.

# %% exercise="pipeline.zb_v"
from fivefold.pipeline import zb_v

# %% check="pipeline.zb_v"
check("pipeline.zb_v", zb_v)

# %%
plots.schedule_of(zb_v, p, m, durations=Durations(0.5, 0.5, 0.5))

# %% [markdown]
# ### `dualpipe`: from both ends
#
# DeepSeek-V3's schedule. Half of the micro-batches enter at rank 0, the other half at rank p−1, so every rank holds two
# stages, one of each direction, and in the middle of a step always has a forward *and* a backward to do. It does them
# as one piece, "F0&B1": while one of them waits for messages (its experts' all-to-all, lesson 09), the other computes.
#
# - The docstring has each rank's list. Rank p−1−r does what rank r does, with the two halves of the micro-batches
#   exchanged. (`in_order(words, stages, first)` takes the micro-batch with which each of the two stages begins.)
# - **Checked**: valid; idle at most (p/2−1)(T_F&B + T_B − 3T_W) by *makespan*, where T_F = T_I ≥ T_W, and the time of
#   the whole; at most p+1 activations alive; gradients, both copies added up; sizes that it cannot take.

# %% exercise="pipeline.dualpipe"
from fivefold.pipeline import dualpipe

# %% check="pipeline.dualpipe"
check("pipeline.dualpipe", dualpipe)

# %%
plots.schedule_of(dualpipe, p, m)

# %% [markdown]
# ## See it
#
# **All of them, on real ranks.** Each is executed with your split, and its ledger is replayed. The idle time is that of
# the rank that idles longest, by the clock that its paper uses. What is alive is counted from F to W. What is kept is
# measured: the peak of the bytes that wait for backward, in units of M_B, what one micro-batch leaves behind in all of
# a rank's layers. Messages are those between stages.

# %%
made = {
    "1F1B": (as_before, "one_f_one_b", "makespan"),
    "ZB-H1": (h1, "zb_h1", "makespan"),
    "ZB-H2": (h2, "zb_h2", "window"),
    "ZB-V": (mine("pipeline.zb_v", zb_v)(p, m), "zb_v", "window"),
    "DualPipe": (mine("pipeline.dualpipe", dualpipe)(p, m), "dualpipe", "makespan"),
}


def clocks(timed: Replay) -> dict[str, float]:
    """The longest idle time of a rank, by the two clocks that one iteration has."""
    own = [[span for span in timed.spans if span.rank == r and span.kind != "comm"] for r in range(timed.num_ranks)]
    windows = [max(x.end for x in spans) - min(x.begin for x in spans) for spans in own]
    return {
        "makespan": max(timed.makespan - timed.busy(r) for r in range(timed.num_ranks)),
        "window": max(window - timed.busy(r) for r, window in enumerate(windows)),
    }


measured = {name: replayed(schedule, split_backward=my_split) for name, (schedule, *_) in made.items()}

# %%
m_b = 2 * b * s * (10 * h + 2) * 4  # of two layers: the norm's input and two numbers a token, two products, a GELU
message = b * s * h * 4
points, rows = {}, []
for name, (schedule, key, clock) in made.items():
    timed, results, ledger = measured[name]
    off = largest_difference(schedule, results)
    assert off < 1e-4, f"{name}: gradients are off by {off}"
    idle, stated = clocks(timed)[clock], cost.bubble_seconds(key, p, 1, 1, 1)
    alive = max(simulate(schedule).peak_memory()) * p / schedule.num_stages  # a half stage counts half
    kept = max(rank.memory.peak_saved for rank in ledger.ranks) / m_b
    sent = sum(c.op == "send" and c.bytes == message for rank in ledger.ranks for c in rank.communications)
    rows.append((name, clock, idle, stated, alive, cost.peak_activations(key, p, m), kept, sent, off))
    points["DualPipe, parameters twice" if name == "DualPipe" else name] = (alive, idle)

print("                        idle steps of a rank    alive from F to W    kept, measured   messages   gradients")
print("          by           replayed      formula   counted     formula            (M_B)                    off")
for name, clock, idle, stated, alive, most, kept, sent, off in rows:
    print(f"{name:10}{clock:9}{idle:12.2f}{stated:13.2f}{alive:10.1f}{most:12.0f}{kept:17.2f}{sent:11}{off:12.0e}")

# %% [markdown]
# Every schedule has the gradients of one process, the bubble of its formula, and the memory of its count. (The rank
# that computes the loss keeps a little more for that.) Not all ranks are at that peak: a micro-batch that waits for its
# W alone has let go of what its GELUs kept, so ranks that owe many W keep less than the count says.

# %%
for name in ("ZB-H1", "ZB-H2"):
    kept = [rank.memory.peak_saved / m_b for rank in measured[name][2].ranks]
    print(f"{name}, by rank: " + ", ".join(f"{one:.2f}" for one in kept) + " M_B")

# %%
plots.bubble_and_memory(points)

# %% [markdown]
# **The three clocks.** First ZB-H2, which is what the warning was about, then the others. The numbers are those of the
# rank that idles longest: from your runs, and in brackets from `simulate` and your `marginal_idle`. The third clock
# takes two runs, of two iterations in a row and of three.

# %%
print("idle steps of a rank     by makespan       in its window     marginal")
for name in ("ZB-H2", "ZB-V", "ZB-H1", "1F1B", "DualPipe"):
    schedule, *_ = made[name]
    units = Durations(*[p / schedule.num_stages] * 3)
    two, three = (replayed(schedule, n, split_backward=my_split)[0] for n in (2, 3))
    again = three.makespan - two.makespan - min(three.busy(r) / 3 for r in range(p))
    once, paper = clocks(measured[name][0]), simulate(schedule, units)
    cells = [
        (once["makespan"], max(paper.idle_by_makespan)),
        (once["window"], max(paper.idle_in_window)),
        (again, max(my_idle(schedule, units))),
    ]
    print(f"{name:22}" + "".join(f"{abs(a):8.2f} ({abs(b):.1f})    " for a, b in cells))

# %% [markdown]
# By makespan ZB-H2 is as far from zero as ZB-H1, and needs nearly twice its memory. If your steps end with a flush,
# take ZB-H1. (ZB-V has half of that bubble, since its stages are half as long.)
#
# **DualPipe's pairs.** On these ranks a pair takes the time of its two parts. On a cluster, where a part is often
# waiting for an all-to-all, it may take less. The same schedule, with shorter and shorter pairs:

# %%
pairs = made["DualPipe"][0]
for together in (3.0, 2.75, 2.5, 2.0):
    run_ = simulate(pairs, Durations(overlapped=together))
    stated = cost.bubble_seconds("dualpipe", p, 1, 1, 1, overlapped=together)
    print(
        f"F&B {together:4.2f}: {run_.makespan:5.2f} steps, idle {max(run_.idle_by_makespan):.2f}, formula {stated:.2f}"
    )

# %% [markdown]
# **Any schedule, any times.** Begin with ZB-H2 and m below 2p−1. Then halve W: what is left to fill bubbles with? Then
# give messages a time: which schedule suffers most, and why? (Times are those of a whole stage; ZB-V's halves take half
# as long.) Press play to follow a schedule step by step.

# %%
from fivefold import widgets

widgets.schedules("ZB-H2", p=4, m=8)

# %% [markdown]
# ## Find the bug
#
# Weights that meet the graph in *one* place can wait: that is what `take_apart` finds out for `split_backward`. This is
# how somebody wrote it. `follow` has listed, for each operation, its results, and for each weight, the operations where
# it enters; `can_be_split(node)` tells whether an operation leaves out of its backward what it is not asked for.
#
# All schedules of this lesson run with it, and all their gradients are right.

# %% exercise="pipeline.graph.take_apart" bug="one_use_only"
from fivefold.pipeline.graph import take_apart

# %% [markdown]
# Then somebody saves parameters: each layer gets a small *adapter*, A, that is used twice, once as it is and once
# transposed. Here are gradients of the last rank, with whole backwards and in halves:


# %%
class Adapted(nn.Module):
    """x + x A Aᵀ, and a layer."""

    def __init__(self, number: int):
        super().__init__()
        self.layer = Layer(number)
        self.adapter = nn.Parameter(torch.randn(h, 4) / h**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + x @ self.adapter @ self.adapter.T)


def apart(schedule: Schedule, Layer: type) -> None:
    parts = yours.taken | {"pipeline.graph.take_apart": take_apart}
    results = fivefold.run(one_step, p, schedule, 1, Layer, parts=parts).results
    found, wanted = results[-1][0], alone(m, Layer)[-layers // p]  # the first layer of the last rank
    for (name, _), one, other in zip(Layer(0).named_parameters(), found, wanted, strict=False):
        print(f"  {name:18} {one.norm() / other.norm():5.2f} times as large as in one process")


for name, schedule in (("1F1B, whole backwards", as_before), ("ZB-H1, in halves", h1)):
    print(name)
    apart(schedule, Adapted)

# %% [markdown]
# No error, and numbers that look like gradients: one weight of each layer learns too little, and only where the
# backward is split. Mend the function above, so that the factor is 1 everywhere. What can wait has to wait still, and
# nothing may be computed twice. Run its cell, the cell with the factors, and the check.
#
# <details><summary>Hint: how to look</summary>
#
# Draw x → · A → · Aᵀ → y, and mark the operations where A enters. Which of them does the loop look at? Before you ask
# at both: backward comes from y. How far does the question at the right one walk, until there is no more A?
# </details>

# %% check="pipeline.graph.take_apart"
check("pipeline.graph.take_apart", take_apart)

# %% [markdown]
# Shared weights are where split backwards go wrong. PyTorch's own, behind its zero-bubble schedules, did the opposite:
# one use was counted twice (pytorch #180952, April 2026). In torch 2.13 it is mended. What does yours say?

# %%
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

layer, x = Adapted(0), batch(1)[0].requires_grad_()
layer(x).square().mean().backward()
whole = layer.adapter.grad.clone()
layer.zero_grad()
(_,), groups = stage_backward_input([layer(x).square().mean()], None, [x], layer.parameters())
stage_backward_weight(layer.parameters(), groups)
factor = layer.adapter.grad.norm() / whole.norm()
print(f"torch {torch.__version__}: the adapter's gradient is {factor:.2f} times as large as it should be")

# %% [markdown]
# ## The real tool
#
# PyTorch's `torch.distributed.pipelining` has schedules as lists of actions too. `ScheduleZBVZeroBubble` is ZB-V;
# `ScheduleDualPipeV` is DualPipe folded in the middle, so that each parameter is there once, on p/2 of the ranks that
# DualPipe takes. For ZB-H1 and ZB-H2 there is no class, but its runtime executes any list: yours, written as text.
# Each has to give the gradients of one process, and so yours.


# %%
def with_torch(name: str, text: str, num_stages: int, mine_: list[int], m: int) -> list[list[Tensor]]:
    from torch.distributed import pipelining

    each, last = layers // num_stages, num_stages - 1
    x, numbers = batch(m), torch.arange(m).repeat_interleave(b)
    parts = [nn.Sequential(*(Layer(stage * each + k) for k in range(each))) for stage in mine_]
    stages = [
        pipelining.PipelineStage(part, stage, num_stages, torch.device("cpu"))
        for part, stage in zip(parts, mine_, strict=True)
    ]

    def loss_of(y: Tensor, target: Tensor) -> Tensor:
        return loss(y, target.view(-1, 1, 1))  # the number of its micro-batch, for each sequence

    if text:
        steps = pipelining.schedules._PipelineScheduleRuntime(stages, m, loss_of, scale_grads=False)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(text)
            file.flush()
            steps._load_csv(file.name, format="compute_only")
    else:
        steps = getattr(pipelining, name)(stages, m, loss_fn=loss_of, scale_grads=False)
    steps.step(*([x.flatten(0, 1)] if 0 in mine_ else []), **({"target": numbers} if last in mine_ else {}))
    return [[parameter.grad for parameter in part.parameters()] for part in parts]


def torchs(name: str, text: str, schedule: Schedule) -> float:
    ranks = [schedule.stages_of(rank) for rank in range(p)]

    def program() -> list[list[Tensor]]:
        return with_torch(name, text, schedule.num_stages, ranks[dist.get_rank()], m)

    return largest_difference(schedule, fivefold.run(program, p).results)


in_a_v = made["ZB-V"][0]
for name, text, schedule in (
    ("your ZB-H1", h1.to_csv(), h1),
    ("your ZB-H2", h2.to_csv(), h2),
    ("your ZB-V", in_a_v.to_csv(), in_a_v),
    ("ScheduleZBVZeroBubble", "", in_a_v),
    ("ScheduleDualPipeV", "", in_a_v),
):
    off = torchs(name, text, schedule)
    assert off < 1e-4, f"{name}: gradients are off by {off}"
    print(f"{name:22} run by torch: gradients differ from those of one process, and yours, by at most {off:.0e}")

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="08.bubble"
bubble_answer = 7 * (1 + 1 - 0.8)

# %% check="08.bubble"
check("08.bubble", bubble_answer)

# %% question="08.clock"
clock_answer = "c"

# %% check="08.clock"
check("08.clock", clock_answer)

# %% question="08.memory"
memory_answer = 15 * 1.5

# %% check="08.memory"
check("08.memory", memory_answer)

# %% question="08.kept"
kept_answer = "b"

# %% check="08.kept"
check("08.kept", kept_answer)

# %% question="08.pairs"
pairs_answer = 7 * (2.5 + 2 - 3)

# %% check="08.pairs"
check("08.pairs", pairs_answer)

# %% [markdown]
# ## Where this stands
#
# | here | the papers' authors | PyTorch |
# | --- | --- | --- |
# | `split_backward` | `WeightGradStore`, in their Megatron-LM fork | `stage_backward_input`, `stage_backward_weight` |
# | `zb_h1`, `zb_h2` | in their Megatron-LM fork | any list, by `_PipelineScheduleRuntime` |
# | `zb_v` | in their Megatron-LM fork | `ScheduleZBVZeroBubble` |
# | `dualpipe` | DeepSeek's repository DualPipe | folded, `ScheduleDualPipeV` |
#
# **What large runs use.** Megatron-LM has 1F1B and interleaved 1F1B, lesson 07; zero-bubble schedules were published as
# a fork of it. DeepSeek-V3 was trained with DualPipe on 2,048 H800 GPUs, with PP 16 and EP 64 over 8 nodes. Its
# experts' all-to-all goes over links between servers, and hiding it in pairs is what the schedule is made for. The
# price is a second copy of the parameters.
#
# **What it buys.** The zero-bubble paper states up to 23% more throughput than 1F1B in similar memory, and up to 31%
# where more memory is allowed. By the formulas: at p = 8, m = 32 and equal times 1F1B idles for 21 of 117 steps and
# ZB-H1 for 7 of 103, so that a step is 12% shorter. What DualPipe buys DeepSeek-V3 in speed is not published apart
# from the rest; its report states the bubble and the memory.
#
# **Papers.** [Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241) (Qi et al. 2023): section 2 has your
# ZB-H1 and ZB-H2, section 4 the optimizer without a flush, section 6 ZB-V.
# [Pipeline Parallelism with Controllable Memory](https://arxiv.org/abs/2405.15362) (Qi et al. 2024) goes on with Vs.
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437) (2024), section 3.2.1, is DualPipe.
# [Chimera](https://arxiv.org/abs/2107.06925) (Li and Hoefler 2021) entered a pipeline from both ends before.
