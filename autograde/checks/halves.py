"""What checks of a split backward do on the ranks: take stages through both halves, and look in between.

The judge calls `whole` and `made` too, for what one undivided backward gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.runtime.ledger import phase
from fivefold.sequence import gather_tokens, scatter_tokens
from fivefold.tensor import ColumnLinear, RowLinear
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autograde.case import Case
from autograde.verdict import in_words

WORDS = 7  # that an embedding knows


@dataclass(frozen=True, kw_only=True)
class Halves(Case):
    """Stages, by their names in `STAGES`, each on micro-batches of `batches` sequences; h is the width."""

    stages: tuple[str, ...]
    batches: tuple[int, ...] = (2,)
    order: tuple[int, ...] = (0,)  # in which the first halves are done; the second ones in that of the micro-batches
    s: int = 3
    h: int = 4

    def __str__(self) -> str:
        many = f", {len(self.batches)} micro-batches" if len(self.batches) > 1 else ""
        ranks = f"{self.world_size} ranks, " if self.world_size > 1 else ""
        return f"{ranks}{in_words(self.stages)}{many}"

    def random(self, what: int, *shape: int) -> Tensor:
        """Random numbers, the same for every `what` and shape."""
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Watch:
    """What a stage made on the way that no weight's gradient needs, and how often its backward passed."""

    def __init__(self) -> None:
        self.made: list[StorageWeakRef] = []
        self.passes = 0

    def of_no_weight(self, x: Tensor) -> Tensor:
        self.made.append(StorageWeakRef(x.untyped_storage()))
        return x

    @property
    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.made)


class _Passes(torch.autograd.Function):
    """Nothing, twice over; counts backwards."""

    @staticmethod
    def forward(ctx, x: Tensor, watch: Watch) -> Tensor:
        ctx.watch = watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.watch.passes += 1
        return grad, None


class _Own(torch.autograd.Function):
    """x wᵀ, whose author computes both gradients whatever is asked for."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, watch: Watch) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.watch = watch
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.watch.passes += 1
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, case: Halves, watch: Watch):
        super().__init__()
        h, self.watch = case.h, watch
        self.norm, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, 3 * h), nn.Linear(3 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = self.watch.of_no_weight((q @ k.mT).softmax(-1)) @ v
        x = _Passes.apply(x + self.out(mixed), self.watch)
        return x + self.down(F.gelu(self.watch.of_no_weight(self.up(x))))


class First(Block):
    """A first stage: its input are words."""

    def __init__(self, case: Halves, watch: Watch):
        super().__init__(case, watch)
        self.embedding = nn.Embedding(WORDS, case.h)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embedding(x))


class Last(Block):
    """A last stage: it gives the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Twice(nn.Module):
    """Weights used twice, one use behind the other and side by side; one is frozen, and one is not used."""

    def __init__(self, case: Halves, watch: Watch):
        super().__init__()
        h, self.watch = case.h, watch
        self.layer, self.once = nn.Linear(h, h), nn.Linear(h, 2 * h)
        self.matrix, self.gain = nn.Parameter(torch.zeros(h, h + 1)), nn.Parameter(torch.zeros(h))
        self.frozen, self.unused = nn.Linear(h, h).requires_grad_(False), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.matrix @ self.matrix.T  # nothing stands between the two uses
        x = _Passes.apply(self.frozen(self.layer(x).tanh() * self.gain), self.watch)
        first, second = self.once(self.layer(x) + self.gain).chunk(2, -1)
        return self.watch.of_no_weight(first.sigmoid()) * second


class Other(nn.Module):
    """A function of somebody's own, a region that is computed again, and a weight made of two others."""

    def __init__(self, case: Halves, watch: Watch):
        super().__init__()
        h, self.watch = case.h, watch
        self.before, self.after, self.again = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.own = nn.Parameter(torch.zeros(h, h))
        self.length, self.direction = nn.Parameter(torch.zeros(h, 1)), nn.Parameter(torch.zeros(h, h))

    def forward(self, x: Tensor) -> Tensor:
        x = _Own.apply(self.before(x).tanh(), self.own, self.watch)
        x = checkpoint(lambda x: self.again(x).tanh(), x, use_reentrant=False)
        return self.after(F.linear(x, self.length * self.direction).relu())


STAGES = {
    "a block": Block,
    "a first stage": First,
    "a last stage": Last,
    "weights used twice": Twice,
    "functions of one's own": Other,
}


def made(name: str, case: Halves, watch: Watch) -> nn.Module:
    """A stage with random weights, each of them with a gradient from before."""
    stage = STAGES[name](case, watch).double()
    for number, parameter in enumerate(stage.parameters()):
        parameter.data = case.random(10 + number, *parameter.shape) / case.h**0.5
        if parameter.requires_grad:
            parameter.grad = case.random(50 + number, *parameter.shape)
    return stage


def fed(name: str, case: Halves, i: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a stage computes on, the leaf that its input is (None for words), and the gradient of its output."""
    b, shape = case.batches[i], (case.batches[i], case.s, case.h)
    if name == "a first stage":
        generator = torch.Generator().manual_seed(case.seed + i)
        return torch.randint(WORDS, (b, case.s), generator=generator), None, case.random(200 + i, *shape)
    x = case.random(100 + i, *shape).requires_grad_()
    return x, x, None if name == "a last stage" else case.random(200 + i, *shape)


def whole(name: str, case: Halves) -> dict[str, Tensor | None]:
    """The gradients that an undivided backward of each micro-batch leaves: of every parameter and input."""
    stage, found = made(name, case, Watch()), {}
    for i in range(len(case.batches)):
        x, leaf, grad = fed(name, case, i)
        stage(x).backward(grad)
        found[f"x.grad of micro-batch {i}"] = None if leaf is None else leaf.grad
    return found | {f"{n}.grad": p.grad for n, p in stage.named_parameters()}


def try_stages(split_backward: Callable, case: Halves) -> dict:
    """All stages, one after the other; of each what `try_stage` finds."""
    return {name: try_stage(split_backward, name, case) for name in case.stages}


def try_stage(split_backward: Callable, name: str, case: Halves) -> dict:
    """Forward of all micro-batches, then the first halves, then the second ones; what there is after each."""
    watch = Watch()
    stage = made(name, case, watch)
    given = {n: None if p.grad is None else p.grad.clone() for n, p in stage.named_parameters()}
    inputs, ends, kept, later, found = [], [], [], {}, {}
    with phase(f"{name}: forward"):
        for i in range(len(case.batches)):
            x, leaf, grad = fed(name, case, i)
            inputs.append((leaf, grad))
            kept.append(None if grad is None else grad.clone())
            ends.append(get_gradient_edge(stage(x)) if i % 2 else stage(x))  # an output, or what stands for it
    with phase(f"{name}: first half"):
        for i in case.order:
            end, (leaf, grad) = ends[i], inputs[i]
            x_grad, later[i] = split_backward(end, leaf, grad)
            found[f"x.grad of micro-batch {i}"] = x_grad
            ends[i] = end = None
    with phase(f"{name}: in between"):
        seen = {"alive": watch.alive, "passes before": watch.passes}
        seen["early"] = sorted(n for n, p in stage.named_parameters() if not _same(p.grad, given[n]))
    with phase(f"{name}: second half"):
        for i in sorted(later):
            later.pop(i)()
    with phase(f"{name}: after both"):
        seen["passes after"] = watch.passes
    found |= {f"{n}.grad": p.grad for n, p in stage.named_parameters()}
    changed = [i for i, grad in enumerate(kept) if not _same(inputs[i][1], grad)]
    return {"gradient": found, "incoming changed": changed} | seen


@dataclass(frozen=True, kw_only=True)
class Shared(Halves):
    """A norm and a pair of split matrices, its tokens split as well."""

    stages: tuple[str, ...] = ("a stage that is split over ranks",)

    def tensors(self) -> dict[str, Tensor]:
        """The norm's weight, both matrices, x and the gradient of the output: whole."""
        t, h = self.world_size, self.h
        shapes = [("norm", (h,)), ("column", (2 * t, h)), ("row", (h, 2 * t))]
        shapes += [(name, (2, 2 * t, h)) for name in ("x", "incoming")]
        return {name: self.random(i, *shape) for i, (name, shape) in enumerate(shapes)}


def try_shared(split_backward: Callable, case: Shared) -> dict:
    """Both halves of a stage that sends something in forward and in backward."""
    whole, rank, t = case.tensors(), dist.get_rank(), case.world_size
    norm = nn.Parameter(whole["norm"])
    column = ColumnLinear(whole["column"], None, dist.group.WORLD, enter=gather_tokens)
    row = RowLinear(whole["row"], None, dist.group.WORLD, leave=scatter_tokens)
    x, incoming = (whole[name].chunk(t, 1)[rank].clone() for name in ("x", "incoming"))
    x.requires_grad_()
    with phase("forward"):
        y = row(column(F.rms_norm(x, (case.h,), norm)).tanh())
    with phase("first half"):
        x_grad, later = split_backward(y, x, incoming)
    with phase("second half"):
        later()
    return {"x.grad": x_grad, "column.grad": column.weight.grad, "row.grad": row.weight.grad, "norm.grad": norm.grad}


def whole_shared(case: Shared) -> list[dict[str, Tensor]]:
    """What one process gets of it, cut for each rank; the norm's gradient is that of the rank's own tokens."""
    t = case.world_size
    pieces = case.tensors()["x"].chunk(t, 1)
    leaves = [piece.clone().requires_grad_() for piece in pieces]
    norms = [case.tensors()["norm"].requires_grad_() for _ in pieces]
    column, row = (case.tensors()[name].requires_grad_() for name in ("column", "row"))
    x = torch.cat([F.rms_norm(leaf, (case.h,), norm) for leaf, norm in zip(leaves, norms, strict=True)], 1)
    ((x @ column.T).tanh() @ row.T).backward(case.tensors()["incoming"])
    columns, rows = column.grad.chunk(t, 0), row.grad.chunk(t, 1)
    return [
        {"x.grad": leaves[r].grad, "column.grad": columns[r], "row.grad": rows[r], "norm.grad": norms[r].grad}
        for r in range(t)
    ]


def _same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
