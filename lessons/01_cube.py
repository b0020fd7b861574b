# %% [markdown]
# # 1 · The work cube
#
# *75 minutes · 9 exercises and 5 questions, 35 points · 4 to 16 processes on this machine, no GPU*
#
# Two rooms of a school kitchen, eight cooks in each, and 1,000 sandwiches to make, each as long as a table. You can
# give every cook sandwiches of their own. You can give them a part of each, or a step of the recipe. And two can bend
# over the same piece. Before anybody cuts a slice, somebody writes a list and pins it to the door: who works on what,
# with whom, and where they stand. Cooks who hand each other something all day should not have a door between them.
# That list is this lesson.
#
# ![A cube with the edges sequences, tokens and layers, cut once along each, into 8 blocks. One block goes to two GPUs,
# which share it. They are neighbours in a row of 8 GPUs, a server; there are two servers.](pictures/01_cube.svg)
#
# **What is split**: the work of one training step, a cube of sequences × tokens × layers. *Data* parallelism cuts the
# sequences, *context* the tokens, *pipeline* the layers; *tensor* cuts inside a block. *Expert* parallelism cuts no
# edge: it shares out the experts among ranks that are there anyway. (An expert is one of several MLPs in a layer; each
# token goes through only a few of them.)
#
# **What travels**: each axis has groups of ranks of its own, and sends in these.
#
# **When it hurts**: when a group that talks all the time is in two servers, or when two ranks have different lists.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). Most of this lesson is arithmetic with whole numbers. The worked
# example, both bugs and the last part run on real ranks.

# %%
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from fivefold import mesh, plots, run
from fivefold.collectives import shift
from fivefold.layout import Layout, LayoutError, check_sizes
from fivefold.mesh import Block, Coordinates, Mesh, tied_groups
from fivefold.runtime.cluster import cluster
from fivefold.runtime.errors import RunError
from fivefold.runtime.ledger import phase
from fivefold.runtime.replay import replay
from torch import Tensor

from autograde import check, mine

# %% tags=["parameters"]
degrees = "dp2,cp2,pp2,tp2,ep4"  # the layout of the examples: 2 to 24 ranks, an axis left out has degree 1

# %% [markdown]
# ## What is split, what travels, when
#
# One step of training takes some sequences through all layers. Put them along the edges of a cube: every point of it
# is one token of one sequence in one layer, and something has to be computed there.
#
# A *layout* says into how many pieces each axis is cut; that number is its *degree*. "Each way" below is forward, and
# again backward. A *stage* is one of the p pieces of the layers.
#
# | axis | degree | cuts | what travels in its groups | how often |
# | --- | --- | --- | --- | --- |
# | tensor, TP | t | the matrices inside a layer | activations: all-reduce | 2 a layer each way |
# | context, CP | c | the tokens of a sequence | keys and values: round a ring | 1 ring a layer each way |
# | pipeline, PP | p | the layers | activations: a message to the next stage | 1 a stage each way |
# | data, DP | d | the sequences | gradients: all-reduce, over DP × CP | 1 a step |
# | expert, EP | e | the experts, over DP × CP | tokens: all-to-all | 2 a layer of experts each way |
#
# (Lessons 02 to 09 build these, one after the other. Here only the *who with whom* matters.)
#
# **GPUs.** Each has a place on each axis, so there are d·c·p·t of them. EP is not in that product. Ranks of DP × CP
# hold the same layers and see different tokens; to share out the experts among them takes no GPU more. This is called
# *folding* EP over DP × CP. So e must divide d·c.
#
# **Blocks.** DP, CP and PP cut the cube into d·c·p blocks. The t ranks of a TP group work on the same block: each has
# a part of every matrix.
#
# **The order.** From one rank to the next, the TP place changes first, then CP, then PP, and DP last: the order of
# Llama 3. Ranks fill servers in turn, 8 GPUs each, so the axis that sends most has the nearest neighbours.

# %% [markdown]
# ## A worked example
#
# `Layout.parse` reads the degrees. A layout that cannot be says why, in one line:

# %%
layout = Layout.parse(degrees)
print(f"{layout} has {layout.world_size} ranks")
try:
    Layout(dp=3, cp=2, ep=4)
except LayoutError as error:
    print(error)

# %% [markdown]
# On every rank, `mesh.make_mesh(layout)` makes the process groups, and returns those that the rank belongs to: `my.tp`,
# `my.cp` and so on. The function below takes one step of training as far as its messages go. No layer computes
# anything here: what counts is that a rank has its block of the cube, and which group it sends in. Gradients are summed
# over all ranks with the same weights, those of DP × CP: `my.dp_cp`. (`phase` writes a name beside each call on the
# ledger.)

# %%
sequences, tokens, layers, h = 8, 64, 4, 32


def one_step(made: Callable[[Layout], Mesh]) -> list[int]:
    my = made(layout)
    block = mesh.blocks_of_work(layout, sequences, tokens, layers)[my.rank]
    x = torch.ones(len(block.sequences), len(block.tokens), h)  # the activations of this block
    stage, stages = my.pp.rank(), my.pp.size()
    with phase("forward"):
        if stage > 0:
            dist.recv(x, group=my.pp, group_src=stage - 1)
        for _ in block.layers:
            keys_and_values = torch.stack([x, x])
            for _ in range(my.cp.size() - 1):
                keys_and_values = shift(keys_and_values, torch.empty_like(keys_and_values), my.cp)
            dist.all_reduce(x, group=my.tp)  # after attention
            dist.all_reduce(x, group=my.tp)  # after the MLP
        if stage < stages - 1:
            dist.send(x, group=my.pp, group_dst=stage + 1)
    with phase("gradients"):
        weights = torch.ones(12 * h * h * len(block.layers) // layout.tp)  # those of this rank
        dist.all_reduce(weights, group=my.dp_cp)
    return list(my.coordinates)


done = run(one_step, layout.world_size, mesh.make_mesh)
for place, (dp, pp, cp, tp) in list(enumerate(done.results))[:6]:
    print(f"rank {place} is at dp {dp}, pp {pp}, cp {cp}, tp {tp}")

# %% [markdown]
# Who sent to whom? A row is a rank that sends, a column one that receives, and the colour is the axis that sends most
# there. Tensor sits closest to the diagonal; gradients, which go over data and context, reach farthest:

# %%
plots.traffic(done.ledger, title="Tensor partners are next door, gradients go to the other end of the house")

# %% [markdown]
# The same by axis, beside the formulas. Of b sequences of s tokens, each token with h numbers, a rank's x has
# b/d · s/c · h numbers, of 4 bytes.

# %%
x_bytes = math.ceil(sequences / layout.dp) * math.ceil(tokens / layout.cp) * h * 4
own_layers = math.ceil(layers / layout.pp)
d, c, t = layout.dp, layout.cp, layout.tp
n = d * c
plots.traffic_by_axis(
    done.ledger,
    {
        ("all_reduce", "tp"): (2 * own_layers * 2 * (t - 1) / t * x_bytes, "2 a layer · 2(t−1)/t · x"),
        ("send", "cp"): (own_layers * (c - 1) * 2 * x_bytes, "1 a layer · (c−1) · keys and values"),
        ("send", "pp"): (x_bytes, "1 · x, but for the last stage"),
        ("all_reduce", "dp_cp" if c > 1 else "dp"): (
            2 * (n - 1) / n * (12 * h * h * own_layers // t) * 4,
            "1 · 2(n−1)/n · weights, n = d·c",
        ),
    },
)

# %% [markdown]
# In this toy, gradients look as heavy as the rest. With long sequences they are not, and they have time: tensor and
# context hold up every layer, gradients wait for the end of the step.
#
# **Experts.** Each rank has tokens for experts on every rank of its expert group, and sends them there. With EP 4 over
# DP 2 × CP 2 the groups are wider than a CP group: they reach over DP as well.


# %%
def tokens_to_experts() -> list[int]:
    my = mesh.make_mesh(layout)
    x = torch.ones(layout.ep * 16, h)  # 16 tokens for each rank of the group
    dist.all_to_all_single(torch.empty_like(x), x, group=my.ep)
    return dist.get_process_group_ranks(my.ep)


to_experts = run(tokens_to_experts, layout.world_size)
print("the expert group of each rank:", *to_experts.results, sep="\n")

# %%
title = f"Expert groups of {layout.ep}, folded over data and context"
plots.traffic(to_experts.ledger, title=title) if layout.ep > 1 else print("With EP 1 no token travels.")

# %% [markdown]
# ## Exercises
#
# ### `servers`
#
# A layout and the size of a server go in, the number of servers comes out. One rank a GPU; the last server may have
# GPUs left over. `layout.world_size` is the number of ranks, and `layout.dp`, `.cp`, `.pp`, `.tp`, `.ep` are the
# degrees.
#
# *Checked*: servers that are full, servers that are not, of 8 GPUs and of other sizes.

# %% exercise="mesh.servers"
from fivefold.mesh import servers

# %% check="mesh.servers"
check("mesh.servers", servers)

# %% [markdown]
# ### `coordinates`
#
# Where does a rank stand? It is as with the digits of a number, but every digit has a base of its own: TP is the last
# digit, then CP, PP, DP. In dp2,cp2,pp2,tp2, rank 13 is 1101 in base 2: dp 1, pp 1, cp 0, tp 1.
#
# - **Out**: `Coordinates(dp=…, pp=…, cp=…, tp=…)`, a named tuple.
# - **Refused**, with a `LayoutError` and a line of your own: a rank that the layout does not have.
# - **Checked**: every rank of several layouts, with unequal degrees.
#
# <details><summary>Hint: one digit at a time</summary>
#
# `divmod(13, 2)` is (6, 1): what remains for the other digits, and the last digit.
# </details>

# %% exercise="mesh.coordinates"
from fivefold.mesh import coordinates

# %% check="mesh.coordinates"
check("mesh.coordinates", coordinates)

# %% [markdown]
# ### `rank`
#
# The way back: `rank(coordinates(r, layout), layout)` is r. A step on an axis is as many ranks long as there are ranks
# inside it: 1 for TP, t for CP, c·t for PP. (In here `coordinates` is the argument: it hides your function of that
# name.)
#
# - **Refused**, with a `LayoutError`: a place below 0, or not below its axis's degree.
# - **Checked**: every place of several layouts, and every axis just outside.

# %% exercise="mesh.rank"
from fivefold.mesh import rank

# %% check="mesh.rank"
check("mesh.rank", rank)

# %% [markdown]
# ### `groups`
#
# The ranks that differ on one axis, and on no other, are a group. `groups(layout, "tp")` lists all of them. With
# several axes, `groups(layout, ("dp", "cp"))`, ranks of a group may differ on each of these: gradients are summed over
# DP × CP.
#
# - **Out**: lists of ranks. Ranks ascend in a group; groups are listed by their first rank.
# - **Refused**, with a `LayoutError`: a name that is not dp, cp, pp or tp.
# - **Checked**: each axis; several, named in any order; the names.
#
# <details><summary>Hint: a key for each group</summary>
#
# Two ranks are in one group when their *other* coordinates are equal. So these can be the key of a dictionary of
# lists. `coordinates(r, layout)._asdict()` has the names beside the numbers.
# </details>

# %% exercise="mesh.groups"
from fivefold.mesh import groups

# %% check="mesh.groups"
check("mesh.groups", groups)

# %% [markdown]
# ### `expert_groups`
#
# Take the ranks of a DP × CP group in ascending order, and write them into lines of e ranks: each line is an expert
# group, which holds every expert once. In dp2,cp2,tp2,ep2 the DP × CP groups are [0, 2, 4, 6] and [1, 3, 5, 7].
#
# - **Out**: lists of e ranks, listed by their first rank, whichever DP × CP group they are from.
# - **Checked**: groups inside a CP group, and wider ones; with TP and PP between their ranks; e = 1.

# %% exercise="mesh.expert_groups"
from fivefold.mesh import expert_groups

# %% check="mesh.expert_groups"
check("mesh.expert_groups", expert_groups)

# %% [markdown]
# ### `blocks_of_work`
#
# Which sequences, which tokens, which layers are a rank's? For each rank one `Block(sequences, tokens, layers)`, each
# a `range`.
#
# - **Cut** in order into pieces as even as can be. What does not divide makes the first pieces longer, by one: 10
#   layers over 4 stages are 3, 3, 2 and 2.
# - **Shared**: the ranks of a TP group have the same block. The list has a block for every rank all the same.
# - **Checked**: sizes that divide and sizes that do not, also 0; layouts with TP and with EP.
#
# <details><summary>Hint: where a piece begins</summary>
#
# Write one function for a piece of a `range`, and use it three times. Before piece i there are i pieces; how many of
# them are longer ones?
# </details>

# %% exercise="mesh.blocks_of_work"
from fivefold.mesh import blocks_of_work

# %% check="mesh.blocks_of_work"
check("mesh.blocks_of_work", blocks_of_work)

# %% [markdown]
# ### `inside_server`
#
# Does *every* group of an axis stay inside one server? Rank r sits in server r // gpus_per_server. Tensor 16 spills
# over two servers of 8. Tensor 3 does as well, if there are more than 8 ranks: write down ranks 6, 7 and 8.
#
# - **Out**: True or False. `axis` is "tp" if nothing else is said; for "ep" take the expert groups.
# - **Checked**: each axis, servers of several sizes, degrees that do not divide them.

# %% exercise="mesh.inside_server"
from fivefold.mesh import inside_server

# %% check="mesh.inside_server"
check("mesh.inside_server", inside_server)

# %% [markdown]
# ### Your list on the door
#
# Three layouts that people have used, by your functions:

# %%
my_servers, my_blocks = mine("mesh.servers", servers), mine("mesh.blocks_of_work", blocks_of_work)
my_inside, my_groups = mine("mesh.inside_server", inside_server), mine("mesh.groups", groups)
my_coordinates, my_rank = mine("mesh.coordinates", coordinates), mine("mesh.rank", rank)
my_expert_groups = mine("mesh.expert_groups", expert_groups)

print("\nlayout                 GPUs  servers  blocks  TP inside  DP inside  the first TP groups")
for text in ("dp4,pp2,tp4", "tp16", "dp8,tp3", "dp64,pp16,tp8"):
    one = Layout.parse(text)
    blocks = len(set(my_blocks(one, 2048, 8192, 126)))
    inside = ["yes" if my_inside(one, axis=axis) else "no" for axis in ("tp", "dp")]
    first = ", ".join(f"{ranks[0]}–{ranks[-1]}" for ranks in my_groups(one, "tp")[:3])
    print(
        f"{text:20} {one.world_size:6,} {my_servers(one):8,} {blocks:7,} {inside[0]:>10} {inside[1]:>10}  ranks {first}"
    )

# %% [markdown]
# The last one is Llama 3 405B on 8,192 GPUs: 126 layers over 16 stages, so some have 8 and some 7.
#
# ## See it
#
# **Your groups on real ranks.** The step of the worked example again, with process groups made from *your* lists:

# %%
NAMES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "dp_cp": ("dp", "cp")}


def from_my_lists(layout: Layout) -> Mesh:
    me, own = dist.get_rank(), {}
    lists = {name: my_groups(layout, axes) for name, axes in NAMES.items()} | {"ep": my_expert_groups(layout)}
    for name, of_axis in lists.items():
        for ranks in of_axis:
            group = dist.new_group(ranks, group_desc=name)
            if me in ranks:
                own[name] = group
    return Mesh(layout, me, my_coordinates(me, layout), dist.group.WORLD, **own, ep_dp=None)  # no experts in this step


mine_done = run(one_step, layout.world_size, from_my_lists, measure=True)  # with what is computed on the ledger too
assert mine_done.results == done.results, "your ranks stand elsewhere than the library's"
plots.traffic(mine_done.ledger, title="Your groups have the same neighbours")

# %% [markdown]
# **The order of the axes.** Nothing forces TP to be innermost: the sums would be right in any order. So replay your
# step on H100s, 8 in a server, with messages 128 times as large. First in your order, then the same program and the
# same bytes with the GPUs handed out the other way round: DP neighbours share a server, and TP neighbours do not. Both
# pictures have the same scale of time. (No layer computes anything here, so everyone is 0% busy: look at the length of
# the whole.)

# %%
near = replay(mine_done.ledger, cluster("h100"), widen=128)
inside_out = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
turned = cluster("h100").placed(inside_out, innermost=("dp", "pp", "cp", "tp"))
far = replay(mine_done.ledger, turned, widen=128)
longest = max(near.makespan, far.makespan)
in_order = f"With tensor innermost, the messages of a step take {near.makespan * 1e3:.2f} ms"
plots.timeline(near, title=in_order, until=longest)

# %%
slower = far.makespan / near.makespan
turned_round = f"With tensor outermost {far.makespan * 1e3:.2f} ms, {slower:.1f} times as long"
plots.timeline(far, title=turned_round, until=longest)

# %% [markdown]
# **The cube.** Move the sliders; the black GPU is the rank, and the letters are those whom it shares a group with.
# Its block is the coloured one. Four things to try:
#
# 1. Data 4, Pipeline 2, Tensor 4: 32 GPUs, 4 servers, 8 blocks. Move the rank, and find two ranks with the same block.
# 2. Only Tensor 16. Then Tensor 3 with Data 3. What is the same, and why?
# 3. Data 4, Context 2, Expert 8. Which of its partners has a rank as an expert partner only?
# 4. Data 4, Expert 3. Then Expert 1 and Pipeline 16. What does it say?
#
# <details><summary>Answers to 2 and 3</summary>
#
# 2: In both, a TP group is in two servers. 16 ranks are more than a server has; groups of 3 would fit, but the third
# has ranks 6, 7 and 8, and rank 8 is in the next server.
#
# 3: Those that are elsewhere on both axes, on data and on context: three of the seven.
# </details>

# %%
from fivefold import widgets

widgets.work_cube("dp4,pp2,tp4")

# %% [markdown]
# ## Find the bug
#
# ### Experts that do not learn
#
# A rank's expert has copies on other ranks, which see other tokens: their gradients have to be added up. Whose? All
# ranks with *the same experts*. Somebody wrote it over DP, the axis of gradients, tried it with dp2,cp2,ep2, and every
# number was right to the last digit.

# %% exercise="mesh.expert_data_groups" bug="over_data"
from fivefold.mesh import expert_data_groups

# %% [markdown]
# Here it is on real ranks. Each rank has one expert, a vector that should learn a vector of its own from the tokens
# that the rank gets. A loss close to 0 says that it has.


# %%
def train_experts(layout: Layout, groups_of: Callable[[Layout], list[list[int]]], steps: int = 60) -> float:
    own, me = {}, dist.get_rank()
    for name, lists in (("ep", mesh.expert_groups(layout)), ("ep_dp", groups_of(layout))):
        for ranks in lists:
            group = dist.new_group(ranks, group_desc=name)
            if me in ranks:
                own[name] = group
    expert = own["ep"].rank()  # which of the experts is here: this rank's place in its expert group
    target = torch.randn(4, generator=torch.Generator().manual_seed(expert))
    tokens = torch.randn(32, 4, generator=torch.Generator().manual_seed(100 + me))
    weight = torch.zeros(4)
    for _ in range(steps):
        gradient = tokens.T @ (tokens @ (weight - target)) / len(tokens)
        dist.all_reduce(gradient, group=own["ep_dp"])
        weight -= 0.3 * gradient / own["ep_dp"].size()
    return (tokens @ (weight - target)).square().mean().item()


groups, coordinates = mine("mesh.groups", groups), mine("mesh.coordinates", coordinates)
expert_groups = mine("mesh.expert_groups", expert_groups)
for text in ("dp2,cp2,ep2", "dp4,ep2", "dp2,cp2,ep4"):
    one = Layout.parse(text)
    try:
        losses = run(train_experts, one.world_size, one, expert_data_groups).results
        print(f"{text:12} largest loss of an expert: {max(losses):.4f}")
    except RunError as report:
        print(report)

# %% [markdown]
# No error, no hang, and one layout is right: equal degrees hide it. Mend the function where it stands, so that the loss
# is close to 0 with all three, and run its cell, the cell with the losses, and the check. (The `try` below it is the
# grader's: leave it.)
#
# *Checked*: the groups, in layouts with unequal degrees; gradients summed over them, on real ranks.
#
# <details><summary>Hint: how to look</summary>
#
# For dp4,ep2, write down the expert groups. Which rank of each holds expert 0? Those are one group, and this function
# should list them.
# </details>

# %% check="mesh.expert_data_groups"
check("mesh.expert_data_groups", expert_data_groups)

# %% [markdown]
# This one is real as well: in torchtitan #2842 on GitHub, groups were wrong, and equal degrees hid it.
#
# ### Everyone makes their own group first
#
# `dist.new_group` is a collective of the *whole world*: every rank calls it for every group, its own or not, in the
# same order. This version of `make_mesh` had a colleague in a hurry. (`use_local_synchronization` is for a group that
# others need not hear of, here that of the rank alone. `tied_groups` lists the first and the last stage of each
# pipeline, which may share a table of words. Neither is the mistake.)

# %% exercise="mesh.make_mesh" bug="own_group_first"
from fivefold.mesh import make_mesh

# %%
expert_data_groups = mine("mesh.expert_data_groups", expert_data_groups)


def sum_over_data() -> float:
    my = make_mesh(Layout.parse("dp2,tp2"))
    x = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(x, group=my.dp)
    return x.item()


try:
    print("sums over data:", run(sum_over_data, 4).results, "expected [5.0, 10.0, 5.0, 10.0]")
except RunError as report:
    print(report)

# %% [markdown]
# You can read the report from lesson 00: who calls what, and where. Plain PyTorch would stand still here, or take
# ranks of two different groups for one. Mend `make_mesh` (and leave the `try` below it, which is the grader's); the
# check runs it on 3, 6 and 8 ranks.
#
# *Checked*: that all ranks make the same groups in the same order; members and sums of each; names; that another
# number of ranks is refused.

# %% check="mesh.make_mesh"
check("mesh.make_mesh", make_mesh)

# %% [markdown]
# ## The real tool
#
# PyTorch has `init_device_mesh`: degrees and names, outermost first. `["tp"]` is the part of it along one axis, and
# `get_group` the process group. Folded experts are another view of the same ranks: a `DeviceMesh` from an array.
# On every rank, its coordinates and groups have to equal yours.


# %%
def with_device_mesh() -> int:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    names = ("dp", "pp", "cp", "tp")
    sizes = [getattr(layout, name) for name in names]
    theirs = init_device_mesh("cpu", sizes, mesh_dim_names=names)

    array = torch.arange(layout.world_size).view(sizes).permute(1, 3, 0, 2)  # pp, tp, dp, cp
    folded = array.reshape(layout.pp, layout.tp, -1, layout.ep)
    experts = DeviceMesh("cpu", folded, mesh_dim_names=("pp", "tp", "ep_dp", "ep"))

    me = dist.get_rank()
    assert tuple(theirs.get_coordinate()) == tuple(my_coordinates(me, layout))
    assert my_rank(Coordinates(*theirs.get_coordinate()), layout) == me
    pairs = [(theirs.get_group(name), my_groups(layout, name)) for name in names]
    pairs += [
        (experts.get_group("ep"), my_expert_groups(layout)),
        (experts.get_group("ep_dp"), expert_data_groups(layout)),
    ]
    for group, lists in pairs:
        assert dist.get_process_group_ranks(group) == next(ranks for ranks in lists if me in ranks)
    return len(pairs)


compared = run(with_device_mesh, layout.world_size).results
print(f"{len(compared)} ranks: coordinates and {compared[0]} groups each are those of DeviceMesh")

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="01.gpus"
gpus_answer = 8 * 2 * 4 * 8

# %% check="01.gpus"
check("01.gpus", gpus_answer)

# %% question="01.stage"
stage_answer = 1000 // 8 % 16

# %% check="01.stage"
check("01.stage", stage_answer)

# %% question="01.spill"
spill_answer = 2

# %% check="01.spill"
check("01.spill", spill_answer)

# %% question="01.copies"
copies_answer = 8 * 2 / 4

# %% check="01.copies"
check("01.copies", copies_answer)

# %% question="01.order"
order_answer = "c"

# %% check="01.order"
check("01.order", order_answer)

# %% [markdown]
# ## Where this stands
#
# | here | Megatron-LM | PyTorch (torchtitan) | DeepSpeed |
# | --- | --- | --- | --- |
# | `coordinates`, `rank` | `RankGenerator` | `DeviceMesh.get_coordinate` | `ProcessTopology` |
# | `groups`, `make_mesh` | `initialize_model_parallel` | `init_device_mesh` | `PipelineParallelGrid` |
# | `expert_groups` | the second `RankGenerator`, for experts | views of the mesh | `deepspeed/utils/groups.py` |
#
# They are in `megatron/core/parallel_state.py`, in `torch.distributed.device_mesh` (torchtitan's degrees in its
# `parallel_dims.py`), and in `deepspeed/runtime/pipe/topology.py`. The order is a choice: here it is that of Llama 3,
# while Megatron-LM's default is `tp-cp-ep-dp-pp`, with PP outermost. Read a program's order before you read its ranks.
#
# **Papers.** [The Llama 3 herd of models](https://arxiv.org/abs/2407.21783) (2024): section 3.3.2 has the four axes and
# their order. [Efficient large-scale language model training](https://arxiv.org/abs/2104.04473) (Narayanan et al.
# 2021): how tensor, pipeline and data parallelism go together, and why tensor parallelism ends at the server's edge.
# [MoE Parallel Folding](https://arxiv.org/abs/2504.14960) (Liu et al. 2025): experts on a mapping of their own.
