"""The widget of lesson 03: data flow through a column-row pair, by number of ranks."""

from __future__ import annotations

from fivefold import plots
from fivefold.runtime.cluster import cluster
from fivefold.widgets.live import choice, explore, switch

DEGREES = [1, 2, 4, 8, 16]


def column_row_pair(t: int = 4) -> None:
    """Show two matrices over `t` ranks (1, 2, 4, 8 or 16), with controls for ranks, tokens, h, servers and the way."""

    def draw(t: int, tokens: int, h: int, gpus_per_server: int, way: str) -> plots.Figure:
        machines = cluster("h100", gpus_per_server=gpus_per_server)
        return plots.column_row_pair(t, tokens, h, machines, way, DEGREES)

    controls = {
        "t": choice("ranks t", DEGREES, t),
        "h": choice("hidden size h", [1024, 2048, 4096, 8192, 12288, 16384], 4096),
        "tokens": choice("tokens b·s", [512, 2048, 8192, 32768], 2048),
        "gpus_per_server": choice("GPUs a server", [1, 2, 4, 8], 8),
        "way": switch("", ["forward", "backward"]),
    }
    explore(draw, controls)
