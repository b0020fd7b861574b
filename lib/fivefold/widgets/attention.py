"""The widgets of lesson 05: a ring of blocks, step by step; a causal mask, and each rank's work in it."""

from __future__ import annotations

from typing import Any

from fivefold import plots
from fivefold.plots.blocks import MASKS
from fivefold.plots.causal import ORDERS
from fivefold.widgets.live import choice, explore, switch

SLOPES = {"falling": -1.0, "level": 0.0, "rising": 0.5, "rising fast": 3.0}  # with each key of the sequence


def ring_attention(n: int = 4, step: int = 1) -> None:
    """Show the block that each of `n` ranks (2, 3, 4 or 8) has after a step, and one row's running maximum and sum.

    There are controls for ranks, step, mask, and for how much scores grow along the sequence.
    """
    ranks, steps = choice("ranks n", [2, 3, 4, 8], n), choice("step", list(range(n)), step)
    ranks.observe(lambda change: _restart(steps, change["new"]), "value")
    controls = {
        "n": ranks,
        "step": steps,
        "slope": choice("scores", SLOPES, 0.5),
        "mask": switch("", list(MASKS), "9em"),
    }
    explore(lambda n, step, slope, mask: plots.ring_attention(n, min(step, n - 1), mask, slope), controls)


def causal_work(n: int = 4) -> None:
    """Show a causal mask over `n` ranks (2, 4 or 8), with controls for ranks, order and the rank that stands out."""
    ranks, rank = choice("ranks n", [2, 4, 8], n), choice("rank", list(range(n)), n - 1)
    ranks.observe(lambda change: _restart(rank, change["new"]), "value")
    controls = {"n": ranks, "rank": rank, "order": switch("", list(ORDERS), "8em")}
    explore(lambda n, rank, order: plots.causal_work(n, order, min(rank, n - 1)), controls)


def _restart(slider: Any, n: int) -> None:
    """Other ranks have other steps; the slider begins at the beginning."""
    slider.options = [(f"{value}", value) for value in range(n)]
