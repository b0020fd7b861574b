"""Idle time against memory: a dot for each schedule, for what schedules of a pipeline are chosen by."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib

from fivefold.plots.style import INK, PIPELINE, RC, RULE, SOFT, Figure, Sheet, duration

DARK_PIPELINE = "#8E3F6B"  # the axis's colour, dark enough for small marks on paper


@matplotlib.rc_context(RC)
def bubble_and_memory(points: Mapping[str, tuple[float, float]], title: str = "") -> Figure:
    """Draw each schedule's peak of activations to the right and its bubble upwards; nearer to the corner is better.

    points: by name of the schedule, (activations at the peak, in micro-batches of all of a rank's layers; idle steps of
    the rank that idles longest, by the clock that is stated of the schedule). Raises ValueError for no points.
    """
    if not points:
        raise ValueError("there are no schedules to draw: give at least one")
    points = {name: (round(memory, 2), round(idle, 2) + 0.0) for name, (memory, idle) in points.items()}
    sheet = Sheet(title or _title(points), 7.0, 2.9, left=0.75, right=0.9, bottom=0.6)
    axes = sheet.axes
    most, longest = (max(pair[i] for pair in points.values()) for i in (0, 1))
    axes.set(xlim=(0, most * 1.35 or 1), ylim=(-0.06 * (longest or 1), (longest or 1) * 1.12))
    axes.set_xlabel("activations at the peak, in micro-batches of a rank's layers")
    axes.set_ylabel("idle steps of a rank, by the paper's clock")
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    there: dict[tuple[float, float], list[str]] = {}
    for name, (memory, idle) in points.items():
        there.setdefault((memory, idle), []).append(name)
    for (memory, idle), names in there.items():
        axes.plot([memory], [idle], "o", markersize=8, color=PIPELINE, markeredgecolor=DARK_PIPELINE, clip_on=False)
        style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": INK}
        axes.annotate(" and ".join(names), (memory, idle), (9, 6), ha="left", fontweight="bold", **style)
        words = f"{idle:.3g} idle, {memory:.3g} kept"
        axes.annotate(words, (memory, idle), (9, -6), ha="left", **(style | {"color": SOFT, "fontsize": 8}))
    return Figure(sheet.figure, _alt(points))


def _title(points: Mapping[str, tuple[float, float]]) -> str:
    """The schedule that idles least, and of those the one that keeps least."""
    best = min(points, key=lambda name: points[name][::-1])
    memory, idle = points[best]
    return f"{best} idles for {duration(idle, '')} by its paper's clock, and keeps {memory:g} micro-batches"


def _alt(points: Mapping[str, tuple[float, float]]) -> str:
    words = [f"{name} idles for {duration(idle, '')} and keeps {memory:g}" for name, (memory, idle) in points.items()]
    return f"Idle time against activations at the peak: {'; '.join(words)}."
