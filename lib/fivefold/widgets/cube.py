"""The widget of lesson 01: the work cube, its blocks, and the servers that work on them."""

from __future__ import annotations

from typing import Any

from fivefold import plots
from fivefold.layout import Layout, LayoutError
from fivefold.widgets.live import choice, explore

DEGREES = {
    "dp": [1, 2, 3, 4, 6, 8, 16, 32],
    "cp": [1, 2, 3, 4, 8, 16],
    "pp": [1, 2, 3, 4, 6, 8, 16],
    "tp": [1, 2, 3, 4, 6, 8, 16],
    "ep": [1, 2, 3, 4, 6, 8, 16, 32],
}
NAMES = {"dp": "Data", "cp": "Context", "pp": "Pipeline", "tp": "Tensor", "ep": "Expert"}


def work_cube(layout: str = "dp4,pp2,tp4", rank: int = 0) -> None:
    """Show the cube cut by a layout, with a slider for each of the five degrees, and one for the rank.

    Degrees that cannot be together say why, in the figure's place. The cube has 64 sequences of 8,192 tokens, and 12
    layers; a server has 8 GPUs.
    """
    given = Layout.parse(layout)
    controls = {axis: choice(NAMES[axis], DEGREES[axis], getattr(given, axis)) for axis in DEGREES}
    ranks = choice("rank", _ranks(given), rank)
    for axis in DEGREES:
        controls[axis].observe(lambda _: _follow(ranks, controls), "value")
    explore(_draw, controls | {"rank": ranks})


def _draw(rank: int, **degrees: int) -> plots.Figure:
    layout = Layout(**degrees)
    return plots.work_cube(layout, min(rank, layout.world_size - 1))


def _ranks(layout: Layout) -> list[int]:
    """Every rank, or 64 of them, so that a slider can hit each."""
    step = max(1, layout.world_size // 64)
    return list(range(0, layout.world_size, step))


def _follow(ranks: Any, controls: dict[str, Any]) -> None:
    """Another layout has other ranks; the slider stays where it is as far as it can."""
    try:
        options = _ranks(Layout(**{axis: control.value for axis, control in controls.items()}))
    except LayoutError:
        return
    value = max(r for r in options if r <= ranks.value)
    ranks.options = [(f"{r:,}", r) for r in options]
    ranks.value = value
