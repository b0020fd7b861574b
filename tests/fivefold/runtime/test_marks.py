"""What a program says of itself reaches the ledger, in measured and in plain runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime import ledger, marks


def test_communications_carry_the_phase_in_every_run():
    """Phases nest, end with their block even where it raises, and need no measuring."""

    def program():
        x = torch.ones(3)
        with ledger.phase("step"):
            with ledger.phase("forward"):
                dist.all_reduce(x)
            dist.all_reduce(x)
        try:
            with ledger.phase("backward"):
                raise KeyError
        except KeyError:
            dist.all_reduce(x)

    for measure in (False, True):
        recorded = run(program, 2, measure=measure).ledger
        for rank in range(2):
            assert [call.phase for call in recorded[rank].communications] == ["forward", "step", ""]


def test_blocks_of_work_are_numbered():
    """Two blocks with the same name are two blocks; what is in one block is one."""

    def program():
        x = torch.ones(3)
        for _ in range(2):
            with ledger.work("F", microbatch=1):
                x @ x
                dist.all_reduce(x)
                x @ x

    entries = run(program, 2, measure=True).ledger[0].entries
    work = [entry for entry in entries if isinstance(entry, ledger.Computation) and entry.kind == "F"]
    assert [entry.flops for entry in work] == [6, 6, 6, 6]
    assert work[0].block == work[1].block != work[2].block == work[3].block


def test_words_that_mean_nothing_are_refused():
    """Each error names the choices."""
    with pytest.raises(ValueError, match="choose parameters, gradients or optimizer"):
        marks.keep("activations")
    with pytest.raises(ValueError, match="choose F, B, I or W"), marks.work("forward"):
        pass
