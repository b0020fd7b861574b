"""The figures of a causal mask's work and of the overlap condition: their numbers are counted and replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fivefold import context, cost, plots, run
from fivefold.plots.causal import ORDERS, chunk_work, chunks_of
from fivefold.plots.condition import Published, Tried
from fivefold.runtime.cluster import cluster
from fivefold.runtime.replay import replay


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_work_is_counted_in_the_mask(n, order):
    """A rank's pairs of chunks times the size of a pair are the true places in its rows, half diagonals apart."""
    chunk = 6
    mask = torch.ones(2 * n * chunk, 2 * n * chunk).tril()
    for rank, work in enumerate(chunk_work(n, order)):
        rows = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks_of(rank, n, order)])
        assert work * chunk**2 + chunk == mask[rows].sum()


@pytest.mark.parametrize("n", [2, 8])
def test_the_share_of_the_ideal_speed(n):
    """In the title it is that of the formula, and all ranks are named with their work."""
    figure = plots.causal_work(n, "contiguous", n - 1)
    title = " ".join(figure.figure.texts[0].get_text().split())
    assert f"{cost.causal_balance(n):.1%} of the ideal speed" in title
    assert all(f"rank {rank} has {work:g}" in figure.alt for rank, work in enumerate(chunk_work(n, "contiguous")))
    assert len(set(chunk_work(n, "zig-zag"))) == 1


@pytest.mark.parametrize(("order", "rank"), [("striped", 0), ("zig-zag", 4), ("zig-zag", -1)])
def test_an_order_or_a_rank_that_there_is_not_is_refused(order, rank):
    """One line that says which there are."""
    with pytest.raises(ValueError, match="choose one of contiguous, zig-zag, rank 0 to 3"):
        plots.causal_work(4, order, rank)


def test_measured_work_has_its_share():
    """Mean over maximum of whatever was measured, for every order."""
    figure = plots.work_by_rank({"contiguous": [1.0, 3.0], "zig-zag": [2.0, 2.0]})
    assert "contiguous: 1, 3, 66.7% of the ideal speed; zig-zag: 2, 2, 100.0%" in figure.alt


def ring(q, k, v):
    cp = dist.new_group(group_desc="cp")
    return context.ring_attention(q, k, v, cp)


@pytest.mark.parametrize(("times", "hidden"), [(0.9, False), (1.1, True)])
def test_a_transfer_hides_from_the_formulas_length_on(times, hidden):
    """The library's ring in bf16, replayed: from a tenth over FLOPS / bandwidth all hide, under it they do not."""
    tokens, bandwidth, a100 = 32, 300e9, cluster("a100")
    q, k, v = (torch.ones(1, 2, tokens, 8, dtype=torch.bfloat16) for _ in range(3))
    ledger = run(ring, 3, q, k, v, measure=True).ledger
    length = times * cost.min_ring_block(a100.gpu.flops, bandwidth)
    machines = replace(a100, inside=replace(a100.inside, alpha=0.0, bandwidth=bandwidth))
    transfers = replay(ledger, machines, widen=length / tokens).overlap("send", "cp")
    assert len(transfers) == 3 * 2 and all(one.hidden(0.01) for one in transfers) == hidden


def test_the_condition_names_its_rows():
    """Every published row, with its bandwidth where that is known, and how many replays hid everything."""
    rows = [Published("A", 1000, 300e9), Published("B", 1100)]
    alt = plots.overlap_condition({"A100": 312e12}, rows, [Tried(1e11, 1e4, 1), Tried(1e11, 1e3, 0.5)]).alt
    assert "A100, 312 TFLOPS. Published: A 1,000 at 300 GB/s; B 1,100. 1 of 2 replays hid every transfer." in alt
