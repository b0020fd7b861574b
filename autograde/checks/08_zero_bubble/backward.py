"""Checks of lesson 08, the backward in two halves: `split_backward`, and where weights enter a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fivefold.pipeline.backward as library
from fivefold.runtime.ledger import Computation, Ledger

from autograde.check import Check
from autograde.checks.halves import Halves, Shared, try_shared, try_stages, whole, whole_shared
from autograde.compare import compare_all
from autograde.traffic import size_in_words
from autograde.verdict import Finding

LATER = {  # the weights whose gradients can wait, by stage
    "a block": ("norm", "qkv", "out", "up", "down"),
    "a first stage": ("norm", "qkv", "out", "up", "down"),
    "a last stage": ("norm", "qkv", "out", "up", "down"),
    "weights used twice": ("once",),
    "functions of one's own": ("before", "after", "length"),
}
PLAIN = ("a block", "a first stage", "a last stage")
AGAIN = "What has the first half computed already? What of it does the second half need?"


class SplitBackward(Check):
    exercise = "pipeline.split_backward"
    points = {"gradient": 2, "halves": 3, "work": 1, "memory": 2, "traffic": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Halves]:
        asked = tuple(name for name in self.points if name != "traffic")
        odd = tuple(name for name in asked if name != "memory")
        if level == "visible":
            sizes = [(PLAIN, (2, 1, 3), (2, 0, 1), 3, asked), (("weights used twice",), (1, 2), (1, 0), 2, odd)]
            ranks = 2
        else:
            sizes = [(PLAIN, (1, 2 + seed % 3), (1, 0), 4, asked)]
            sizes.append((("weights used twice", "functions of one's own"), (3, 1), (0, 1), 2, odd))
            ranks = 3
        cases = [
            Halves(
                world_size=1, stages=stages, batches=batches, order=order, s=s, h=4 + seed % 3, seed=seed + i,
                properties=properties,
            )
            for i, (stages, batches, order, s, properties) in enumerate(sizes)
        ]  # fmt: skip
        return [*cases, Shared(world_size=ranks, seed=seed, properties=("gradient", "traffic"))]

    @staticmethod
    def program(solution: Any, case: Halves) -> dict:
        return (try_shared if isinstance(case, Shared) else try_stages)(solution, case)

    def judge(self, case: Halves, outcomes: list, ledger: Ledger) -> Iterator[Finding]:
        if isinstance(case, Shared):
            yield compare_all("gradient", outcomes, whole_shared(case), "layers")
            yield _sent(ledger)
            return
        for name in case.stages:
            outcome = outcomes[0][name]
            yield from judge_values(name, case, outcome)
            halves = judge_halves(name, outcome)
            yield halves
            yield judge_work(name, case, outcome, ledger)
            if "memory" in case.properties:
                nothing = Finding("memory", None, "not judged: nothing was left for later")
                yield _judge_memory(name, case, outcome, ledger) if halves.passed else nothing


class TakeApart(Check):
    exercise = "pipeline.graph.take_apart"
    points = {"gradient": 2, "halves": 2, "work": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Halves]:
        if level == "visible":
            sizes = [(("a block", "weights used twice"), (2,), (0,)), (("functions of one's own",), (2, 1), (0, 1))]
        else:
            sizes = [(("a first stage", "weights used twice", "functions of one's own"), (1, 2), (1, 0))]
        return [
            Halves(world_size=1, stages=stages, batches=batches, order=order, h=4 + seed % 4, seed=seed + i)
            for i, (stages, batches, order) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Halves) -> dict:
        library.take_apart = solution
        return try_stages(library.split_backward, case)

    def judge(self, case: Halves, outcomes: list, ledger: Ledger) -> Iterator[Finding]:
        for name in case.stages:
            yield from judge_values(name, case, outcomes[0][name])
            yield judge_halves(name, outcomes[0][name])
            yield judge_work(name, case, outcomes[0][name], ledger)


def judge_values(name: str, case: Halves, outcome: dict) -> Iterator[Finding]:
    """Every gradient is that of one undivided backward, on top of what was there."""
    yield compare_all("gradient", [_of(name, outcome["gradient"])], [_of(name, whole(name, case))], "layers")
    if outcome["incoming changed"]:
        yield Finding("gradient", False, f"{name}: the gradient of the output is overwritten", look="It is not yours.")


def judge_halves(name: str, outcome: dict) -> Finding:
    """The first half leaves those weights alone that can wait."""
    early = [n for n in outcome["early"] if n.partition(".")[0] in LATER[name]]
    if early:
        seen = f"{name}: after the first half, {early[0]}.grad has changed already"
        return Finding("halves", False, seen, look="Nobody waits for it. What may the first half compute?")
    return Finding("halves", True, "what can wait does wait", error=0.0)


def judge_work(name: str, case: Halves, outcome: dict, ledger: Ledger) -> Finding:
    """Both halves together go through the stage once, and multiply no more than one backward does."""
    before, after, once = outcome["passes before"], outcome["passes after"], len(case.batches)
    if (before, after) != (once, once):
        seen = (
            f"{name}: backward goes through the stage {after / once:.3g} times, {before / once:.3g} in the first half"
        )
        return Finding("work", False, seen, "expected once, in the first half", AGAIN)
    forward, first, second = (_flops(ledger, f"{name}: {part}") for part in ("forward", "first half", "second half"))
    if not second:
        return Finding(
            "work", False, f"{name}: nothing is multiplied in the second half", look="Which products can wait?"
        )
    times = (first + second) / forward
    most = 2 if name != "functions of one's own" else 2.5  # where a part is computed again
    seen = f"{name}: both halves multiply {times:.3g} times as much as forward"
    return Finding("work", times <= most + 1e-9, seen, f"expected {most:g} at most", AGAIN, error=0.0)


def _judge_memory(name: str, case: Halves, outcome: dict, ledger: Ledger) -> Finding:
    """In between, the inputs of the weights' products are kept, and of a norm two numbers a row more; then nothing."""
    phases = ledger[0].memory.phases
    between, after = phases.get(f"{name}: in between", 0), phases.get(f"{name}: after both", 0)
    forward = phases.get(f"{name}: forward", 0)
    if outcome["alive"]:
        seen = f"{name}: {outcome['alive']} tensors that no weight's gradient needs are alive between the halves"
        return Finding("memory", False, seen, look="Which operations have nothing left to do? What frees theirs?")
    rows = sum(case.batches) * case.s
    wanted = 8 * rows * ((case.h + 2) + case.h + case.h + case.h + 3 * case.h)
    wanted += 8 * rows if name == "a first stage" else 0  # the words
    if between > wanted:
        seen = f"{name}: {size_in_words(between)} kept between the halves, expected {size_in_words(wanted)} at most"
        return Finding("memory", False, seen, f"after forward it was {size_in_words(forward)}")
    if after:
        return Finding("memory", False, f"{name}: {size_in_words(after)} are still kept after both halves")
    seen = f"{name}: {size_in_words(between)} of {size_in_words(forward)} kept in between"
    return Finding("memory", True, seen)


def _sent(ledger: Ledger) -> Finding:
    """All communication of backward is in the first half: an all-gather and a reduce-scatter."""
    for rank, own in enumerate(ledger.ranks):
        ops = {
            half: sorted(c.op for c in own.communications if c.phase == half) for half in ("first half", "second half")
        }
        if ops["second half"]:
            seen = f"rank {rank} sends {len(ops['second half'])} times in the second half, expected 0"
            return Finding("traffic", False, seen, look=AGAIN)
        if ops["first half"] != ["all_gather", "reduce_scatter"]:
            return Finding(
                "traffic", False, f"the first half of rank {rank} makes {len(ops['first half'])} calls, expected 2"
            )
    return Finding("traffic", True, "2 calls in the first half, 0 in the second")


def _of(name: str, gradients: dict) -> dict:
    return {f"{name}: {key}": value for key, value in gradients.items() if value is not None}


def _flops(ledger: Ledger, name: str) -> int:
    return sum(e.flops for e in ledger[0].entries if isinstance(e, Computation) and e.phase == name)
