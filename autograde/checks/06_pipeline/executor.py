"""The check of lesson 06's executor: schedules on real ranks, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fivefold import pipeline
from fivefold.pipeline import Schedule

from autograde.case import Case, ranks_in_words
from autograde.check import Check
from autograde.checks import staged
from autograde.checks.messages import expect_messages
from autograde.checks.training import group_of
from autograde.compare import compare_all
from autograde.verdict import Finding

BYTES = 8 * staged.ROWS * staged.WIDTH
BOTH = ("losses", "gradient", "traffic", "order")
LOOK = {
    "gradient": "It is that of the sum of all losses: does each backward begin with the gradient that came "
    "for it from the stage after?",
    "traffic": "A value goes once to the rank that needs it, and only where that is another rank.",
}


@dataclass(frozen=True, kw_only=True)
class Run(Case):
    """Each group of ranks runs a schedule of its own: of one kind, for as many ranks as it has."""

    kind: str
    m: int
    v: int = 0
    groups: tuple[tuple[int, ...], ...]
    steps: int = 1
    messages: bool = False  # whether sends and receives stand in the lists

    def __str__(self) -> str:
        chunks = f", v {self.v}" if self.v else ""
        more = (", messages in the lists" if self.messages else "") + (", twice" if self.steps > 1 else "")
        return f"{self.kind or 'what does not fit'} on {ranks_in_words(self.groups)}, m {self.m}{chunks}{more}"

    def schedule(self, ranks: int) -> Schedule:
        sizes = (ranks, self.m, self.v) if self.v else (ranks, self.m)
        made = getattr(pipeline, self.kind)(*sizes)
        return pipeline.order_messages(made) if self.messages else made


class Executor(Check):
    exercise = "pipeline.run"
    points = {"losses": 1, "gradient": 3, "traffic": 2, "order": 1, "halves": 1, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Case]:
        all4, two, unequal, five = ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0, 2, 4), (1, 3))
        plans = [
            ("gpipe", 3, 0, all4, 1, False, BOTH),
            ("one_f_one_b", 4, 0, unequal, 2, False, BOTH),
            ("interleaved", 4, 2, two, 1, False, BOTH),
            ("zb_h1", 5, 0, unequal, 1, False, ("halves",)),
            ("dualpipe", 4, 0, two, 1, False, ("gradient",)),  # two pieces of work in one entry
            ("", 2, 0, unequal, 1, False, ("arguments",)),
        ]
        if level == "hidden":
            plans = [
                ("one_f_one_b", 2 + seed % 3, 0, five, 1, True, BOTH),
                ("interleaved", 6, 3, five, 2, False, BOTH),
                ("naive", 2, 0, five, 1, False, BOTH),
                ("zb_v", 6, 0, five, 1, False, ("halves",)),
                ("dualpipe", 4, 0, ((0, 2), (1, 3)), 1, False, ("gradient",)),
            ]
        return [
            Run(
                world_size=max(map(max, groups)) + 1, seed=seed + number, kind=kind, m=m, v=v, groups=groups,
                steps=steps, messages=messages, properties=properties,
            )
            for number, (kind, m, v, groups, steps, messages, properties) in enumerate(plans)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Run) -> dict:
        group, place = group_of(case.groups)
        if not case.kind:
            return _try_to_run_what_does_not_fit(solution, group)
        schedule, log = case.schedule(group.size()), []
        seed = case.seed + 100 * place
        done = staged.execute(solution, schedule, seed, group, case.steps, log)
        return done | {"log": log}

    def judge(self, case: Run, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if not case.kind:
            yield from _judge_refusals(outcomes)
            return
        grads, losses, sends, logs = ([None] * case.world_size for _ in range(4))
        for place, ranks in enumerate(case.groups):
            schedule, seed = case.schedule(len(ranks)), case.seed + 100 * place
            stages = schedule.num_stages
            every = staged.expected_losses(stages, case.m, seed, case.steps)
            for number, rank in enumerate(ranks):
                grads[rank] = staged.expected(schedule.stages_of(number), stages, case.m, seed, case.steps)
                losses[rank] = {i: x for i, x in every.items() if schedule.rank_of(stages - 1, i) == number}
                made = [schedule.makes(step) for a in schedule.actions[number] for step in a.steps]
                sends[rank] = case.steps * sum(v is not None and schedule.receiver(v) is not None for v in made)
                logs[rank] = case.steps * [entry for a in schedule.actions[number] for entry in _entries(a)]
        halves = case.properties == ("halves",)
        name = "halves" if halves else "gradient"
        yield compare_all(name, [o["gradient"] for o in outcomes], grads, "layers", look=LOOK["gradient"])
        if halves or "order" in case.properties:
            yield _judge_order("halves" if halves else "order", [o["log"] for o in outcomes], logs)
            yield from _judge_kept("halves" if halves else "order", outcomes)
        if "losses" in case.properties:
            yield _judge_losses(outcomes, losses)
            sent = [BYTES * number for number in sends]
            yield expect_messages("traffic", ledger, case.groups, sends, sent, look=LOOK["traffic"])


def _entries(action: Any) -> list[list]:
    """What `Watched` writes down for one action."""
    found = []
    for step in action.steps:
        for letter in {"F": "F", "B": "BW", "I": "B", "W": "W"}[step.letter]:
            found.append([letter, step.stage, step.letter, str(step.microbatch)])
    return found


def _judge_losses(outcomes: list, expected: list[dict]) -> Finding:
    for rank, (outcome, wanted) in enumerate(zip(outcomes, expected, strict=True)):
        got = outcome["losses"]
        if not isinstance(got, dict):
            return Finding("losses", False, f"rank {rank} returns no dict of losses by micro-batch")
        if sorted(got) != sorted(wanted):
            return Finding("losses", False, f"rank {rank} returns losses of {sorted(got)}, expected {sorted(wanted)}")
        if outcome["graph"]:
            return Finding("losses", False, f"the losses on rank {rank} still have their graphs")
    named = [{f"the loss of micro-batch {i}": value for i, value in of.items()} for of in expected]
    got = [{f"the loss of micro-batch {i}": value for i, value in outcome["losses"].items()} for outcome in outcomes]
    finding = compare_all("losses", got, named, "layers")
    if not finding.passed:
        return finding
    return Finding("losses", True, "each on the rank of its last stage")


def _judge_order(name: str, logs: list[list], expected: list[list]) -> Finding:
    words = {"F": "a forward", "B": "a backward", "W": "weight gradients"}
    for rank, (got, wanted) in enumerate(zip(logs, expected, strict=True)):
        done, to_do = [entry[:2] for entry in got], [entry[:2] for entry in wanted]
        at = next((k for k, pair in enumerate(zip(done, to_do, strict=False)) if pair[0] != pair[1]), None)
        if at is not None:
            seen, should = (f"{words[entry[0]]} of stage {entry[1]}" for entry in (done[at], to_do[at]))
            return Finding(name, False, f"rank {rank} does {seen} where its list has {should}")
        if len(done) != len(to_do):
            return Finding(name, False, f"rank {rank} does {len(done)} pieces of work, its list has {len(to_do)}")
        for one, other in zip(got, wanted, strict=True):
            if one[2:] != other[2:]:
                seen = (
                    f"{words[one[0]]} of micro-batch {other[3]} on rank {rank} is on the ledger as '{one[2]}{one[3]}'"
                )
                return Finding(name, False, seen, f"expected work('{other[2]}', microbatch={other[3]})")
    return Finding(name, True, "in the order of the lists")


def _judge_kept(name: str, outcomes: list) -> Iterator[Finding]:
    """Outputs that are there after their backward; one may still stand in a variable."""
    for rank, outcome in enumerate(outcomes):
        if outcome["kept"] > 1:
            seen = f"rank {rank} still keeps {outcome['kept']} outputs of a stage whose backward is done"
            yield Finding(name, False, seen, look="Who still holds them, and what for?")
            return


def _try_to_run_what_does_not_fit(solution: Any, group: Any) -> dict:
    """Schedules that are broken, for other ranks, or for other stages: the exception of each, by name."""
    size, rank = group.size(), group.rank()
    good = pipeline.gpipe(size, 2)
    lists = [pipeline.in_order("F B B F".split(), [number]) for number in range(size)]
    broken = Schedule("broken", 2, pipeline.straight(size), lists)
    trials = {
        "a schedule with a backward before its forward": (broken, [rank]),
        "a schedule for one rank more": (pipeline.gpipe(size + 1, 2), [rank]),
        "a stage that is not this rank's": (good, [rank + 7]),
    }
    found = {}
    for name, (schedule, stages) in trials.items():
        modules, template = (
            {stage: staged.Stage(stage % 4, 1) for stage in stages},
            torch.zeros(staged.ROWS, staged.WIDTH),
        )
        try:
            solution(schedule, modules, staged.inputs(2, 1), staged.loss, group, template)
            found[name] = "nothing"
        except NotImplementedError:
            raise
        except Exception as error:
            found[name] = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    dist.barrier()
    return found


def _judge_refusals(outcomes: list) -> Iterator[Finding]:
    for rank, outcome in enumerate(outcomes):
        for name, kind in outcome.items():
            if kind != "ValueError":
                yield Finding("arguments", False, f"{name} raises {kind} on rank {rank}", "expected a ValueError")
    yield Finding("arguments", True, "what does not fit is refused")
