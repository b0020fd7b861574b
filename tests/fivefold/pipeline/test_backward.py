"""The split backward: the gradients of the undivided one to the bit, nothing computed or sent twice, less kept."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.pipeline import split_backward
from fivefold.pipeline.graph import take_apart
from fivefold.runtime.ledger import phase
from fivefold.sequence import gather_tokens, scatter_tokens
from fivefold.tensor import ColumnLinear, RowLinear
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

HIDDEN = 12


class Block(nn.Module):
    """A transformer block with attention, as written with torch's own modules."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=bias), nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.up, self.down = nn.Linear(HIDDEN, 30, bias=bias), nn.Linear(30, HIDDEN, bias=bias)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(2, 3)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Twice(nn.Module):
    """Weights used twice, one use behind the other: a whole layer, a gain, and a matrix that is also transposed."""

    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.rand(HIDDEN))
        self.matrix, self.once = nn.Parameter(torch.randn(HIDDEN, 5)), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = self.once(self.layer(x).tanh() * self.gain)
        return self.layer(x @ self.matrix @ self.matrix.T).sigmoid() * self.gain


class Odd(nn.Module):
    """A convolution, a weight made of two others, a frozen one, one without use, and an operation in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.length, self.direction = nn.Parameter(torch.rand(HIDDEN, 1)), nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.frozen, self.unused = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False), nn.Parameter(torch.zeros(3))
        self.shift = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2).relu()
        x = F.linear(x, self.length * self.direction / self.direction.norm(dim=1, keepdim=True))
        first, second = self.frozen(x).tanh().chunk(2, -1)
        return torch.cat([first * second, first.exp()], -1).add_(self.shift)


class Own(torch.autograd.Function):
    """x wᵀ whose author computes both gradients whatever is asked for."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        Own.calls += 1
        x, w = ctx.saved_tensors
        return grad @ w, grad.flatten(0, -2).T @ x.flatten(0, -2)


class WithOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(self, x):
        return self.after(Own.apply(self.before(x).tanh(), self.weight).tanh())


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.last = Block(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.last(checkpoint(self.block, x, use_reentrant=False))


class First(nn.Module):
    """A first stage: the input has no gradient. The output layer has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, HIDDEN), nn.Sequential(Block(), Block())

    def forward(self, ids):
        return F.linear(self.blocks(self.embedding(ids)), self.embedding.weight)


STAGES = {
    "blocks": lambda: nn.Sequential(Block(), Block(bias=False)),
    "weights used twice": Twice,
    "odd": Odd,
    "own function": WithOwn,
    "recomputed": Recomputed,
    "first": First,
    "linear alone": lambda: nn.Linear(HIDDEN, 4),
    "embedding alone": lambda: nn.Embedding(9, HIDDEN),
    "no weights": nn.Tanh,
}


class Flops(TorchDispatchMode):
    """FLOPs by torch's formulas. Its own FlopCounterMode has hooks in modules that a recomputation cannot bear."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        self.total += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(len(name))
    stage = STAGES[name]().double()
    if name in ("first", "embedding alone"):
        return stage, torch.randint(9, (2, 5))
    return stage, torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)


def grads_of(stage: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize("name", STAGES)
def test_halves_are_the_whole(name):
    """Gradients of input and weights, on top of what was in `.grad`, are those of one backward; so is their work."""
    stage, x = made(name)
    whole = copy.deepcopy(stage)
    y = whole(x)
    grad = torch.randn_like(y)
    for modules in (stage, whole):
        torch.manual_seed(1)
        for parameter in modules.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
    with Flops() as together:
        y.backward(grad)
    expected = x.grad
    x.grad = None
    y = stage(x)
    with Flops() as first:
        found, weight_gradients = split_backward(y, x, grad)
    with Flops() as second:
        weight_gradients()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads_of(stage), grads_of(whole), rtol=1e-13, atol=1e-13)
    assert x.grad is None
    assert first.total + second.total == together.total


def test_the_first_half_leaves_the_weights_to_the_second():
    """Products of a block: those of the input gradient in the first half, those of its four weights in the second."""
    stage, x = made("blocks")
    rows, weights = 2 * 5, 2 * HIDDEN * (3 * HIDDEN + HIDDEN + 30 + 30)
    attention = 2 * 2 * (2 * 4 * 5 * 5 * HIDDEN // 4) * 2 * 2  # blocks, sequences and heads, two products, twice back
    y = stage(x)
    with Flops() as first:
        _, weight_gradients = split_backward(y, x, torch.ones_like(y))
    assert all(grad is None for grad in grads_of(stage).values())
    with Flops() as second:
        weight_gradients()
    assert second.total == 2 * rows * weights
    assert first.total == 2 * rows * weights + attention


def test_a_function_of_ones_own_runs_once():
    """So what it communicates is communicated once. Its weight comes early, the others late."""
    stage, x = made("own function")
    Own.calls = 0
    y = stage(x)
    _, weight_gradients = split_backward(y, x, torch.ones_like(y))
    assert [name for name, grad in grads_of(stage).items() if grad is not None] == ["weight"]
    weight_gradients()
    assert Own.calls == 1


def test_early_weights_are_those_that_cannot_wait():
    """Used in two places, in a function of one's own, in a region that is computed again; no others."""
    early = {}
    for name in ("blocks", "weights used twice", "odd", "own function", "first"):
        stage, x = made(name)
        names = {parameter: path for path, parameter in stage.named_parameters()}
        early[name] = {names[weight] for weight in take_apart(stage(x), x).early}
    assert early == {
        "blocks": set(),
        "weights used twice": {"layer.weight", "layer.bias", "gain", "matrix"},
        "odd": {"direction"},
        "own function": {"weight"},
        "first": {"embedding.weight"},
    }


def test_halves_of_several_microbatches_in_any_order():
    """Weight gradients may wait while others overtake them, and gradients come in another order than activations."""
    stage, _ = made("blocks")
    whole = copy.deepcopy(stage)
    inputs = [torch.randn(2, n, HIDDEN, dtype=torch.float64, requires_grad=True) for n in (3, 1, 4)]
    sum(whole(x).square().sum() for x in inputs).backward()
    expected = [x.grad for x in inputs]
    losses = [stage(x).square().sum() for x in inputs]
    halves = {i: split_backward(losses[i], inputs[i]) for i in (2, 0, 1)}
    for i in (0, 2, 1):
        halves[i][1]()
    for i, (found, _) in halves.items():
        torch.testing.assert_close(found, expected[i], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads_of(stage), grads_of(whole), rtol=1e-12, atol=1e-12)


def test_torchs_split_agrees():
    """Against the two functions behind `torch.distributed.pipelining`'s zero-bubble schedules."""
    stage, x = made("blocks")
    theirs = copy.deepcopy(stage)
    other = x.detach().clone().requires_grad_()
    y, z = stage(x), theirs(other)
    grad = torch.randn_like(y)
    found, weight_gradients = split_backward(y, x, grad)
    weight_gradients()
    (expected,), groups = stage_backward_input([z], [grad], [other], theirs.parameters())
    stage_backward_weight(theirs.parameters(), groups)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads_of(stage), grads_of(theirs), rtol=1e-13, atol=1e-13)


def kept_by_halves():
    """A phase after forward, one after the first half and one after the second, to see what is kept there."""
    stage, x = made("blocks")
    y = stage(x)
    with phase("after forward"):
        pass
    _, weight_gradients = split_backward(y, x, torch.ones_like(y))
    del y
    with phase("between"):
        pass
    weight_gradients()
    with phase("after all"):
        pass


def test_between_the_halves_only_what_weights_need_is_kept():
    """A block: the inputs of its four products, and of its norms with two numbers a row; then nothing."""
    kept = run(kept_by_halves, 1, measure=True).ledger[0].memory.phases
    rows = 2 * 5
    norms = 2 * (rows * HIDDEN + 2 * rows)
    products = rows * (HIDDEN + HIDDEN + HIDDEN + 30)
    assert kept["between"] == 2 * 8 * (norms + products)
    assert kept["after forward"] > 1.5 * kept["between"]
    assert kept["after all"] == 0


def test_what_is_released_is_freed_where_nothing_is_measured_too():
    """The input of a GELU dies in the first half, that of a linear layer in the second."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    x = torch.randn(3, 6, requires_grad=True)
    hidden = first(x)
    activated = F.gelu(hidden)
    of_gelu, of_linear = weakref.ref(hidden.untyped_storage()), weakref.ref(activated.untyped_storage())
    end = get_gradient_edge(second(activated))
    del hidden, activated
    assert of_gelu() is not None
    _, weight_gradients = split_backward(end, x, torch.ones(3, 6))
    del end
    assert of_gelu() is None and of_linear() is not None
    weight_gradients()
    assert of_linear() is None


def tensor_parallel(sequence: bool, split: bool):
    """Forward and backward of a column and a row layer over all ranks, with the norm before them."""
    generator = torch.Generator().manual_seed(5)
    norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((8, HIDDEN), (8,), (HIDDEN, 8))]
    ways = {"enter": gather_tokens}, {"leave": scatter_tokens}
    column = ColumnLinear(*made[:2], dist.group.WORLD, **(ways[0] if sequence else {}))
    row = RowLinear(made[2], None, dist.group.WORLD, **(ways[1] if sequence else {}))
    x = torch.randn(2, 4, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    y = row(column(norm(x)).tanh())
    if split:
        x_grad, weight_gradients = split_backward(y.square().sum(), x)
        with phase("second half"):
            weight_gradients()
    else:
        y.square().sum().backward()
        x_grad = x.grad
    return x_grad, [p.grad for layer in (norm, column, row) for p in layer.parameters()]


@pytest.mark.parametrize("sequence", [False, True])
def test_no_communication_in_the_second_half(sequence):
    """Tensor and sequence parallelism: the same collectives as in one backward, all of them in the first half."""
    whole, halves = (run(tensor_parallel, 2, sequence, split) for split in (False, True))
    for ours, theirs in zip(halves.results, whole.results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(halves.ledger.ranks, whole.ledger.ranks, strict=True):
        assert [c.op for c in ours.communications] == [c.op for c in theirs.communications]
        assert len(ours.communications) == (4 if sequence else 2)
        assert not [c for c in ours.communications if c.phase == "second half"]
