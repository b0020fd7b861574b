"""Schedules as plain data, which is all that comes back from a rank."""

from __future__ import annotations

from typing import Any

from fivefold.pipeline import (
    Backward,
    Forward,
    InputGradient,
    Overlapped,
    Receive,
    Schedule,
    Send,
    Value,
    WeightGradient,
)

KINDS = {kind.letter: kind for kind in (Forward, Backward, InputGradient, WeightGradient)}


def encode(schedule: Any) -> Any:
    """A schedule as plain data, to come back from a rank; for anything else, what it is."""
    if not isinstance(schedule, Schedule):
        return f"a {type(schedule).__name__}" if schedule is not None else "None"
    lists = [[_code(action) for action in actions] for actions in schedule.actions]
    routes = [list(map(int, route)) for route in schedule.routes]
    return {"name": str(schedule.name), "m": int(schedule.num_microbatches), "routes": routes, "lists": lists}


def decode(made: Any) -> Schedule:
    """The schedule that was encoded; ValueError where it was none."""
    if not isinstance(made, dict):
        raise ValueError(f"it is {made}, expected a Schedule")
    return Schedule(made["name"], made["m"], made["routes"], [[_action(c) for c in own] for own in made["lists"]])


class _Unknown:
    """An entry of a list that is no action."""

    steps = ()

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _code(action: Any) -> list:
    if isinstance(action, Overlapped):
        return ["&", _code(action.forward), _code(action.backward)]
    if isinstance(action, Send | Receive):
        return [type(action).__name__, *action.value, action.peer]
    if type(action) in KINDS.values() and type(action.stage) is int and type(action.microbatch) is int:
        return [action.letter, action.stage, action.microbatch]
    return ["?", repr(action)[:60]]


def _action(code: list) -> Any:
    kind, *rest = code
    if kind == "&":
        return Overlapped(*map(_action, rest))
    if kind in ("Send", "Receive"):
        *value, peer = rest
        return {"Send": Send, "Receive": Receive}[kind](Value(*value), peer)
    return KINDS[kind](*rest) if kind in KINDS else _Unknown(*rest)
