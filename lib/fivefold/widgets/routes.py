"""The widget of lesson 09: tokens on their way to experts, stage by stage."""

from __future__ import annotations

from fivefold import plots
from fivefold.plots.routes import ROUTERS, STAGES
from fivefold.widgets.live import choice, explore, switch


def tokens_to_experts(ranks: int = 4) -> None:
    """Show sixteen tokens on their way to four experts, with controls for stage, top_k, capacity, router and ranks."""
    stages = switch("stage", list(STAGES))
    stages.value = "dispatch"  # what shows most where nobody can move the controls
    controls = {
        "stage": stages,
        "top_k": choice("top_k", [1, 2, 3, 4], 2),
        "factor": choice("capacity factor", [0.5, 0.75, 1.0, 1.25, 1.5, 2.0], 1.0),
        "router": switch("router", list(ROUTERS)),
        "ranks": choice("ranks", [1, 2, 4], ranks),
    }
    explore(plots.tokens_to_experts, controls)
