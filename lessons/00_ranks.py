# %% [markdown]
# # 0 · Ranks and collectives
#
# *75 minutes · 7 exercises and 5 questions, 26 points · 4 processes on this machine, no GPU*
#
# Four cooks work in four rooms. Each has a table of their own, and nobody sees another's. Whatever they share goes
# through a hatch in the wall, a tray at a time. Before they make 1,000 sandwiches together, they have to learn to pass
# trays: to tell everybody a number, to add up what all of them have, and not to stand at the hatch for ever, each with
# a full tray in their hands. That is this lesson.
#
# ![Four ranks in a row. Each has an x of its own, 0 to 3, and room for another. An arrow leads from the x of each rank
# to the free room of the next, and from the last one round to the first.](pictures/00_ring.svg)
#
# **What is split**: nothing yet. A program runs on n *ranks*: n processes, each with memory of its own.
#
# **What travels**: tensors, in messages from one rank to another. To add up M bytes over all ranks, each sends
# 2(n−1)/n · M bytes.
#
# **When it hurts**: when somebody waits for a message that nobody sends.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). You need no GPU, and you cannot break anything: whatever goes wrong
# on the ranks is reported in the notebook, and no process is left behind.

# %%
import math

import torch
import torch.distributed as dist
from fivefold import run
from torch import Tensor

from autograde import check, mine

# %% tags=["parameters"]
world_size = 4  # ranks in the examples: 2 to 8

# %% [markdown]
# ## What is split, what travels, when
#
# A **rank** is a process, and the number that it goes by: 0, 1, 2, … In training, there is one for each GPU. All ranks
# run the *same program*. It asks for its number, and does its own share of the work.
#
# A **message** is a tensor that one rank sends and another receives. Both have to call something for it: `send` there,
# `recv` here.
#
# A **collective** is a pattern of messages in which all ranks take part. Five of them come up again and again in
# this course. Say that the whole tensor has M bytes, and that it is cut into n pieces, one for each rank:
#
# | | before | after | each rank sends |
# | --- | --- | --- | --- |
# | **all-reduce** | every rank has an x | every rank has the sum of them | 2(n−1)/n · M |
# | **reduce-scatter** | every rank has an x | rank r has piece r of the sum | (n−1)/n · M |
# | **all-gather** | rank r has piece r | every rank has all the pieces | (n−1)/n · M |
# | **broadcast** | one rank has an x | every rank has it | at most ⌈log₂ n⌉ · M |
# | **all-to-all** | every rank has a piece for each | every rank has the pieces meant for it | (n−1)/n · M |
#
# PyTorch has all of them in `torch.distributed`. You are going to make them yourself, from messages, and see why the
# last column says what it says.

# %% [markdown]
# ## A worked example
#
# ### Four processes
#
# `run(function, 4)` starts four processes, calls the function on each of them, and collects what they return.


# %%
def hello() -> int:
    rank, n = dist.get_rank(), dist.get_world_size()
    print(f"I am one of {n} ranks.")
    return 10 * rank


done = run(hello, world_size)
done.results

# %% [markdown]
# What a rank prints has its number in front. The lines may come in another order next time: the processes run side by
# side. `done.results` is in the order of the ranks.
#
# ### A collective
#
# Every rank makes a tensor, and all of them call `all_reduce`. It overwrites the tensor with the sum.


# %%
def total() -> Tensor:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x


run(total, world_size).results

# %% [markdown]
# Your turn. Set the answer below, run the cell, and run the check after it. You may answer as often as you like.

# %% question="00.sum"
sum_answer = 10

# %% check="00.sum"
check("00.sum", sum_answer)

# %% [markdown]
# ### Messages, and what they cost
#
# Now the same without the collective. Rank 0 receives every x, adds them up, and sends the sum to everyone.
#
# - `dist.send(x, dst=2)` sends x to rank 2, and returns when it has been received.
# - `dist.recv(part, src=2)` waits for a message from rank 2, and writes it into `part`. That must be there already, of
#   the same size and dtype as what comes.


# %%
def one_collects(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    if rank == 0:
        part = torch.empty_like(x)
        for other in range(1, n):
            dist.recv(part, src=other)
            total += part
        for other in range(1, n):
            dist.send(total, dst=other)
    else:
        dist.send(x, dst=0)
        dist.recv(total, src=0)
    return total


x = torch.ones(1_000_000)  # 4 MB on each rank
collected = run(one_collects, world_size, x)
[result[0].item() for result in collected.results]

# %% [markdown]
# The sum is right. What did it cost? Every call of `torch.distributed` is on the run's *ledger*. Its traffic table has
# a line for each operation: the group of ranks that it ran in ("world" is all of them), how many calls a rank made, and
# how many bytes left it. Where ranks differ, both are those of the rank that has most; "at most" says so. Here it is
# rank 0 that sends n − 1 times 4 MB.

# %%
collected.ledger.traffic()

# %% [markdown]
# The ledger can be *replayed* on machines that you do not have. Here every rank is an H100 GPU, all in one server. Time
# goes to the right. A solid line is a transfer, and the stripes above it say that the rank stands still for it; where a
# row is empty, that rank waits for its turn. "0% busy" says that nothing is computed here.

# %%
from fivefold import plots
from fivefold.runtime.cluster import cluster
from fivefold.runtime.replay import replay

slow = replay(collected.ledger, cluster("h100"))
plots.timeline(slow, title=f"Everything goes through rank 0: {slow.makespan * 1e6:.0f} µs, and most of it is waiting")

# %% [markdown]
# With 1,000 ranks it would be 1,998 transfers, one after the other. You will do better, by the fourth exercise.
#
# ## When it goes wrong
#
# You will see three kinds of report in this course. Cause each of them once.
#
# ### A deadlock
#
# Everyone passes its x to the next rank, as in the picture at the top. What could be easier? (`try` and `except` are
# here so that the notebook goes on. Without them you would see the same report, and the cell would stop.)

# %%
from fivefold.runtime.errors import Deadlock, Mismatch


def everyone_passes_on() -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, received = torch.tensor([float(rank)]), torch.empty(1)
    dist.send(x, dst=(rank + 1) % n)
    dist.recv(received, src=(rank - 1) % n)
    return received


try:
    run(everyone_passes_on, world_size)
except Deadlock as report:
    print(report)

# %% [markdown]
# There is a line for each rank that is stuck: the call that it is in, what that call waits for, and the cell and the
# line where it stands. The last line says what kind of knot it is.
#
# Plain PyTorch says nothing here. It stands still for 30 minutes, and then reports that a time limit is over.
#
# ### A mismatch
#
# All ranks make the same call, but rank 1 has a row more than the others: the rest of a data set, perhaps.


# %%
def one_row_more() -> Tensor:
    rows = 3 if dist.get_rank() == 1 else 2
    x = torch.ones(rows, 4)
    dist.all_reduce(x)
    return x


try:
    run(one_row_more, world_size)
except Mismatch as report:
    print(report)

# %% [markdown]
# Operations are counted from 0 in each group; this is the first one. Ranks that agree share a line. Look for what
# differs: the operation, the dtype or, here, the shape.
#
# Plain PyTorch would go on with wrong numbers, or end the process without a word, depending on the sizes.
#
# ### A verdict
#
# `check(name, function)` tries a function on ranks, with random numbers and odd sizes, and says what it saw. Here is a
# broadcast in which the root sends to every other rank itself. (A *group* is a set of ranks. They have numbers of their
# own in it, from 0: `group.rank()` of `group.size()`. With `group_dst=` and `group_src=` you name a rank by that
# number.)


# %%
def root_sends_to_all(x: Tensor, root: int, group: dist.ProcessGroup) -> Tensor:
    if group.rank() == root:
        for other in range(group.size()):
            if other != root:
                dist.send(x, group=group, group_dst=other)
    else:
        dist.recv(x, group=group, group_src=root)
    return x


check("collectives.tree_broadcast", root_sends_to_all)

# %% [markdown]
# Read it like this:
#
# - A line for each *property*. ✓ passed, ✗ failed, – not looked at yet. Each property is worth points of its own.
# - After ✗ stands what was seen and what was expected, then the smallest case in which it happened.
# - Where your mistake is a known one, the last lines name it and ask you a question. They never give the solution.
# - At the bottom you can unfold every message that was sent: to whom, how many bytes, and by which line.
#
# So this broadcast puts the right numbers everywhere, and sends what it should; but it takes too many *rounds*, one
# after the other. A program with the right result can still be the wrong one. You will write the one that passes.

# %% [markdown]
# ## Exercises
#
# ### Find the bug: `shift`
#
# The knot from above, as a function: every rank of `group` sends x to the rank `distance` places further, and fills
# `received` with what comes from as far behind. It stands still. Repair it, in the cell itself (the `try` below the
# function is for the course: leave it), then run the cell and the check.
#
# *Checked*: what arrives, also over distances other than 1; one message for each rank; that each is waited for.
#
# <details><summary>Hint: a send that does not wait</summary>
#
# `dist.isend(…)` takes the same arguments as `dist.send(…)`, starts the message and returns at once, with a handle.
# `handle.wait()` returns when the message has left. Until then, x must not be changed.
# </details>
#
# <details><summary>Hint: why not let one rank receive first?</summary>
#
# That unties a ring of all ranks. But with 4 ranks and a distance of 2 there are two rings, 0 ⇄ 2 and 1 ⇄ 3.
# </details>

# %% exercise="collectives.shift" bug="everyone_sends_first"
from fivefold.collectives import shift

# %% check="collectives.shift"
check("collectives.shift", shift)

# %% [markdown]
# From here on, `shift` does the sending: each of the next exercises needs a few lines around it. (`mine` takes your
# function where it has passed its check, and the library's where not, so that the lesson goes on either way.)

# %%
shift_that_works = mine("collectives.shift", shift)


def pass_on() -> list[int]:
    x, received = torch.tensor([float(dist.get_rank())]), torch.empty(1)
    return [int(shift_that_works(x, received, dist.group.WORLD, distance)) for distance in (1, 2, -1)]


for rank, came in enumerate(run(pass_on, world_size).results):
    print(f"rank {rank} receives over the distances 1, 2 and −1 from ranks {came}")

# %% [markdown]
# ### `ring_reduce_scatter`
#
# Rank 0 had all the work, because everything went through it. Better: cut x into n pieces, and let all the pieces
# travel at the same time, each one rank further in each step. Whoever receives a piece adds its own numbers to it
# before it hands it on. After n − 1 steps each piece has been everywhere, and its sum is complete. With 4 ranks:
#
# | | rank 0 sends | rank 1 sends | rank 2 sends | rank 3 sends |
# | --- | --- | --- | --- | --- |
# | step 1 | piece 3 | piece 0 | piece 1 | piece 2 |
# | step 2 | piece 2 | piece 3 | piece 0 | piece 1 |
# | step 3 | piece 1 | piece 2 | piece 3 | piece 0 |
#
# Follow piece 0: it sets out on rank 1 and ends on rank 0, its owner. `x.split(sizes)` cuts x into the pieces.
#
# *Checked*: this rank's piece, and x as it was; n − 1 messages to one neighbour; unequal and empty pieces.
#
# <details><summary>Hint: the numbers of the pieces</summary>
#
# In step s, rank r sends piece (r − s) mod n. Which one does it receive then, if rank r − 1 follows the same rule?
# In Python, `%` of a negative number is what you want: `-1 % 4` is 3.
# </details>
#
# <details><summary>Hint: room for what comes</summary>
#
# A piece that arrives is as large as your own piece of that number, so `torch.empty_like` of that one is the room for
# it. `shift` returns it filled.
# </details>

# %% exercise="collectives.ring_reduce_scatter"
from fivefold.collectives import ring_reduce_scatter

# %% check="collectives.ring_reduce_scatter"
check("collectives.ring_reduce_scatter", ring_reduce_scatter)

# %% [markdown]
# ### `ring_all_gather`
#
# The way back: every rank has one piece, and all shall have all of them. Each hands on what it received in the step
# before; in the first step, its own piece. Nothing is added this time, and a rank keeps what passes through.
# x (rows, …) is this rank's piece; the result (sum of all rows, …), of the same dtype, has them in the order of the
# ranks. A slice of a tensor is a view of it: what `shift` writes into the slice stands in the tensor.
#
# *Checked*: the result, and x as it was; n − 1 messages to one neighbour; unequal and empty pieces.

# %% exercise="collectives.ring_all_gather"
from fivefold.collectives import ring_all_gather

# %% check="collectives.ring_all_gather"
check("collectives.ring_all_gather", ring_all_gather)

# %% [markdown]
# ### `ring_all_reduce`
#
# Both in a row: the first leaves each rank a piece of the sum, the second gives the pieces to everyone. x may have any
# shape, and a number of elements that n does not divide: 5 numbers over 4 ranks are pieces of 2, 1, 1 and 1; a single
# number is one piece of 1 and three empty ones. (You may also fill up to equal pieces.) Leave x as it is.
#
# *Checked*: the sum, to the last bit the same on all ranks; 2(n − 1) messages to one neighbour, of 2(n−1)/n · M bytes
# together; sizes that n does not divide.

# %% exercise="collectives.ring_all_reduce"
from fivefold.collectives import ring_all_reduce

# %% check="collectives.ring_all_reduce"
check("collectives.ring_all_reduce", ring_all_reduce)

# %% [markdown]
# ### `tree_broadcast`
#
# The broadcast that passes. In each round, every rank that has x sends it to one that has not. So 1, 2, 4, 8, … ranks
# have it, and n of them do after ⌈log₂ n⌉ rounds. Any rank can be the root, and n need not be a power of two.
# x is overwritten, except on the root. Here `dist.send` and `dist.recv` will do: nobody sends in a circle.
#
# *Checked*: x on every rank; the rounds; n − 1 messages in all.
#
# <details><summary>Hint: any root</summary>
#
# Give each rank a place: the root stands at place 0, the rank after it at place 1, round to the rank before it. Write
# the tree for places. Before you send, turn a place into a rank again.
# </details>
#
# <details><summary>Hint: who sends to whom</summary>
#
# Say that places 0 to have − 1 have x. In this round, place p of them can send to place p + have, if there is one.
# </details>

# %% exercise="collectives.tree_broadcast"
from fivefold.collectives import tree_broadcast

# %% check="collectives.tree_broadcast"
check("collectives.tree_broadcast", tree_broadcast)

# %% [markdown]
# ### `pairwise_all_to_all`
#
# Every rank has rows for every rank: `send_sizes[r]` of them for rank r, one after the other in x. They go straight to
# where they belong: in step d each rank sends to the rank d places further and receives from the rank d places behind,
# so nobody waits in a queue. What comes is put in the order of the ranks that it comes from.
# Mixture-of-experts models send tokens to their experts like this, and some get none. (An *expert* is one of several
# MLPs in a layer; each token goes through only a few of them.)
#
# *Checked*: the result, and x as it was; one message to each other rank, where an empty one may be left out; unequal
# sizes, and sizes of 0.

# %% exercise="collectives.pairwise_all_to_all"
from fivefold.collectives import pairwise_all_to_all

# %% check="collectives.pairwise_all_to_all"
check("collectives.pairwise_all_to_all", pairwise_all_to_all)

# %% [markdown]
# ### `cost.collective_seconds`
#
# How long does it take on other machines? A message takes **α** seconds to start, however small it is, and **β**
# seconds for each byte: on NVLink in an H100 server, 1.9 µs and 1/450 GB/s. A collective is rounds of messages, one
# after the other: rounds · (α + β · bytes of a message). The table in the docstring has the rounds and the bytes; you
# have written most of these algorithms by now. Here nothing travels: it is arithmetic.
#
# *Checked*: the seconds, with an algorithm named and not; a ValueError for a pair that is not in the table.

# %% exercise="cost.collective_seconds"
from fivefold.cost import collective_seconds

# %% check="cost.collective_seconds"
check("cost.collective_seconds", collective_seconds)

# %% [markdown]
# ## See it
#
# **The traffic.** Your all-reduce on the same 4 MB as at the start. First who sends to whom when rank 0 collects, then
# around the ring:

# %%
my_all_reduce = mine("collectives.ring_all_reduce", ring_all_reduce)


def around_the_ring(x: Tensor) -> Tensor:
    return my_all_reduce(x, dist.group.WORLD)


ring = run(around_the_ring, world_size, x)
plots.traffic(collected.ledger, title="Rank 0 talks to everyone")

# %%
plots.traffic(ring.ledger, title="Around the ring, each talks to one")

# %%
n, M = world_size, 4 * len(x)
print(f"2(n−1) = {2 * (n - 1)} messages of M/n = {M / n / 1e6:.3g} MB make {2 * (n - 1) / n * M / 1e6:.3g} MB a rank")
ring.ledger.traffic()

# %% [markdown]
# **The time.** Replayed on the same GPUs. Every link carries something all the time, and nobody waits for a turn. What
# the ledger says and what your formula says is the same:

# %%
fast, link = replay(ring.ledger, cluster("h100")), cluster("h100").inside
seconds = mine("cost.collective_seconds", collective_seconds)
formula = seconds("all_reduce", n, M, link.alpha, 1 / link.bandwidth)
print(f"around the ring: replayed {fast.makespan * 1e6:.1f} µs, by formula {formula * 1e6:.1f} µs")
assert math.isclose(fast.makespan, formula, rel_tol=1e-3)
times = slow.makespan / fast.makespan
plots.timeline(fast, title=f"Around the ring it takes {fast.makespan * 1e6:.0f} µs: {times:.1f} times as fast")

# %% [markdown]
# **Ring or tree?** A ring cuts x into small pieces and makes many steps; a tree makes few steps with all of x. So the
# ring wins for large tensors, the tree for small ones. Where they meet depends on n:

# %%
print("all-reduce over 64 GPUs that have a 400 Gb/s network card each\n")
print("     bytes         ring         tree")
card = cluster("h100").between
for size in (4, 4_000, 400_000, 4_000_000, 400_000_000):
    ways = {way: seconds("all_reduce", 64, size, card.alpha, 1 / card.bandwidth, way) for way in ("ring", "tree")}
    print(
        f"{size:>11,} {ways['ring'] * 1e3:9.3f} ms {ways['tree'] * 1e3:9.3f} ms   {min(ways, key=ways.get)} is faster"
    )

# %% [markdown]
# **Step by step.** Each row is a rank, each column a piece. In a box stands whose numbers are in the sum so far. Move
# the step. In which step is the first sum complete? Then take 5 ranks and 3 numbers: what do the empty pieces do?
#
# <details><summary>Answer</summary>
#
# With 4 ranks in step 3, which is n − 1, and on every rank at once: each has one sum of its own by then. An empty piece
# makes every step that the others make, as a message of 0 bytes: it takes the start of a message, and no more.
# </details>

# %%
from fivefold import widgets

widgets.ring_all_reduce(n=4)

# %% [markdown]
# ## The real tool
#
# `torch.distributed` has all of these, and the results are the same. Two things are worth knowing. Sums of floats may
# differ in the last digit, because they are added up in another order. And `all_gather` wants pieces of one size on
# most backends; yours does not.

# %%
functions = [
    mine(f"collectives.{function.__name__}", function)
    for function in (shift, ring_reduce_scatter, ring_all_gather, ring_all_reduce, tree_broadcast, pairwise_all_to_all)
]


def beside_torch(shift, reduce_scatter, all_gather, all_reduce, broadcast, all_to_all) -> dict[str, float]:
    world, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.randn(2 * n + 1, 3, generator=torch.Generator().manual_seed(rank))
    pairs = {}

    theirs = torch.empty_like(x)
    messages = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, theirs, (rank - 1) % n)]
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()
    pairs["shift"] = shift(x, torch.empty_like(x), world), theirs

    theirs = x.clone()
    dist.all_reduce(theirs)
    pairs["all-reduce"] = all_reduce(x, world), theirs

    sizes = [3] + [2] * (n - 1)
    theirs = torch.empty(sizes[rank], 3)
    dist.reduce_scatter(theirs, [piece.contiguous() for piece in x.split(sizes)])
    pairs["reduce-scatter"] = reduce_scatter(x, sizes, world), theirs

    pieces = [torch.empty(2, 3) for _ in range(n)]
    dist.all_gather(pieces, x[:2])
    pairs["all-gather"] = all_gather(x[:2], [2] * n, world), torch.cat(pieces)

    theirs = x.clone()
    dist.broadcast(theirs, src=1)
    pairs["broadcast"] = broadcast(x.clone(), 1, world), theirs

    send, receive = [(rank + 2 * to) % 4 for to in range(n)], [(source + 2 * rank) % 4 for source in range(n)]
    rows = torch.randn(sum(send), 3, generator=torch.Generator().manual_seed(100 + rank))
    theirs = torch.empty(sum(receive), 3)
    dist.all_to_all_single(theirs, rows, receive, send)
    pairs["all-to-all"] = all_to_all(rows, send, receive, world), theirs

    for name, (ours, theirs) in pairs.items():
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
    return {name: (ours - theirs).abs().max().item() for name, (ours, theirs) in pairs.items()}


for name, off in run(beside_torch, world_size, *functions).results[0].items():
    print(f"{name:15} differs by at most {off:.0e}")

# %% [markdown]
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="00.missing"
missing_answer = "c"

# %% check="00.missing"
check("00.missing", missing_answer)

# %% question="00.bytes"
bytes_answer = 2 * 7 / 8 * 2

# %% check="00.bytes"
check("00.bytes", bytes_answer)

# %% question="00.rounds"
rounds_answer = 7

# %% check="00.rounds"
check("00.rounds", rounds_answer)

# %% question="00.small"
small_answer = 126 / 12

# %% check="00.small"
check("00.small", small_answer)

# %% [markdown]
# ## Where this stands
#
# | here | `torch.distributed` | NCCL | MPI |
# | --- | --- | --- | --- |
# | `shift` | `batch_isend_irecv` | `ncclSend` and `ncclRecv` in one group call | `MPI_Sendrecv` |
# | `ring_reduce_scatter` | `reduce_scatter` | `ncclReduceScatter` | `MPI_Reduce_scatter` |
# | `ring_all_gather` | `all_gather` | `ncclAllGather` | `MPI_Allgatherv` |
# | `ring_all_reduce` | `all_reduce` | `ncclAllReduce` | `MPI_Allreduce` |
# | `tree_broadcast` | `broadcast` | `ncclBroadcast` | `MPI_Bcast` |
# | `pairwise_all_to_all` | `all_to_all_single` | sends and receives in one group call | `MPI_Alltoallv` |
#
# NCCL, which `torch.distributed` uses on GPUs, chooses between rings and trees by the size of the tensor. Megatron-LM's
# pipelines know two repairs of your deadlock, in `megatron/core/pipeline_parallel/p2p_communication.py`: one function
# starts everything and waits for all, another lets even and odd ranks take turns. DeepSpeed and torchtitan call the
# collectives of `torch.distributed`.
#
# **Papers.** [Bandwidth optimal all-reduce algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002) (Patarasuk and Yuan
# 2009): your ring, and why no all-reduce sends less. [Optimization of collective communication operations in
# MPICH](https://doi.org/10.1177/1094342005051521) (Thakur, Rabenseifner and Gropp 2005): the tree, the pairwise
# exchange, α and β, and when to take which. [Horovod](https://arxiv.org/abs/1802.05799) (Sergeev and Del Balso 2018)
# brought the ring to deep learning.
