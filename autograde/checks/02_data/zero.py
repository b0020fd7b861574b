"""Checks of lesson 02 on ZeRO, stage 1: how a bucket is cut, and a step in which each rank updates its own piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autograde.case import Case
from autograde.check import Check
from autograde.checks.among import APART, FIVE, UNEQUAL, Among
from autograde.checks.replicas import expect_sizes, expect_waits
from autograde.checks.shards import RATE, Shares, measured, shards_of
from autograde.checks.training import group_of
from autograde.compare import compare_all
from autograde.traffic import size_in_words
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Cut(Case):
    """Sizes to be cut, each with a number of ranks."""

    cuts: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return ", ".join(f"{size:,} elements on {ranks} ranks" for size, ranks in self.cuts)


class Partition(Check):
    exercise = "zero.partition"
    points = {"even": 1, "uneven": 1, "empty": 1}

    def cases(self, seed: int, level: str) -> list[Cut]:
        k = 2 + seed % 9
        plans = {
            "even": ((12, 4), (5, 1), (6, 6)),
            "uneven": ((10, 4), (7, 3), (7_500_000_001, 64)),
            "empty": ((5, 4), (2, 5), (0, 3), (9, 8)),
        }
        if level == "hidden":
            plans = {
                "even": ((k * 7, 7), (10**12, 1000)),
                "uneven": ((7 * k + 6, 7), (3 * k * k + 1, 3 * k), (10**12 + 1, 1000)),
                "empty": ((1, k), (k + 1, k), (0, 1)),
            }
        return [Cut(world_size=1, cuts=cuts, properties=(name,)) for name, cuts in plans.items()]

    @staticmethod
    def program(solution: Any, case: Cut) -> dict:
        found = {}
        for size, ranks in case.cuts:
            pieces = list(solution(size, ranks))
            plain = [[p.start, p.stop, p.step] if type(p) is range else [type(p).__name__] for p in pieces]
            found[f"{size} {ranks}"] = plain
        return found

    def judge(self, case: Cut, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        for size, ranks in case.cuts:
            yield self._pieces(name, size, ranks, outcomes[0][f"{size} {ranks}"])

    @staticmethod
    def _pieces(name: str, size: int, ranks: int, pieces: list) -> Finding:
        what = f"{size:,} elements on {ranks} rank{'s' * (ranks > 1)}"
        if len(pieces) != ranks:
            return Finding(name, False, f"{what}: {len(pieces)} pieces, expected {ranks}")
        length = -(-size // ranks)
        for r, piece in enumerate(pieces):
            if len(piece) == 1:
                return Finding(name, False, f"{what}: piece {r} is a {piece[0]}, expected a range")
            got = range(*piece)
            wanted = range(min(r * length, size), min((r + 1) * length, size))
            if got != wanted:
                seen = f"{what}: piece {r} has {len(got):,} elements"
                seen += f" from {got.start:,} on" if len(got) else ""
                expected = f"expected {len(wanted):,}" + (f", from {wanted.start:,} on" if len(wanted) else "")
                return Finding(name, False, seen, expected)
        return Finding(name, True, f"{what} and others", error=0.0)


PAIRS = ((0, 1), (2, 3))


class Step1(Check):
    exercise = "zero.step1"
    points = {"weights": 2, "traffic": 1, "memory": 1, "stage 2": 1}

    def cases(self, seed: int, level: str) -> list[Shares]:
        asked = ("weights", "traffic", "memory")
        if level == "visible":
            shapes = (((3, 5), (7,)), ((2,),), ((1, 4), (3,)))
            plans = [
                (UNEQUAL, shapes, {"everyone": (1,), "without": ((0, 1),), "properties": asked}),
                (PAIRS, (((3, 3), (2,)),), {"dtype": "bfloat16", "properties": asked}),
                (UNEQUAL, shapes, {"ready": (0, 1), "steps": 1, "properties": ("stage 2",)}),
            ]
        else:
            k = 1 + seed % 4
            shapes = (((k, 3),), ((1,),), ((2, k), (5,)))
            plans = [
                (APART, shapes, {"everyone": (0, 1), "without": ((2, 0),), "properties": asked}),
                (FIVE, shapes, {"ready": (0, 1, 2), "steps": 1, "properties": ("stage 2",)}),
            ]
        return [
            Shares(world_size=sum(map(len, groups)), groups=groups, shapes=shapes, seed=seed + i, **more)
            for i, (groups, shapes, more) in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Shares) -> dict:
        (group, _), rank = group_of(case.groups), dist.get_rank()
        found: dict[str, Any] = {}
        with measured() as held:
            shards = shards_of(case, group)
            for step in range(case.steps):
                for i, shard in enumerate(shards):
                    if i in case.ready:
                        shard.gradient = case.pieces(i, case.summed(i, rank, step), rank)
                        continue
                    for p, grad in zip(shard.parameters, case.gradients(i, rank, step), strict=True):
                        p.grad = grad
                solution(shards, RATE)
                for i, shard in enumerate(shards):
                    for k, p in enumerate(shard.parameters):
                        found[f"parameter {k} of shard {i} after step {step}"] = p.detach().clone()
        left = [f"parameter {k} of shard {i}" for i, shard in enumerate(shards)
                for k, p in enumerate(shard.parameters) if p.grad is not None]  # fmt: skip
        left += [f"shard {i}" for i, shard in enumerate(shards) if shard.gradient is not None]
        return {"weights": found, "left": left, "held": held}

    def judge(self, case: Shares, outcomes: list, ledger: Any) -> Iterator[Finding]:
        name = "stage 2" if case.ready else "weights"
        ranks, shards = range(case.world_size), range(len(case.shapes))
        expected = [
            {
                f"parameter {k} of shard {i} after step {step}": value
                for i in shards
                for step, values in enumerate(case.trained(i, rank))
                for k, value in enumerate(values)
            }
            for rank in ranks
        ]
        look = "Which sums is a piece updated with, and when do the others learn of the new piece?"
        yield compare_all(name, [o["weights"] for o in outcomes], expected, "layers", look)
        yield from expect_waits(name, ledger)
        bytes_ = 8 if case.dtype == "float64" else 2
        yield self._traffic(case, ledger, bytes_, name)
        if name == "weights":
            yield self._memory(case, outcomes, bytes_)

    @staticmethod
    def _traffic(case: Shares, ledger: Any, bytes_: int, name: str) -> Finding:
        """A reduce-scatter and an all-gather for each shard; shards of the world apart from those of the group."""
        property, shards = ("traffic" if name == "weights" else name), range(len(case.shapes))
        look = "" if name == "weights" else "Shards 0 and 1 have their gradient already. What is left to do for them?"
        for everyone in (True, False):
            own = [i for i in shards if (i in case.everyone) == everyone]
            groups = (tuple(range(case.world_size)),) if everyone else case.groups
            among = Among(world_size=case.world_size, groups=groups)
            wanted = []
            for rank in range(case.world_size):
                n = len(among.peers(rank))
                lengths = {i: case.length(i, rank) for i in own}
                calls = [("reduce_scatter", n * lengths[i] * bytes_) for i in own if i not in case.ready]
                wanted.append((calls + [("all_gather", lengths[i] * bytes_) for i in own]) * case.steps)
            if own or not everyone:
                found = expect_sizes(property, _over(ledger, case, everyone), among, wanted, look)
                if not found.passed or not everyone:
                    return found
        return Finding(property, True, "as expected")

    @staticmethod
    def _memory(case: Shares, outcomes: list, bytes_: int) -> Finding:
        """The optimizer's state of the rank's own pieces, and no gradient is left over."""
        for rank, outcome in enumerate(outcomes):
            each = 2 * 8 if bytes_ == 8 else 3 * 4
            wanted = each * sum(case.length(i, rank) for i in range(len(case.shapes)))
            kept = outcome["held"]["optimizer"]
            if kept > wanted:
                seen = f"rank {rank} keeps {size_in_words(kept)} of optimizer state, expected {size_in_words(wanted)}"
                look = "A rank updates its own pieces: it needs state for no others."
                return Finding("memory", False, seen, look=look)
            if outcome["left"]:
                return Finding("memory", False, f"after the step, {outcome['left'][0]} has a gradient on rank {rank}",
                               "expected None")  # fmt: skip
        seen = f"{size_in_words(outcomes[0]['held']['optimizer'])} of optimizer state"
        return Finding("memory", True, seen, "no gradient left over")


def _over(ledger: Any, case: Among, everyone: bool) -> Any:
    """Of the ledger, the calls over all ranks of the world, or all others; where the two are one, all."""
    if (tuple(range(case.world_size)),) == case.groups:
        return ledger
    ranks = []
    for own in ledger.ranks:
        whole = [len(getattr(entry, "ranks", ())) == case.world_size for entry in own.entries]
        entries = [entry for entry, is_whole in zip(own.entries, whole, strict=True) if is_whole == everyone]
        ranks.append(type(own)(own.rank, entries, own.memory))
    return type(ledger)(ranks)
