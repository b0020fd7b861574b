"""Figures and the widget of the planner: what they draw is what they are given."""

from functools import partial

import pytest
from fivefold import cost, plan, plots
from fivefold.plots.plans import Point
from fivefold.widgets.planner import draw_plans

LLAMA, WORK = plan.MODELS["llama3-8b"], plan.Work(1 << 19, 8192)


def test_plans_are_drawn_with_their_numbers() -> None:
    """The title is a sentence about the fastest; the alt text has every row's parts and memory."""
    found = plan.search(LLAMA, WORK, 16, plan.cluster("h100"))
    figure = plots.plans(found, most=5)
    assert figure.alt.count(" of 75 GB") == 5 and str(found[4].plan) in figure.alt
    with pytest.raises(ValueError, match="nothing fits"):
        plots.plans([])


def test_where_two_ways_cross_is_where_the_formula_says() -> None:
    """The drawn crossing of pipeline and ZeRO-3 is 3Ψ(n-1)/(2nh)."""
    parameters, h, n = 175e9, 12288, 384
    tokens = [1 << power for power in range(16, 28)]
    figure = plots.bytes_moved(partial(_moved, parameters, h, n), tokens, {"batch": 3 << 20})
    expected = 3 * parameters * (n - 1) / (2 * n * h) / 1e6
    assert f"cross at {expected:.1f} million" in figure.alt


def _moved(parameters: float, h: int, n: int, tokens: int) -> tuple[float, float]:
    return cost.pipeline_vs_zero3(parameters, h, tokens, n)


def test_predictions_state_their_errors() -> None:
    """The title has the median and the largest error, the alt text the run that is furthest."""
    points = [Point("a", 100, 101, "x"), Point("b", 200, 230, "x"), Point("c", 300, 294, "y")]
    figure = plots.predictions(points)
    assert "furthest is b" in figure.alt and "Groups: x, y" in figure.alt


def test_the_widget_draws_one_row_a_layout() -> None:
    """Each layout once, the fastest first; where nothing fits it says so."""
    figure = draw_plans(LLAMA, 16, 8192, 1 << 20, "h100", "choose")
    layouts = [row.split(" ZeRO")[0] for row in figure.alt.split(". ", 1)[1].split("; ")]
    assert len(set(layouts)) == len(layouts) == 8
    with pytest.raises(ValueError, match="nothing fits"):
        draw_plans(plan.MODELS["gpt-1t"], 8, 2048, 1 << 20, "a100", "none")
