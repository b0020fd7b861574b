"""What checks of a vocabulary that is split over ranks do on the ranks, and what they expect there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.runtime.ledger import phase
from torch import Tensor

from autograde.case import Case, ranks_in_words
from autograde.checks.training import RATE, group_of, kept_storages

LOSS = "the loss"  # the phase in which bytes kept for backward are the loss's own


@dataclass(frozen=True, kw_only=True)
class Words(Case):
    """A vocabulary of `size` words over each group of ranks, ceil(size/t) on each; what is missing is padding."""

    groups: tuple[tuple[int, ...], ...]
    size: int
    tokens: tuple[int, ...]  # the shape of the tokens

    def __str__(self) -> str:
        return f"{ranks_in_words(self.groups)}, {self.size} words, {math.prod(self.tokens)} tokens"

    def random(self, what: int, *shape: int) -> Tensor:
        """Random numbers, the same for every `what` and shape."""
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def words(self, what: int, below: int) -> Tensor:
        """Tokens that are smaller than `below`."""
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randint(below, self.tokens, generator=generator)

    def place(self, rank: int) -> tuple[int, int, int]:
        """The place of a rank's group, the rank's number in it, and how many ranks it has."""
        place = next(place for place, ranks in enumerate(self.groups) if rank in ranks)
        return place, self.groups[place].index(rank), len(self.groups[place])

    def calls(self, number: int) -> list[int]:
        """How many calls each rank makes where `number` are needed: none where it is alone in its group."""
        return [number * (self.place(rank)[2] > 1) for rank in range(self.world_size)]

    def rows(self, rank: int) -> int:
        """How many rows of the vocabulary each rank of this one's group keeps, padding included."""
        return -(-self.size // self.place(rank)[2])

    def piece(self, rank: int, whole: Tensor) -> Tensor:
        """This rank's rows of a whole (size, ...), with zeros in the place of padding."""
        _, number, t = self.place(rank)
        missing = t * self.rows(rank) - self.size
        padded = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
        return padded.chunk(t)[number].clone()


@dataclass(frozen=True, kw_only=True)
class Embedded(Words):
    """An embedding of `h` numbers a word, used in two steps: with any tokens, then with those of the first ranks."""

    h: int
    steps: int = 2  # 0: with an exchange of the check's own

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and the gradient of their embedding for each step; the second step's tokens are of few rows."""
        place, few = self.place(rank)[0], max(1, self.size // 4)
        below = [self.size, few][: self.steps or 2]
        return [
            (self.words(10 + 3 * i + place, limit), self.random(20 + 3 * i + place, *self.tokens, self.h))
            for i, limit in enumerate(below)
        ]

    def weight(self) -> Tensor:
        return self.random(0, self.size, self.h)


def try_embedding(solution: Callable, case: Embedded) -> dict:
    """The first step's output and gradient, the weight after both, and what the layer keeps."""
    rank, (group, _) = dist.get_rank(), group_of(case.groups)
    weight = case.weight()
    if not case.steps:
        return _own_exchange(solution, case, group, weight)
    layer = solution(weight, group)
    kept = kept_storages(layer)
    found = {"kept": sum(kept.values()), "shared": weight.untyped_storage().data_ptr() in kept}
    parameters = dict(layer.named_parameters())
    for step, (tokens, incoming) in enumerate(case.batches(rank)):
        given = tokens.clone()
        y = layer(given)
        if not step:
            found |= {"output": y.detach(), "tokens": given}
        if y.shape != incoming.shape:
            break
        if y.requires_grad:
            y.backward(incoming)
        else:
            found["apart"] = True
        with torch.no_grad():
            for name, parameter in parameters.items():
                if not step:
                    found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                parameter.grad = None
    return found | {f"{name} after 2 steps": parameter.detach() for name, parameter in parameters.items()}


def _own_exchange(solution: Callable, case: Embedded, group: dist.ProcessGroup, weight: Tensor) -> dict:
    """With words of any rank, then with those of the first ranks. The exchange sums and scales."""
    called = []

    def leave(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        called.append(rows.shape)
        total = rows.detach().clone()
        dist.all_reduce(total, group=group)
        return (2 + group.rank()) * total

    layer = solution(weight, group, leave=leave)
    any_words, few_words = (layer(tokens).detach() for tokens, _ in case.batches(dist.get_rank()))
    return {"own": any_words, "own, few": few_words, "calls": len(called)}


def expected_embedding(case: Embedded, rank: int) -> dict:
    """What `try_embedding` is to return, but for the memory."""
    weight = case.weight().requires_grad_()
    batches, found = case.batches(rank), {}
    if not case.steps:
        any_words, few_words = (
            (2 + case.place(rank)[1]) * F.embedding(tokens, weight).detach() for tokens, _ in batches
        )
        return {"own": any_words, "own, few": few_words, "calls": 2}
    for step, (tokens, incoming) in enumerate(batches):
        y = F.embedding(tokens, weight)
        (grad,) = torch.autograd.grad(y, weight, incoming)
        if not step:
            found = {"output": y.detach(), "tokens": tokens, "weight.grad": case.piece(rank, grad)}
        weight = (weight - RATE * grad).detach().requires_grad_()
    return found | {"weight after 2 steps": case.piece(rank, weight.detach())}


@dataclass(frozen=True, kw_only=True)
class Targets(Words):
    """Logits and targets; all logits of a token are shifted by a number as large as `shift`."""

    shift: float = 0.0
    ignored: int | None = None  # None: the default, -100
    dtype: str = "float64"

    def __str__(self) -> str:
        more = f", {self.dtype}" * (self.dtype != "float64") + ", large logits" * (self.shift > 0)
        return f"{super().__str__()}{more}" + (f", ignore_index {self.ignored}" if self.ignored is not None else "")

    def tensors(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Whole logits with -inf for padding, targets, and the gradient of the losses, of the rank's group."""
        place, _, t = self.place(rank)
        wide = t * self.rows(rank)
        logits = 3 * self.random(10 + place, *self.tokens, wide) + self.shift * self.random(20 + place, *self.tokens, 1)
        logits[..., self.size :] = -torch.inf
        targets = self.words(30 + place, self.size).flatten()
        targets[0], targets[-1], targets[1] = 0, self.size - 1, -100 if self.ignored is None else self.ignored
        incoming = self.random(40 + place, *self.tokens)
        single = torch.float64 if self.dtype == "float64" else torch.float32
        return logits.to(getattr(torch, self.dtype)), targets.view(self.tokens), incoming.to(single)


def try_loss(solution: Callable, case: Targets) -> dict:
    """Losses and the gradient of this rank's logits."""
    rank, (group, _) = dist.get_rank(), group_of(case.groups)
    whole, targets, incoming = case.tensors(rank)
    leaf = whole.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    logits, given = leaf * 1, targets.clone()
    more = {} if case.ignored is None else {"ignore_index": case.ignored}
    with phase(LOSS):
        loss = solution(logits, given, group, **more)
    found: dict[str, Any] = {"loss": loss.detach(), "logits": logits.detach(), "targets": given, "logits.grad": None}
    if loss.shape == incoming.shape and loss.requires_grad:
        loss.backward(incoming.to(loss.dtype))
        found["logits.grad"] = leaf.grad
    return found


def expected_loss(case: Targets, rank: int) -> dict:
    """What `try_loss` is to return."""
    logits, targets, incoming = case.tensors(rank)
    _, number, t = case.place(rank)
    leaf = logits.clone().requires_grad_()
    wide = leaf if case.dtype == "float64" else leaf.float()
    ignored = -100 if case.ignored is None else case.ignored
    loss = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=ignored)
    loss = loss.view(case.tokens)
    loss.backward(incoming)
    pieces = {"logits": logits.chunk(t, -1)[number], "logits.grad": leaf.grad.chunk(t, -1)[number]}
    return {"loss": loss.detach(), "targets": targets} | pieces
