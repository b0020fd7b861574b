"""The figure and the widget of a column-row pair: its numbers are those of the formulas and of a replayed ledger."""

from __future__ import annotations

import re

import pytest
from fivefold import plots, widgets
from fivefold.cost import collective_bytes, collective_seconds
from fivefold.plots.pair import pushed_bytes
from fivefold.runtime.cluster import cluster
from fivefold.runtime.traffic import size
from fivefold.widgets import pair


@pytest.mark.parametrize("t", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_bytes_and_seconds_are_those_of_the_formulas(t, way):
    """What each rank sends, and the modelled time: FLOPs of two products over the rate, and a ring in one server."""
    tokens, h, machines = 2048, 4096, cluster("h100", gpus_per_server=16)
    alt = plots.column_row_pair(t, tokens, h, machines, way).alt
    sent = collective_bytes("all_reduce", t, 2 * tokens * h)
    assert pushed_bytes(t, tokens, h) == sent
    assert (f"{size(sent)} from each rank" in alt) == (t > 1)
    compute, exchange = (
        _seconds(text or "0 s")
        for text in re.search(rf"\b{t} ranks? (\S+ \S+) computing(?: and (\S+ \S+) in the)?", alt).groups()
    )
    flops = {"forward": 2, "backward": 4}[way] * 2 * tokens * h * 4 * h
    assert compute == pytest.approx(flops / t / machines.gpu.flops, rel=0.01)
    link = machines.inside
    assert exchange == pytest.approx(
        collective_seconds("all_reduce", t, 2 * tokens * h, link.alpha, 1 / link.bandwidth) if t > 1 else 0, rel=0.01
    )


def _seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}[unit]


def test_a_pair_over_servers_says_so():
    """The title names servers where the ranks do not fit into one."""
    far = plots.column_row_pair(8, 512, 1024, cluster("h100", gpus_per_server=2)).figure.texts[0].get_text()
    assert far.startswith("8 ranks, over 4 servers: each computes 1/8 of the work")


@pytest.mark.parametrize(
    ("change", "message"), [({"t": 3}, "3 ranks are not among"), ({"way": "up"}, "choose forward or backward")]
)
def test_what_cannot_be_drawn_is_one_line(change, message):
    """Another number of ranks, another way."""
    arguments = {"t": 4, "tokens": 512, "h": 1024, "cluster": cluster("h100"), "way": "forward"} | change
    with pytest.raises(ValueError, match=message):
        plots.column_row_pair(**arguments)


def test_every_position_of_the_controls_can_be_drawn(monkeypatch):
    """Each control through all its values, the others where they begin; the picture changes with it."""
    seen = {}
    monkeypatch.setattr(pair, "explore", lambda draw, controls: seen.update(draw=draw, controls=controls))
    widgets.column_row_pair(8)
    start = {name: control.value for name, control in seen["controls"].items()}
    assert start["t"] == 8
    for name, control in seen["controls"].items():
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        alts = {seen["draw"](**(start | {name: value})).alt for value in values}
        assert len(alts) == len(values), name
