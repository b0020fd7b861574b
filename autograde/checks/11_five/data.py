"""Check of lesson 11's bug: which tokens of a step a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fivefold.layout import Layout
from fivefold.mesh import coordinates
from torch import Tensor

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare
from autograde.traffic import expect
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Tokens(Case):
    layout: str
    batch: int
    micro_batches: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.batch} sequences of {self.tokens} tokens in {self.micro_batches} micro-batches"

    def numbers(self) -> Tensor:
        """Every token is another number, so that each is known wherever it turns up."""
        order = torch.randperm(self.batch * (self.tokens + 1), generator=torch.Generator().manual_seed(self.seed))
        return order.view(self.batch, self.tokens + 1)


class LocalBatches(Check):
    exercise = "train.local_batches"
    points = {"inputs": 2, "labels": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        visible = [("dp2,cp2,tp2", 8, 2, 8), ("dp2,pp2,tp2", 6, 3, 5)]
        hidden = [("dp3,cp2", 6, 1, 12), ("cp2,pp3", 2, 2, 8), ("dp2,pp2", 12, 3, 4 + seed % 3)]
        return [
            Tokens(
                world_size=Layout.parse(layout).world_size, layout=layout, batch=b, micro_batches=m, tokens=s, seed=seed
            )  # fmt: skip
            for layout, b, m, s in (visible if level == "visible" else hidden)
        ]

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        from fivefold.mesh import make_mesh

        parts = list(solution(case.numbers(), case.micro_batches, make_mesh(Layout.parse(case.layout))))
        return {name: [getattr(part, name) for part in parts] for name in ("inputs", "labels", "positions")}

    def judge(self, case: Tokens, outcomes: list[Any], ledger: Any) -> Iterator[Finding]:
        layout, m = Layout.parse(case.layout), case.micro_batches
        rows, chunk = case.batch // m // layout.dp, case.tokens // (2 * layout.cp) if layout.cp > 1 else case.tokens
        for i in range(m):
            inputs, labels = [], []
            for rank in range(case.world_size):
                at = coordinates(rank, layout)
                first = (i * layout.dp + at.dp) * rows
                places = list(range(at.cp * chunk, (at.cp + 1) * chunk))
                if layout.cp > 1:
                    last = (2 * layout.cp - 1 - at.cp) * chunk
                    places += range(last, last + chunk)
                whole = case.numbers()[first : first + rows]
                inputs.append(whole[:, places])
                labels.append(whole[:, [place + 1 for place in places]])
            look = "Which ranks share a sequence, and which ranks work on the same tokens?"
            for name, wanted in (("inputs", inputs), ("labels", labels)):
                got = [outcome[name][i] if i < len(outcome[name]) else None for outcome in outcomes]
                yield compare(name, f"the block of {name} of micro-batch {i}", got, wanted, "exact", look)
        yield expect("traffic", ledger)
