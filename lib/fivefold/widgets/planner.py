"""The widget of lesson 10: the layouts of a model on a cluster, ranked."""

from __future__ import annotations

from collections.abc import Callable

from fivefold import plan, plots
from fivefold.widgets.live import choice, explore, switch

GPUS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
CONTEXTS = [2048, 4096, 8192, 32768, 131072, 460800]
BATCHES = [1 << power for power in range(19, 25)]  # tokens, rounded to whole sequences
RECOMPUTE = ("choose", "none", "full")


def planner(
    model: str = "llama3-405b", gpus: int = 16384, context: int = 131072, search: Callable = plan.search
) -> None:
    """Show the fastest plans, with controls for model, GPUs, context, batch, cluster and recomputation.

    One row a layout: its best plan. `search` may be the learner's own.
    """

    def draw(model: plan.Model, gpus: int, context: int, batch: int, cluster: str, recompute: str) -> plots.Figure:
        return draw_plans(model, gpus, context, batch, cluster, recompute, search)

    names = {name: made for name, made in plan.MODELS.items() if name != "gpt-18b"}
    controls = {
        "model": choice("model", names, names[model]),
        "gpus": choice("GPUs", GPUS, gpus),
        "context": choice("context", CONTEXTS, context),
        "batch": choice("tokens a step", {f"{size / 1e6:.1f} million": size for size in BATCHES}, BATCHES[-1]),
        "cluster": switch("cluster", ["llama3", "h100", "a100", "h200"]),
        "recompute": switch("recompute", list(RECOMPUTE)),
    }
    explore(draw, controls)


def draw_plans(
    model: plan.Model, gpus: int, context: int, batch: int, cluster: str, recompute: str, search: Callable = plan.search
) -> plots.Figure:
    """The figure for one setting of the controls. Raises ValueError where nothing fits."""
    again = ("none", "full") if recompute == "choose" else (recompute,)
    options = plan.Options(zero=(1, 3), schedules=("one_f_one_b", "interleaved"), recompute=again)
    work = plan.Work(max(1, batch // context) * context, context)
    found = search(model, work, gpus, plan.cluster(cluster), options=options)
    best = {choice.plan.layout: choice for choice in reversed(found)}
    return plots.plans(sorted(best.values(), key=lambda choice: choice.seconds.total))
