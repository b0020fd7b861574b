# %% [markdown]
# # 3 · Tensor parallelism
#
# *80 minutes · 6 exercises and 5 questions, 36 points · 4 processes on this machine, no GPU*
#
# The school kitchen has 1,000 sandwiches to make by noon. Two cooks make every one of them together: each prepares a
# whole sandwich with half of the fillings, and before it leaves the table the two are stacked, every single time. That
# stacking is this lesson.
#
# ![Two ranks, each with all of X. Rank 0 has the left columns of A and the upper rows of B, rank 1 the rest. Each gets
# a part of Y; one arrow between the ranks adds the parts up.](pictures/03_column_row.svg)
#
# **What is split**: the matrices inside a layer. Each of t ranks (processes, one a GPU) sees every token, and holds 1/t
# of each matrix.
#
# **What travels**: activations, the numbers that layers hand on. One all-reduce forward and one backward for each pair
# of matrices: it adds up a tensor over the ranks and leaves the sum on all of them. With b sequences of s tokens of h
# numbers, that is 2(t−1)/t · b·s·h numbers from every rank, each time.
#
# **When it hurts**: the moment that arrow leaves the server.

# %% [markdown]
# Run the cells from top to bottom (Shift + Enter). `run(function, 4)` calls a function on four ranks: four processes
# on this machine that talk through `torch.distributed`, as GPUs would. An exercise is a piece of the course's library
# with its body taken out. The cell below it checks what you write, on real ranks, and says what it saw.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import plots, run
from fivefold.tensor import Exchange, shard
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
# So there are two places to look after, one on either side of the pair. Megatron-LM, the paper behind this lesson,
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
# Now split them by hand. Each rank cuts its piece, computes its part, and one `all_reduce` over a *group* of ranks, all
# of them here, adds the parts up. (Biases have to wait: there is a trap in them too.)

# %%
from fivefold.runtime.ledger import phase


def by_hand(x: Tensor) -> Tensor:
    rank, t = dist.get_rank(), dist.get_world_size()
    tp = dist.new_group(group_desc="tp")  # all ranks, under the name that figures show
    w_in, _, w_out, _ = weights()
    with phase("forward"):  # the name that a timeline gives to what happens inside
        columns = w_in.chunk(t, dim=0)[rank]  # (4h/t, h)
        inner = F.gelu(F.linear(x, columns))  # (b, s, 4h/t): finished features
        rows = w_out.chunk(t, dim=1)[rank]  # (h, 4h/t)
        y = F.linear(inner, rows)  # (b, s, h): one part of a sum
        dist.all_reduce(y, group=tp)
    return y


x = random(b, s, h, seed=5)
done = run(by_hand, world_size, x, measure=True)

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
# all-reduce.

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
# `dist.all_reduce(tensor, group=group)` overwrites its tensor, which must be contiguous.
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
# - **Travels**: nothing of its own. x passes an exchange first, `enter(x, group)`, which is *f* where nothing else is
#   given. (Lesson 04 gives something else.)
# - **Checked**: output; gradients of x and of both parameters, also after an optimizer step; traffic; memory; other
#   arguments: no bias, another `enter`, a size that t does not divide.

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
# ## See it
#
# A transformer is a stack of such pairs. Three of yours, one on top of the other, one step of training, measured:

# %%
layers = 3


def one_step(Layer: type) -> None:
    tp = dist.new_group(group_desc="tp")
    stack = [Layer(*weights(), tp) for _ in range(layers)]
    x = random(b, s, h, seed=7).requires_grad_()
    with phase("forward"):
        y = x
        for layer in stack:
            y = y + layer(y)
    with phase("backward"):
        y.backward(random(b, s, h, seed=8))


measured = run(one_step, world_size, my_MLP, measure=True).ledger

# %% [markdown]
# **The rhythm.** Compute, add up, compute, add up. First with all ranks in one server of H100s, then with the same
# GPUs, one in each server (h = 12,288 again). Nothing else is different: the program, the bytes and the work are the
# same.

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
# **The bytes.** One all-reduce a layer each way, and nothing else.

# %%
expected = layers * 2 * 2 * (world_size - 1) / world_size * b * s * h * 4
plots.traffic_by_axis(measured, {("all_reduce", "tp"): (expected, f"{layers} · 2 · 2(t−1)/t · b·s·h · 4")})

# %% [markdown]
# **The memory.** Weights shrink to 1/t, and so do the inner features that wait for backward. The input of each pair
# does not: every rank keeps every token of it.

# %%
t = world_size
one, each = run(one_step, 1, my_MLP, measure=True).ledger[0].memory, measured[0].memory
weights_formula = layers * ((8 * h * h + 4 * h) / t + h) * 4
kept_formula = layers * b * s * h * (1 + 8 / t) * 4
print(f"                    1 rank   one of {t}    formula")
for name, a, c, formula, words in (
    ("weights", one.parameters, each.parameters, weights_formula, "3 · ((8h² + 4h)/t + h) · 4"),
    ("kept for backward", one.peak_saved, each.peak_saved, kept_formula, "3 · b·s·h · (1 + 8/t) · 4"),
):
    print(f"{name:17} {a / 1e6:5.2f} MB {c / 1e6:7.2f} MB {formula / 1e6:7.2f} MB = {words}")
plots.memory(measured)

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
# looks at shapes, at traffic, or at whether the loss goes down. Attention has the same trap, where queries, keys and
# values share a matrix.

# %% [markdown]
# ## The real tool
#
# PyTorch does all of this with `DTensor`: a tensor that knows how it is spread over ranks. Name each layer's cut, and
# `parallelize_module` replaces its parameters. (`0` and `2` are names in the `nn.Sequential`.) Output and gradients
# have to equal yours.


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
# ## Self-check
#
# Set each answer, and run the cell below it. A wrong answer is explained, and you can answer again.

# %% question="03.bytes"
bytes_answer = 2 * 2 * 7 / 8 * 2048 * 4096 * 2 / 1e6

# %% check="03.bytes"
check("03.bytes", bytes_answer)

# %% question="03.order"
order_answer = "b"

# %% check="03.order"
check("03.order", order_answer)

# %% question="03.without_f"
without_f_answer = "c"

# %% check="03.without_f"
check("03.without_f", without_f_answer)

# %% question="03.stays"
stays_answer = "d"

# %% check="03.stays"
check("03.stays", stays_answer)

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
#
# They are in `megatron/core/tensor_parallel` (`mappings.py`, `layers.py`), in `torch.distributed.tensor.parallel`, and
# in `deepspeed/module_inject/layers.py`. torchtitan names the cut of every layer of a model in one file, its
# `parallelize.py`.
#
# **Papers.** [Megatron-LM](https://arxiv.org/abs/1909.08053) (Shoeybi et al. 2019): section 3 and figure 3 are this
# lesson, with *f* and *g*. [Efficient Large-Scale Language Model Training](https://arxiv.org/abs/2104.04473)
# (Narayanan et al. 2021): section 3.2 says why it stays inside a server.
# [Mesh-TensorFlow](https://arxiv.org/abs/1811.02084) (Shazeer et al. 2018) had the idea of splitting named dimensions
# before. [GLU variants](https://arxiv.org/abs/2002.05202) (Shazeer 2020) has the gated MLP.
