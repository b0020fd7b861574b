"""Static figures of a run: who computed when, what travelled where, what was kept.

    timeline(replay(ledger, cluster("h100")))     rows of ranks, time to the right
    traffic(ledger)                               bytes from every rank to every other
    traffic_by_axis(ledger, formulas)             bytes by operation and group, beside the formula
    memory(ledger)                                bytes saved for backward, as the program goes on
    layouts(ledgers, cluster)                     layouts side by side: memory, bytes by axis, time
    activation_memory(t, layer, tokens, …)        what a rank keeps of a layer, by number of ranks
    column_row_pair(t, tokens, h, cluster)        two matrices over t ranks: what each holds, what travels, how long
    work_cube(layout, rank)                       sequences x tokens x layers in blocks, and the servers under them
    data_parallel_limits(ranks, states, …)        memory, batch and gradient sync, as ranks are added
    kept_by_stage(measured, formula, title)       parameters, gradients and optimizer states held, beside a formula
    expert_load({name: steps})                    the share of choices by expert and step
    dropped_choices(factors, {name: shares})      the share of choices dropped, by capacity factor
    tokens_to_experts(stage, ranks, top_k, …)     tokens on their way to experts: scores, capacity, there and back
    ring_all_reduce(n, step, numbers)             a ring, step by step: which sums each rank holds of each piece
    zero_memory(parameters, ranks, stage, …)      what ZeRO leaves on a rank, by stage and by number of ranks
    plans(choices)                                plans of a search: where a step's time goes, and the memory
    bytes_moved(moved, tokens, marks)             a pipeline's and ZeRO-3's bytes by tokens a step, and where they cross
    predictions(points)                           predicted over reported, with a band of 10%
    ring_attention(n, step, mask, slope)          a ring of blocks: which one is where, one row's maximum and sum
    causal_work(n, order, rank)                   a causal mask in chunks, and the work of each rank
    work_by_rank(work)                            each rank's work in several orders, beside an even share
    overlap_condition(gpus, published, tried)     how long a block must be for its transfer to hide
    bubble_and_memory(points)                     pipeline schedules: how long ranks idle, and what they keep
    schedule(schedule, durations)                 a pipeline schedule and what ranks keep; what is wrong, crossed out
    schedule_of(function, p, m)                   the same of what a function gives, or a line that says why not

Each returns a `Figure`: a notebook shows it with its alt text, `save(path)` writes it as PNG, SVG or PDF.
"""

from fivefold.plots.activations import activation_memory
from fivefold.plots.blocks import ring_attention
from fivefold.plots.causal import causal_work, work_by_rank
from fivefold.plots.condition import overlap_condition
from fivefold.plots.cube import work_cube
from fivefold.plots.curves import memory
from fivefold.plots.gantt import timeline, timeline_of_schedule
from fivefold.plots.layouts import layouts
from fivefold.plots.limits import data_parallel_limits
from fivefold.plots.load import dropped_choices, expert_load
from fivefold.plots.matrix import traffic, traffic_by_axis
from fivefold.plots.pair import column_row_pair
from fivefold.plots.pipeline import schedule, schedule_of
from fivefold.plots.plans import bytes_moved, plans, predictions
from fivefold.plots.ring import ring_all_reduce
from fivefold.plots.routes import tokens_to_experts
from fivefold.plots.style import Figure, axis_colour
from fivefold.plots.tradeoff import bubble_and_memory
from fivefold.plots.zero import kept_by_stage, zero_memory

__all__ = [
    "Figure",
    "activation_memory",
    "axis_colour",
    "bubble_and_memory",
    "bytes_moved",
    "causal_work",
    "column_row_pair",
    "data_parallel_limits",
    "dropped_choices",
    "expert_load",
    "kept_by_stage",
    "layouts",
    "memory",
    "overlap_condition",
    "plans",
    "predictions",
    "ring_all_reduce",
    "ring_attention",
    "schedule",
    "schedule_of",
    "timeline",
    "timeline_of_schedule",
    "tokens_to_experts",
    "traffic",
    "traffic_by_axis",
    "work_by_rank",
    "work_cube",
    "zero_memory",
]
