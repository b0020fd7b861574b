"""The check of lesson 07's bug: the order of sends and receives, on paper and with sends that block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fivefold import pipeline
from fivefold.pipeline import Receive, Schedule, Send, find_faults, straight

from autograde.case import Case
from autograde.check import Check
from autograde.checks import staged
from autograde.checks.encoded import decode, encode
from autograde.compare import compare_all
from autograde.verdict import Finding, numbered

NAMES = {
    "one_f_one_b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved 1F1B",
    "stuck": "a schedule that stops",
    "zb_h1": "ZB-H1 of lesson 08",
    "zb_h2": "ZB-H2 of lesson 08",
    "zb_v": "ZB-V of lesson 08, with two stages on each rank",
    "dualpipe": "DualPipe of lesson 08",
}


@dataclass(frozen=True, kw_only=True)
class Ordered(Case):
    kind: str
    p: int
    m: int
    v: int = 0
    executed: bool = False

    def __str__(self) -> str:
        chunks = f", v {self.v}" if self.v else ""
        how = ", executed with sends that block" if self.executed else ""
        return f"{NAMES.get(self.kind, self.kind)}, p {self.p}, m {self.m}{chunks}{how}"

    def schedule(self) -> Schedule:
        if self.kind == "stuck":  # each rank waits for what the other has later
            lists = [pipeline.in_order("F B F B".split(), [0]), pipeline.in_order("F F B B".split(), [1])]
            return Schedule("stuck", 2, straight(2), lists)
        return getattr(pipeline, self.kind)(*((self.p, self.m, self.v) if self.v else (self.p, self.m)))


class OrderMessages(Check):
    exercise = "pipeline.order_messages"
    points = {"messages": 1, "order": 1, "deadlock": 2, "gradient": 1, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Ordered]:
        on_paper, executed = ("messages", "order", "deadlock"), ("gradient",)
        plans = [("one_f_one_b", 2, 4, 0), ("one_f_one_b", 4, 6, 0), ("gpipe", 3, 4, 0), ("interleaved", 2, 4, 2)]
        plans += [("naive", 3, 2, 0), ("one_f_one_b", 1, 2, 0), ("zb_v", 3, 6, 0)]
        runs = [("one_f_one_b", 3, 4, 0), ("interleaved", 3, 3, 2)]
        if level == "hidden":
            plans = [("zb_h2", 4, 9, 0), ("dualpipe", 4, 8, 0), ("interleaved", 3, 6, 3), ("one_f_one_b", 5, 2, 0)]
            plans += [("gpipe", 2, 1 + seed % 4, 0), ("zb_h1", 2, 5, 0)]
            runs = [("one_f_one_b", 2, 5, 0), ("interleaved", 2, 4, 2)]
        cases = [Ordered(world_size=1, seed=seed, kind=k, p=p, m=m, v=v, properties=on_paper) for k, p, m, v in plans]
        cases += [
            Ordered(world_size=p, seed=seed, kind=k, p=p, m=m, v=v, executed=True, properties=executed)
            for k, p, m, v in runs
        ]
        return [*cases, Ordered(world_size=1, kind="stuck", p=2, m=2, properties=("arguments",))]

    @staticmethod
    def program(solution: Any, case: Ordered) -> dict:
        given = case.schedule()
        if case.kind == "stuck":
            try:
                return {"made": encode(solution(given))}
            except ValueError:
                return {"made": "ValueError"}
        made = solution(given)
        if not case.executed:
            return {"made": encode(made), "given": encode(given)}
        if not isinstance(made, Schedule) or find_faults(made):
            return {"made": encode(made)}
        return {"made": encode(made)} | staged.execute(_blocking, made, case.seed)

    def judge(self, case: Ordered, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.kind == "stuck":
            done = outcomes[0]["made"]
            seen = "what cannot end is refused" if done == "ValueError" else "it gives a schedule all the same"
            yield Finding("arguments", done == "ValueError", seen, "expected a ValueError for one that cannot end")
            return
        try:
            made = decode(outcomes[0]["made"])
        except ValueError as error:
            yield Finding(case.properties[0], False, str(error))
            return
        if case.executed:
            yield _judge_run(case, made, outcomes)
            return
        given = case.schedule()
        if outcomes[0]["given"] != encode(given):
            yield Finding("messages", False, "the schedule that was given is changed")
        findings = [judge(given, made) for judge in (_judge_messages, _judge_order, _judge_deadlock)]
        for number, finding in enumerate(findings):
            before = all(other.passed for other in findings[:number])
            yield finding if before else Finding(finding.property, None, "not judged: see above")


def _judge_messages(given: Schedule, made: Schedule) -> Finding:
    """The same work on every rank, and each value once at both ends."""
    wanted: Counter = Counter()
    for rank, actions in enumerate(given.actions):
        plain = [action for action in made.actions[rank] if not isinstance(action, Send | Receive)]
        if made.routes != given.routes or plain != list(actions):
            return Finding("messages", False, f"the computation of rank {rank} is not what it was")
        for value in (given.makes(step) for action in actions for step in action.steps):
            if value is not None and (peer := given.receiver(value)) is not None:
                wanted[rank, Send(value, peer)] += 1
                wanted[peer, Receive(value, rank)] += 1
    found = Counter((rank, a) for rank, own in enumerate(made.actions) for a in own if isinstance(a, Send | Receive))
    for entries, words in ((wanted - found, "is missing"), (found - wanted, "is one too many")):
        if entries:
            rank, action = min(entries, key=lambda entry: (entry[0], str(entry[1])))
            return Finding("messages", False, f"rank {rank}: the {_words(action)} {words}")
    return Finding("messages", True, numbered(sum(wanted.values()) // 2, "message"))


def _judge_order(given: Schedule, made: Schedule) -> Finding:
    """A value is sent after it is made and received before it is used; a pair of ranks agrees about the order."""
    sends: dict[tuple[int, int], list] = {}
    receives: dict[tuple[int, int], list] = {}
    for rank, actions in enumerate(made.actions):
        here = set()
        for index, action in enumerate(actions):
            if isinstance(action, Send) and action.value not in here:
                return Finding("order", False, f"rank {rank}, action {index}: {_words(action)} before it is made")
            needs = [value for step in action.steps for value in given.needs(step)]
            if any(value not in here for value in needs):
                missing = next(value for value in needs if value not in here)
                return Finding(
                    "order", False, f"rank {rank}, action {index}: {action} before the {missing} is received"
                )
            here |= {given.makes(step) for step in action.steps}
            if isinstance(action, Receive):
                here.add(action.value)
                receives.setdefault((action.peer, rank), []).append(action.value)
            elif isinstance(action, Send):
                sends.setdefault((rank, action.peer), []).append(action.value)
    for (source, rank), values in sends.items():
        for one, other in zip(values, receives[source, rank], strict=True):
            if one != other:
                return Finding("order", False, f"rank {source} sends the {one}, where rank {rank} receives the {other}")
    return Finding("order", True, "the same at both ends")


def _judge_deadlock(given: Schedule, made: Schedule) -> Finding:
    """With sends that wait for their receive, all ranks come to their ends."""
    at = [0] * made.num_ranks

    def head(rank: int) -> Any:
        return made.actions[rank][at[rank]] if at[rank] < len(made.actions[rank]) else None

    went_on = True
    while went_on:
        went_on = False
        for rank in range(made.num_ranks):
            action = head(rank)
            if isinstance(action, Send) and head(action.peer) == Receive(action.value, rank):
                at[action.peer] += 1
                at[rank] += 1
                went_on = True
            elif action is not None and not isinstance(action, Send | Receive):
                at[rank] += 1
                went_on = True
    waiting = [rank for rank in range(made.num_ranks) if head(rank) is not None]
    if not waiting:
        return Finding("deadlock", True, "every rank comes to its end")
    words = [f"rank {rank} is at action {at[rank]}, {_words(head(rank))}" for rank in waiting[:3]]
    look = "Who has to begin, so that somebody receives?"
    return Finding(
        "deadlock", False, f"with sends that block {len(waiting)} ranks wait for ever", "\n".join(words), look
    )


def _words(action: Any) -> str:
    if isinstance(action, Send):
        return f"send of the {action.value} to rank {action.peer}"
    if isinstance(action, Receive):
        return f"receive of the {action.value} from rank {action.peer}"
    return str(action)


def _judge_run(case: Ordered, made: Schedule, outcomes: list) -> Finding:
    if faults := find_faults(made):
        return Finding("gradient", False, f"it cannot be executed: {faults[0]}")
    wanted = [staged.expected(made.stages_of(rank), made.num_stages, case.m, case.seed) for rank in range(case.p)]
    return compare_all("gradient", [outcome.get("gradient") for outcome in outcomes], wanted, "layers")


def _blocking(
    schedule: Schedule, stages: dict, inputs: list, loss: Any, group: Any, template: torch.Tensor
) -> dict[int, torch.Tensor]:
    """A small executor of whole backwards, in which every send and receive blocks."""
    last, here, kept, losses = schedule.num_stages - 1, {}, {}, {}
    for action in schedule.actions[group.rank()]:
        if isinstance(action, Send):
            dist.send(here.pop(action.value).contiguous(), group=group, group_dst=action.peer)
        elif isinstance(action, Receive):
            here[action.value] = torch.empty_like(template)
            dist.recv(here[action.value], group=group, group_src=action.peer)
        for step in action.steps:
            key = step.stage, step.microbatch
            if step.letter == "F":
                x = inputs[key[1]] if key[0] == 0 else here.pop(schedule.needs(step)[0]).requires_grad_()
                y = stages[key[0]](x)
                if key[0] == last:
                    losses[key[1]] = y = loss(y, key[1])
                kept[key] = x, y
                here[schedule.makes(step)] = y.detach()
            else:
                x, y = kept.pop(key)
                y.backward(here.pop(schedule.needs(step)[1]) if key[0] < last else None)
                here[schedule.makes(step)] = x.grad
    return losses
