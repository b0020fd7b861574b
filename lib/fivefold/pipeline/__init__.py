"""Pipeline parallelism: the model cut into stages, one after the other, each on its own rank.

A schedule is one object that is printed, compared, simulated, drawn and executed. Nothing here needs torch.
"""

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
from fivefold.pipeline.messages import order_messages
from fivefold.pipeline.partition import partition_layers
from fivefold.pipeline.schedule import gpipe, interleaved, naive, one_f_one_b
from fivefold.pipeline.simulate import Durations, Event, Simulation, marginal_idle, simulate
from fivefold.pipeline.validate import Fault, InvalidSchedule, find_faults, validate
from fivefold.pipeline.zero_bubble import dualpipe, zb_h1, zb_h2, zb_v

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
    "simulate",
    "straight",
    "v_shaped",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
