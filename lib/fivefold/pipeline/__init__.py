"""Pipeline parallelism: the model cut into stages, one after the other, each on its own rank.

A schedule is one object that is printed, compared, simulated, drawn and executed. Torch is loaded for the last alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.pipeline.actions import (
    Action,
    Backward,
    Forward,
    InputGradient,
    Overlapped,
    Receive,
    Schedule,
    Send,
    Value,
    WeightGradient,
    both_ways,
    in_order,
    looped,
    straight,
    v_shaped,
)
from fivefold.pipeline.messages import order_messages, with_messages
from fivefold.pipeline.partition import partition_layers
from fivefold.pipeline.schedule import gpipe, interleaved, naive, one_f_one_b
from fivefold.pipeline.simulate import Durations, Event, Simulation, marginal_idle, simulate
from fivefold.pipeline.validate import Fault, InvalidSchedule, find_faults, validate
from fivefold.pipeline.zero_bubble import dualpipe, zb_h1, zb_h2, zb_v

if TYPE_CHECKING:
    from fivefold.pipeline.backward import split_backward
    from fivefold.pipeline.copies import sum_copies
    from fivefold.pipeline.execute import run
    from fivefold.pipeline.values import Values

__all__ = [
    "Action",
    "Backward",
    "Durations",
    "Event",
    "Fault",
    "Forward",
    "InputGradient",
    "InvalidSchedule",
    "Overlapped",
    "Receive",
    "Schedule",
    "Send",
    "Simulation",
    "Value",
    "Values",
    "WeightGradient",
    "both_ways",
    "dualpipe",
    "find_faults",
    "gpipe",
    "in_order",
    "interleaved",
    "looped",
    "marginal_idle",
    "naive",
    "one_f_one_b",
    "order_messages",
    "partition_layers",
    "run",
    "simulate",
    "split_backward",
    "straight",
    "sum_copies",
    "v_shaped",
    "validate",
    "with_messages",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_WITH_TORCH = {"Values": "values", "run": "execute", "split_backward": "backward", "sum_copies": "copies"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    globals()[name] = value
    return value
