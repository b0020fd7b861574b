"""The check of lesson 06's bug: the values that travel, each by itself and inside the executor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fivefold import pipeline
from fivefold.pipeline import Value
from fivefold.runtime.ledger import Communication, Wait
from torch.multiprocessing.reductions import StorageWeakRef

from autograde.case import Case
from autograde.check import Check
from autograde.checks import staged
from autograde.checks.messages import entries_here, unwaited
from autograde.checks.training import group_of
from autograde.compare import compare, compare_all
from autograde.verdict import Finding

EARLY = "taken before it is there"


@dataclass(frozen=True, kw_only=True)
class Passed(Case):
    """Values go from the first and the last of three ranks to the one between, and back; or a schedule is executed."""

    groups: tuple[tuple[int, ...], ...]
    count: int
    schedule: str = ""

    def __str__(self) -> str:
        if self.schedule:
            return f"{self.schedule} on {len(self.groups[0])} ranks, m {self.count}"
        return f"{self.count} values from each of two ranks to a third, and back"

    def value(self, kind: str, i: int) -> torch.Tensor:
        """Not contiguous, so that what is sent as it lies in memory arrives wrong."""
        return staged.random(self.seed * 100 + i + 50 * (kind == "gradient"), 3, 2).T


class CheckValues(Check):
    exercise = "pipeline.Values"
    points = {"values": 1, "gradient": 2, "memory": 1}

    def cases(self, seed: int, level: str) -> list[Passed]:
        three, spread = ((0, 1, 2),), ((0, 2, 3), (1,))
        plans = [(three, 4, ""), (three, 5, "gpipe"), (three, 4, "one_f_one_b"), (three, 3, "naive")]
        if level == "hidden":
            plans = [(spread, 3, ""), (spread, 4, "zb_h1"), (three, 2 + seed % 4, "gpipe")]
        return [
            Passed(
                world_size=max(map(max, groups)) + 1, seed=seed + number, groups=groups, count=count, schedule=schedule,
                properties=("gradient",) if schedule else ("values", "memory"),
            )
            for number, (groups, count, schedule) in enumerate(plans)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Passed) -> dict:
        group, _ = group_of(case.groups)
        if group.size() == 1:
            return {}
        if case.schedule:
            from fivefold.pipeline import execute  # the executor takes the class from there

            library, execute.Values = execute.Values, _in_step(solution)
            try:
                schedule = getattr(pipeline, case.schedule)(group.size(), case.count)
                return staged.execute(pipeline.run, schedule, case.seed, group)
            finally:
                execute.Values = library
        values, first = solution(group, torch.full((2, 3), torch.nan).double()), len(entries_here())
        if group.rank() == 1:
            found = _between(values, case)
        else:
            found = _outside(values, case, "activation" if group.rank() == 0 else "gradient")
        entries = entries_here()[first:]
        return found | {"open": unwaited(entries), "under way": _most_under_way(entries)}

    def judge(self, case: Passed, outcomes: list, ledger: Any) -> Iterator[Finding]:
        outcomes = [outcomes[rank] for rank in case.groups[0]]
        if case.schedule:
            schedule = getattr(pipeline, case.schedule)(3, case.count)
            wanted = [staged.expected(schedule.stages_of(rank), 3, case.count, case.seed) for rank in range(3)]
            look = "The losses are right. What does backward read that forward has read before?"
            yield compare_all("gradient", [o["gradient"] for o in outcomes], wanted, "layers", look=look)
            return
        for name in ("activation", "gradient"):
            for i in range(case.count):
                key, wanted = f"{name} {i}", case.value(name, i).contiguous()
                holders = [outcome[key] for outcome in outcomes if key in outcome]
                if EARLY in holders:
                    yield Finding("values", False, f"{key} is taken, and nobody has waited for its message")
                    return
                finding = compare("values", key, holders, [wanted] * 2, "exact")
                if not finding.passed:
                    yield finding
                    return
        yield Finding("values", True, "each arrives as it left")
        yield self._judge_memory(case, outcomes)

    def _judge_memory(self, case: Passed, outcomes: list) -> Finding:
        for rank, outcome in zip(case.groups[0], outcomes, strict=True):
            if outcome.get("kept"):
                return Finding("memory", False, f"rank {rank} keeps {outcome['kept']} of the values that it has sent")
            if outcome["taken"]:
                seen = f"rank {rank} keeps {outcome['taken']} of the values that have been taken"
                return Finding("memory", False, seen, look="They are there until they are used, and no longer.")
            if outcome["open"]:
                return Finding("memory", False, f"on rank {rank} {outcome['open']} messages are never waited for")
            if outcome["under way"] > 1:
                seen = f"{outcome['under way']} messages from rank {rank} to one other are under way at once"
                return Finding("memory", False, seen, look="A fast rank piles up what a slow one has no room for.")
        return Finding("memory", True, "what is sent is let go, one at a time")


def _in_step(solution: Any) -> Any:
    """The same class, with every message waited for where it begins, so that what is overwritten is so each time."""

    class InStep(solution):
        def receive(self, value: Value, peer: int) -> None:
            super().receive(value, peer)
            self.wait([value])

        def send(self, value: Value, peer: int) -> None:
            super().send(value, peer)
            self.sent([peer])

    return InStep


def _taken(values: Any, value: Value, let_go: list[StorageWeakRef]) -> Any:
    """The tensor, copied; what arrives only after it is taken may be anything, so that is only said."""
    before = unwaited(entries_here())
    tensor = values.take(value)
    let_go.append(StorageWeakRef(tensor.untyped_storage()))
    return tensor.clone() if unwaited(entries_here()) < before or not before else EARLY


def _outside(values: Any, case: Passed, kind: str) -> dict:
    """Make some values, send them to the rank between, and take those that come back."""
    made = []
    for i in range(case.count):
        tensor = case.value(kind, i)
        made.append(weakref.ref(tensor))
        values.put(Value(kind, 0, i), tensor)
        del tensor
    for i in range(case.count):
        values.send(Value(kind, 0, i), 1)
    values.sent(range(3))
    gc.collect()
    kept, let_go = sum(ref() is not None for ref in made), []
    for i in range(case.count):
        values.receive(Value(kind, 1, i), 1)
    found = {f"{kind} {i}": _taken(values, Value(kind, 1, i), let_go) for i in reversed(range(case.count))}
    return found | {"kept": kept, "taken": _still_there(let_go)}


def _between(values: Any, case: Passed) -> dict:
    """Take values from one side and then the other, all asked for before the first is used, and send each back."""
    kinds, found, let_go = {"activation": 0, "gradient": 2}, {}, []
    for kind, peer in kinds.items():
        for i in range(case.count):
            values.receive(Value(kind, 0, i), peer)
        for i in reversed(range(case.count)):
            found[f"{kind} {i}"] = _taken(values, Value(kind, 0, i), let_go)
    values.wait([Value("gradient", 7, 7)])  # of which there is none
    for kind, peer in kinds.items():
        for i in range(case.count):
            values.put(Value(kind, 1, i), case.value(kind, i))
            values.send(Value(kind, 1, i), peer)
    values.sent([0, 2])
    return found | {"taken": _still_there(let_go)}


def _still_there(let_go: list[StorageWeakRef]) -> int:
    gc.collect()
    return sum(not storage.expired() for storage in let_go)


def _most_under_way(entries: list) -> int:
    """The most messages from here to one rank that have been started and not waited for."""
    open_ones: dict[int, int] = {}
    most = 0
    for entry in entries:
        if isinstance(entry, Communication) and entry.op == "send" and entry.asynchronous:
            open_ones[entry.index] = entry.peer
            most = max(most, list(open_ones.values()).count(entry.peer))
        elif isinstance(entry, Wait):
            open_ones.pop(entry.of, None)
    return most
