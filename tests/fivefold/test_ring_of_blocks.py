"""The picture of ring attention, and its widget: what it shows is what the library's ring does."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from fivefold import context, plots, run
from fivefold.plots.blocks import MASKS, row_of, scores_of, tokens_of

RINGS = [(2, 0.0), (3, 3.0), (8, -1.0)]


def test_blocks_are_where_the_ring_takes_them():
    """Step by step, each rank has the block that the library's `ring_blocks` gives it."""
    n = 4
    seen = run(lambda: [s for s, _ in context.ring_blocks(torch.zeros(1), dist.group.WORLD)], n).results
    for rank in range(n):
        assert [block for block, *_ in row_of(rank, n, "no mask", 0.0)] == seen[rank]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("n", "slope"), RINGS)
def test_the_running_numbers_are_those_of_a_softmax(n, slope, mask):
    """At every step m is the largest score that the row has seen, and m + log(sum) torch's log-sum-exp of all these."""
    for rank in range(n):
        query = tokens_of(rank, n, mask)[-1]
        scores, seen = torch.tensor(scores_of(query, n, slope), dtype=torch.float64), []
        for block, _, largest, total in row_of(rank, n, mask, slope):
            seen += [key for key in tokens_of(block, n, mask) if mask == "no mask" or key <= query]
            assert largest == (scores[seen].max() if seen else -math.inf)
            assert not seen or largest + math.log(total) == pytest.approx(scores[seen].logsumexp(0).item())


def test_tokens_are_those_of_the_table():
    """Zig-zag and contiguous, two tokens a rank: as `token_positions` and an arange give them."""
    for n in (1, 3, 8):
        zigzag = [list(tokens_of(rank, n, "causal, zig-zag")) for rank in range(n)]
        assert zigzag == context.token_positions(2 * n, n).tolist()
        assert [list(tokens_of(r, n, "causal")) for r in range(n)] == torch.arange(2 * n).view(n, 2).tolist()


def test_every_step_can_be_drawn():
    """Steps, masks and scores of all kinds; the alternative text names what each rank has."""
    for n, slope in RINGS:
        for mask in MASKS:
            for step in range(n):
                figure = plots.ring_attention(n, step, mask, slope)
                assert figure.alt.startswith(f"Ring attention of {n} ranks after {step} of {n - 1} transfers, {mask}")
    assert "sees nothing of it" in plots.ring_attention(4, 1, "causal").alt


@pytest.mark.parametrize(("step", "mask"), [(-1, "causal"), (4, "causal"), (0, "half")])
def test_what_there_is_not_is_refused(step, mask):
    """One line that says which there are."""
    with pytest.raises(ValueError, match="choose 0 to 3, and one of no mask, causal, causal, zig-zag"):
        plots.ring_attention(4, step, mask)


def test_another_ring_restarts_the_steps():
    """The slider of steps follows the number of ranks."""
    from fivefold.widgets.attention import _restart
    from fivefold.widgets.live import choice

    steps = choice("step", list(range(8)), 6)
    _restart(steps, 3)
    assert [value for _, value in steps.options] == [0, 1, 2] and steps.value == 0
