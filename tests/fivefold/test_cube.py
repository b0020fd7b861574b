"""The picture and the widget of the work cube: its numbers are those of the published layouts and of brute force."""

from __future__ import annotations

import re

import pytest
from fivefold import plots, widgets
from fivefold.layout import Layout, LayoutError
from fivefold.plots.cube import Work, numbers
from fivefold.widgets import cube

TITLES = {
    "dp4,pp2,tp4": "Data 4, Pipeline 2, Tensor 4: 32 GPUs, 4 servers, 8 blocks of work",
    "tp16": "Tensor 16: 16 GPUs, 2 servers, 1 block of work; Tensor spills over two servers",
    "tp3,dp3": "Data 3, Tensor 3: 9 GPUs, 2 servers, 3 blocks of work; Tensor spills over two servers",
    "dp1": "One rank: 1 GPU, 1 server, 1 block of work",
    "dp2,cp2,ep4": "Data 2, Context 2, Expert 4: 4 GPUs, 1 server, 4 blocks of work",
}


@pytest.mark.parametrize("text", TITLES)
def test_the_title_counts(text):
    """GPUs, servers of 8 and blocks of work; TP that is in two servers is told, experts take no GPUs."""
    assert plots.work_cube(Layout.parse(text)).figure.texts[0].get_text().replace("\n", " ") == TITLES[text]


@pytest.mark.parametrize("text", ["dp4,pp2,tp4", "dp3,cp3,tp3,ep9", "dp2,cp2,pp2,tp2,ep4", "dp5,tp5"])
def test_inside_and_spans_agree(text):
    """An axis is inside when no group is in two servers, and the most servers are counted group by group."""
    counted = numbers(Layout.parse(text), Work())
    for axis, lists in counted.groups.items():
        spans = max(len({rank // 8 for rank in ranks}) for ranks in lists)
        assert (counted.spans[axis], counted.inside[axis]) == (spans, spans == 1)
    assert counted.gpus == sum(map(len, counted.groups["tp"]))


def test_the_ranks_partners_are_named():
    """The alternative text says with whom a rank is together, axis by axis."""
    alt = plots.work_cube(Layout.parse("dp2,cp2,pp2,tp2,ep4"), 13).alt
    assert re.search(
        r"Tensor with 12, Context with 15, Pipeline with 9, Data with 5 and Expert with 5, 7, 15\.$", alt
    ), alt


WRONG = {
    "pp16": "12 layers cannot fill the 16 stages",
    "dp128": "64 sequences leave ranks of dp128 without work: take dp64 or less",
    "dp16,tp512": "has 8,192 GPUs: this picture ends at 4,096",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_drawn_says_why(text):
    """One line with the number to change."""
    with pytest.raises(LayoutError, match=WRONG[text]):
        plots.work_cube(Layout.parse(text))
    with pytest.raises(LayoutError, match="rank 4 is outside layout tp4"):
        plots.work_cube(Layout(tp=4), 4)


@pytest.fixture
def shown(monkeypatch):
    """What the widget hands to `explore`."""
    seen = {}
    monkeypatch.setattr(cube, "explore", lambda draw, controls: seen.update(draw=draw, controls=controls))
    widgets.work_cube("dp4,pp2,tp4")
    return seen


def test_every_position_of_the_controls_draws_or_says_why(shown):
    """Each control through all its values, the others where they begin; the answer changes with it."""
    start = {name: control.value for name, control in shown["controls"].items()}
    assert list(start.values()) == [4, 1, 2, 4, 1, 0]
    for name, control in shown["controls"].items():
        answers = set()
        for _, value in control.options if name != "rank" else control.options[::8]:
            try:
                answers.add(shown["draw"](**(start | {name: value})).alt)
            except LayoutError as error:
                answers.add(str(error))
        assert len(answers) == len(control.options if name != "rank" else control.options[::8]), name


def test_the_rank_follows_the_layout(shown):
    """The slider of ranks has those of the layout, and stays where it is as far as it can."""
    controls = shown["controls"]
    controls["rank"].value = 13
    controls["tp"].value = 1
    assert [value for _, value in controls["rank"].options] == list(range(8)) and controls["rank"].value == 7
    controls["ep"].value = 32  # a layout that cannot be: nothing changes until it can again
    assert controls["rank"].value == 7
    controls["dp"].value = 32
    assert len(controls["rank"].options) == 64
