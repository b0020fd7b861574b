"""Figures with controls: every one is a figure of `plots` that is drawn again when a control is moved.

    activation_memory()          what a rank keeps of a layer, by number of ranks, and the price of keeping less
    column_row_pair()            two matrices over t ranks: what a rank holds, what travels, how long it takes
    work_cube()                  the work cube in blocks, and the servers under them, by the five degrees
    replayed(ledger)             the timeline of a measured run on other GPUs and servers
    planner()                    the layouts of a model on a cluster, ranked: time by part, and memory
    ring_all_reduce()            a ring, step by step: which sums each rank holds of each piece
    zero_memory()                what ZeRO leaves on a rank, by stage and by number of ranks
    ring_attention()             a ring of blocks, step by step: which one is where, one row's maximum and sum
    causal_work()                a causal mask in chunks, and each rank's work before and after zig-zag
    tokens_to_experts()          tokens on their way to experts: scores, top-k, capacity, dispatch, combine
    schedules()                  pipeline schedules by size and durations, step by step, with their memory

The picture stands in the notebook by itself, so that it is there without a running kernel too.
"""

from fivefold.widgets.activations import activation_memory
from fivefold.widgets.attention import causal_work, ring_attention
from fivefold.widgets.cube import work_cube
from fivefold.widgets.explorer import schedules
from fivefold.widgets.pair import column_row_pair
from fivefold.widgets.planner import planner
from fivefold.widgets.replayed import replayed
from fivefold.widgets.ring import ring_all_reduce
from fivefold.widgets.routes import tokens_to_experts
from fivefold.widgets.zero import zero_memory

__all__ = [
    "activation_memory",
    "causal_work",
    "column_row_pair",
    "planner",
    "replayed",
    "ring_all_reduce",
    "ring_attention",
    "tokens_to_experts",
    "schedules",
    "work_cube",
    "zero_memory",
]
