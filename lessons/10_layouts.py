# %% [markdown]
# # 10 · Layouts: links, memory, Llama 3's, and your own
#
# *100 minutes · 6 exercises and 4 questions, 35 points · 4 processes on this machine, no GPU*
#
# By now the school kitchen knows every way to share its work. This morning it moves to a new building: tables of eight,
# a corridor between them, 1,000 sandwiches by noon. Who stands beside whom? Those who push halves together at every
# sandwich need one table. Those who hand on a tray can walk a few steps. Those who compare notes once, at night, may
# stand at the far end. And every place has a shelf, which must not overflow.
#
# ![Four frames, one in the other. Innermost tensor parallelism, on one server with the fast link: activations, in each
# half of a layer, while everybody waits. Around it context parallelism: keys and values in each layer. Around that
# pipeline parallelism: activations of each micro-batch. Outermost data parallelism: gradients, once a
# step.](pictures/10_layout.svg)
#
# **What is split**: everything, by up to five axes at once. A *layout* is their five degrees.
#
# **What travels**: what travelled in lessons 02 to 09. New is the question over *which link*, and what waits for it.
#
# **When it hurts**: a layout that does not fit does not run. One that fits can still be several times slower than the
# best. On 16,384 GPUs some two hundred layouts fit, and each can be tuned in dozens of ways: thousands of plans. So you
# write a program that looks at all of them. It is compared with 26 runs that were published.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). You need not have solved the other lessons: what is needed of them
# comes from the library.

# %%
import math
from dataclasses import replace

import torch
from fivefold import cost, mesh, plan, plots, run
from fivefold.cost import BytesMoved
from fivefold.layout import Layout
from fivefold.plan import (
    MODERN,
    RESERVE,
    TAKEN,
    Choice,
    Memory,
    Model,
    Options,
    Plan,
    Seconds,
    Software,
    Work,
    cuts,
    data_seconds,
    filled,
    layer_bytes,
    message_seconds,
    optimizer_seconds,
    rank_parameters,
    stage_layers,
    stage_seconds,
    state_seconds,
    tunings,
)
from fivefold.runtime.cluster import Cluster, Link

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks of the small runs: 2, 4 or 8

# %% [markdown]
# ## What is split, what travels, when
#
# A rank has b·s/c tokens of h numbers in a layer: b sequences a micro-batch, s tokens each, over c ranks. m
# micro-batches make a step, P is the number of parameters that a rank holds, v the number of its chunks of layers.
#
# | axis | splits | sends, from each rank | how often | waits? |
# | --- | --- | --- | --- | --- |
# | TP, t ranks | matrices | 2(t−1)/t · b·s/c·h | 4 a layer and micro-batch | always |
# | CP, c ranks | tokens | (c−1)/c · 2·b·s·(K/V width)/t | 3 a layer and micro-batch | mostly |
# | EP, e ranks | experts | (e−1)/e · top-k · b·s/c·h/t | 4 a layer and micro-batch | always |
# | PP, p ranks | layers | b·s/c·h/t | 2v a micro-batch | a little, and (p−1)/(vm) of the work as a bubble |
# | DP, d ranks | sequences | about P of gradients, P of parameters | once a step | hardly: it hides |
# | DP with ZeRO-3 | parameters too | 3P | every micro-batch | if computing is too short to hide it |
#
# TP's 4 are counted in all-reduces. With sequence parallelism each is an all-gather and a reduce-scatter; where
# gathered inputs are not kept, backward gathers them again, and it is as much as 5.
#
# Read the last two columns from the top: what is sent most often, and is always waited for, comes first. A server has 8
# GPUs with 450 GB/s between any two (NVLink 4), and each GPU a network card of 50 GB/s. So the first in the list get
# the places inside: **TP innermost, then CP, then PP, DP outermost**. That is Llama 3's order, and this course's. EP
# has no ranks of its own: its groups lie in DP × CP, so mostly outside, although they are always waited for.
#
# Memory is the other half. TP, PP and EP make P smaller; ZeRO splits what belongs to each parameter; CP and TP split
# activations; PP keeps several micro-batches of them alive.

# %% [markdown]
# ## A worked example
#
# The same traffic over two links. A small GPT takes one step on real ranks, and the replay times it on servers of two
# GPUs: once with the TP ranks on one server, once with the TP ranks on two and the pipeline inside.

# %%
from fivefold.model import GPTConfig
from fivefold.plan.checked import TOY
from fivefold.runtime.replay import replay
from fivefold.train import Job, train

small = GPTConfig(layers=4, hidden=64, heads=8, kv_heads=4, ffn=256, vocabulary=256, moe_every=0)
layout = Layout.parse({2: "tp2", 4: "pp2,tp2", 8: "dp2,pp2,tp2"}[world_size])
job = Job(layout, small, num_microbatches=4, batch=16, sequence=64, sequence_parallel=True)


def one_step() -> None:
    train(job, 1)


ledger = run(one_step, world_size, measure=True).ledger
near = replace(TOY, gpus_per_server=2)
far = near.placed({"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, innermost=("pp", "dp", "tp"))
if world_size == 2:
    far = replace(TOY, gpus_per_server=1)
for words, machines in (("TP inside servers", near), ("TP between servers", far)):
    timed = replay(ledger, machines)
    busy, still = timed.share("busy"), timed.share("exposed")
    shares = f"{busy:.0%} computing, {still:.0%} standing still for a transfer, {1 - busy - still:.0%} other waiting"
    print(f"{words:18} {timed.makespan * 1e3:6.3f} ms a step: {shares}")
ledger.traffic()

# %% [markdown]
# Not a byte more is sent, and the step is longer. Other waiting is mostly the pipeline's bubble. (The links of this
# example are as slow as the model is small, so that their ratio to computing is that of a large model on GPUs: see
# `fivefold/plan/checked.py`.)

# %% [markdown]
# ## Exercises
#
# ### `pipeline_vs_zero3`
#
# A model is too large for one GPU, and there are n of them. Cut it into a pipeline, or keep shards of it and gather
# them (ZeRO-3): how many bytes does a rank send in a step? All ranks together train on `tokens` tokens. Return
# `BytesMoved(pipeline, zero3)`.
#
# - A middle stage of the pipeline sends h numbers for each token, and as many back. One rank alone sends nothing.
# - ZeRO-3 gathers all parameters for forward, again for backward, and scatters gradients; for every micro-batch. Each
#   of the three moves (n−1)/n of the numbers.
#
# *Checked*: both numbers, for several models, micro-batches and sizes of a number.

# %% exercise="cost.pipeline_vs_zero3"
from fivefold.cost import pipeline_vs_zero3

# %% check="cost.pipeline_vs_zero3"
check("cost.pipeline_vs_zero3", pipeline_vs_zero3)

# %% [markdown]
# One depends on the batch and not on the model, the other on the model and not on the batch. So there is a batch at
# which they cross. GPT-3 over 384 GPUs:

# %%
moved = mine("cost.pipeline_vs_zero3", pipeline_vs_zero3)
plots.bytes_moved(
    lambda tokens: moved(175e9, 12288, tokens, 384),
    [1 << power for power in range(16, 28)],
    {"the paper's batch: 3.1 million": 1536 * 2048},
)

# %% [markdown]
# Bytes are not yet seconds: ZeRO-3's can hide behind computing, as long as there is enough of it. With twice the GPUs
# and the same batch, each computes half as long, and gathers as much. You will see below what that does.
#
# ### `place`
#
# Which link does each axis get? Ranks are numbered with TP innermost, then CP, PP, DP, and fill servers in that order.
# Return a dict from the axes of degree 2 or more to `cluster.inside` or `cluster.between`.
#
# - An axis is inside only if **every one** of its groups is on one server: the slowest holds up all.
# - A group of DP has `dp` ranks that stand tp·cp·pp apart. What must a server hold to hold all of a group?
# - Expert groups are `ep` ranks in a row of a DP × CP group (`mesh.expert_groups(layout)` lists them).
#
# *Checked*: each axis; servers whose size the degrees do not divide; experts.
#
# <details><summary>Hint: rows of ranks</summary>
#
# tp·cp ranks in a row hold tp whole groups of CP. If no server ends within such a row, CP is inside. Servers end at
# multiples of their size, up to the last rank. (Or list the groups with `mesh.groups(layout, axis)`, and look at each:
# that is right too, and takes a while for 16,384 ranks.)
# </details>

# %% exercise="plan.place"
from fivefold.plan import place

# %% check="plan.place"
check("plan.place", place)

# %%
my_place = mine("plan.place", place)
llama3_cluster = plan.cluster("llama3")
for text in ("dp128,pp16,tp8", "dp8,cp16,pp16,tp8", "dp64,pp16,tp16", "dp4096,tp4"):
    links = {axis: link.name for axis, link in my_place(Layout.parse(text), llama3_cluster).items()}
    print(f"{text:20} {links}")

# %% [markdown]
# **The hierarchy.** With TP 16 every all-reduce of every layer leaves the server. What that costs, for a layer of Llama
# 3 405B and one sequence of 8,192 tokens:

# %%
whole = 2 * 8192 * 16384  # bytes of b·s·h numbers
for gpus_per_server, tp in ((8, 8), (16, 16), (8, 16)):
    machines = plan.cluster("llama3", gpus_per_server=gpus_per_server)
    seconds = plan.exchange_seconds("all_reduce", "tp", whole, Layout(tp=tp), machines)
    where = "one server" if tp <= gpus_per_server else "two servers"
    print(f"TP {tp:2} on {where:11}: {seconds * 1e3:.2f} ms for an all-reduce of {whole / 1e6:.0f} MB")

# %% [markdown]
# Over two servers it takes half as long again, although eight network cards share the work: the all-reduce is rings
# inside the servers, and rings between them at once. And each of 16 ranks computes half as long as one of 8: what
# stands still has grown, what works has shrunk.
#
# Names that the next exercises use:
#
# | what | fields, or arguments in order |
# | --- | --- |
# | `Plan` | `layout`, `zero`, `schedule`, `chunks`, `micro_batch`, `recompute` |
# | its methods | `num_microbatches(work)`, `tokens(work)`: of one micro-batch on a rank |
# | `Cluster` | `inside`, `between`, `gpus_per_server`, `gpu.memory` (bytes) |
# | `Software` | `element_bytes` (of a weight or an activation), `gradient_bytes`, `optimizer_bytes` |
# | `cost.peak_activations` | `(schedule, p, m, v)`: stages, micro-batches, chunks |
# | `cost.bubble_seconds` | `(schedule, p, f, b, w, v)`: f, b, w of a rank and one micro-batch |
# | `stage_seconds`, `message_seconds`, `data_seconds` | `(model, plan, work, cluster, software)` |
# | `optimizer_seconds` | `(model, plan, cluster, software)`, without `work` |
#
# A plan is printed as "dp8,cp16,pp16,tp8 ZeRO-1 interleaved x8 b1": degrees, ZeRO stage, schedule with 8 chunks a rank,
# 1 sequence a micro-batch. 1F1B is the schedule "one_f_one_b" of lesson 06, zb-h1 the "zb_h1" of lesson 08.
#
# ### `fits`
#
# What does the fullest rank keep, and does it fit? The pieces are there; put them together.
#
# - `rank_parameters(model, plan)`: what a rank holds outside experts, and of experts. `software` has the bytes of each.
# - ZeRO splits states over DP × CP (experts: DP × CP / EP). With m > 1 micro-batches gradients are added up whole.
# - Stage 3 on more than one rank holds two gathered layers besides, experts too: `2 / stage_layers(model, plan)[0]` of
#   the rank's parameters.
# - `layer_bytes(model, plan, work, software)` is one layer's activations for one micro-batch. How many layers are on a
#   rank, and how many micro-batches in flight (`cost.peak_activations`)? The docstring has the small rest.
#
# *Checked*: the states by stage, experts, activations, the limit.

# %% exercise="plan.fits"
from fivefold.plan import fits

# %% check="plan.fits"
check("plan.fits", fits)

# %% [markdown]
# Against the truth: your formula for the run above, and the bytes that its ledger counted on the fullest rank.

# %%
my_fits = mine("plan.fits", fits)
as_model = Model(4, 64, 8, 4, 256, 256, gated=False, tied=True, bias=True)
step_work, step_plan = Work(16 * 64, 64), Plan(layout, micro_batch=16 // 4 // layout.dp)
by_formula = my_fits(as_model, step_plan, step_work, TOY, plan.COURSE)
fullest = max((rank.memory for rank in ledger.ranks), key=lambda m: m.parameters + m.peak_saved)
rows = {"parameters": fullest.parameters, "gradients": fullest.gradients, "optimizer": fullest.optimizer}
for name, counted in (rows | {"activations": fullest.peak_saved}).items():
    formula = getattr(by_formula, name)
    print(f"{name:12} counted {counted / 1e3:7.1f} kB   formula {formula / 1e3:7.1f} kB   {formula / counted - 1:+.1%}")

# %% [markdown]
# Parameters are exact but for the last norm. Activations are off by up to a tenth: the course's attention keeps its
# result twice, the formula counts the fullest stage as if all were full, and here every small thing counts.
#
# Now Llama 3 405B on 16,384 GPUs of 80 GB. Which of these would you have tried first?

# %%
llama3, long_work = plan.MODELS["llama3-405b"], Work(tokens=1 << 24, context=131_072)
for text, more in (
    ("dp2048,tp8", {}),
    ("dp2048,tp8", {"zero": 3}),
    ("dp128,cp16,tp8", {"zero": 3}),
    ("dp128,pp16,tp8", {}),
    ("dp8,cp16,pp16,tp8", {"schedule": "interleaved", "chunks": 8}),
):
    one = Plan(Layout.parse(text), **more)
    if long_work.sequences % one.layout.dp:
        print(f"{text:18} ZeRO-{one.zero}: {one.layout.dp} data-parallel ranks for {long_work.sequences} sequences")
        continue
    kept = my_fits(llama3, one, long_work, llama3_cluster)
    size = f"{kept.total / 1e9:7.1f} GB of {kept.limit / 1e9:.1f} GB"
    print(f"{text:18} ZeRO-{one.zero}: {size}, {kept.activations / 1e9:.1f} GB of it activations")

# %% [markdown]
# A step of 16 million tokens has only 128 sequences of that length, so DP alone cannot use the GPUs. With PP for the
# rest, each pipeline has a single sequence, which does not fit, and would leave 15 of 16 stages idle at any time. So
# sequences must be split: CP. Two lines with CP fit. The third needs the least memory; the last is Llama 3's own
# layout. Memory alone does not choose between them. Time does, and your next function gives it.
#
# ### `step_seconds`
#
# How long does a step take? By part: `Seconds(compute, tp, cp, ep, pp, dp, bubble)`. The pieces:
#
# - for each micro-batch `stage_seconds(…)`, a `Stage(compute, tp, cp, ep, forward, backward, weight)`: the first four
#   on the slowest stage, both ways; and `message_seconds(…)`, to the next stage and back;
# - once a step the bubble: `cost.bubble_seconds` of `forward` and `backward`, each with half of the messages, where
#   `weight` of backward is the weight gradient (w) and the rest the input gradient (b);
# - once a step `data_seconds(…)`, what DP adds, and `optimizer_seconds(…)`, which belongs to compute.
#
# *Checked*: each part, for several schedules, clusters and models.

# %% exercise="plan.step_seconds"
from fivefold.plan import step_seconds

# %% check="plan.step_seconds"
check("plan.step_seconds", step_seconds)

# %%
my_seconds = mine("plan.step_seconds", step_seconds)
replayed = replay(ledger, near).makespan
formula = my_seconds(as_model, step_plan, step_work, near, plan.COURSE).total
print(f"the run above, replayed: {replayed * 1e3:.3f} ms; by your formula: {formula * 1e3:.3f} ms", end="")
print(f" ({formula / replayed - 1:+.1%})")

# %% [markdown]
# A formula against an event-by-event simulation of what a program did. And against the world:

# %%
from fivefold.plan import published
from fivefold.plots.plans import Point

predicted = [published.predict(one, my_seconds, my_fits) for one in published.rows()]
print(f"{'TFLOPS a GPU':20}   GPUs  {'layout':18}  reported  predicted   error")
for number, one in enumerate(predicted):
    fitted = "  fitted here" if number in published.FITTED.values() else ""
    layout_words = f"{one.run.plan.layout}" + (" ZeRO-3" if one.run.plan.zero == 3 else "")
    print(
        f"{one.run.model.name:20} {one.run.gpus:6,}  {layout_words:18} {one.run.reported:9.0f} {one.tflops:10.0f} "
        f"{one.error:+7.1%}{fitted}"
    )

# %%
kinds = {"Llama 3 2024": "Llama 3", "torchtitan 2024-12": "torchtitan"}
points = []
for one in predicted:
    zero3 = ", ZeRO-3" if one.run.plan.zero == 3 else ""
    kind = kinds.get(one.run.source, f"Narayanan 2021, table {one.run.table}{zero3}")
    points.append(Point(one.run.model.name, one.run.reported, one.tflops, kind))
plots.predictions(points)

# %% [markdown]
# **How honest is that?** One number is fitted for each type of GPU, on one row each: the share of its peak that large
# matrix products reach. It is 70% on the A100 (fitted on the model of a trillion parameters) and 60% on the H100 (on
# Llama 3 with 8,192 GPUs). Links have 120/128 of their bandwidth, as NCCL's protocol has. All else follows from shapes.
#
# But sources do not say everything, and what was filled in was chosen with the table in sight:
#
# - The ZeRO-3 rows (DeepSpeed in 2021) are as slow as *one* network card a server, and summed gradients without hiding
#   them. With eight cards, as programs use now, ZeRO-3 would be much better than these rows.
# - The micro-batch of table 1 is not stated: the fastest is taken. Llama 3's report does not say how it counts
#   attention: half of it, under the mask, is taken.
# - torchtitan's H100 has less power and slower memory than the one that was fitted; its peak is that of a sister model.
# - By `fits`, 530 billion parameters over 640 GPUs by ZeRO-3 need 88 GB. They ran in 80, so something is counted too
#   much there, or they did something to fit that the row does not say, and that took time.
#
# `python bench/plan.py` prints the table, a few further runs, and how far off those are.

# %%
pairs = {"175B, 384 GPUs": (16, 10), "175B, 768": (17, 11), "530B, 560 / 640": (19, 13), "530B, 1,120": (20, 14)}
print("pipeline + tensor ahead of ZeRO-3 by   reported  predicted")
for name, (ours, zero) in pairs.items():
    reported = predicted[ours].run.reported / predicted[zero].run.reported - 1
    print(f"{name:38} {reported:+8.0%} {predicted[ours].tflops / predicted[zero].tflops - 1:+10.0%}")

# %% [markdown]
# The rule of the crossing in seconds: on few GPUs ZeRO-3 nearly hides its traffic. On twice as many, with the same
# batch, it computes half as long and gathers as long as before.
#
# ### `search`
#
# The cheatsheet that engineers use, as a program:
#
# 1. **Make it fit**: cut the model by TP, CP and PP (`cuts(model, work, gpus, options)`).
# 2. **Fill with data parallelism**: the GPUs that are left (`filled(model, work, gpus, cut)`; it also spreads experts).
# 3. **Tune**: ZeRO stage, micro-batch, schedule, recomputation (`tunings(model, work, layout, options)`).
#
# Return what fits as a list of `Choice(plan, memory, seconds)`, the fastest first. You may look at fewer plans. Time
# and memory are those of the `software` given; what `options` leaves out (None: nothing) is not to be in the list.
#
# *Checked*, on models that you have not seen: all that you return fits, uses all GPUs, is in order and true, and the
# first takes at most 1.1 times as long as the best there is. Where nothing fits the list is empty.

# %% exercise="plan.search"
from fivefold.plan import search

# %% check="plan.search"
check("plan.search", search)

# %% [markdown]
# ## See it
#
# **Llama 3.** Its report has three layouts for 405 billion parameters. Among all that fit, where do they stand?

# %%
my_search = mine("plan.search", search)
for number in (22, 23, 24):
    theirs = predicted[number]
    choices = my_search(theirs.run.model, theirs.run.work, theirs.run.gpus, theirs.run.cluster)
    ahead = sum(one.seconds.total < theirs.seconds.total * (1 - 1e-9) for one in choices)
    slower = theirs.seconds.total / choices[0].seconds.total - 1
    beside = f"{slower:.1%} slower than {choices[0].plan}" if ahead else "nothing is faster"
    print(f"{theirs.run.plan.layout!s:18} {theirs.run.work.context:7,} tokens, {theirs.run.gpus:6,} GPUs:", end=" ")
    print(f"rank {ahead + 1} of {len(choices):,}; {beside}")

# %% [markdown]
# The long one comes out on top. For 8,192 tokens the planner has a few percent to offer: TP 4 with CP 4 in the place
# of TP 8. A rank sends half as many tokens over NVLink; K and V are small, since 128 heads share 8 of them; and with
# half as much DP each pipeline has twice as many micro-batches, so its bubble is half as long. Is it better? The
# formula knows nothing of a busy network with K and V on it in every layer, and little of memory that is lost in holes.
# Four percent are within its error. What it can say is where these plans stand among the thousands that fit.
#
# Two parts of the winner are longer, besides CP. It computes 4% longer: a rank multiplies a quarter of the tokens at a
# time by twice as large a share of the weights, so it reads four times as many bytes of weights in a step. And DP is 5%
# of the step, not 1%: gradients can hide behind the last micro-batch's backward only, and that has a quarter of the
# tokens and takes half as long.

# %%
short = predicted[23]
best = my_search(short.run.model, short.run.work, short.run.gpus, short.run.cluster)[0]
theirs = Choice(short.plan, short.memory, short.seconds)
plots.plans([best, theirs], "TP 4 with CP 4 waits less for TP and for the bubble than TP 8 does")

# %% [markdown]
# Every number has its formula:

# %%
print(plan.explain(llama3, best.plan, short.run.work, llama3_cluster))

# %% [markdown]
# **TP over two servers.** The best plan with each TP, everything else free:

# %%
tried = my_search(llama3, Work(1 << 24, 8192), 16_384, llama3_cluster)
by_tp = {}
for one in tried:
    by_tp.setdefault(one.plan.layout.tp, one)
plots.plans(sorted(by_tp.values(), key=lambda one: one.plan.layout.tp), "TP 16 leaves the server, and pays for it")

# %% [markdown]
# **A robot.** Cameras at 30 frames a second, 256 tokens a frame, one minute of history: 30 · 256 · 60 = 460,800 tokens.
# A model of 8 billion parameters, 64 H100s, eight such histories a step. Before you run the cell: what must be split?

# %%
robot = Work(tokens=8 * 460_800, context=460_800)


def best_of_each(choices: list[Choice]) -> list[Choice]:
    """For every layout its fastest plan."""
    found = {}
    for one in choices:
        found.setdefault(one.plan.layout, one)
    return list(found.values())


plots.plans(best_of_each(my_search(plan.MODELS["llama3-8b"], robot, 64, plan.cluster("h100"))))

# %%
for again in ("none", "full"):
    whole_sequences = Plan(Layout(dp=8, tp=8), 3, recompute=again)
    task = plan.MODELS["llama3-8b"], whole_sequences, robot, plan.cluster("h100")
    kept = my_fits(*task)
    size = f"{kept.total / 1e9:.0f} GB a rank, {kept.activations / 1e9:.0f} GB of it activations"
    seconds = f"{my_seconds(*task).total:.1f} s a step" if kept.fits else f"over {kept.limit / 1e9:.0f} GB"
    print(f"DP 8 with TP 8, no CP, recomputation {again}: {size}; {seconds}")
share = 4 * 460_800 * 4096 / 2 / (2 * plan.MODELS["llama3-8b"].parameters / 32)
print(f"attention computes {share:.1f} times as much as all matrices")

# %% [markdown]
# Eight histories fill eight data-parallel ranks at most. The rest can be TP only if all is computed again: that fits,
# and takes 63 s in the place of 48.5 s. Better to split tokens: with so long a sequence most computing is attention,
# and exchanging K and V, whose cost grows with s, is little beside work that grows with s².
#
# **And yours.** Here is a genome: windows of a million letters, a model with grouped heads, 32 older GPUs. Put in its
# place what you would like to train: the sizes, the GPUs, the context.

# %%
my_model = Model(layers=32, hidden=4096, heads=32, kv_heads=4, ffn=11008, vocabulary=512, name="a genome model")
my_work = Work(tokens=1 << 22, context=1 << 20)
plots.plans(best_of_each(my_search(my_model, my_work, 32, plan.cluster("a100"))))

# %% [markdown]
# **All of it.** Move the GPUs from 16,384 down until 405 billion parameters fit no more. What changes on the way?

# %%
from fivefold import widgets

widgets.planner(gpus=16384, context=131072)

# %% [markdown]
# <details><summary>What changes on the way</summary>
#
# Down to 2,048 GPUs the fastest plan stays CP 16, PP 16, TP 8, with less and less DP. At 1,024 the pipeline vanishes:
# DP 8, CP 32, TP 4 with ZeRO-3. Its gathers hide, since each GPU has more to compute; but what is hidden takes a part
# of the GPU, and so 15% of the step. At 256 the fastest plan computes everything again, at 128 all that fit do, and on
# 64 nothing fits.
# </details>

# %% [markdown]
# ## Find the bug
#
# ### The planner that thinks data parallelism is free
#
# This is how somebody wrote `data_seconds`. It agrees with the run above, where nothing hides. It agrees in stage 3.
# And it likes layouts with as much data parallelism as the batch allows.

# %% exercise="plan.data_seconds" bug="hidden_behind_the_whole_step"
from fivefold.plan import data_seconds

# %% [markdown]
# A network that is four times as slow, and 32 micro-batches. Gradients of 6.4 billion parameters travel for more than
# a second; how much of that can hide?

# %%
slow = replace(llama3_cluster, between=replace(llama3_cluster.between, bandwidth=llama3_cluster.between.bandwidth / 4))
one = Plan(Layout(64, 4, 16, 4), 1, "interleaved", 8)
stage = stage_seconds(llama3, one, short.run.work, slow)
sums, gathers = state_seconds(llama3, one.layout, stage_layers(llama3, one), slow, MODERN)
print(f"one micro-batch: {stage.forward:.2f} s forward, {stage.backward:.2f} s backward on a stage")
print(f"gradients {sums:.2f} s, parameters {gathers:.2f} s on the network")
print(f"added to the step by this function: {data_seconds(llama3, one, short.run.work, slow):.2f} s")

# %% [markdown]
# When is the first gradient whole, so that it can leave? Mend the function in its place, and leave the lines below it;
# run the cell above again, then the check.
#
# <details><summary>Hint: how to look</summary>
#
# A rank adds its micro-batches' gradients up, and sums over ranks once. Of which micro-batch's backward can that sum be
# beside? And which forward is the first to need new parameters?
# </details>

# %% check="plan.data_seconds"
check("plan.data_seconds", data_seconds)

# %% [markdown]
# ## The real tool
#
# PyTorch places ranks with a `DeviceMesh`: names and sizes of dimensions, the last one innermost. Here it lists every
# group of a layout on 8 real ranks, and they are where your `place` says, for servers of 2 and of 4:


# %%
def groups_of_torch(sizes: dict[str, int]) -> dict[str, list[int]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {axis: torch.distributed.get_process_group_ranks(mesh.get_group(axis)) for axis in sizes}


for text in ("dp2,pp2,tp2", "cp2,pp2,tp2", "dp2,cp4", "dp4,tp2", "pp4,tp2"):
    layout = Layout.parse(text)
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "tp")}
    by_rank = run(groups_of_torch, 8, sizes).results
    for gpus_per_server in (2, 4):
        machines = Cluster(gpus_per_server=gpus_per_server)
        theirs = {}
        for axis in (axis for axis, degree in sizes.items() if degree > 1):
            apart = any(machines.slowest_link(groups[axis]) is machines.between for groups in by_rank)
            theirs[axis] = machines.between if apart else machines.inside
        assert theirs == my_place(layout, machines)
print("your place agrees with every DeviceMesh")

# %% [markdown]
# Megatron-LM takes the degrees as `--tensor-model-parallel-size` and so on, and places ranks in the order
# `tp-cp-ep-dp-pp`: there DP comes before PP. Which order is right depends on what hides: a gradient sum over fast links
# can be worth more than a pipeline's few messages.

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="10.crossing"
crossing_answer = 3 * 530e9 * 559 / 560 / (2 * 20480) / 1e6

# %% check="10.crossing"
check("10.crossing", crossing_answer)

# %% question="10.order"
order_answer = "c"

# %% check="10.order"
check("10.order", order_answer)

# %% question="10.interleaving"
interleaving_answer = 100 * 15 / (8 * 16)

# %% check="10.interleaving"
check("10.interleaving", interleaving_answer)

# %% question="10.zero2"
zero2_answer = 4 * 5 * 15 / 16

# %% check="10.zero2"
check("10.zero2", zero2_answer)

# %% [markdown]
# ## Where this stands
#
# The whole planner is on the command line: `fivefold plan llama3-405b --gpus 16384 --context 131072 --batch 16777216
# --cluster llama3`. It says for each layout how long, how much, and why.
#
# What it does not know: congestion, the topology above servers, stragglers, failures (at 16,384 GPUs something breaks
# every few hours), how evenly experts are loaded, and kernels that are better or worse than the one share of the peak
# that it was given. Use it to throw away 9,990 of 10,000 plans, and a stopwatch for the rest.
#
# | here | in the field |
# | --- | --- |
# | `place` | `DeviceMesh`; Megatron-LM's `--tensor-model-parallel-size`, …; torchtitan's `parallel_dims` |
# | `fits` | Megatron-LM's theoretical memory report; a dry run |
# | `step_seconds`, `search` | [Alpa](https://arxiv.org/abs/2201.12023) (Zheng et al. 2022) searches with a compiler |
#
# **Papers.** [Efficient large-scale training on GPU clusters](https://arxiv.org/abs/2104.04473) (Narayanan et al.
# 2021): sections 3 and 5, tables 1 and 2. [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783) (2024):
# section 3.3.
# [torchtitan](https://arxiv.org/abs/2410.06511) (Liang et al. 2024).
# [ZeRO](https://arxiv.org/abs/1910.02054) (Rajbhandari et al. 2020). [DeepSeek-V3](https://arxiv.org/abs/2412.19437)
# (2024): another answer, without TP, for experts on 2,048 GPUs.
