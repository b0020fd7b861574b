"""The layout planner: which layouts fit a model on a cluster, how long a step of each takes, and why.

    model, work = plan.MODELS["llama3-405b"], plan.Work(tokens=2**24, context=8192)
    best, *others = plan.search(model, work, 16384, plan.cluster("llama3"))
    print(plan.explain(model, best.plan, work, plan.cluster("llama3")))

`model` says what is trained, `layout` what can be chosen, `links` which axis gets which link, `memory` what fits,
`compute` and `time` how long it takes, `search` tries all. `published` compares with 26 published runs: one number is
fitted for each GPU type, the share of its peak that matrix products reach. Everything else is a formula of `cost`, a
maker's figure in `runtime.cluster`, or a number with its source beside it.
"""

from fivefold.plan.compute import layer_seconds
from fivefold.plan.explain import explain, table
from fivefold.plan.layout import Plan, check, stage_layers
from fivefold.plan.links import exchange_seconds, place, sharing
from fivefold.plan.memory import RESERVE, Memory, fits, layer_bytes, rank_parameters
from fivefold.plan.model import (
    COMPILED,
    COURSE,
    DEEPSPEED_2021,
    EAGER,
    EFFICIENCY,
    MEGATRON_2021,
    MODELS,
    MODERN,
    Model,
    Software,
    Work,
    cluster,
    gpt,
)
from fivefold.plan.search import Choice, Options, cuts, filled, search, survey, tunings
from fivefold.plan.time import (
    TAKEN,
    Seconds,
    Stage,
    data_seconds,
    message_seconds,
    optimizer_seconds,
    stage_seconds,
    state_seconds,
    step_seconds,
)


def forget() -> None:
    """Empty the planner's caches, so that a search can be timed from nothing."""
    from fivefold.plan import compute, layout, links, memory, search, time

    for module in (compute, layout, links, memory, search, time):
        for item in vars(module).values():
            if hasattr(item, "cache_clear"):
                item.cache_clear()


__all__ = [
    "COMPILED",
    "COURSE",
    "DEEPSPEED_2021",
    "EAGER",
    "EFFICIENCY",
    "MEGATRON_2021",
    "MODELS",
    "MODERN",
    "RESERVE",
    "TAKEN",
    "Choice",
    "Memory",
    "Model",
    "Options",
    "Plan",
    "Seconds",
    "Software",
    "Stage",
    "Work",
    "check",
    "cluster",
    "cuts",
    "data_seconds",
    "exchange_seconds",
    "explain",
    "filled",
    "fits",
    "forget",
    "gpt",
    "layer_bytes",
    "layer_seconds",
    "message_seconds",
    "optimizer_seconds",
    "place",
    "rank_parameters",
    "search",
    "sharing",
    "stage_layers",
    "stage_seconds",
    "state_seconds",
    "step_seconds",
    "survey",
    "table",
    "tunings",
]
