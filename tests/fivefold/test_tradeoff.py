"""The figure of idle time against memory: it says in words what it draws, and every dot is at its numbers."""

from __future__ import annotations

import pytest
from fivefold import plots

POINTS = {"1F1B": (4, 9.0), "ZB-H2": (7, 1e-6), "ZB-V": (4, 0.0), "DualPipe": (5, 2.0)}


def test_dots_are_at_their_numbers():
    """One dot for each schedule, memory to the right, idle time upwards."""
    axes = plots.bubble_and_memory(POINTS).figure.axes[0]
    dots = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines}
    assert dots == {(4, 9), (7, 0), (4, 0), (5, 2)}


def test_the_title_names_the_best():
    """The schedule that idles least, and of two that idle alike the one that keeps less; alt text has all numbers."""
    figure = plots.bubble_and_memory(POINTS)
    title = figure.figure.texts[0].get_text()
    assert title.startswith("ZB-V idles for 0 steps") and "keeps 4 micro-batches" in title
    assert "1F1B idles for 9 steps and keeps 4" in figure.alt and "ZB-H2 idles for 0 steps and keeps 7" in figure.alt


def test_schedules_at_one_place_share_a_label():
    """Names are joined, not written over each other."""
    axes = plots.bubble_and_memory({"GPipe": (4, 9.0), "1F1B": (4, 9.0)}).figure.axes[0]
    assert "GPipe and 1F1B" in [text.get_text() for text in axes.texts]


def test_nothing_to_draw_is_one_line():
    """No points are refused."""
    with pytest.raises(ValueError, match="at least one"):
        plots.bubble_and_memory({})
