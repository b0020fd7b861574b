"""Checks of lesson 04: a layer whose tokens are split, and the gradients of what is replicated in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autograde.check import Check
from autograde.checks.blocks import Column, Layers, try_block, try_column, try_dropout
from autograde.checks.sequence import (
    judge_block,
    judge_dropout,
    judge_kept,
    sent,
)
from autograde.checks.tokens import (
    APART,
    PAIRS,
    UNLIKE,
    Replicated,
    try_sync,
)
from autograde.compare import compare, compare_all
from autograde.traffic import Calls
from autograde.verdict import Finding


class Block(Check):
    exercise = "sequence.Block"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1, "arguments": 2}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Layers]:
        """One of training, and one of dropout in both regions."""
        if level == "visible":
            sizes = [(4, UNLIKE, 2, 6, 5, 3, 6), (2, ((0, 1),), 2, 24, 64, 2, 2)]
        else:
            sizes = [(5, APART, 1, 6 * (1 + seed % 3), 4, 6, 12), (3, ((0, 1, 2),), 2, 24, 96, 3, 3)]
        asked = tuple(name for name in self.points if name != "arguments"), ("arguments",)
        return [
            Layers(
                world_size=world, groups=groups, b=b, s=s, h=h, heads=heads, size=2, inner=inner, seed=seed + i,
                properties=asked[i],
            )
            for i, (world, groups, b, s, h, heads, inner) in enumerate(sizes)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Layers) -> dict:
        return (try_dropout if "arguments" in case.properties else try_block)(solution, case)

    def judge(self, case: Layers, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if "arguments" in case.properties:
            yield judge_dropout(outcomes)
        else:
            yield from judge_block(case, outcomes, ledger)


class SyncReplicatedGradients(Check):
    exercise = "sequence.sync_replicated_gradients"
    points = {"gradient": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Replicated]:
        sizes = [(4, UNLIKE), (4, PAIRS)] if level == "visible" else [(5, APART), (2, ((0, 1),))]
        shapes = ((1, 5), (2, 3), (1, 1), (4, 1 + seed % 5))
        return [
            Replicated(world_size=world, groups=groups, shapes=shapes, without=1 + i, seed=seed + i)
            for i, (world, groups) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Replicated) -> dict:
        return try_sync(solution, case)

    def judge(self, case: Replicated, outcomes: list, ledger: Any) -> Iterator[Finding]:
        sums = [case.summed(rank) for rank in range(case.world_size)]
        look = "Others may hold the tensors that .grad was. Where does a sum have to go?"
        places = {"after": "gradient", "kept": "the tensor that was gradient", "views": "a view of what was gradient"}
        for key, name in places.items():
            expected = [{f"{name} {i}": total for i, total in enumerate(own)} for own in sums]
            yield compare_all("gradient", [o[key] for o in outcomes], expected, look="" if key == "after" else look)
        ones = [torch.ones(shape, dtype=torch.float64) for shape in case.shapes]
        for i, one in enumerate(ones):
            yield compare("gradient", f"parameter {i}", [o["parameters"][i] for o in outcomes], one, "exact")
        size = 8 * sum(one.numel() for i, one in enumerate(ones) if i != case.without)
        look = "The second call had parameters without any gradient."
        one = Calls("all_reduce", case.calls(1), 0, size, case.groups)
        yield sent("traffic", ledger, "1 all-reduce", one, look=look)


class RegatheringColumnLinear(Check):
    exercise = "sequence.RegatheringColumnLinear"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Column]:
        if level == "visible":
            return [Column(world_size=4, groups=UNLIKE, b=2, s=6, h=5, out=12, seed=seed)]
        return [Column(world_size=5, groups=APART, b=1, s=12, h=3 + seed % 4, out=18, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Column) -> dict:
        return try_column(solution, case)

    def judge(self, case: Column, outcomes: list, ledger: Any) -> Iterator[Finding]:
        output, without, grads = [], [], []
        for rank in range(case.world_size):
            _, ranks, number = case.place(rank)
            x, incoming, weight, bias = case.tensors(rank)
            tensors = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]

            def piece(y: Tensor, t: int = len(ranks), r: int = number) -> Tensor:
                return y.chunk(t, -1)[r].detach()

            y = F.linear(*tensors)
            y.backward(incoming)
            output.append(piece(y))
            without.append(piece(y - bias))
            own = {"x.grad": case.own(rank, x.grad), "weight.grad": piece(weight.grad.mT).mT}
            grads.append(own | {"bias.grad": piece(bias.grad)})
        yield compare("output", "the output", [o["output"] for o in outcomes], output)
        yield compare("output", "the output without a bias", [o["without a bias"] for o in outcomes], without)
        yield compare_all("gradient", [o["gradient"] for o in outcomes], grads)
        whole, own = case.bytes()
        gather = Calls("all_gather", case.calls(2), case.calls(1), own, case.groups)
        scatter = Calls("reduce_scatter", 0, case.calls(1), whole, case.groups)
        words = "1 all-gather each way, 1 reduce-scatter backward"
        look = "Forward ran twice, with a bias and without one; backward ran once."
        yield sent("traffic", ledger, words, gather, scatter, look=look)
        yield judge_kept(ledger, own, "Which tokens does this rank need to keep, and which can it ask for again?")
