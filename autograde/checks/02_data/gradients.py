"""Checks of lesson 02 on gradients that are summed over ranks: while backward goes on, and over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fivefold.runtime.ledger import Wait
from torch import Tensor, nn

from autograde.check import Check
from autograde.checks.among import APART, FIVE, FOUR, UNEQUAL, Among
from autograde.checks.messages import entries_here
from autograde.checks.replicas import (
    NUMBER,
    Replicas,
    expect_overlap,
    expect_sizes,
    expect_waits,
    in_buckets,
    named,
    token_loss,
)
from autograde.checks.shards import measured
from autograde.checks.training import group_of
from autograde.compare import compare_all
from autograde.verdict import Finding, numbered


class SyncGradients(Check):
    exercise = "data.sync_gradients"
    points = {"gradient": 3, "traffic": 1, "overlap": 2}

    def cases(self, seed: int, level: str) -> list[Replicas]:
        """Odd sizes in unequal groups; ranks whose gradients come in unlike orders; one that is timed."""
        if level == "visible":
            plans = [(UNEQUAL, "odd", 300, 7), (UNEQUAL, "reordered", 1, 4), (FOUR, "deep", 8192, 0)]
        else:
            k = 1 + seed % 4
            plans = [(APART, "odd", 100 * k, 4 + k), (FIVE, "odd", 1e9, k), (FIVE, "deep", 8192, 0)]
        names = {"odd": ("gradient", "traffic"), "reordered": ("gradient",), "deep": ("overlap",)}
        return [
            Replicas(
                world_size=sum(map(len, groups)), groups=groups, kind=kind, bucket_bytes=limit, width=width,
                seed=seed + i, properties=names[kind],
            )
            for i, (groups, kind, limit, width) in enumerate(plans)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Replicas) -> dict:
        (group, _), rank, model = group_of(case.groups), dist.get_rank(), case.model()
        parameters = list(model.parameters())
        buckets = in_buckets(parameters, case.bucket_bytes)
        given = [list(bucket) for bucket in buckets]
        if case.kind == "deep":
            first = len(entries_here())
            with measured():
                finish = solution(buckets, group)
                case.loss(model, rank).backward()
                waits = sum(isinstance(entry, Wait) for entry in entries_here()[first:])
                finish()
            return {"once": named([p.grad for p in parameters]), "waits in backward": waits}
        finish = solution(buckets, group)
        case.loss(model, rank).backward()
        finish()
        once = [None if p.grad is None else p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        case.loss(model, rank, 1).backward()  # this one is not watched: it stays on its rank, and in p.grad
        alone = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        finish = solution(buckets, group)
        case.loss(model, rank, 2).backward()
        finish()
        same = all(a is b for one, other in zip(buckets, given, strict=True) for a, b in zip(one, other, strict=True))
        return {
            "once": named(once), "alone": named(alone), "same": same,
            "twice": named([p.grad for p in parameters], "accumulated gradient of parameter"),
        }  # fmt: skip

    def judge(self, case: Replicas, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks = range(case.world_size)
        if case.kind == "deep":
            look = "Which line lets backward go on, and which makes it wait?"
            yield expect_overlap("overlap", ledger, "all_reduce", look=look)
            expected = [named(case.summed(rank)) for rank in ranks]
            found = compare_all("overlap", [o["once"] for o in outcomes], expected)
            if not found.passed:
                yield found
            return
        yield from expect_waits("gradient", ledger)
        look = "A sum over the ranks, not a mean; zero where a rank has no gradient. Is each part in its own p.grad?"
        if any(grad is None for o in outcomes for grad in o["once"].values()):
            look = "A p.grad is None after finish(): was its bucket ever started, and waited for?"
        expected = [named(case.summed(rank)) for rank in ranks]
        yield compare_all("gradient", [o["once"] for o in outcomes], expected, look=look)
        expected = [named(case.gradients(rank, 1)) for rank in ranks]
        look = "This backward was nobody's to sum. Which hooks were still there?"
        yield compare_all("gradient", [o["alone"] for o in outcomes], expected, look=look)
        words = "accumulated gradient of parameter"
        expected = [named(case.summed(rank, (1, 2)), words) for rank in ranks]
        yield compare_all("gradient", [o["twice"] for o in outcomes], expected)
        changed = [rank for rank in ranks if not outcomes[rank]["same"]]
        if changed:
            yield Finding("gradient", False, f"the buckets that were given are changed on rank {changed[0]}")
        if "traffic" in case.properties:
            sizes = [sum(p.nbytes for p in b) for b in in_buckets(list(case.model().parameters()), case.bucket_bytes)]
            wanted = [[("all_reduce", size) for size in sizes * 2]] * case.world_size
            yield expect_sizes("traffic", ledger, case, wanted, "Two backwards were watched: one all-reduce a bucket.")


VOCABULARY = 11


class Detour(nn.Module):
    """Guesses tokens; some ranks go through one layer more, of a bucket that the others make ready last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 7), nn.Linear(7, VOCABULARY)
        self.sometimes = nn.Linear(7, 7)
        self.taken = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.first(tokens)))
        return self.last(torch.tanh(self.sometimes(x)) if self.taken else x)


@dataclass(frozen=True, kw_only=True)
class Texts(Among):
    """Micro-batches of tokens: `micro_batches` of them on each rank, each with other tokens that count; some with none.

    The first of rank 1 has none at all. The first rank of each group leaves one layer out.
    """

    micro_batches: tuple[int, ...]
    bucket_bytes: float = 400

    def __str__(self) -> str:
        return f"{super().__str__()} with {' · '.join(map(str, self.micro_batches))} micro-batches, some of 0 tokens"

    def model(self) -> Detour:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Detour().double()

    def detour(self, rank: int) -> bool:
        """Whether `rank` uses all layers."""
        return self.place(rank)[1] > 0

    def texts(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        found, generator = [], torch.Generator().manual_seed(100 * self.seed + rank)
        for i in range(self.micro_batches[rank]):
            tokens, targets = (torch.randint(VOCABULARY, (2, 6), generator=generator) for _ in range(2))
            share = 1.0 if (rank, i) == (1, 0) else 0.25 * ((rank + i) % 4)
            targets[torch.rand(2, 6, generator=generator) < share] = -100
            found.append((tokens, targets))
        return found


class Accumulate(Check):
    exercise = "data.accumulate"
    points = {"loss": 1, "gradient": 2, "traffic": 2, "overlap": 1}

    def cases(self, seed: int, level: str) -> list[Texts]:
        plans = [(FOUR, (1, 3, 2, 4)), (UNEQUAL, (2, 2, 2, 1))]
        if level == "hidden":
            plans = [(FIVE, (3, 2, 1 + seed % 4, 1, 2)), (APART, (1, 2, 4, 1, 3))]
        return [
            Texts(world_size=sum(map(len, groups)), groups=groups, micro_batches=numbers, seed=seed + i)
            for i, (groups, numbers) in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Texts) -> dict:
        (group, _), rank, model = group_of(case.groups), dist.get_rank(), case.model()
        model.taken = case.detour(rank)
        buckets, texts = in_buckets(list(model.parameters()), case.bucket_bytes), case.texts(rank)
        calls: list[int] = []  # communications before each forward

        def loss_sum(micro_batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
            calls.append(_calls())
            return token_loss(model, *micro_batch)

        before = _calls()
        mean = solution(loss_sum, texts, buckets, group)
        graph = isinstance(mean, Tensor) and mean.requires_grad
        mean = mean.detach().clone() if isinstance(mean, Tensor) else mean
        once = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.grad = None
                p += 0.125
        again = solution(lambda micro_batch: token_loss(model, *micro_batch), texts[::-1], buckets, group)
        return {
            "loss": {"the loss": _number(mean), "the loss of a second step": _number(again)},
            "once": named(once), "twice": named([p.grad for p in model.parameters()], "second gradient of parameter"),
            "calls": [number - before for number in calls], "graph": graph,
        }  # fmt: skip

    def judge(self, case: Texts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks = range(case.world_size)
        steps = [[_mean(case, case.peers(rank), moved) for rank in ranks] for moved in (0.0, 0.125)]
        losses = [{"the loss": a[0], "the loss of a second step": b[0]} for a, b in zip(*steps, strict=True)]
        look = "Each token counts as much as any other, however many its micro-batch has."
        yield compare_all("loss", [o["loss"] for o in outcomes], losses, look=look)
        graphs = [rank for rank in ranks if outcomes[rank]["graph"]]
        if graphs:
            more = "Whoever keeps such losses keeps the activations of every step. What is the mean for?"
            yield Finding("loss", False, f"the loss of rank {graphs[0]} still has its graph", "it requires grad", more)
        grads = [named(one) for _, one in steps[0]], [named(two, "second gradient of parameter") for _, two in steps[1]]
        for name, expected in zip(("once", "twice"), grads, strict=True):
            yield compare_all("gradient", [o[name] for o in outcomes], expected, look=look)
        yield from expect_waits("gradient", ledger)
        yield from self._judge_traffic(case, outcomes, ledger)

    @staticmethod
    def _judge_traffic(case: Texts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        """Nothing before the last micro-batch's forward; then each bucket once, and one small sum."""
        for rank in range(case.world_size):
            early = next((i for i, number in enumerate(outcomes[rank]["calls"]) if number), None)
            if early is not None:
                seen = f"rank {rank} communicates before micro-batch {early}, of {case.micro_batches[rank]}"
                yield Finding("traffic", False, seen, "expected nothing before the last one's forward has run")
        sizes = [sum(p.nbytes for p in b) for b in in_buckets(list(case.model().parameters()), case.bucket_bytes)]
        small = 2 * NUMBER
        told = replace_small(ledger, small)
        wanted = [[("all_reduce", size) for size in [*sizes, small] * 2]] * case.world_size
        look = "Two steps were done: each bucket once a step, and one all-reduce of the sums of losses and tokens."
        yield expect_sizes("traffic", told, case, wanted, look)
        for rank in range(case.world_size):
            if not case.detour(rank):  # without a gradient of that layer, it and those after it start in finish
                continue
            late = [c for c in ledger[rank].communications if c.bytes > small and not c.backward]
            if late:
                seen = f"{numbered(len(late), 'bucket')} of rank {rank} start after backward"
                yield Finding("overlap", False, seen, f"called at {late[0].line}")
                return
        yield Finding("overlap", True, "buckets start in the last backward")


def replace_small(ledger: Any, size: int) -> Any:
    """The ledger with calls of at most `size` bytes at that size: two numbers may be of a smaller dtype."""
    ranks = []
    for own in ledger.ranks:
        entries = [replace(e, bytes=size) if 0 < getattr(e, "bytes", 0) <= size and hasattr(e, "op") else e
                   for e in own.entries]  # fmt: skip
        ranks.append(type(own)(own.rank, entries, own.memory))
    return type(ledger)(ranks)


def _calls() -> int:
    return sum(hasattr(entry, "op") and entry.op != "barrier" for entry in entries_here())


def _number(loss: Any) -> Any:
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else loss


def _mean(case: Texts, ranks: Any, moved: float = 0.0) -> tuple[float, list[Tensor]]:
    """The mean over all tokens of all these ranks at once, and its gradients."""
    model = case.model()
    with torch.no_grad():
        for p in model.parameters():
            p += moved
    loss, tokens = torch.zeros((), dtype=torch.float64), 0
    for rank in ranks:
        model.taken = case.detour(rank)
        own, number = token_loss(model, *(torch.cat(part) for part in zip(*case.texts(rank), strict=True)))
        loss, tokens = loss + own, tokens + number
    (loss / tokens).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return (loss / tokens).item(), grads
