"""The picture of a ring all-reduce: what it shows is what the library's function does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fivefold import plots, run
from fivefold.collectives import ring_all_reduce
from fivefold.plots.ring import held_after, piece_sizes, sent_piece

RINGS = [(1, 5), (2, 3), (3, 7), (5, 3), (8, 16)]


@pytest.mark.parametrize(("n", "numbers"), RINGS)
def test_at_the_end_every_rank_has_every_sum(n, numbers):
    """All n contributions in each piece, each once; after half of the steps in one piece, the rank's own."""
    everyone = list(range(n))
    assert all(sorted(piece) == everyone for rank in held_after(n, 2 * (n - 1)) for piece in rank)
    for rank, own in enumerate(held_after(n, n - 1)):
        assert [piece for piece in range(n) if sorted(own[piece]) == everyone] == [rank]
    assert sum(piece_sizes(n, numbers)) == numbers
    assert piece_sizes(n, numbers) == [len(piece) for piece in torch.arange(numbers).tensor_split(n)]


@pytest.mark.parametrize(("n", "numbers"), [(3, 7), (5, 3)])
def test_the_messages_are_those_of_the_program(n, numbers):
    """Step by step and rank by rank, as many bytes as the ledger of the library's function has, empty pieces too."""
    ledger = run(lambda: ring_all_reduce(torch.ones(numbers), dist.group.WORLD), n).ledger
    sizes = piece_sizes(n, numbers)
    for rank in range(n):
        sent = [call.bytes for call in ledger[rank].communications if call.op == "send"]
        assert sent == [4 * sizes[sent_piece(n, step, rank)] for step in range(1, 2 * n - 1)]


def test_every_step_can_be_drawn():
    """Steps and sizes of all kinds; the title names the step, the alternative text what each rank holds."""
    for n, numbers in RINGS:
        for step in range(2 * n - 1):
            figure = plots.ring_all_reduce(n, step, numbers)
            assert figure.alt.startswith(f"{n} ranks after step {step} of {2 * n - 2}")
    title = plots.ring_all_reduce(5, 4, 3).figure.texts[0].get_text()
    assert title == "Step 4 of 8: each sum is complete, on one rank"


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_that_there_is_not_is_refused(step):
    """One line that says which there are."""
    with pytest.raises(ValueError, match="choose 0 to 4"):
        plots.ring_all_reduce(3, step)


def test_another_ring_restarts_the_steps():
    """The slider of steps follows the number of ranks."""
    from fivefold.widgets.live import choice
    from fivefold.widgets.ring import _restart, _steps

    steps = choice("step", _steps(4), 6)
    _restart(steps, 3)
    assert [value for _, value in steps.options] == [0, 1, 2, 3, 4] and steps.value == 0
