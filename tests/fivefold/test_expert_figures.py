"""Figures of experts: loads, drops, and the way of tokens are those of the library's functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fivefold import expert, plots, run, widgets
from fivefold.plots.routes import EACH, EXPERTS, ROUTERS, STAGES, WORDS, logits, routes
from fivefold.widgets import routes as widget


def test_shares_are_of_each_step_and_the_busiest_is_in_the_title():
    """Counts are divided by their sum, step by step; the last step is told expert by expert."""
    figure = plots.expert_load({"free": [[1, 1, 2], [0, 3, 1]], "even": [[1, 1, 1]]})
    assert figure.figure.texts[0].get_text().endswith("75% free, 33% even")
    assert "free, after 2 steps: expert 0 0%, expert 1 75%, expert 2 25%" in figure.alt


@pytest.mark.parametrize("loads", [{}, {"free": []}, {"free": [[0, 0]]}])
def test_a_load_without_a_choice_is_refused(loads):
    """No step, or nobody in it."""
    with pytest.raises(ValueError, match="no step|no expert was chosen"):
        plots.expert_load(loads)


def test_drops_name_what_is_lost_at_a_factor_of_one():
    """The title is the number at 1, the words beside a line its last one; lengths must fit."""
    figure = plots.dropped_choices([0.5, 1.0, 2.0], {"free": [0.6, 0.4, 0.1], "even": [0.5, 0.2, 0.0]})
    assert figure.figure.texts[0].get_text() == "Dropped at a capacity factor of 1: 40% free, 20% even"
    assert "even: 50% at 0.5, 20% at 1, 0% at 2" in figure.alt
    with pytest.raises(ValueError, match="2 points for 1 factors"):
        plots.dropped_choices([1.0], {"free": [0.1, 0.2]})


@pytest.mark.parametrize(("ranks", "top_k", "factor"), [(2, 3, 1.0), (4, 2, 0.75)])
def test_rows_are_those_that_dispatch_sends(ranks, top_k, factor):
    """The table of rows from rank to rank, on real ranks; all words come back where they are not dropped."""
    way = routes(ranks, top_k, factor, "skewed")

    def program():
        rank = dist.get_rank()
        own = way.routing[rank]
        _, counts, plan = expert.dispatch(torch.ones(EACH, 1), own.experts, EXPERTS, dist.group.WORLD, way.keep[rank])
        return plan.sends, counts.tolist()

    done = run(program, ranks).results
    assert [sends for sends, _ in done] == way.sent()
    assert sum((counts for _, counts in done), []) == [
        sum(len(way.rows(e, rank)) for rank in range(ranks)) for e in range(EXPERTS)
    ]


def test_a_word_has_the_same_scores_wherever_it_stands():
    """The router sees a token, and not its place; the skewed one prefers expert 1."""
    scores = logits("even")
    twice = [place for place, word in enumerate(WORDS) if word == "is"]
    assert len(twice) == 3 and all(torch.equal(scores[place], scores[twice[0]]) for place in twice)
    assert int(logits("skewed").argmax(1).bincount().argmax()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"ranks": 3}, "choose 1, 2 or 4"), ({"router": "lazy"}, "even or skewed"), ({"stage": "lunch"}, "no stage")],
)
def test_what_cannot_be_drawn_is_one_line(change, message):
    """Other ranks, routers and stages."""
    with pytest.raises(ValueError, match=message):
        plots.tokens_to_experts(**({"stage": "scores"} | change))


def test_every_position_of_the_controls_can_be_drawn(monkeypatch):
    """Each control through all its values, the others where they begin."""
    seen = {}
    monkeypatch.setattr(widget, "explore", lambda draw, controls: seen.update(draw=draw, controls=controls))
    widgets.tokens_to_experts(2)
    start = {name: control.value for name, control in seen["controls"].items()}
    assert start["ranks"] == 2 and start["stage"] in STAGES and start["router"] in ROUTERS
    for name, control in seen["controls"].items():
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        titles = {seen["draw"](**(start | {name: value})).alt for value in values}
        assert len(titles) > 1, name
