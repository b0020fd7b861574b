"""Checks of lesson 02 on ZeRO, stage 2: gradients of which each rank keeps its pieces, and their norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fivefold.runtime.ledger import Wait
from fivefold.zero import Shard
from torch import Tensor

from autograde.check import Check
from autograde.checks.among import APART, FIVE, FOUR, UNEQUAL, Among
from autograde.checks.messages import entries_here, unwaited
from autograde.checks.replicas import (
    DEEP,
    NUMBER,
    WIDTH,
    Replicas,
    expect_overlap,
    expect_sizes,
    expect_waits,
    in_buckets,
)
from autograde.checks.shards import measured
from autograde.checks.training import group_of
from autograde.compare import compare, compare_all
from autograde.traffic import size_in_words
from autograde.verdict import Finding


class ReduceGradients(Check):
    exercise = "zero.reduce_gradients"
    points = {"gradient": 2, "traffic": 1, "overlap": 2, "memory": 1}

    def cases(self, seed: int, level: str) -> list[Replicas]:
        """Odd sizes in unequal groups, two micro-batches; ranks whose gradients come in unlike orders; one timed."""
        if level == "visible":
            plans = [(UNEQUAL, "odd", 300, 7), (UNEQUAL, "reordered", 1, 4), (FOUR, "deep", 8192, 0)]
        else:
            k = 1 + seed % 4
            plans = [(APART, "odd", 100 * k, 3 + k), (FIVE, "odd", 1, k), (FIVE, "deep", 8192, 0)]
        names = {"odd": ("gradient", "traffic"), "reordered": ("gradient",), "deep": ("overlap", "memory")}
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
        shards = [Shard(bucket, group) for bucket in in_buckets(list(model.parameters()), case.bucket_bytes)]
        found: dict[str, Any] = {}

        def note(words: str) -> None:
            for i, shard in enumerate(shards):
                found[f"{words} of shard {i}"] = None if shard.gradient is None else shard.gradient.clone()

        if case.kind == "deep":
            first = len(entries_here())
            with measured() as held, _watched(shards) as taken:
                finish = solution(shards)
                case.loss(model, rank).backward()
                waits = sum(isinstance(entry, Wait) for entry in entries_here()[first:])
                finish()
            note("the gradient")
            early = _early(first, taken)  # what is held then, at the peak, is chance
            return {"pieces": found, "held": {} if early else held, "waits in backward": waits, "early": early}
        for step in (0, 1):
            finish = solution(shards)
            case.loss(model, rank, step).backward()
            finish()
        whole = [i for i, p in enumerate(model.parameters()) if p.grad is not None]
        note("the gradient")
        for shard in shards:
            shard.gradient = None
        case.loss(model, rank, 2).backward()  # this one is not watched; then its gradients are reduced
        note("without a reduction, the gradient")
        solution(shards)()
        note("reduced afterwards, the gradient")
        return {"pieces": found, "whole": whole}

    def judge(self, case: Replicas, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks = range(case.world_size)
        expected = [_pieces(case, rank, (0,) if case.kind == "deep" else (0, 1), "the gradient") for rank in ranks]
        if case.kind == "deep":
            yield expect_overlap("overlap", ledger, "reduce_scatter",
                                 look="Which line lets backward go on, and which makes it wait?")  # fmt: skip
            found = compare_all("overlap", [o["pieces"] for o in outcomes], expected)
            if not found.passed:
                yield found
            yield self._memory(case, outcomes)
            return
        for rank in ranks:
            expected[rank] |= {n: None for n in _pieces(case, rank, (2,), "without a reduction, the gradient")}
            expected[rank] |= _pieces(case, rank, (2,), "reduced afterwards, the gradient")
        look = "Sums over the ranks, added up over two micro-batches, zeros where there is padding."
        yield compare_all("gradient", [o["pieces"] for o in outcomes], expected, look=look)
        yield from expect_waits("gradient", ledger)
        left = next(((rank, o["whole"][0]) for rank, o in enumerate(outcomes) if o["whole"]), None)
        if left:
            yield Finding("gradient", False, f"parameter {left[1]} still has its gradient on rank {left[0]}")
        wanted = []
        for rank in ranks:
            n = len(case.peers(rank))
            sizes = [sum(p.numel() for p in b) for b in in_buckets(list(case.model().parameters()), case.bucket_bytes)]
            wanted.append([("reduce_scatter", n * -(-size // n) * NUMBER) for size in sizes * 3])
        yield expect_sizes("traffic", ledger, case, wanted, "Three were reduced: one reduce-scatter a shard each time.")

    @staticmethod
    def _memory(case: Replicas, outcomes: list) -> Finding:
        """The pieces, and two buckets of whole gradients: one that travels and one that backward makes.

        What the meter sees at the peak depends on what is freed when; so the order of waits is judged as well.
        """
        for rank, outcome in enumerate(outcomes):
            if outcome["early"]:
                look = "How many buckets of whole gradients does a rank hold then, with the one that still travels?"
                return Finding("memory", False, f"on rank {rank} {outcome['early']}", look=look)
        bucket, n = NUMBER * WIDTH * WIDTH, case.world_size
        limit = DEEP * NUMBER * -(-WIDTH * WIDTH // n) + 2 * bucket + 2 * n * NUMBER
        for rank, outcome in enumerate(outcomes):
            held = outcome["held"]["gradients"]
            if held > limit:
                seen = f"at the peak rank {rank} holds {size_in_words(held)} of gradients"
                wanted = f"expected {size_in_words(limit)} at most: its pieces, and two buckets that are whole"
                look = "How many buckets are whole at one time: those that travel, and those nobody took out of p.grad?"
                return Finding("memory", False, seen, wanted, look)
        whole = f"of {size_in_words(DEEP * bucket)}"
        return Finding("memory", True, f"{size_in_words(outcomes[0]['held']['gradients'])} {whole} at the peak")


@contextmanager
def _watched(shards: list[Shard]) -> Iterator[dict[int, int]]:
    """For each shard: how many entries the ledger had when its gradients were taken, where the shard was asked."""
    taken: dict[int, int] = {}

    def watch(i: int, take: Any) -> Any:
        def noted() -> Tensor:
            taken[i] = len(entries_here())
            return take()

        return noted

    for i, shard in enumerate(shards):
        shard.take_gradients = watch(i, shard.take_gradients)
    yield taken
    for shard in shards:
        del shard.take_gradients


def _early(first: int, taken: dict[int, int]) -> str:
    """What was done before the reduce-scatter on its way had been waited for; empty if nothing was."""
    entries = entries_here()
    for i, place in taken.items():
        if unwaited(entries[first:place]):
            return f"the gradients of shard {i} are taken while a reduce-scatter travels that nobody has waited for"
    for place in range(first, len(entries)):
        if getattr(entries[place], "op", "") == "reduce_scatter" and unwaited(entries[first:place]):
            return "a reduce-scatter starts while another one travels that nobody has waited for"
    return ""


def _pieces(case: Replicas, rank: int, steps: tuple[int, ...], words: str) -> dict[str, Tensor]:
    """The pieces of a rank, of gradients that are summed over its group and over steps."""
    model, found = case.model(), {}
    grads = {id(p): grad for p, grad in zip(model.parameters(), case.summed(rank, steps), strict=True)}
    n, place = len(case.peers(rank)), case.place(rank)[1]
    for i, bucket in enumerate(in_buckets(list(model.parameters()), case.bucket_bytes)):
        flat = torch.cat([grads[id(p)].flatten() for p in bucket])
        length = -(-len(flat) // n)
        flat = torch.cat([flat, flat.new_zeros(n * length - len(flat))])
        found[f"{words} of shard {i}"] = flat.view(n, length)[place]
    return found


@dataclass(frozen=True, kw_only=True)
class Norms(Among):
    """Gradients of unlike sizes: `own` are the elements of each rank's, group by group; then one that pairs of ranks
    share, if `paired`, and one of all ranks of the group. `max_norm` is a share of the norm that there is."""

    own: tuple[tuple[int, ...], ...]
    limit: float
    paired: bool = False

    def __str__(self) -> str:
        sizes = " · ".join(" ".join(map(str, sizes)) for sizes in self.own)
        return f"{super().__str__()}, pieces of {sizes} per rank, limit {self.limit:g} of the norm"

    def gradients(self, rank: int) -> list[Tensor]:
        group, number = self.place(rank)
        size = self.own[group][number]
        found = [self.numbers(rank, size)[: size // 2], self.numbers(rank + 50, 1, size - size // 2).t()]
        if self.paired:
            found += [self.numbers(100 + 10 * group + number // 2, 2, 3).float()]
            found += [self.numbers(200 + group, 5)]
        return found

    def copies(self) -> list[int]:
        return [1, 1, 2, 4] if self.paired else [1, 1]

    def norm(self, rank: int) -> float:
        """Of all gradients of the rank's group, each counted once."""
        squares = 0.0
        for peer in self.peers(rank):
            for gradient, number in zip(self.gradients(peer), self.copies(), strict=True):
                squares += gradient.double().square().sum().item() / number
        return squares**0.5


class ClipGradNorm(Check):
    exercise = "zero.clip_grad_norm"
    points = {"norm": 2, "gradient": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Norms]:
        k = 1 + seed % 5
        if level == "visible":
            plans = [
                (UNEQUAL, ((7, 3, 0), (4,)), 0.25, False),
                (FOUR, ((5, 5, 5, 1),), 3.0, False),
                (FOUR, ((2, 0, 9, 4),), 0.5, True),
            ]
        else:
            plans = [
                (APART, ((k, 4), (0, 3, 2 * k)), 0.125, False),
                (FIVE, ((0, 0, 0, 0, k),), 0.5, False),
                (FOUR, ((k, 1, 0, 3),), 0.3, True),
                (FOUR, ((0, 0, 0, 0),), 1.0, False),
            ]
        return [
            Norms(world_size=sum(map(len, groups)), groups=groups, own=own, limit=limit, paired=paired, seed=seed + i)
            for i, (groups, own, limit, paired) in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Norms) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        gradients = case.gradients(rank)
        max_norm = case.limit * case.norm(rank) or 1.0
        given = list(gradients)
        copies = (case.copies(),) if case.paired else ()
        norm = solution(gradients, max_norm, group, *copies)
        return {"norm": norm, "gradients": {f"gradient {i}": gradient for i, gradient in enumerate(given)}}

    def judge(self, case: Norms, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks = range(case.world_size)
        norms = [torch.tensor(case.norm(rank), dtype=torch.float64) for rank in ranks]
        look = "A gradient that several ranks hold counts once." if case.paired else "Do norms add up, or squares?"
        if not all(isinstance(o["norm"], Tensor) for o in outcomes):
            look = "The norm is to be a scalar tensor, in float64."
        elif not case.paired and case.limit < 1:
            look += " And is it the norm of before, or of what was scaled?"
        yield compare("norm", "the norm", [o["norm"] for o in outcomes], norms, look=look)
        expected = []
        for rank in ranks:
            scale = min((case.limit * case.norm(rank) or 1.0) / (case.norm(rank) + 1e-6), 1.0)
            expected.append({f"gradient {i}": g * scale for i, g in enumerate(case.gradients(rank))})
        look = "They are changed in place, and all ranks scale by the same number."
        yield compare_all("gradient", [o["gradients"] for o in outcomes], expected, look=look)
        calls = [[call for call in ledger[rank].communications if call.op != "barrier"] for rank in ranks]
        for rank in ranks:
            if any(call.bytes > NUMBER for call in calls[rank]):
                size = size_in_words(max(call.bytes for call in calls[rank]))
                yield Finding("traffic", False, f"{size} travel from rank {rank}, expected one number")
                return
        wanted = [[("all_reduce", NUMBER)]] * case.world_size
        yield expect_sizes("traffic", ledger, case, wanted)
