"""A small model in stages, for checks that execute a schedule: its stages on a rank, and what one process gets."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from fivefold.runtime.marks import now
from torch import Tensor, nn

WIDTH, ROWS = 5, 3


def random(what: int, *shape: int) -> Tensor:
    """Random fp64 numbers, the same for every `what` and shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(what), dtype=torch.float64)


class Stage(nn.Module):
    """An uneven stage: one pair of layers or two, by its number, all with biases."""

    def __init__(self, number: int, seed: int):
        super().__init__()
        inner, first = 3 + number % 4, 1000 * seed + 10 * number
        self.up = nn.Parameter(random(first, inner, WIDTH))
        self.bias = nn.Parameter(random(first + 1, inner))
        self.down = nn.Parameter(random(first + 2, WIDTH, inner) / inner)
        self.more = nn.Linear(WIDTH, WIDTH, dtype=torch.float64) if number % 2 else None
        if self.more is not None:
            self.more.weight.data.copy_(random(first + 3, WIDTH, WIDTH) / WIDTH)
            self.more.bias.data.copy_(random(first + 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.up.T + self.bias) @ self.down.T
        return x if self.more is None else torch.tanh(self.more(x))


class Watched(nn.Module):
    """A stage that writes down what is done with it, and what the program says that it is doing."""

    def __init__(self, number: int, seed: int, log: list):
        super().__init__()
        self.number, self.log, self.stage = number, log, Stage(number, seed)
        self.outputs: list[weakref.ref] = []  # of those whose backward has begun
        self.kept = 0  # the most of them that were there when a later backward began
        for parameter in self.stage.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.note("W"))

    def note(self, letter: str) -> None:
        entry = [letter, self.number, now.kind, now.label.partition(".")[0]]
        if not (letter == "W" and self.log and self.log[-1] == entry):
            self.log.append(entry)

    def forward(self, x: Tensor) -> Tensor:
        self.note("F")
        y = self.stage(x)
        if y.requires_grad:
            output = weakref.ref(y)
            y.register_hook(lambda _: self.backward(output))
        return y

    def backward(self, output: weakref.ref) -> None:
        self.note("B")
        self.kept = max(self.kept, sum(ref() is not None for ref in self.outputs))
        self.outputs.append(output)


def inputs(num_microbatches: int, seed: int) -> list[Tensor]:
    """The micro-batches, unlike each other."""
    return [random(1000 * seed + 500 + i, ROWS, WIDTH) for i in range(num_microbatches)]


def loss(y: Tensor, i: int) -> Tensor:
    """Another loss for every micro-batch, so that one taken for another shows."""
    return (y * random(900 + i, ROWS, WIDTH)).sum() + (1 + i) / 7 * y.square().mean()


def execute(
    executor: Any, schedule: Any, seed: int, group: Any = None, steps: int = 1, log: list | None = None
) -> dict:
    """Let `executor`, such as `pipeline.run`, run the schedule on the ranks of `group`: gradients by name, losses by
    micro-batch, and whether any of these still has its graph. Where two ranks hold a stage, their gradients are added
    up here. With more steps they pile up. What is done with each stage is written into `log`."""
    group = group or dist.group.WORLD
    numbers = schedule.stages_of(group.rank())
    parts = {n: Stage(n, seed) if log is None else Watched(n, seed, log) for n in numbers}
    losses = {}
    for step in range(steps):
        given = inputs(schedule.num_microbatches, seed + step)
        losses = executor(schedule, parts, given, loss, group, torch.full((ROWS, WIDTH), torch.nan).double())
    for number, route in enumerate(schedule.routes[1:]):
        _add_copies(parts, schedule.routes[0], route, group, number)
    found = {"gradient": _gradients(parts), "losses": None, "graph": False}
    found["kept"] = max((part.kept for part in parts.values() if isinstance(part, Watched)), default=0)
    if isinstance(losses, dict):
        found["graph"] = any(value.requires_grad for value in losses.values() if isinstance(value, Tensor))
        found["losses"] = {i: value.detach() if isinstance(value, Tensor) else value for i, value in losses.items()}
    return found


def expected(stages: Iterable[int], num_stages: int, num_microbatches: int, seed: int, steps: int = 1) -> dict:
    """The gradients of these stages in one process, by name."""
    every, _ = _alone(num_stages, num_microbatches, seed, steps)
    return {name: grad for name, grad in every.items() if int(name.split()[1]) in set(stages)}


def expected_losses(num_stages: int, num_microbatches: int, seed: int, steps: int = 1) -> dict[int, Tensor]:
    """The loss of each micro-batch of the last step in one process."""
    return _alone(num_stages, num_microbatches, seed, steps)[1]


@lru_cache(maxsize=64)
def _alone(num_stages: int, num_microbatches: int, seed: int, steps: int) -> tuple[dict, dict]:
    model = [Stage(number, seed) for number in range(num_stages)]
    losses = {}
    for step in range(steps):
        for i, x in enumerate(inputs(num_microbatches, seed + step)):
            for stage in model:
                x = stage(x)
            losses[i] = loss(x, i)
            losses[i].backward()
    return _gradients(dict(enumerate(model))), {i: value.detach() for i, value in losses.items()}


def _gradients(parts: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"stage {number} {name.removeprefix('stage.')}.grad": parameter.grad
        for number, part in sorted(parts.items())
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


def _add_copies(parts: dict[int, nn.Module], one: tuple, other: tuple, group: Any, number: int) -> None:
    """Two routes: each stage's two ranks add up what each of them has."""
    for stage, ranks in enumerate(zip(one, other, strict=True)):
        if group.rank() in ranks and ranks[0] != ranks[1]:
            peer = ranks[0] if group.rank() == ranks[1] else ranks[1]
            for parameter in parts[stage].parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                theirs = torch.empty_like(grad)
                sending = dist.isend(grad.clone(), group=group, group_dst=peer)
                dist.recv(theirs, group=group, group_src=peer)
                sending.wait()
                parameter.grad = grad + theirs
