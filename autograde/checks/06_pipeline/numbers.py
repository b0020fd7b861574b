"""Checks of lesson 06 that need no ranks to talk: the cut into stages, and the bubble."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fivefold.pipeline import gpipe, interleaved, simulate

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare
from autograde.verdict import Finding, numbered


@dataclass(frozen=True, kw_only=True)
class Cut(Case):
    costs: tuple[float, ...]
    stages: int

    def __str__(self) -> str:
        costs = ", ".join(f"{cost:g}" for cost in self.costs[:8])
        return f"layers that cost {costs}{', …' if len(self.costs) > 8 else ''}, in {numbered(self.stages, 'stage')}"


class PartitionLayers(Check):
    exercise = "pipeline.partition_layers"
    points = {"cut": 1, "balance": 2, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Cut]:
        draw = random.Random(seed)
        plans = [
            ((1.0,) * 12, 4),
            ((1.0,) * 7, 3),
            ((8.0, 5, 4, 2, 1, 9, 4), 4),  # one stage filled after the other is not enough, whatever fills it
            ((0.3, 0.4, 0.3, 0.2, 0.35, 0.25), 3),  # no whole number is between the best and the next
            ((5.0, 2, 5, 4, 2, 6, 5), 3),
            ((1.0, 1, 1, 1, 1, 10), 3),
            ((0.0, 0, 5, 0), 3),
            ((3.0, 1, 2), 3),
            ((4.0, 2), 1),
        ]
        if level == "hidden":
            plans = [(tuple(float(draw.randint(0, 9)) for _ in range(n)), draw.randint(1, min(n, 6))) for n in
                     (1, 5, 8, 11, 12, 14)]  # fmt: skip
            plans += [(tuple(round(draw.uniform(0.1, 4), 3) for _ in range(13)), 5)]
        judged = [Cut(world_size=1, seed=seed, costs=c, stages=k, properties=("cut", "balance")) for c, k in plans]
        refused = [((1.0, 2.0), 3), ((1.0, 2.0), 0)]
        return judged + [Cut(world_size=1, costs=c, stages=k, properties=("arguments",)) for c, k in refused]

    @staticmethod
    def program(solution: Any, case: Cut) -> dict:
        costs = list(case.costs)
        if case.properties == ("arguments",):
            try:
                return {"refused": repr(solution(costs, case.stages))[:60]}
            except ValueError:
                return {"refused": "ValueError"}
        found = solution(costs, case.stages)
        if not isinstance(found, list | tuple) or not all(isinstance(part, range | list | tuple) for part in found):
            return {"cut": repr(found)[:60], "costs": costs}
        return {"cut": [[int(layer) for layer in part] for part in found], "costs": costs}

    def judge(self, case: Cut, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (outcome,) = outcomes
        if case.properties == ("arguments",):
            done = outcome["refused"]
            words = f"{len(case.costs)} layers in {numbered(case.stages, 'stage')}"
            yield Finding("arguments", done == "ValueError", f"{words}: {done}", "expected a ValueError")
            return
        cut = outcome["cut"]
        problem = _problem(cut, case)
        if problem or outcome["costs"] != list(case.costs):
            yield Finding("cut", False, problem or "the costs that were given are changed")
            yield Finding("balance", None, "not judged: it is no cut")
            return
        yield Finding("cut", True, "every layer once, in order")
        largest, best = max(sum(case.costs[k] for k in part) for part in cut), _best(case.costs, case.stages)
        seen = f"the largest stage costs {largest:g}" + (f", {best:g} is possible" if largest > best + 1e-9 else "")
        detail = f"the stages are {', '.join(str(part) for part in cut)}"
        yield Finding("balance", largest <= best + 1e-9, seen, detail if largest > best + 1e-9 else "")


def _problem(cut: Any, case: Cut) -> str:
    """What makes it no cut of the layers into stages, empty where nothing does."""
    if isinstance(cut, str):
        return f"{cut} is not a list of ranges"
    if len(cut) != case.stages:
        return f"{numbered(len(cut), 'stage')}, expected {case.stages}"
    if not all(cut):
        return f"stage {cut.index([])} has no layer"
    flat = [layer for part in cut for layer in part]
    if flat != list(range(len(case.costs))):
        return f"the stages hold the layers {flat}, expected 0 to {len(case.costs) - 1}, each once and in order"
    return ""


def _best(costs: tuple[float, ...], stages: int) -> float:
    """The smallest largest stage, by trying every cut."""
    cuts = combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)) for cut in cuts)


@dataclass(frozen=True, kw_only=True)
class Idle(Case):
    p: int
    m: int
    v: int = 1
    of: str = "total"

    def __str__(self) -> str:
        return f"p {self.p}, m {self.m}, v {self.v}, of {self.of} time"


class Bubble(Check):
    exercise = "cost.bubble"
    points = {"total": 1, "ideal": 1, "chunks": 1, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Idle]:
        draw = random.Random(seed)
        sizes = [(4, 8, 1), (8, 32, 1), (1, 5, 1), (5, 2, 1), (4, 8, 2), (3, 6, 4)]
        if level == "hidden":
            sizes = [(draw.randint(2, 9), draw.randint(1, 20), 1), (2, 2 * draw.randint(1, 5), draw.randint(2, 5))]
        return [
            Idle(world_size=1, p=p, m=m, v=v, of=of, properties=("chunks" if v > 1 else of,))
            for p, m, v in sizes for of in ("total", "ideal")
        ] + [Idle(world_size=1, p=4, m=8, of="all", properties=("arguments",))]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Idle) -> Any:
        if case.of == "all":
            try:
                return repr(solution(case.p, case.m, 1, "all"))[:40]
            except ValueError:
                return "ValueError"
        result = solution(case.p, case.m, case.v, of=case.of)
        if (case.v, case.of) == (1, "total") and result != solution(case.p, case.m):
            return "another number where v and `of` are left out"
        return result

    def judge(self, case: Idle, outcomes: list, ledger: Any) -> Iterator[Finding]:
        """The expected share is that of a schedule, simulated in unit times."""
        (name,) = case.properties
        if case.of == "all":
            yield Finding(name, outcomes[0] == "ValueError", f'of="all" gives {outcomes[0]}', "expected a ValueError")
            return
        run = simulate(gpipe(case.p, case.m) if case.v == 1 else interleaved(case.p, case.m, case.v))
        idle, work = run.idle_by_makespan[0], run.busy[0]
        share = idle / (run.makespan if case.of == "total" else work)
        yield compare(name, f"the share of {case.of} time", outcomes, share)
