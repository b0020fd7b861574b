"""The check of lesson 03's formula: what a transformer layer sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autograde.case import Case
from autograde.check import Check
from autograde.verdict import Finding, numbered


@dataclass(frozen=True, kw_only=True)
class Sizes(Case):
    """Arguments of `tensor_traffic`: b, s, h and t."""

    layers: tuple[tuple[int, int, int, int], ...]

    def __str__(self) -> str:
        return "one layer, of several sizes"


class TensorTraffic(Check):
    exercise = "cost.tensor_traffic"
    points = {"several ranks": 1, "one rank": 1}

    def cases(self, seed: int, level: str) -> list[Sizes]:
        k = 1 + seed % 7
        known = ((1, 2048, 12288, 8), (2, 100, 96, 3), (4, 512, 1024, 2), (3, 128, 64, 1))
        fresh = ((k, 64 + k, 48, 5), (1, 7, 3 * k, 16), (k, 9, 10, 1))
        return [Sizes(world_size=1, layers=known if level == "visible" else fresh, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Sizes) -> dict:
        return {"elements": [float(solution(*sizes)) for sizes in case.layers]}

    def judge(self, case: Sizes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        for got, (b, s, h, t) in zip(outcomes[0]["elements"], case.layers, strict=True):
            all_reduces = 2 + 2  # of the attention and of the MLP: forward, backward
            wanted = all_reduces * b * s * h * 2 * (t - 1) / t
            off = abs(got - wanted) / (wanted or 1)
            times = f" ({got / wanted:.4g} times)" if wanted else ""
            seen = f"{got:,.0f} elements, expected {wanted:,.0f}{times}"
            detail = f"b {b}, s {s}, h {h}, t {t}"
            if off >= 1e-9:
                yield Finding("several ranks" if t > 1 else "one rank", False, seen, detail, error=off)
        for name, alone in (("several ranks", False), ("one rank", True)):
            sizes = sum((t == 1) == alone for *_, t in case.layers)
            yield Finding(name, True, f"{numbered(sizes, 'size')} of a layer", "exact")
