"""Layouts side by side: every bar is what ledger and replay say; a run that was not measured is an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fivefold import plots, run
from fivefold.plots.layouts import kept_bytes, layouts, sent_bytes, times
from fivefold.runtime.cluster import cluster
from fivefold.runtime.ledger import keep, phase
from fivefold.runtime.replay import replay


def program(mib):
    """Rank 1 keeps twice as much as rank 0; one all-reduce of 1,000 numbers after a product."""
    group = dist.new_group(group_desc="dp")
    weight = torch.ones(250 * mib * (1 + dist.get_rank()), dtype=torch.float32)
    keep("parameters", weight)
    with phase("forward"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    dist.all_reduce(torch.ones(1000), group=group)


@pytest.fixture(scope="module")
def ledgers():
    return {f"{k} kB": run(program, 2, k, measure=True).ledger for k in (1, 3)}


def test_the_numbers_are_those_of_the_run(ledgers):
    """Memory of the rank that keeps most, the mean of what ranks send, and the whole of the replayed time."""
    ledger = ledgers["3 kB"]
    assert kept_bytes(ledger)["weights"] == 2 * 3 * 1000
    assert sent_bytes(ledger) == {"dp": 4000.0}
    spent, replayed = times(ledger, cluster("h100")), replay(ledger, cluster("h100"))
    assert sum(spent.values()) == pytest.approx(replayed.makespan)
    assert spent["computes"] == pytest.approx(2 * 64**3 / cluster("h100").gpu.flops)


def test_bars_are_as_long_as_their_numbers(ledgers):
    """In each column, to one scale; the alt text says all of them."""
    figure = layouts(ledgers, cluster("h100"))
    kept, sent, _ = figure.figure.axes[1:]
    assert [patch.get_width() for patch in kept.patches if patch.get_width()] == [2000, 6000]
    assert [patch.get_width() for patch in sent.patches] == [4000, 4000]
    assert "1 kB: a rank keeps at most: weights 2 kB" in figure.alt and "dp 4 kB" in figure.alt
    assert figure.png()[:4] == b"\x89PNG"


def test_a_run_that_was_not_measured_is_an_error():
    """Rather than three columns of nothing."""
    with pytest.raises(ValueError, match="run with measure=True"):
        plots.layouts({"a": run(program, 2, 0).ledger}, cluster("h100"))
