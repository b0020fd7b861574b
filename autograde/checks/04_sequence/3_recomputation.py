"""Checks of lesson 04: what is computed again in backward, and the bytes that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from autograde.case import Case
from autograde.check import Check
from autograde.checks.recomputed import Passes, Residual, core, flops, try_full, try_selective
from autograde.checks.sequence import (
    judge_kept,
    judge_pass,
    one_pass,
)
from autograde.verdict import Finding


class Selective(Check):
    exercise = "recompute.selective"
    points = {"output": 1, "gradient": 1, "random": 1, "memory": 1, "computation": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Passes]:
        if level == "visible":
            sizes = [(2, 6, 3, 4, ()), (1, 4, 2, 2, (1,))]
        else:
            sizes = [(1, 5 + seed % 4, 4, 2, (seed % 3,))]
        return [
            Passes(world_size=1, groups=((0,),), b=b, s=s, h=h, heads=heads, frozen=frozen, seed=seed + i)
            for i, (b, s, h, heads, frozen) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Passes) -> dict:
        return try_selective(solution, case)

    def judge(self, case: Passes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        inputs = dict(zip("qkv", case.qkv(), strict=True))
        output, gradient, drawn = one_pass(case, core, inputs, ())
        elsewhere = {name: grad if grad is None else grad + 1 for name, grad in gradient.items()}
        yield from judge_pass(outcomes, (output, elsewhere, drawn))
        size = 8 * (3 + sum(x.numel() for x in inputs.values()))  # three numbers are the check's own
        kept = judge_kept(ledger, [size], "q, k and v may stay. What of the core's own is still there?")
        yield replace(kept, seen="q, k and v, nothing of the core's") if kept.passed else kept
        if outcomes[0]["alive"]:
            yield Finding("memory", False, "after forward, what the core computed on the way is still in memory")
        yield from _judge_held(outcomes, sum(8 * x.numel() for x in inputs.values()))
        if outcomes[0]["output alive"]:
            seen = "nobody uses the core's output any more, and it is still in memory"
            yield Finding("memory", False, seen, look="Who holds it, and does backward need it?")
        once = flops(ledger[0], "forward")
        backward = flops(ledger[0], "backward") / once
        again, least = backward - 2, backward - (2 - len(case.frozen) / 2)  # a frozen input may save half of a forward
        seen = f"{max(again, least):.0%} of the core computed again"
        if again > 1:
            seen = f"backward does {again:.3g} times forward's work besides its own, expected once at most"
        elif least <= 0:
            seen = "backward computes nothing again"
        yield Finding("computation", least > 0 and again <= 1, seen)


class Full(Check):
    exercise = "recompute.full"
    points = {"output": 1, "gradient": 2, "random": 1, "memory": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Passes]:
        if level == "visible":
            return [Passes(world_size=2, groups=((0, 1),), b=2, s=3, h=4, seed=seed)]
        return [Passes(world_size=3, groups=((0, 1, 2),), b=1, s=4 + seed % 3, h=6, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Passes) -> dict:
        return try_full(solution, case)

    def judge(self, case: Passes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        x = case.random(0, case.b, case.s, case.h).requires_grad_()
        names = ("mlp.column.weight", "mlp.column.bias", "mlp.row.weight", "mlp.row.bias")
        w = {name: tensor.requires_grad_() for name, tensor in zip(names, case.weights(), strict=True)}

        def mlp(x: Tensor) -> Tensor:
            w_in, b_in, w_out, b_out = w.values()
            return F.linear(F.gelu(F.linear(x, w_in, b_in)), w_out, b_out)

        output, gradient, drawn = one_pass(case, Residual(mlp), {"x": x} | w, (0.5,), inputs=1)
        pieces = []
        for rank in range(case.world_size):
            cut = {f"{name}.grad": dim for name, dim in zip(names[:3], (0, 0, 1), strict=True)}
            pieces.append({n: g.chunk(case.world_size, cut[n])[rank] if n in cut else g for n, g in gradient.items()})
        yield from judge_pass(outcomes, (output, pieces, drawn))
        size = 8 * x.numel()
        yield judge_kept(ledger, [size] * case.world_size, "The block's input may stay. What else does?")
        yield from _judge_held(outcomes, size)


def _judge_held(outcomes: list, most: int) -> Iterator[Finding]:
    """Bytes that forward has made and somebody still holds, whether they were saved for backward or in another way."""
    for rank, outcome in enumerate(outcomes):
        if outcome["held"] > most:
            seen = f"after forward rank {rank} holds {outcome['held']:,} B that forward has made, expected {most:,} B"
            yield Finding("memory", False, seen, look="Not only what is saved for backward counts. Who holds tensors?")
            return


@dataclass(frozen=True, kw_only=True)
class Sizes(Case):
    """Arguments of `activation_bytes`: b, s, h, a, and t."""

    layers: tuple[tuple[int, int, int, int, int], ...]

    def __str__(self) -> str:
        return f"one layer in {len(self.layers)} sizes"


class ActivationBytes(Check):
    exercise = "cost.activation_bytes"
    points = {"none": 2, "selective": 1, "full": 1}

    def cases(self, seed: int, level: str) -> list[Sizes]:
        k = 1 + seed % 7
        known = (
            (1, 2048, 12288, 96, 8),
            (1, 2048, 20480, 128, 8),
            (4, 512, 1024, 16, 1),
            (3, 128, 96, 12, 4),
            (2, 96, 80, 10, 5),
        )
        fresh = ((k, 64 * k, 256, 4, 2), (2, 100, 48 * k, 6, 3))
        return [Sizes(world_size=1, layers=known if level == "visible" else fresh, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Sizes) -> dict:
        values = {
            f"{recompute} {split} {i}": solution(*sizes, sequence_parallel=split, recompute=recompute)
            for recompute, split in product(("none", "selective", "full"), (False, True))
            for i, sizes in enumerate(case.layers)
        }
        default = solution(*case.layers[0][:4])
        refused = {}
        for split in (False, True):
            try:
                solution(*case.layers[0], sequence_parallel=split, recompute="some")
                refused[split] = ""
            except Exception as error:
                refused[split] = type(error).__name__
        return {"values": values, "default": default, "refused": refused}

    def judge(self, case: Sizes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        got, table = outcomes[0], {}
        for i, (b, s, h, a, t) in enumerate(case.layers):
            sbh, core = s * b * h, 5 * a * s / h
            table |= {
                f"none False {i}": sbh * (10 + (24 + core) / t), f"none True {i}": sbh * (34 + core) / t,
                f"selective False {i}": sbh * (10 + 24 / t), f"selective True {i}": 34 * sbh / t,
                f"full False {i}": 2 * sbh, f"full True {i}": 2 * sbh,
            }  # fmt: skip
        for key, wanted in table.items():
            recompute, split, i = key.split()
            b, s, h, a, t = case.layers[int(i)]
            words = f"b {b}, s {s}, h {h}, a {a}, t {t}, sequence_parallel={split}, recompute={recompute!r}"
            yield _bytes(recompute, got["values"][key], wanted, words)
        b, s, h, a, _ = case.layers[0]
        words = "without t, sequence_parallel and recompute"
        yield _bytes("none", got["default"], s * b * h * 34 + 5 * a * s * s * b, words)
        for split, refused in got["refused"].items():
            seen = f"recompute='some' with sequence_parallel={split} raises {refused or 'nothing'}"
            yield Finding("full", refused == "ValueError", seen, "expected a ValueError", error=0.0)


def _bytes(property: str, got: float, wanted: float, words: str) -> Finding:
    seen = f"{got:,.0f} bytes, expected {wanted:,.0f} ({got / wanted:.4g} times)"
    return Finding(property, abs(got / wanted - 1) < 1e-9, seen, words, error=abs(got / wanted - 1))
