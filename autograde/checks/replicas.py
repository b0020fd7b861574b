"""What checks of data parallelism share: small models, a copy on each rank, and sequences of its own for each rank.

A judge asks the same models, in one process, for what the gradients should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fivefold.cost import collective_bytes
from fivefold.runtime.cluster import H100, Cluster, Link
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.replay import replay
from torch import Tensor, nn

from autograde.checks.among import Among
from autograde.checks.messages import unwaited
from autograde.traffic import NOUNS, size_in_words
from autograde.verdict import Finding, in_words, numbered

NUMBER = 8  # bytes of a float64
DEEP, WIDTH, ROWS = 6, 32, 16  # layers, features and rows of the model whose communication is timed


class Odd(nn.Module):
    """Sizes that nothing divides, a weight used twice, a layer that odd ranks use alone, and one that nobody uses."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(5, width), nn.Linear(width, width), nn.Linear(3, 1)
        self.last, self.tied = nn.Linear(width, 5, bias=False), nn.Linear(5, width)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        if detour:
            x = torch.tanh(self.sometimes(x))
        return self.last(torch.tanh(self.tied(self.last(x))))


@dataclass(frozen=True, kw_only=True)
class Replicas(Among):
    """A copy of one model on every rank. `kind` is "odd", "reordered" (each rank goes through the layers in an order of
    its own) or "deep" (layers of one size, to be timed)."""

    kind: str = "odd"
    bucket_bytes: float = 300
    width: int = 7

    def __str__(self) -> str:
        words = {
            "odd": f"a model of odd sizes, width {self.width}",
            "reordered": "layers that ranks use in unlike orders",
            "deep": f"{DEEP} layers of one size, timed",
        }
        return f"{super().__str__()}, {words[self.kind]}"

    def model(self) -> nn.Module:
        """The same on every rank and in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.kind == "odd":
                return Odd(self.width).double()
            number, size = (DEEP, WIDTH) if self.kind == "deep" else (max(map(len, self.groups)), 4)
            layers = [nn.Linear(size, size, bias=self.kind == "reordered") for _ in range(number)]
            return nn.ModuleList(layers).double()

    def loss(self, model: nn.Module, rank: int, step: int = 0) -> Tensor:
        """The loss of what `rank` of the world has at this step; of unlike many rows on every rank."""
        if self.kind == "deep":
            x = self.numbers(rank, ROWS, WIDTH).requires_grad_()  # so that every layer's backward is two products
            for layer in model:
                x = layer(x)
            return x.square().sum()
        rows = torch.randn(1 + (rank + step) % 3, 5, generator=self._generator(rank, step), dtype=torch.float64)
        if self.kind == "odd":
            return model(rows, detour=rank % 2 == 1).square().sum()
        x, first = rows[:, :4], self.place(rank)[1]
        for i in range(len(model)):
            x = torch.tanh(model[(first + i) % len(model)](x))
        return x.square().sum()

    def gradients(self, rank: int, step: int = 0) -> list[Tensor]:
        """Those of one rank alone, of every parameter; zero where it does not use one."""
        model = self.model()
        self.loss(model, rank, step).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    def summed(self, rank: int, steps: Sequence[int] = (0,)) -> list[Tensor]:
        """The sum over the ranks of `rank`'s group, and over steps."""
        everyone = [self.gradients(peer, step) for peer in self.peers(rank) for step in steps]
        return [sum(grads) for grads in zip(*everyone, strict=True)]

    def _generator(self, rank: int, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + 10 * rank + step)


def in_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """The check's own buckets, from back to front."""
    buckets: list[list[nn.Parameter]] = [[]]
    for p in list(parameters)[::-1]:
        if buckets[-1] and sum(q.nbytes for q in buckets[-1]) + p.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(p)
    return buckets


def named(tensors: Sequence[Any], words: str = "gradient of parameter") -> dict[str, Any]:
    """{"gradient of parameter 0": …}."""
    return {f"{words} {i}": tensor for i, tensor in enumerate(tensors)}


def expect_sizes(
    property: str, ledger: Ledger, case: Among, wanted: Sequence[Sequence[tuple[str, int]]], look: str = ""
) -> Finding:
    """Whether each rank made exactly the calls `wanted`, an op and its bytes each, in its own group and in any order.

    A rank alone in its group may leave them out.
    """
    for rank, own in enumerate(wanted):
        peers, calls = list(case.peers(rank)), ledger[rank].communications
        if len(peers) == 1 and not calls:
            continue
        foreign = [call for call in calls if sorted(call.ranks) != sorted(peers)]
        if foreign:
            seen = f"{_a(foreign[0].op)} in ranks {list(foreign[0].ranks)} by rank {rank}, whose group is {peers}"
            return Finding(property, False, seen, _where(foreign), look)
        for op in dict.fromkeys([*(op for op, _ in own), *(call.op for call in calls)]):
            sizes, held = sorted(size for o, size in own if o == op), [call for call in calls if call.op == op]
            if len(held) != len(sizes):
                seen = f"{numbered(len(held), NOUNS.get(op, op))} on rank {rank}, expected {len(sizes)}"
                return Finding(property, False, seen, _where(held or calls), look)
            for call, size in zip(sorted(held, key=lambda call: call.bytes), sizes, strict=True):
                if call.bytes != size:
                    seen = f"{_a(op)} of {size_in_words(call.bytes)} on rank {rank}, expected {size_in_words(size)}"
                    return Finding(property, False, seen, _where([call]), look)
    first = max(wanted, key=len)
    numbers = {op: sum(o == op for o, _ in first) for op, _ in first}
    words = in_words([numbered(number, NOUNS.get(op, op)) for op, number in numbers.items()])
    return Finding(property, True, words, f"{size_in_words(sum(c.sent for c in ledger[0].communications))} a rank")


def expect_waits(property: str, ledger: Ledger) -> list[Finding]:
    """A finding that fails for the first rank that leaves something under way; none where all have waited."""
    for own in ledger.ranks:
        number = unwaited(own.entries)
        if number:
            seen = f"rank {own.rank} starts {numbered(number, 'operation')} that it never waits for"
            return [Finding(property, False, seen, look="What stands in a tensor before its sum has arrived?")]
    return []


def even_cluster(op: str, n: int) -> Cluster:
    """A cluster on which `op` of one layer's gradients takes as long as the layer's backward."""
    flops, size = 2 * 2 * ROWS * WIDTH * WIDTH, NUMBER * WIDTH * WIDTH
    seconds = flops / H100.flops
    return Cluster(H100, inside=Link("even", 0.0, collective_bytes(op, n, size) / seconds))


def expect_overlap(property: str, ledger: Ledger, op: str, allowed: float = 0.1, look: str = "") -> Finding:
    """Whether, on `even_cluster`, ranks stand still for no more than the last of the operations, within `allowed`."""
    timed = replay(ledger, even_cluster(op, len(ledger)))
    one = 2 * 2 * ROWS * WIDTH * WIDTH / H100.flops
    exposed = max(timed.exposed(rank) for rank in range(len(ledger))) / one
    noun = NOUNS[op]
    if exposed <= 1 + allowed:
        return Finding(property, True, f"only the last of {DEEP} {noun}s is exposed", "the others travel in backward")
    seen = f"ranks stand still for {exposed:.1f} of {DEEP} {noun}s, expected 1 at most"
    detail = f"replayed where {_a(op)} of one bucket takes as long as one layer's backward"
    return Finding(property, False, seen, detail, look)


def token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum of the losses of all tokens whose target is not -100, and how many these are."""
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((targets != -100).sum())


def _a(op: str) -> str:
    noun = NOUNS.get(op, op)
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _where(calls: Sequence[Any]) -> str:
    lines = list(dict.fromkeys(call.line for call in calls if call.line))
    return f"called at {in_words(lines[:3])}" if lines else ""
