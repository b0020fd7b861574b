# %% [markdown]
# # 11 · Five in one
#
# *120 minutes · 5 exercises and 5 questions, 29 points · 16 processes on this machine, no GPU*
#
# The school kitchen, all together: two teams share out the children's orders (data). In each team half of the cooks
# fill, the other half fold and wrap (pipeline). A long sandwich is cut along its length (context). Two cooks make each
# piece together (tensor). And whoever needs smoked cheese goes to the one who has it (expert). Sixteen cooks, five ways
# to share, one lunch.
#
# ![Sixteen ranks in two boxes, half of the sequences in each. In a box, lower layers stand left and upper layers right,
# outer tokens above and inner tokens below; each of the four places has two ranks. Arrows in five colours say what
# goes along each axis.](pictures/11_five.svg)
#
# **What is split**: everything. Sequences over DP, tokens of each over CP, layers over PP, matrices over TP, and
# experts over EP, which uses the ranks of DP × CP a second time.
#
# **What travels**: what you know from each lesson, each along its own axis.
#
# **When it hurts**: where two axes meet. Every part of this course is right by itself. Together they are right only if
# each gradient is summed over the right ranks, the loss is one mean, and the norm counts every number once. That glue
# is what you write now. At the end a model trains on functions that are all yours.

# %% [markdown]
# As before: run the cells from top to bottom. Sixteen processes on a laptop take a few seconds a step; the whole
# notebook needs about four minutes on two cores.

# %%
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from fivefold import context, pipeline, plots, run, tensor, zero
from fivefold.layout import Layout
from fivefold.mesh import Mesh, make_mesh
from fivefold.model import GPTConfig, Role
from fivefold.pipeline import sum_copies
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import Ledger, phase
from fivefold.runtime.replay import replay
from fivefold.sequence import sync_replicated_gradients
from fivefold.train import Job, StepReport, Trainer, local_batches, train
from IPython.display import display
from torch import Tensor, nn

from autograde import check, mine, own_parts

# %% tags=["parameters"]
layout = "dp2,cp2,pp2,tp2,ep4"  # 16 ranks
device = "cpu"  # or "cuda": one rank a GPU, and where there are more ranks than GPUs they share them
steps = 3  # of each training below
parts = "mine"  # what the last page trains with: "mine", or "library"
notebooks = ""  # the folder of your notebooks, where it is not this one

# %% [markdown]
# ## What is split, what travels, when
#
# Here is the whole course in one table. B tokens a step in micro-batches, width h, Ψ parameters; dp, c, p, t and e are
# the degrees of DP, CP, PP, TP and EP, n = dp · c the ranks of DP × CP, and k the experts that a token goes to:
#
# | axis | splits | what travels, over which ranks | when |
# | --- | --- | --- | --- |
# | data, DP | sequences | gradients and weights, 2(n−1)/n · Ψ/(p·t) numbers, over DP × CP or less | once a step |
# | context, CP | tokens of a sequence | keys and values, c−1 blocks forward, around the ring | in each layer |
# | pipeline, PP | layers | activations, B/(dp·c) · h/t numbers each way, to the next stage | for each micro-batch |
# | tensor, TP | matrices | activations, 4 · (t−1)/t · B/(dp·c) · h numbers a layer each way | in each layer |
# | expert, EP | experts | tokens, 2 · k · (e−1)/e · B/(dp·c) · h numbers a layer each way | in layers with experts |
#
# So the axes are not alike. TP speaks in every layer, in the middle of the work, and wants the fastest link: its ranks
# are neighbours. DP speaks once a step and can wait: its ranks stand farthest apart. In between, CP and PP. This order,
# TP innermost, then CP, then PP, then DP, is the one in which `mesh` numbers the ranks.
#
# Three rules keep it exact:
#
# 1. **A gradient is whole when every token of the step has had its say once.** Sum over the ranks that hold the same
#    numbers and saw other tokens, and over the two places that use one weight. Never a mean, and never over ranks that
#    did the same work with the same tokens.
# 2. **The loss is one number**: the mean over all tokens of the step, whoever had them. Each rank divides by that
#    count *before* backward, so that everything after it is a sum.
# 3. **The norm is one number** as well: that of the gradient of the model, in which each parameter stands once,
#    however many ranks hold a copy of it.

# %% [markdown]
# ## A worked example
#
# The model is a byte-level GPT: 4 layers, 64 features, every second layer with 4 experts of which a token meets 2. The
# text is the language reference inside Python. A `Job` says what to train and how; `train` does it on the ranks of its
# layout. First one process:

# %%
model = GPTConfig(layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, experts=4, top_k=2)


def job_for(layout: str, **more) -> Job:
    """The same training on any layout: 16 sequences of 64 tokens a step, in 4 micro-batches."""
    return Job(Layout.parse(layout), model, batch=16, sequence=64, sequence_parallel=True, device=device, **more)


def losses(job: Job, steps: int) -> list[float]:
    return [report.loss for report in train(job, steps)]


alone = run(losses, 1, job_for("dp1"), steps, device=device, measure=True)
print("  ".join(f"{loss:.6f}" for loss in alone.results[0]))

# %% [markdown]
# And now all five axes at once:

# %%
job = job_for(layout)
together = run(losses, job.layout.world_size, job, steps, device=device, measure=True, timeout=600)
for one, five in zip(alone.results[0], together.results[0], strict=True):
    print(f"one process {one:.6f}   {job.layout.world_size} ranks {five:.6f}   difference {abs(one - five):.0e}")
torch.testing.assert_close(together.results[0], alone.results[0], rtol=1e-4, atol=0)

# %% [markdown]
# The same losses, but for the last digits of float32: sums in another order round in another way. In fp64 they agree to
# 10⁻¹⁰, which the course's own tests ask of 115 layouts. This is what went over the wires:

# %%
together.ledger.traffic()

# %% [markdown]
# Five axes, and each has its own operations: `tp` all-gathers and reduce-scatters, `cp` and `pp` messages, `ep`
# all-to-alls, `dp_cp` gradients. Now take the glue out of it, and write it.

# %% [markdown]
# ## Exercises
#
# ### `gradient_groups`
#
# Over which groups is a parameter's gradient summed, one after the other? `role` says what the parameter is:
# `role.expert`, and `role.split`, the dimension that TP cuts, or None where each TP rank has all of it.
#
# - **In, out**: the role, the mesh, whether tokens are split over TP too (lesson 04); a list of process groups.
# - **The first group** is the one over which ZeRO will share out the optimizer's state.
# - **Travels**: nothing. The groups are named here, and used by others.
# - **Checked**: on several layouts, that every token's share is in the sum once: none missing, none twice, none that
#   belongs to another piece.
#
# <details><summary>Hint: three parameters</summary>
#
# Take DP 2 × TP 2 with EP 2. Draw the four ranks. Write beside each which tokens it saw, which columns of a split
# matrix it has, and which experts. Do it for a split matrix, an expert's and a LayerNorm's weight.
# </details>

# %% exercise="train.gradient_groups"
from fivefold.train import gradient_groups

# %% check="train.gradient_groups"
check("train.gradient_groups", gradient_groups)

# %% [markdown]
# Yours, on the layout above, for rank 0:

# %%
groups_of = mine("train.gradient_groups", gradient_groups)


def shown() -> dict[str, list]:
    mesh = make_mesh(Layout.parse(layout))
    kinds = {"a LayerNorm": Role("w"), "a split matrix": Role("w", 0), "an expert": Role("w", 1, expert=True)}
    ranks_of = dist.get_process_group_ranks
    return {kind: [ranks_of(group) for group in groups_of(role, mesh, True)] for kind, role in kinds.items()}


for kind, groups in run(shown, job.layout.world_size).results[0].items():
    print(f"{kind:15} {groups}")

# %% [markdown]
# ### `loss_mean`
#
# Returns the loss function of a step. Its values, over all micro-batches and ranks, add up to the mean over all tokens.
#
# - **In, out**: this rank's labels, (b, s/c) for each micro-batch; `loss(logits, i)`, a scalar for micro-batch i.
# - **A token that is ignored** is none. Ranks and micro-batches may have different numbers of tokens.
# - **Travels**: one number over `mesh.dp_cp`, once, and what `tensor.vocab_cross_entropy(logits, labels, mesh.tp,
#   ignore_index)`, the losses (b, s/c) of lesson 03, needs.
# - **Checked**: losses, gradients of the logits, traffic; with unlike counts, and a rank that has no token.
#
# <details><summary>Hint: two micro-batches</summary>
#
# One has 3 tokens with losses 1, 1, 1, the other 1 token with loss 5. What is the mean over the four tokens, and what
# the mean of the two means? By which number must each sum be divided, and who knows it?
# </details>

# %% exercise="train.loss_mean"
from fivefold.train import loss_mean

# %% check="train.loss_mean"
check("train.loss_mean", loss_mean)

# %% [markdown]
# ### `clip`
#
# Scales the gradients of a step so that the norm of the model's gradient is `max_norm` at most.
#
# - **In, out**: this rank's shards, each with its piece in `shard.gradient`; the norm before. `copies[i]` says how many
#   ranks of the world hold the very piece that shard i has.
# - **Each piece counts once**, and all ranks scale by the same number, max_norm/(norm + 1e-6) where that is below 1.
# - **Travels**: one number, over the world. Norms do not add up: what does?
# - **Checked**: norm, gradients, traffic; pieces of unlike lengths, one of them empty, held by 1, some and all ranks.
#
# (You wrote the half of it in lesson 02: `zero.clip_grad_norm(gradients, max_norm, group, copies)` is at hand.)

# %% exercise="train.clip"
from fivefold.train import clip

# %% check="train.clip"
check("train.clip", clip)

# %% [markdown]
# ### `step`
#
# One step of training, five ways at once. Nearly every piece of it you have written before (`local_batches`, which
# tokens a rank has, comes below); their order is the exercise.
#
# - **In, out**: a `Trainer`, with all that a rank has, and tokens (batch, sequence + 1), the same on every rank; a
#   `StepReport` of loss and norm. (`help(Trainer)` lists its fields.) Of the `Trainer` you need `mesh`, `stages`,
#   `schedule`, `shards`, `copies`, `tied`; `roles`, the `Role` of each parameter; `job`, with `num_microbatches`,
#   `sequence_parallel`, `max_norm` and `lr`; `template()`, what the executor wants; `total(losses)`, the whole loss.
# - **In four parts**: the schedule (`local_batches`, `loss_mean`, executor), gradients made whole, clipped, the update.
# - **Checked**: the loss, the norm and every weight after two steps, against one process; traffic; with and without
#   sequence parallelism, tied embeddings, another learning rate.
#
# <details><summary>Hint: in which order gradients become whole</summary>
#
# A gradient is added up three times: over the two stages that share a weight, over the TP ranks where the weight is
# whole and tokens are split, and over DP × CP. The last of these takes it out of `p.grad`, and leaves each rank a piece
# in `shard.gradient`. What has to come before that? And what can only come after?
# </details>

# %% exercise="train.step"
from fivefold.train import step

# %% check="train.step"
check("train.step", step)

# %% [markdown]
# From here on, trainings run on your glue where it is right. (`parts` puts a function in the place of the library's, on
# every rank.)

# %%
glue = {
    "train.gradient_groups": groups_of,
    "train.loss_mean": mine("train.loss_mean", loss_mean),
    "train.clip": mine("train.clip", clip),
    "train.step": mine("train.step", step),
}

# %% [markdown]
# ## See it
#
# **One axis at a time.** Each cell turns on one more, trains on the same text, and compares the losses with one
# process, step by step. Its bars stand beside those of the layout before: what a rank keeps, what leaves it in two
# steps, and the time that these would take on H100s in servers of 8, with the model 64 times as wide (h = 4,096).

# %%
wide = 64
runs = {}


def measured(layout: str) -> Ledger:
    """Train for two steps, compare the losses with those of one process, and keep the ledger of the run."""
    job = job_for(layout)
    done = run(losses, job.layout.world_size, job, 2, device=device, parts=glue, measure=True, timeout=600)
    off = max(abs(many - one) for many, one in zip(done.results[0], alone.results[0], strict=False))
    print(f"{layout}: losses {' and '.join(f'{loss:.6f}' for loss in done.results[0])}, off one process by {off:.0e}")
    torch.testing.assert_close(done.results[0], alone.results[0][:2], rtol=1e-4, atol=0)
    return done.ledger


def turn_on(layout: str, words: str) -> plots.Figure:
    before = list(runs)[-1]
    runs[layout] = measured(layout)
    both = {before: runs[before], layout: runs[layout]}
    display(plots.layouts(both, cluster("h100"), widen=wide, title=words))
    return plots.timeline(replay(runs[layout], cluster("h100"), widen=wide), ranks=range(min(8, len(runs[layout]))))


runs["dp1"] = measured("dp1")

# %%
turn_on("dp2", "Data: half of the work for each, and gradients travel once")

# %% [markdown]
# Weights stay whole on every rank; ZeRO shares out the optimizer's state. The blue stripes stand at the end of the
# step, one reduce-scatter and one all-gather.

# %%
turn_on("dp2,cp2", "Context: half of the tokens for each, and keys and values go round")

# %% [markdown]
# What waits for backward halves again. The weights do not: CP, like DP, splits tokens.

# %%
turn_on("dp2,cp2,pp2", "Pipeline: half of the layers for each, and ranks wait for each other")

# %% [markdown]
# Now weights halve too. White gaps are the bubble of lesson 06, (p−1)/m of the work; the pink lines are so thin because
# so little travels.

# %%
turn_on("dp2,cp2,pp2,tp2", "Tensor: half of each matrix, and transfers in every layer")

# %% [markdown]
# The fourth halving of the work, and the first that pays little: at this width TP's transfers take about as long as the
# work they save. Go back to the widget of lesson 03 to see from which width on it pays.

# %%
turn_on("dp2,cp2,pp2,tp2,ep4", "Experts: a quarter of them for each, and tokens go to see them")

# %% [markdown]
# EP has taken no ranks of its own. A rank holds one expert of a layer where it held four, and what it pays is two
# all-to-alls a layer each way. Here they cross the network, and the time grows: with four small experts EP saves
# little memory and costs much. DeepSeek-V3 has 256 experts in each layer, which no GPU could hold.
#
# **One axis less.** From all five, turn each off in turn. What did it cost, what did it save?

# %%
every = "dp2,cp2,pp2,tp2,ep4"
without = {
    "no DP": "cp2,pp2,tp2,ep2",
    "no CP": "dp2,pp2,tp2,ep2",
    "no PP": "dp2,cp2,tp2,ep4",
    "no TP": "dp2,cp2,pp2,ep4",
    "no EP": "dp2,cp2,pp2,tp2",
}
fewer = {name: runs[layout] if layout in runs else measured(layout) for name, layout in without.items()}
plots.layouts({"all five": runs[every]} | fewer, cluster("h100"), widen=wide, title="All five axes, and one less")

# %% [markdown]
# Read it by columns. *Memory*: without PP or TP a rank keeps nearly twice the weights; without DP or CP it keeps twice
# what waits for backward, and EP can be 2 only. *Traffic*: each axis's colour is gone in its row, and the others grow,
# since there are half as many ranks for the same work. *Time*: rows two to five have 8 GPUs where the others have 16.
# And eight are faster here: with 1,024 tokens a step, this model is too small for sixteen. Which layout is right for
# which model was lesson 10's question.
#
# **The bytes, against the formulas.** What a rank of the first stage sends in these two steps, all five axes on, and
# what `cost` says. (For the experts the formula takes tokens that are spread evenly; a router spreads them as it
# likes. The axes also carry small things: counts of tokens, losses, the experts' loads.)

# %%
from fivefold import cost

h, t, c, ep = model.hidden, 2, 2, 4
tokens = 16 * 64 // 4  # of a step, at one place of DP x CP
kv_width = model.kv_heads * (h // model.heads) // t  # of a TP rank
tied = model.vocabulary * h // t  # the embedding's gradient, to the last stage
by_hand = {
    "tp": 2 * cost.tensor_traffic(1, tokens, h, t) + cost.tensor_traffic(1, tokens, h, t) / 4,  # 2 layers, embedding
    "cp": 2 * 3 * cost.ring_attention_traffic(tokens * c, kv_width, c),  # 2 layers; backward takes twice as much
    "pp": cost.pipeline_traffic(1, tokens // t, h) + tied,
    "ep": cost.expert_traffic(tokens, h, model.top_k, ep),  # 1 layer with experts
}
sent = {axis: sum(call.sent for call in runs[every][0].communications if call.group == axis) for axis in by_hand}
print("axis   sent by rank 0   formula")
for axis, numbers in by_hand.items():
    print(f"{axis:4} {sent[axis] / 1e3:13.1f} kB {2 * 4 * numbers / 1e3:8.1f} kB")

# %%
plots.traffic_by_axis(runs[every], title="What leaves a rank in two steps of all five, at most")

# %% [markdown]
# **Where the ranks stand.** The same ledger, the same bytes; only the servers differ. First two servers of 8, DP
# between them. Then the same two servers, filled so that the two ranks of each TP pair stand in different ones:

# %%
near = replay(runs[every], cluster("h100"), widen=wide)
order = {"tp": 2, "cp": 2, "pp": 2, "dp": 2}
far = replay(runs[every], cluster("h100").placed(order, innermost=("cp", "pp", "dp", "tp")), widen=wide)
print(f"DP between servers: {1e3 * near.makespan / 2:.2f} ms a step, {near.share('exposed'):.0%} of it standing still")
print(f"TP between servers: {1e3 * far.makespan / 2:.2f} ms a step, {far.share('exposed'):.0%} of it standing still")

# %% [markdown]
# **On other machines.** Your run, on GPUs and servers of your choice. Put all 16 GPUs into one server. Then make the
# model four times as wide: whose stripes become thin first?

# %%
from fivefold import widgets

widgets.replayed(runs[every])

# %% [markdown]
# ## Find the bug
#
# `local_batches` gives each rank its share of a step's tokens. Somebody wrote it for data parallelism, where it worked
# for a year.

# %% exercise="train.local_batches" bug="by_rank_of_the_world"
from fivefold.train import local_batches

# %% [markdown]
# The losses of the second step; with one process it is the first number:

# %%
for name in ("dp1", "dp2", "dp2,cp2", "dp2,tp2", "dp2,pp2"):
    job = job_for(name)
    glue_too = glue | {"train.local_batches": local_batches}
    found = run(losses, job.layout.world_size, job, 2, device=device, parts=glue_too).results[0]
    print(f"{name:8} {found[1]:.4f}")

# %% [markdown]
# Nothing hangs, every shape is right, and each of these trains: the loss falls on all of them. Mend the function, so
# that it is one number in all rows. Then run the cell above again, and the check.
#
# <details><summary>Hint: how to look</summary>
#
# For DP 2 × TP 2, write down which half of the sequences each of the four ranks takes. Two ranks of a TP group add up
# parts of *one* layer's output. For which tokens?
# </details>

# %% check="train.local_batches"
check("train.local_batches", local_batches)

# %% [markdown]
# In PyTorch this is the argument of a `DistributedSampler`: `num_replicas` and `rank` are the size of DP and the place
# in DP. Left out, they are those of the world.

# %% [markdown]
# ## The real tool
#
# PyTorch composes by meshes of several dimensions. TP on one, FSDP2 on the other, and `clip_grad_norm_` knows from each
# DTensor's placements which numbers it has counted already. Beside it, yours: a split MLP, ZeRO's shards, your `clip`.


# %%
def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / shape[-1] ** 0.5


def weights() -> tuple[Tensor, ...]:
    return random(4 * h, h, seed=1), random(4 * h, seed=2), random(h, 4 * h, seed=3), random(h, seed=4)


def norms(clip) -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ours = make_mesh(Layout(dp=2, tp=2))
    x = random(2, 8, h, seed=5)[ours.dp.rank()]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)).double()
    for parameter, whole in zip(theirs.parameters(), weights(), strict=True):
        parameter.data.copy_(whole)
    parallelize_module(theirs, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(theirs, mesh=mesh["dp"])
    theirs(x).square().mean().backward()  # FSDP2 takes the mean over DP by itself
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)

    layer = tensor.MLP(*weights(), ours.tp)
    (layer(x).square().mean() / 2).backward()  # we divide first, and sum
    shards = [zero.Shard([parameter], ours.dp_cp) for parameter in layer.parameters()]
    zero.reduce_gradients(shards)()
    copies = [2 if parameter is layer.row.bias else 1 for parameter in layer.parameters()]
    return float(norm.full_tensor()), float(clip(shards, copies, 0.05, ours))


theirs, yours = run(norms, 4, glue["train.clip"], echo=False).results[0]  # FSDP2 warns of what is not done here
print(f"norm of the gradient: PyTorch {theirs:.12f}, yours {yours:.12f}")
torch.testing.assert_close(yours, theirs, rtol=1e-12, atol=0)

# %% [markdown]
# torchtitan puts the five together in this way: one `DeviceMesh` with a dimension for each axis, and one function that
# applies TP, then recomputation, then compilation, then FSDP to a model. Megatron-LM keeps process groups by name
# (`parallel_state`), as `mesh` does, and its `finalize_model_grads` is the middle of your `step`.

# %% [markdown]
# ## From one layout to another
#
# A cluster loses a node, and the training goes on with fewer. A checkpoint holds every weight and the optimizer's state
# in pieces, each with its place in the whole matrix; whoever reads it takes the pieces that it needs. Two steps on
# eight ranks, and on from there on four, cut in another way:

# %%
from fivefold import checkpoint
from fivefold.train_loop import Course, launch

with tempfile.TemporaryDirectory() as folder:
    first = launch(job_for("dp2,pp2,tp2,ep2"), Course(steps=2, folder=folder), parts=glue)
    print()
    second = launch(job_for("cp2,tp2,ep2"), Course(steps=3, folder=folder, resume=str(checkpoint.newest(folder))), glue)

gone_on = [row["loss"] for row in first["steps"] + second["steps"]]
print(
    "\none process:", "  ".join(f"{loss:.4f}" for loss in run(losses, 1, job_for("dp1"), 3, device=device).results[0])
)
print("moved:      ", "  ".join(f"{loss:.4f}" for loss in gone_on))

# %% [markdown]
# ## On a node of GPUs
#
# The same notebook, with `device = "cuda"` in the cell of parameters. Then each rank has a GPU and NCCL between them;
# numbers are bf16 with AdamW's state in float32; attention is fused; a rank's experts are one grouped product; and
# transfers overlap with work. Where there are more ranks than GPUs, they share them. That shows that the numbers are
# right, and says nothing about speed.
#
# Tokens a second and MFU are printed for each step. **MFU**, the model FLOPs utilisation, is
#
# $$\mathrm{MFU} = \frac{3 \cdot \mathrm{FLOPs\ of\ a\ forward}}{\mathrm{seconds\ a\ step} \cdot \mathrm{GPUs} \cdot
# R}$$
#
# where a backward counts as two forwards, the causal half of attention is not taken off, what is computed again does
# not count, and R is the rate that one large matrix product reaches *on this very card*, measured before the first
# step.
#
# All five axes at once, each larger than 1, take 16 GPUs or ranks that share. On 8 GPUs two layouts have all five
# between them: `dp2,pp2,tp2,ep2` and `dp2,cp2,tp2,ep4`.

# %%
on_gpus = ["dp2,pp2,tp2,ep2", "dp2,cp2,tp2,ep4"]
large = GPTConfig(layers=8, hidden=1024, heads=16, kv_heads=8, ffn=4096, experts=8, top_k=2, dtype=torch.bfloat16)
if torch.cuda.is_available():
    for name in on_gpus:
        gpu_job = Job(
            Layout.parse(name), large, batch=32, sequence=1024, num_microbatches=8, sequence_parallel=True,
            fused_attention=True, device="cuda",
        )  # fmt: skip
        launch(gpu_job, Course(steps=steps))
        print()
else:
    print(f"no GPU here. With one, this cell would train {' and '.join(on_gpus)} on it, in bf16 with fused attention,")
    print("and print tokens a second and the MFU of each step. It is not graded.")

# %% [markdown]
# From a shell, `fivefold train --layout dp2,cp2,pp2,tp2,ep4 --device cuda` does the same. Under `torchrun`, which
# starts a process for each rank and tells it its number in the environment, `run` starts nothing: the process *is* a
# rank.
#
# ```
# torchrun --nproc-per-node 8 -m fivefold.cli train --device cuda --layout dp2,pp2,tp2,ep2
# ```
#
# On several nodes, one `torchrun` runs on each, and all are given the address of one of them, where they meet. Slurm
# starts them: `sbatch examples/slurm.sh`. It asks for one task a node, finds the first node's name, starts `torchrun`
# on each, saves checkpoints, and goes on from the newest if the job is queued again. `examples/README.md` explains each
# line.
#
# Neither this cell nor the script has been run on GPUs yet; on CPUs, both have.

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="11.gpus"
gpus_answer = 4 * 2 * 4 * 8

# %% check="11.gpus"
check("11.gpus", gpus_answer)

# %% question="11.copies"
copies_answer = 4 * 2 / 4

# %% check="11.copies"
check("11.copies", copies_answer)

# %% question="11.second_loss"
second_loss_answer = "b"

# %% check="11.second_loss"
check("11.second_loss", second_loss_answer)

# %% question="11.norm"
norm_answer = 5

# %% check="11.norm"
check("11.norm", norm_answer)

# %% question="11.innermost"
innermost_answer = "c"

# %% check="11.innermost"
check("11.innermost", innermost_answer)

# %% [markdown]
# ## Where this stands
#
# | here | Megatron-LM | torchtitan |
# | --- | --- | --- |
# | `mesh.make_mesh` | `parallel_state.initialize_model_parallel` | `ParallelDims`, a `DeviceMesh` |
# | `gradient_groups` | `finalize_model_grads`, by attributes of each parameter | placements of each DTensor |
# | `loss_mean` | `num_tokens`, reduced in `finalize_model_grads` | the count of valid tokens, over the loss mesh |
# | `clip` | `clip_grad_norm_fp32`, `param_is_not_tensor_parallel_duplicate` | `clip_grad_norm_` on DTensors |
# | `step` | `train_step` | `Trainer.train_step` |
# | `checkpoint` | `dist_checkpointing` | `torch.distributed.checkpoint` |
#
# **Papers.** [Efficient Large-Scale Language Model Training](https://arxiv.org/abs/2104.04473) (Narayanan et al. 2021)
# put three axes together. [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783) (2024), section 3.3.2, has
# four, and says why in this order. [DeepSeek-V3](https://arxiv.org/abs/2412.19437) (2024) has experts across many
# nodes. [TorchTitan](https://arxiv.org/abs/2410.06511) (Liang et al. 2024) composes them with DTensor.

# %% [markdown]
# ## The last page
#
# The course is a library with its key functions taken out. Now yours go in. `own_parts` reads your notebooks as they
# are **saved** (so save this one first), checks every solution, and takes those that pass. What is missing stays the
# library's. Then the model trains on all sixteen ranks with them. (Notebooks in another folder? Name it in `notebooks`,
# in the cell of parameters.)
#
# (With all of them solved, the checks take two minutes or so.)

# %%
found = own_parts(notebooks) if parts == "mine" else None
found

# %%
taken = found.taken if found else {}
final = run(losses, 16, job_for(every), steps, device=device, parts=taken, timeout=600).results[0]
for number, (one, five) in enumerate(zip(alone.results[0], final, strict=True), start=1):
    print(f"step {number}: one process {one:.6f}, 16 ranks on your {len(taken)} parts {five:.6f}")
torch.testing.assert_close(final, alone.results[0], rtol=1e-4, atol=0)

# %% [markdown]
# A mixture-of-experts GPT, split five ways over sixteen ranks, and every function that splits it is one that you wrote
# or can write. Train it for longer with `fivefold train --layout dp2,cp2,pp2,tp2,ep4 --steps 200`. Then change a part,
# and see whether it still is one process.
