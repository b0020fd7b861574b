"""The figures and the widget of ZeRO: their numbers are the paper's, and those of the formulas."""

from __future__ import annotations

import pytest
from fivefold import cost, plots, widgets
from fivefold.plots import style
from fivefold.plots.zero import PARTS, kept_states, size
from fivefold.widgets import zero


def inside(figure):
    """Whether no text of a figure is cut off at its sides."""
    figure.figure.draw_without_rendering()
    texts = [text for text in figure.figure.findobj(style.matplotlib.text.Text) if text.get_text()]
    places = [text.get_window_extent() for text in texts if text.get_visible()]
    return all(place.x0 >= 0 and place.x1 <= figure.figure.bbox.x1 for place in places)


@pytest.mark.parametrize("k", [12, 8])
@pytest.mark.parametrize("stage", range(4))
def test_the_parts_are_the_formula(stage, k):
    """Parameters, gradients and optimizer states together are `zero_bytes`, for any number of ranks."""
    for ranks in (1, 3, 64):
        parts = kept_states(7.5e9, ranks, stage, k)
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == pytest.approx(cost.zero_bytes(7.5e9, ranks, stage, k))


def test_the_papers_numbers_stand_in_the_figure():
    """ZeRO's figure 1: 120, 31.4, 16.6 and 1.9 GB for 7.5B on 64 ranks; 41.3 and 15.1 GB of table 1 for stage 2."""
    figure = plots.zero_memory(7.5e9, 64, 2)
    words = [text.get_text() for text in figure.figure.axes[0].texts]
    for number in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "41.2 GB", "15.1 GB"):
        assert number in words and number in figure.alt
    assert size(0.12e9) == "0.12 GB" and size(15.6e12) == "15.6 TB" and size(30_000) == "30 kB"


def test_bars_have_the_length_of_what_they_stand_for():
    """On either side, in proportion to the bytes; the line stands where the GPU is full."""
    figure = plots.zero_memory(7.5e9, 16, 1, gpu_bytes=80e9)
    axes = figure.figure.axes[0]
    bars = [p for p in axes.patches if p.get_y() > 0.5]
    left, right = ([p for p in bars if (p.get_x() > 4.7) == side] for side in (False, True))
    stages = sum(cost.zero_bytes(7.5e9, 16, s) for s in range(4))
    ranks = sum(cost.zero_bytes(7.5e9, n, 1) for n in (1, 4, 16, 64, 256, 1024))
    scale = sum(p.get_width() for p in left) / stages
    assert sum(p.get_width() for p in right) / scale == pytest.approx(ranks)
    begin = min(p.get_x() for p in left)
    assert any(line.get_xdata()[0] == pytest.approx(begin + 80e9 * scale) for line in axes.lines)
    assert inside(figure)


def test_what_was_measured_stands_beside_the_formula():
    """Each bar as long as its bytes, each outline as its formula's; unlike names are refused."""
    measured = {"stage 1": {"parameters": 2e5, "gradients": 1e5, "optimizer": 3e5}}
    figure = plots.kept_by_stage(measured, {"stage 1": 3e5}, "A title")
    patches = [p for p in figure.figure.axes[0].patches if p.get_y() > 0.3]
    bar = sum(p.get_width() for p in patches if p.get_facecolor()[3])
    (outline,) = (p.get_width() for p in patches if not p.get_facecolor()[3])
    assert bar / outline == pytest.approx(2) and "600 kB, formula 300 kB" in figure.alt.replace("optimizer ", "") + str(
        [text.get_text() for text in figure.figure.axes[0].texts]
    )
    assert inside(figure)
    with pytest.raises(ValueError, match="give the same"):
        plots.kept_by_stage(measured, {"stage 2": 1.0}, "")


def test_the_three_limits_are_drawn_as_given():
    """Three panels with these values; a ratio of zero, on one rank, has no place on a logarithm."""
    ranks = [1, 8, 512]
    figure = plots.data_parallel_limits(ranks, [9e10, 1e10, 1e8], [3e10] * 3, ranks, [0.0, 0.1, 3.0], 512, 8e10, "T")
    memory, batch, sync = figure.figure.axes
    assert [list(line.get_ydata()) for line in memory.lines[:2]] == [[9e10, 1e10, 1e8], [3e10] * 3]
    assert list(batch.lines[0].get_ydata()) == ranks and list(sync.lines[0].get_ydata()) == [0.1, 3.0]
    assert "512 ranks: states" in figure.alt and inside(figure)
    with pytest.raises(ValueError, match="unlike lengths"):
        plots.data_parallel_limits(ranks, [1.0], [1.0] * 3, ranks, [1.0] * 3, 1, 1, "")


@pytest.mark.parametrize(("change", "message"), [({"stage": 4}, "no stage 4"), ({"ranks": 3}, "not among")])
def test_what_cannot_be_drawn_is_one_line(change, message):
    """Another stage, another number of ranks."""
    with pytest.raises(ValueError, match=message):
        plots.zero_memory(**({"parameters": 1e9, "ranks": 64, "stage": 1} | change))


def test_every_position_of_the_controls_can_be_drawn(monkeypatch):
    """Each control through all its values, the others where they begin: another picture each time, no text cut off."""
    seen = {}
    monkeypatch.setattr(zero, "explore", lambda draw, controls: seen.update(draw=draw, controls=controls))
    widgets.zero_memory(16)
    start = {name: control.value for name, control in seen["controls"].items()}
    assert start["ranks"] == 16 and start["stage"] == "stage 2"
    for name, control in seen["controls"].items():
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        figures = [seen["draw"](**(start | {name: value})) for value in values]
        assert len({figure.alt for figure in figures}) == len(values), name
        assert all(map(inside, figures)), name
