"""The drawing of schedules and their explorer: what is drawn is what the simulation and the validator say."""

from __future__ import annotations

import pytest
from fivefold import plots, widgets
from fivefold.pipeline import (
    Backward,
    Durations,
    Schedule,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    order_messages,
    simulate,
)
from fivefold.plots.pipeline import WRONG
from fivefold.widgets import explorer


def title(figure) -> str:
    return figure.figure.texts[0].get_text()


def crossed_out(figure) -> list[tuple[float, float]]:
    """Begin and row of every box with the border of what is wrong."""
    boxes = [patch for patch in figure.figure.axes[0].patches if patch.get_edgecolor()[:3] == rgb(WRONG)]
    return [(box.get_x(), int(box.get_y())) for box in boxes]


def rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def changed(rank: int, edit) -> Schedule:
    """1F1B on 4 ranks with one rank's list edited."""
    made = one_f_one_b(4, 8)
    lists = [list(actions) for actions in made.actions]
    edit(lists[rank])
    return Schedule("changed", 8, made.routes, lists)


def framed(figure) -> list[tuple[float, float]]:
    """Begin and length of every frame that holds nothing of its own."""
    frames = [patch for patch in figure.figure.axes[0].patches if not patch.get_fill()]
    return [(frame.get_x(), frame.get_width()) for frame in frames]


def test_a_forward_and_a_backward_that_are_one_piece_stand_in_a_frame():
    """As many frames as pairs, each as long as its pair; and the legend says what a frame is."""
    made = dualpipe(4, 8)
    figure = plots.schedule(made)
    pairs = [(e.start, e.end - e.start) for own in simulate(made).events for e in own if len(e.action.steps) > 1]
    assert framed(figure) == pairs and len(pairs) == 12
    legend = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert "a pair, done as one piece" in legend
    plain = plots.schedule(one_f_one_b(4, 8))
    assert not framed(plain) and "a pair" not in str(plain.figure.legends[0].get_texts())


def test_the_words_are_those_of_the_simulation():
    """Share of idle time, steps and the most that is kept, in the title and in the alternative text."""
    figure = plots.schedule(one_f_one_b(4, 8))
    assert title(figure) == "1F1B: ranks idle for 27.3% of 33 steps, and keep at most 4 activations"
    assert "rank 0 is busy for 73% and keeps at most 4 activations" in figure.alt
    assert crossed_out(figure) == []


def test_the_first_broken_rule_is_said_and_marked():
    """A backward before its forward, where the rank stops; one that is done twice, where it was done."""
    early = changed(2, lambda own: own.insert(3, own.pop(own.index(Backward(2, 5)))))
    figure = plots.schedule(early)
    assert title(figure) == "Not valid: rank 2, action 3: backward of micro-batch 5 before its forward"
    stopped = simulate(early).events[2][-1].end
    assert crossed_out(figure) == [(stopped, 2)]
    twice = changed(3, lambda own: own.insert(4, own[1]))
    (place,) = crossed_out(plots.schedule(twice))
    assert place == (simulate(twice).events[3][4].start, 3)


def test_a_missing_action_is_marked_on_its_rank():
    """It has no place in the list, so the row is marked where it ends."""
    figure = plots.schedule(changed(1, lambda own: own.pop()))
    assert title(figure) == "Not valid: rank 1: backward of micro-batch 7 is missing"
    assert any("missing" in text.get_text() for text in figure.figure.axes[0].texts)


def test_messages_and_entries_that_are_no_action_can_be_drawn():
    """Sends and receives with their time, a list with something else in it, and a deadlock."""
    plots.schedule(order_messages(one_f_one_b(3, 4)), Durations(communication=0.5))
    assert title(plots.schedule(changed(0, lambda own: own.insert(0, "F0")))).startswith("Not valid: rank 0, action 0")
    with pytest.raises(ValueError, match="too many rows"):
        plots.schedule(gpipe(33, 1))


def test_a_function_is_drawn_or_told():
    """A schedule, nothing written yet, something else, an error: the notebook goes on."""

    def unwritten(p, m):
        raise NotImplementedError

    assert plots.schedule_of(gpipe, 3, 4).alt == plots.schedule(gpipe(3, 4)).alt
    assert repr(plots.schedule_of(unwritten, 3, 4)) == "unwritten is not written yet: there is nothing to draw."
    assert "gives int, not a Schedule" in repr(plots.schedule_of(lambda p, m: 3, 3, 4))
    assert "stopped with ValueError: interleaved needs" in repr(plots.schedule_of(interleaved, 3, 4, 2))


def explored(monkeypatch, *arguments):
    seen = {}
    monkeypatch.setattr(explorer, "explore", lambda draw, controls, also: seen.update(draw=draw, controls=controls))
    widgets.schedules(*arguments)
    return seen["draw"], seen["controls"]


def test_every_position_of_the_controls_is_drawn_or_told(monkeypatch):
    """Each control through all its values; sizes for which there is no such schedule are one line."""
    draw, controls = explored(monkeypatch, "1F1B", 2, 4)
    start = {name: control.value for name, control in controls.items()}
    for name, control in controls.items():
        for _, value in getattr(control, "options", ()):
            draw(**(start | {name: value, "step": 10**6}))
    with pytest.raises(ValueError, match="interleaved needs a multiple of 4"):
        draw(**(start | {"name": "interleaved", "p": 4, "m": 6}))


def test_steps_go_from_nothing_to_the_whole(monkeypatch):
    """The steps are the moments at which something starts; another schedule begins with all of it drawn."""
    draw, controls = explored(monkeypatch, "GPipe", 2, 2)
    values = {name: control.value for name, control in controls.items()}
    assert values["step"] == len(explorer.moments(gpipe(2, 2), Durations())) == controls["step"].max
    assert title(draw(**(values | {"step": 0}))) == "GPipe at step 0: 1 of 2 ranks compute, 1 activation in all"
    assert title(draw(**(values | {"step": 1}))).endswith("at step 1: 2 of 2 ranks compute, 3 activations in all")
    assert title(draw(**values)) == title(plots.schedule(gpipe(2, 2)))
    halves = values | {"name": "ZB-V", "p": 2, "m": 4}
    assert "of 12.5 steps" in title(draw(**(halves | {"step": 10**6}))), "half a stage takes half of the time"
    controls["m"].value = 8
    assert controls["step"].max == controls["step"].value == len(explorer.moments(gpipe(2, 8), Durations()))
