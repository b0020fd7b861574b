"""Checks of lesson 05: attention over blocks of keys that are merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autograde.case import Case
from autograde.check import Check
from autograde.checks.attention import Watch
from autograde.compare import compare
from autograde.verdict import Finding

LARGE = 1e4  # logits up to this
LOW = -1e5  # and down to this, where a row is "low"


@dataclass(frozen=True, kw_only=True)
class Keys(Case):
    """Rows of scores, (…, rows, sum of sizes), and values, in blocks of `sizes` keys.

    `scores` are "ordinary", "rising" from block to block up to ±1e4, "falling", or "low": all near -1e4, those of the
    last row near -1e5. `unseen` names rows that may see nothing: of the "first" block, of the "last", or of "all".
    """

    sizes: tuple[int, ...]
    rows: int = 4
    d: int = 3
    leading: tuple[int, ...] = ()
    scores: str = "ordinary"
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = f"1 rank, blocks of {', '.join(map(str, self.sizes))} keys"
        words += {"ordinary": "", "low": ", logits near -1e4 and -1e5"}.get(
            self.scores, f", logits {self.scores} through ±1e4"
        )
        return words + (f", rows that see nothing of {', '.join(self.unseen)}" if self.unseen else "")

    def tensors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed)
        total = sum(self.sizes)
        scores, values = (
            torch.randn(*self.leading, *shape, generator=generator, dtype=torch.float64)
            for shape in ((self.rows, total), (total, self.d))
        )
        if self.scores == "low":
            scores -= LARGE
            scores[..., -1, :] += LOW
        elif self.scores != "ordinary":
            scores = (LARGE * scores / scores.abs().max()).sort(dim=-1, descending=self.scores == "falling").values
        for row, part in enumerate(self.unseen):
            first, last = self.sizes[0], total - self.sizes[-1]
            start, end = {"first": (0, first), "last": (last, total), "all": (0, total)}[part]
            scores[..., row, start:end] = -torch.inf
        return scores, values

    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        scores, values = self.tensors()
        cut = zip(scores.split(self.sizes, -1), values.split(self.sizes, -2), strict=True)
        return [(one.clone(), other.clone()) for one, other in cut]

    def parts(self) -> list[Tensor]:
        """Of two blocks: out and lse of the first, out and lse of the second."""
        return [x for block in self.blocks() for x in attend(*block)]


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """All at once, by torch: a row that sees nothing has 0 and -inf."""
    return scores.softmax(dim=-1).nan_to_num(0.0) @ values, scores.logsumexp(dim=-1)


def planned(seed: int, plans: list[dict[str, Any]]) -> list[Keys]:
    return [Keys(world_size=1, seed=seed + i, **plan) for i, plan in enumerate(plans)]


class Merge(Check):
    exercise = "attention.merge"
    points = {"output": 1, "large": 1, "nothing": 1}

    def cases(self, seed: int, level: str) -> list[Keys]:
        k = 1 + seed % 4
        many = (2, 3) if level == "visible" else (k, 2)
        size = (3, 2) if level == "visible" else (1 + k, 5)
        return planned(seed, [
            {"sizes": size, "leading": many, "properties": ("output",)},
            {"sizes": size, "rows": 6, "scores": "rising", "properties": ("large",)},
            {"sizes": size, "rows": 6, "leading": many, "scores": "falling", "properties": ("large",)},
            {"sizes": size, "unseen": ("first", "last", "all"), "properties": ("nothing",)},
        ])  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Keys) -> dict:
        parts = case.parts()
        found = dict(zip(("out", "lse"), solution(*parts), strict=True))
        if "output" in case.properties:
            small = [x.float() if x.dim() == parts[1].dim() else x.bfloat16() for x in parts]
            found |= dict(zip(("half out", "half lse"), solution(*small), strict=True))
        return found | {"after": parts}

    def judge(self, case: Keys, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        tolerance = "large logits" if name == "large" else "layers"
        for key, wanted in zip(("out", "lse"), attend(*case.tensors()), strict=True):
            yield compare(name, key, [o[key] for o in outcomes], wanted, tolerance)
        for i, part in enumerate(case.parts()):
            words = ("out_a", "lse_a", "out_b", "lse_b")[i]
            yield compare(name, f"{words} afterwards", [o["after"][i] for o in outcomes], part, "exact")
        if name == "output":
            parts = [x.float() if i % 2 else x.bfloat16().double() for i, x in enumerate(case.parts())]
            weights = torch.stack((parts[1], parts[3])).double().softmax(dim=0)[..., None]
            out = (weights[0] * parts[0] + weights[1] * parts[2]).float()
            words = "out of bfloat16 outputs and float32 lse"
            yield compare(name, words, [o["half out"] for o in outcomes], out)


class OnlineSoftmax(Check):
    exercise = "attention.online_softmax"
    points = {"output": 1, "growing": 1, "nothing": 1, "memory": 1}

    def cases(self, seed: int, level: str) -> list[Keys]:
        k = 1 + seed % 4
        sizes = (2, 1, 3, 2) if level == "visible" else (1, k, 4)
        return planned(seed, [
            {"sizes": sizes, "leading": (2, 3), "properties": ("output",)},
            {"sizes": (4,), "properties": ("output",)},
            {"sizes": sizes, "scores": "rising", "properties": ("growing",)},
            {"sizes": sizes, "scores": "falling", "properties": ("growing",)},
            {"sizes": sizes, "scores": "low", "properties": ("growing",)},
            {"sizes": sizes, "unseen": ("first", "last", "all"), "properties": ("nothing",)},
            {"sizes": (16,) * 8, "rows": 16, "d": 4, "properties": ("memory",)},
        ])  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Keys) -> dict:
        seen: list[StorageWeakRef] = []
        alive: list[int] = []

        blocks = case.blocks()

        def one_by_one() -> Iterator[tuple[Tensor, Tensor]]:
            for place in range(len(case.sizes)):
                alive.append(sum(not reference.expired() for reference in seen))
                yield fresh(place)

        def fresh(place: int) -> tuple[Tensor, Tensor]:
            scores, values = (x.clone() for x in blocks[place])
            seen.append(StorageWeakRef(scores.untyped_storage()))
            return scores, values

        with Watch() if "memory" in case.properties else nullcontext() as watch:
            found = dict(zip(("out", "lse"), solution(one_by_one()), strict=True))
        return found | {"alive": max(alive), "largest": watch.largest if watch else 0}

    def judge(self, case: Keys, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        if name == "memory":
            alive, largest, block = outcomes[0]["alive"], outcomes[0]["largest"], case.rows * max(case.sizes)
            look = "What of a block is needed when it has been looked at?"
            if alive > 2:  # the last one, and one that a variable may still name
                seen = f"{alive} of {len(case.sizes) - 1} earlier blocks are still there when the last is asked for"
                yield Finding(name, False, seen, look=look)
            elif largest > 2 * block:
                seen = f"a tensor of {largest:,} numbers is made; a block of scores has {block:,}"
                yield Finding(name, False, seen, look=look)
            else:
                yield Finding(name, True, "one block at a time")
            return
        tolerance = "layers" if case.scores == "ordinary" else "large logits"
        for key, wanted in zip(("out", "lse"), attend(*case.tensors()), strict=True):
            yield compare(name, key, [o[key] for o in outcomes], wanted, tolerance)
