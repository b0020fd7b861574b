"""Figures: what they show is what was given, nothing is cut off, and nothing depends on colour alone."""

from __future__ import annotations

import base64
import functools
import html
import re

import pytest
from fivefold import plots
from fivefold.pipeline.schedule import interleaved, one_f_one_b
from fivefold.pipeline.simulate import simulate
from fivefold.plots import style
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import Communication, Computation, Ledger, Memory, RankLedger, Wait
from fivefold.runtime.replay import replay
from fivefold.runtime.timeline import Span, Timeline

CONTRAST = 4.5  # WCAG 2.2, 1.4.3: text against its ground


def training(world=4, layers=3):
    """Tensor parallelism in pairs with a gradient all-reduce over the other axis."""
    ranks = []
    for rank in range(world):
        own, handles = [], []
        tp, dp = (rank // 2 * 2, rank // 2 * 2 + 1), tuple(range(rank % 2, world, 2))
        for backward in (False, True):
            for _ in range(layers):
                own.append(Computation(len(own), flops=10**12, backward=backward, phase="" if backward else "forward"))
                own.append(Communication(len(own), "all_reduce", "tp", tp, 0, 40_000_000))
                if backward:
                    handles.append(len(own))
                    own.append(Communication(len(own), "all_reduce", "dp", dp, 0, 9_000_000, asynchronous=True))
        own += [Wait(len(own) + k, handle) for k, handle in enumerate(handles)]
        memory = Memory(timeline=[(0, 0), (1, 500), (3, 1500 + rank), (9, 0)])
        ranks.append(RankLedger(rank, own, memory))
    return Ledger(ranks)


DRAWN = {
    "replay": lambda: plots.timeline(replay(training(), cluster("h100"))),
    "schedule": lambda: plots.timeline(plots.timeline_of_schedule(simulate(interleaved(4, 8, 2)))),
    "many ranks": lambda: plots.timeline(replay(training(40, 2), cluster("h100"))),
    "traffic": lambda: plots.traffic(training()),
    "traffic of many": lambda: plots.traffic(training(40, 2), cluster("h100")),
    "by axis": lambda: plots.traffic_by_axis(training(), {("all_reduce", "tp"): (1e8, "formula · 2(n−1)/n · b·s·h")}),
    "memory": lambda: plots.memory(training(), replay(training(), cluster("h100"))),
    "memory by entry": lambda: plots.memory(training()),
    "micro-batches": lambda: microbatches(simulate(interleaved(4, 8, 2))),
    "pair": lambda: plots.column_row_pair(4, 2048, 4096, cluster("h100")),
    "pair of many": lambda: plots.column_row_pair(16, 32768, 16384, cluster("h100"), "backward"),
    "pair of one": lambda: plots.column_row_pair(1, 512, 1024, cluster("h100", gpus_per_server=1), "backward"),
    "ring": lambda: plots.ring_all_reduce(4, 2),
    "ring of many": lambda: plots.ring_all_reduce(8, 9, 5),
    "long title": lambda: plots.traffic(training(), title="A title longer than a small figure is wide, by far " * 2),
}


def microbatches(schedule):
    curves = {f"rank {rank}": schedule.memory(rank) for rank in range(4)}
    return plots.memory(curves, amount="micro-batches", end=schedule.makespan)


@functools.cache
def drawn(name):
    return DRAWN[name]()


def texts(figure):
    figure.figure.draw_without_rendering()
    found = [
        text for text in figure.figure.findobj(style.matplotlib.text.Text) if text.get_text() and text.get_visible()
    ]
    return [(text.get_text(), text.get_window_extent()) for text in found]


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_is_cut_off_and_none_lies_on_another(name):
    """Every label, title and number stands inside the figure, apart from the others."""
    figure = drawn(name)
    box, found = figure.figure.bbox, [item for item in texts(figure) if item[1].width > 0]
    for text, place in found:
        assert place.x0 >= 0 and place.y0 >= 0 and place.x1 <= box.x1 and place.y1 <= box.y1, text
    for k, (text, place) in enumerate(found):
        for other, where in found[k + 1 :]:
            apart = place.x1 <= where.x0 + 1 or where.x1 <= place.x0 + 1
            assert apart or place.y1 <= where.y0 + 2 or where.y1 <= place.y0 + 2, (text, other)


@pytest.mark.parametrize("name", DRAWN)
def test_a_notebook_shows_an_image_with_alt_text(name):
    """HTML with a PNG inside and an alt that says what is to be seen, in numbers; that text where HTML is not shown."""
    figure = drawn(name)
    bundle = figure._repr_mimebundle_()
    match = re.fullmatch(r'<img alt="([^"]*)" style="[^"]*" src="data:image/png;base64,([^"]*)">', bundle["text/html"])
    assert html.unescape(match[1]) == bundle["text/plain"] == repr(figure) == figure.alt
    assert base64.b64decode(match[2]).startswith(b"\x89PNG")
    assert len(figure.alt) > 40 and re.search(r"\d", figure.alt)


def test_figures_are_the_same_every_time():
    """Two drawings of one run are equal to the byte."""
    assert plots.timeline(replay(training(), cluster("h100"))).png() == drawn("replay").png()


def test_a_figure_is_saved_in_the_format_of_its_name(tmp_path):
    """PNG, SVG and PDF by their first bytes."""
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert drawn("by axis").save(tmp_path / f"f.{ending}").read_bytes().startswith(start)


def luminance(colour):
    """Relative luminance, WCAG 2.2."""
    rgb = style.matplotlib.colors.to_rgb(colour)
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_numbers_are_readable_on_their_ground_and_kinds_of_work_apart_in_grey():
    """Ink on light and paper on dark work reach WCAG's contrast; forward, weight and input gradient differ in grey."""
    for kind, ground in style.WORK.items():
        assert contrast(style.PAPER if kind in "BI" else style.INK, ground) >= CONTRAST
    assert contrast(style.SOFT, style.PAPER) >= CONTRAST
    light, middle, dark = (luminance(style.WORK[kind]) for kind in "FWI")
    assert light > 1.6 * middle and middle > 1.6 * dark


def test_axes_have_the_palette_of_okabe_and_ito_and_a_pattern_each():
    """The five colours that the course uses everywhere, whatever the group is called, and five different stripes."""
    names = {"dp": "#0072B2", "tensor": "#D55E00", "cp": "#009E73", "pp_0": "#CC79A7", "ep-1": "#E69F00"}
    for name, colour in names.items():
        assert plots.axis_colour(name) == colour
    assert plots.axis_colour("world") not in names.values()
    assert len({style.axis_stripes(name)["hatch"] for name in names}) == 5


def test_a_schedule_is_drawn_with_every_micro_batch_of_every_rank():
    """Each number stands on its rank's row as often as the schedule has an action for it."""
    p, m = 3, 5
    figure = plots.timeline(plots.timeline_of_schedule(simulate(one_f_one_b(p, m))))
    numbers = [text for text in figure.figure.axes[0].texts if text.get_text().isdigit()]
    for rank in range(p):
        row = [t.get_text() for t in numbers if rank <= t.get_position()[1] < rank + 1]
        assert sorted(row) == sorted(str(k) for k in range(m) for _ in "FB")
    assert "3 ranks" in figure.alt


def test_bars_have_the_length_of_what_they_stand_for():
    """What is painted in the colour of forward adds up to the forward time of all ranks."""
    timed = replay(training(), cluster("h100"))
    axes = plots.timeline(timed).figure.axes[0]
    forward = style.matplotlib.colors.to_rgba(style.WORK["F"])
    bars = [c for c in axes.collections if tuple(c.get_facecolor()[0]) == forward]
    painted = sum(path.get_extents().width for collection in bars for path in collection.get_paths())
    assert painted == pytest.approx(sum(s.seconds for s in timed.spans if s.kind == "F"))


def test_overlapped_steps_stand_side_by_side():
    """A pair of steps in one action shares its time."""
    from fivefold.pipeline import zero_bubble

    timeline = plots.timeline_of_schedule(simulate(zero_bubble.zb_h1(4, 8)))
    assert {span.kind for span in timeline.spans} == {"F", "I", "W"}
    assert sum(s.seconds for s in timeline.spans) == 4 * 8 * 3


def test_the_matrix_has_the_bytes_of_a_ring():
    """Pairs of tp: 2(n−1)/n · 40 MB six times in each direction; dp 9 MB three times."""
    cells = [text.get_text() for text in drawn("traffic").figure.axes[0].texts]
    assert sorted(cells) == sorted(["240\ntp"] * 4 + ["27\ndp"] * 4)
    assert "numbers in MB" in [text for text, _ in texts(drawn("traffic"))]


def test_a_bar_says_whether_it_agrees_with_the_formula():
    """The wrong formula is named in the title and marked on its bar; the right one has a tick."""
    right = {("all_reduce", "tp"): (240e6, "6 · 2(n−1)/n · M")}
    good = " ".join(text for text, _ in texts(plots.traffic_by_axis(training(), right)))
    bad = " ".join(text for text, _ in texts(drawn("by axis")))
    assert "as the formulas say" in good and "✓" in good and "✗" not in good
    assert "differs from the formula: all-reduce in tp" in bad and "✗ 100 MB by formula" in bad


def test_ranks_with_the_same_curve_share_a_row():
    """Three equal curves and one other: two rows, each with its peak."""
    curve, other = [(0, 0), (1, 2000), (2, 0)], [(0, 0), (1, 3000), (2, 0)]
    figure = plots.memory({"rank 0": curve, "rank 1": curve, "rank 2": curve, "rank 3": other})
    words = [text for text, _ in texts(figure)]
    assert "ranks 0–2" in words and "rank 3" in words and "peak 2 kB" in words and "peak 3 kB" in words


def test_there_must_be_something_to_draw():
    """Empty runs are refused in one line that says what to do."""
    silent = Ledger([RankLedger(0), RankLedger(1)])
    with pytest.raises(ValueError, match="measure the run"):
        plots.timeline(replay(silent, cluster("h100")))
    for draw in (plots.traffic, plots.traffic_by_axis):
        with pytest.raises(ValueError, match="no traffic to draw"):
            draw(silent)
    with pytest.raises(ValueError, match="measure=True"):
        plots.memory(silent)


def test_a_long_run_is_drawn_without_numbers_that_do_not_fit():
    """Ten thousand micro-batches: no number on a bar that is narrower than it."""
    spans = [Span(0, k, k + 1, "F", str(k)) for k in range(10_000)]
    figure = plots.timeline(Timeline(spans, 1, 10_000, ""))
    assert not [text for text in figure.figure.axes[0].texts if text.get_text().isdigit()]


def test_two_timelines_can_have_one_scale():
    """With `until`, time goes on after the end of the shorter one; a time before the end cuts nothing off."""
    short = Timeline([Span(0, 0, 10, "F", "0")], 1, 10, "")
    assert plots.timeline(short, until=25).figure.axes[0].get_xlim() == (0, 25)
    assert plots.timeline(short, until=5).figure.axes[0].get_xlim() == (0, 10)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [(1.5, "s", "1.5 s"), (2e-3, "s", "2 ms"), (3.14159e-6, "s", "3.14 µs"), (1, "", "1 step"), (12, "", "12 steps")],
)
def test_times_have_units(value, unit, words):
    """Three digits and a unit."""
    assert style.duration(value, unit) == words


def test_a_scale_bar_is_a_round_number():
    """The largest of 1, 2, 5 times a power of ten that fits."""
    assert [style.round_length(x) for x in (7.3, 4.99, 0.023, 1000)] == [5, 2, 0.02, 1000]
