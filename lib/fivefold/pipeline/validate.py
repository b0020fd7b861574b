"""Which rules a schedule breaks, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fivefold.pipeline.actions import (
    KINDS,
    Action,
    AnyAction,
    Backward,
    Forward,
    InputGradient,
    Receive,
    Schedule,
    Send,
    Value,
    WeightGradient,
    is_computation,
)
from fivefold.pipeline.simulate import simulate


@dataclass(frozen=True)
class Fault:
    """One broken rule. `index` counts the rank's actions from 0; it is None where an action is missing."""

    rank: int
    index: int | None
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}{'' if self.index is None else f', action {self.index}'}: {self.reason}"


class InvalidSchedule(ValueError):
    """A schedule that breaks a rule; `faults` holds all that were found."""

    def __init__(self, schedule: Schedule, faults: list[Fault]) -> None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{schedule.name} is not valid: {faults[0]}{more}")
        self.faults = faults


def validate(schedule: Schedule) -> None:
    """Raise InvalidSchedule with the first broken rule where there is one."""
    if faults := find_faults(schedule):
        raise InvalidSchedule(schedule, faults)


def find_faults(schedule: Schedule) -> list[Fault]:
    """Every broken rule of a schedule, the earliest action first, missing actions last; empty where it is valid.

    The rules: actions are on the ranks that hold their stages; each stage does one forward and one backward (or input
    and weight gradient) of each micro-batch, in that order; every value that another rank needs is sent and received
    once, in the same order at both ends (only where the lists hold messages); no rank waits for ever.
    Only where all else holds is the last one tried, since any other fault can make ranks wait.
    """
    ranks = range(schedule.num_ranks)
    faults = [fault for rank in ranks for fault in _misplaced(schedule, rank)]
    if not faults:
        faults = [fault for rank in ranks for fault in _out_of_order(schedule, rank) + _missing(schedule, rank)]
    if not faults and schedule.has_messages:
        faults = _messages(schedule)
    if not faults:
        faults = _waiting(schedule)
    return sorted(faults, key=lambda f: (f.index is None, f.index, f.rank))


def _misplaced(schedule: Schedule, rank: int) -> list[Fault]:
    """Entries that are no action, and those whose stage or micro-batch does not exist or is not on this rank."""
    wrong = [
        (index, action)
        for index, action in enumerate(schedule.actions[rank])
        if not isinstance(action, Send | Receive) and not schedule.holds(rank, action)
    ]
    return [Fault(rank, index, _misfit(schedule, rank, action)) for index, action in wrong]


def _misfit(schedule: Schedule, rank: int, action: AnyAction) -> str:
    for step in action.steps if is_computation(action) else ():
        if step.microbatch not in range(schedule.num_microbatches):
            return f"there is no micro-batch {step.microbatch}: the last is {schedule.num_microbatches - 1}"
        if step.stage not in range(schedule.num_stages):
            return f"there is no stage {step.stage}: the last is {schedule.num_stages - 1}"
        if rank != (home := schedule.rank_of(step.stage, step.microbatch)):
            return f"{step.title} of micro-batch {step.microbatch} on stage {step.stage}, which is on rank {home}"
    return f"{action!r} is not an action"


def _name(schedule: Schedule, step: Action) -> str:
    """Such as "input gradient of micro-batch 3", with the stage where the rank has several."""
    rank = schedule.rank_of(step.stage, step.microbatch)
    stage = f" on stage {step.stage}" if len(schedule.stages_of(rank)) > 1 else ""
    return f"{step.title} of micro-batch {step.microbatch}{stage}"


def _out_of_order(schedule: Schedule, rank: int) -> list[Fault]:
    """Steps done twice, and backwards and weight gradients before what they follow."""
    faults = []
    listed = {step for action in schedule.actions[rank] for step in action.steps}
    seen: dict[Action, int] = {}
    for index, action in enumerate(schedule.actions[rank]):
        for step in action.steps:
            place = (step.stage, step.microbatch)
            full, first = Backward(*place), Forward(*place)
            before = InputGradient(*place) if isinstance(step, WeightGradient) else first
            name = _name(schedule, step)
            if step in seen:
                faults.append(Fault(rank, index, f"{name} a second time, after action {seen[step]}"))
            elif isinstance(step, InputGradient | WeightGradient) and full in listed:
                faults.append(Fault(rank, index, f"{name}, which its whole backward does already"))
            elif not isinstance(step, Forward) and before in listed and before not in seen:
                faults.append(Fault(rank, index, f"{name} before its {before.title}"))
            seen.setdefault(step, index)
    return faults


def _missing(schedule: Schedule, rank: int) -> list[Fault]:
    """Steps that some micro-batch on some stage of this rank never gets."""
    listed = {step for action in schedule.actions[rank] for step in action.steps}
    faults = []
    for stage in schedule.stages_of(rank):
        for microbatch in range(schedule.num_microbatches):
            if schedule.rank_of(stage, microbatch) != rank:
                continue
            forward, backward, inputs, weights = (kind(stage, microbatch) for kind in KINDS)
            lacking = [] if forward in listed else [forward]
            if not listed & {backward, inputs, weights}:
                lacking.append(backward)
            elif backward not in listed:
                lacking += [step for step in (inputs, weights) if step not in listed]
            faults += [Fault(rank, None, f"{_name(schedule, step)} is missing") for step in lacking]
    return faults


def _messages(schedule: Schedule) -> list[Fault]:
    """Messages that are missing, in excess, or in another order at the other end."""
    wanted = Counter()
    for rank, actions in enumerate(schedule.actions):
        for value in (schedule.makes(step) for action in actions for step in action.steps):
            peer = schedule.receiver(value) if value else None
            if peer is not None:
                wanted[rank, Send(value, peer)] += 1
                wanted[peer, Receive(value, rank)] += 1
    faults = []
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if isinstance(action, Send | Receive):
                wanted.subtract([(rank, action)])
                if wanted[rank, action] < 0:
                    why = "a second time" if action in actions[:index] else "which nobody needs"
                    faults.append(Fault(rank, index, f"{_message(action)}, {why}"))
    faults += [Fault(rank, None, f"{_message(action)} is missing") for (rank, action), n in wanted.items() if n > 0]
    return faults or _crossed(schedule)


def _message(action: Send | Receive) -> str:
    verb, preposition = ("send", "to") if isinstance(action, Send) else ("receive", "from")
    return f"{verb} the {action.value} {preposition} rank {action.peer}"


def _crossed(schedule: Schedule) -> list[Fault]:
    """For each pair of ranks, the first receive that is not what the other rank sends at that point."""
    sends, receives = {}, {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if isinstance(action, Send):
                sends.setdefault((rank, action.peer), []).append(action.value)
            elif isinstance(action, Receive):
                receives.setdefault((action.peer, rank), []).append((index, action))
    faults = []
    for (source, rank), arrivals in receives.items():
        for value, (index, action) in zip(sends[source, rank], arrivals, strict=True):
            if value != action.value:
                faults.append(Fault(rank, index, f"{_message(action)}, which sends the {value} first"))
                break
    return faults


def _waiting(schedule: Schedule) -> list[Fault]:
    """Once nobody can go on: the ranks that wait for themselves, or else each rank, and for what it waits."""
    waiting = simulate(schedule).waiting
    causes = {rank: _cause(schedule, waiting, rank) for rank in waiting}
    alone = [rank for rank, (source, _) in causes.items() if source == rank]
    return [Fault(rank, waiting[rank], causes[rank][1]) for rank in alone or waiting]


def _cause(schedule: Schedule, waiting: dict[int, int], rank: int) -> tuple[int, str]:
    """The rank for which this one waits, and the reason in words."""
    action = schedule.actions[rank][waiting[rank]]
    needed = [(_message(action), action.value)] if isinstance(action, Send) else []
    needed += [(_name(schedule, step), value) for step in action.steps for value in schedule.needs(step)]
    for what, value in needed:
        source, index = _supply(schedule, rank, value)
        if index >= waiting.get(source, len(schedule.actions[source])):
            who = "it" if source == rank else f"rank {source}"
            return source, f"{what} waits for the {value}, which {who} has only after action {index}"
    at = f"is at action {waiting[action.peer]}" if action.peer in waiting else "has finished"
    return action.peer, f"{_message(action)} waits for rank {action.peer}, which {at}"


def _supply(schedule: Schedule, rank: int, value: Value) -> tuple[int, int]:
    """The rank and the action from which a value comes: this rank's receive, or else the action that makes it."""
    for index, action in enumerate(schedule.actions[rank]):
        if isinstance(action, Receive) and action.value == value:
            return rank, index
    maker = schedule.rank_of(value.stage, value.microbatch)
    made = [[schedule.makes(step) for step in action.steps] for action in schedule.actions[maker]]
    return maker, next(index for index, values in enumerate(made) if value in values)
