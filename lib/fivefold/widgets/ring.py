"""The widget of lesson 00: a ring all-reduce, step by step."""

from __future__ import annotations

from typing import Any

from fivefold import plots
from fivefold.widgets.live import choice, explore


def ring_all_reduce(n: int = 4, step: int = 1) -> None:
    """Show what each of `n` ranks (2, 3, 4, 5 or 8) holds after a step, with controls for ranks, step and numbers."""
    ranks, steps = choice("ranks n", [2, 3, 4, 5, 8], n), choice("step", _steps(n), step)
    ranks.observe(lambda change: _restart(steps, change["new"]), "value")
    controls = {"n": ranks, "step": steps, "numbers": choice("numbers in x", [16, 12, 7, 3, 1], 12)}
    explore(lambda n, step, numbers: plots.ring_all_reduce(n, min(step, 2 * (n - 1)), numbers), controls)


def _restart(steps: Any, n: int) -> None:
    """Another ring has other steps; it begins at the beginning."""
    steps.options = [(f"{step}", step) for step in _steps(n)]


def _steps(n: int) -> list[int]:
    return list(range(2 * n - 1))
