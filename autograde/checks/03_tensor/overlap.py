"""The check of lesson 03's column layer that hides its all-reduce behind the weight's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from fivefold.runtime import marks  # the module: a rank has a `now` of its own
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import Computation, Wait
from fivefold.runtime.replay import replay
from torch import Tensor

from autograde.checks.layers import LayerCheck
from autograde.checks.training import Kind, Layer, group_of, try_layer
from autograde.compare import compare
from autograde.traffic import expect
from autograde.verdict import Finding

WIDEN = 1e6  # as if h were so many times larger: then a product takes longer than any all-reduce of its input
ALLOWED = 0.05  # of an all-reduce's time, in which a rank may stand still for it
NO_GRADIENT = 0  # the steps of the case whose input needs none


def _column(case: Layer) -> dict[str, Tensor]:
    return {"weight": case.random(0, case.inner, case.h), "bias": case.random(1, case.inner)}


COLUMN = Kind(_column, {"weight": 0, "bias": 0, "output": -1}, {})


def _what_was_computed() -> dict[str, int]:
    """FLOPs of backward before its all-reduce starts, while it is on its way, and after: marks by which a mistake is
    recognised. What is judged is the replay."""
    marks.now.meter.flush()
    found, now = {"before": 0, "meanwhile": 0, "after": 0}, "before"
    for entry in marks.now.recorder.entries:
        if not isinstance(entry, Computation):
            now = "meanwhile" if getattr(entry, "asynchronous", False) else "after"
        elif entry.backward:
            found[now] += entry.flops
        else:
            now = "before"
    return found


class OverlappedColumnLinear(LayerCheck):
    exercise = "tensor.OverlappedColumnLinear"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1, "overlap": 2}
    kind, exchanges = COLUMN, ("backward",)
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Layer]:
        """Also an input that needs no gradient, without a bias."""
        cases = super().cases(seed, level)
        if level == "visible":
            cases.append(replace(cases[0], steps=NO_GRADIENT, seed=seed + 9, properties=("output", "traffic")))
        return cases

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        if case.steps != NO_GRADIENT:
            return try_layer(solution, case, COLUMN) | _what_was_computed()
        group, place = group_of(case.groups)
        (x, incoming), weight = COLUMN.batches(case, place)[0], _column(case)["weight"]
        y = solution(weight, None, group)(x)
        y.backward(COLUMN.piece("output", incoming, group.rank(), group.size()))
        return {"output": y.detach()}

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        return F.linear(x, p["weight"], p["bias"])

    def judge(self, case: Layer, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.steps == NO_GRADIENT:
            x, weight = COLUMN.batches(case, 0)[0][0], _column(case)["weight"]
            whole = F.linear(x, weight)
            pieces = [COLUMN.piece("output", whole, rank, case.world_size) for rank in range(case.world_size)]
            yield compare("output", "the output without a bias", [o["output"] for o in outcomes], pieces, "layers")
            yield expect("traffic", ledger, look="Here the input needs no gradient. Who asks for the sum?")
            return
        yield from super().judge(case, outcomes, ledger)
        yield from self._judge_waits(ledger)
        yield self._judge_overlap(ledger)

    @staticmethod
    def _judge_waits(ledger: Any) -> Iterator[Finding]:
        """What was started is waited for: else the gradient is right by luck."""
        for rank in range(len(ledger)):
            entries = ledger[rank].entries
            waited = {entry.of for entry in entries if isinstance(entry, Wait)}
            for call in ledger[rank].communications:
                if call.asynchronous and call.index not in waited:
                    seen = f"an all-reduce of rank {rank} is started, and nobody waits for it"
                    detail = f"called at {call.line}" if call.line else ""
                    yield Finding("gradient", False, seen, detail, "When is the sum there?")
                    return

    @staticmethod
    def _judge_overlap(ledger: Any) -> Finding:
        found = replay(ledger, cluster("h100"), widen=WIDEN).overlap("all_reduce")
        if not found:
            return Finding("overlap", False, "there is no all-reduce to hide")
        worst = max(found, key=lambda overlap: overlap.share)
        if not worst.hidden(ALLOWED):
            look = "What is still to be computed when the sum is asked for? Could that wait?"
            return Finding("overlap", False, worst.describe("the all-reduce", ALLOWED), "replayed with large matrices",
                           look)  # fmt: skip
        return Finding("overlap", True, f"{worst.share:.0%} of the all-reduce is exposed")
