"""Judging traffic: exactly the expected calls, in the right groups, directions and sizes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fivefold import run

from autograde.traffic import Calls, expect, fingerprint, size_in_words, table

BYTES = 6 * 8


def program(forward=1, backward=1, size=6, everywhere=False, gather=False, barrier=False):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = None if everywhere else groups[rank // 2]

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            for _ in range(forward):
                dist.all_reduce(x.clone(), group=group)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(backward):
                dist.all_reduce(grad.clone(), group=group)
            return grad

    x = torch.ones(size, dtype=torch.float64, requires_grad=True)
    Sum.apply(x).sum().backward()
    if gather:
        dist.all_gather([torch.zeros(1) for _ in range(2)], torch.zeros(1), group=groups[rank // 2])
    if barrier:
        dist.barrier()


def ledger(**options):
    names = ("forward", "backward", "size", "everywhere", "gather", "barrier")
    defaults = (1, 1, 6, False, False, False)
    return run(program, 4, *(options.get(n, d) for n, d in zip(names, defaults, strict=True))).ledger


WANTED = Calls("all_reduce", forward=1, backward=1, bytes=BYTES, groups=[(0, 1), (2, 3)])


def test_exactly_the_expected_calls_pass():
    """The expected traffic passes, and the bytes are those of the ring formula 2(n-1)/n·M."""
    found = expect("traffic", ledger(), WANTED)
    assert found.passed and found.seen == "1 all-reduce forward, 1 backward"
    assert found.detail == f"{2 * BYTES} B a rank"  # two calls of 2 · 1/2 · 48 bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": 2}, "2 all-reduces forward on rank 0, expected 1"),
        ({"backward": 0}, "0 all-reduces backward on rank 0, expected 1"),
        ({"size": 12}, "an all-reduce forward of 96 B on rank 0, expected 48 B (2 times)"),
        ({"gather": True}, "an all-gather in ranks [0, 1] that should not be there, forward on rank 0"),
        ({"barrier": True}, "a barrier in ranks [0, 1, 2, 3] that should not be there, forward on rank 0"),
        (
            {"everywhere": True},
            "0 all-reduces forward on rank 0, expected 1 over [0, 1]; seen: all-reduce over [0, 1, 2, 3]",
        ),
    ],
)
def test_other_traffic_fails_and_is_named(options, words):
    """Calls too many or too few, of another size or kind, or in the wrong group fail with a sentence of their own."""
    found = expect("traffic", ledger(**options), WANTED)
    assert found.passed is False and found.seen == words


def test_sizes_may_differ_between_calls_of_one_operation():
    """Two kinds of calls of one operation are matched by their sizes, in any order."""
    pairs = WANTED.groups
    forward = Calls("all_reduce", forward=1, bytes=BYTES, groups=pairs)
    backward = Calls("all_reduce", backward=1, bytes=BYTES, groups=pairs)
    assert expect("traffic", ledger(), backward, forward).passed
    found = expect("traffic", ledger(), Calls("all_reduce", forward=1, bytes=8, groups=pairs), backward)
    assert found.seen == "an all-reduce forward of 48 B on rank 0, expected 8 B (6 times)"


def test_no_traffic_where_none_is_expected():
    """With nothing expected, silence passes and any call fails."""
    assert expect("traffic", run(lambda: None, 2).ledger).seen == "no communication"
    assert expect("traffic", ledger()).passed is False


def test_fingerprints_leave_out_times_and_lines():
    """Two runs of one program have one fingerprint; one call more has another. The table names every call."""
    one, other, more = ledger(), ledger(), ledger(forward=2)
    assert fingerprint(one) == fingerprint(other) != fingerprint(more)
    assert table(more).count("  all_reduce  ") == 12
    assert table(more).count("  forward  ") == 8 and table(more).count("  backward  ") == 4


def passes_on():
    x, rank = torch.ones(2), dist.get_rank()
    dist.send(x, dst=1) if rank == 0 else dist.recv(x, src=0)


def test_a_message_in_the_table_has_its_other_end():
    """Who receives stands beside a send, who sends beside a receive; the way is told only where some go backward."""
    lines = table(run(passes_on, 2).ledger).splitlines()
    assert lines[1].startswith("  send to 1 ") and "8 B" in lines[1]
    assert lines[3].startswith("  recv from 0 ") and " B " not in lines[3]
    assert "test_traffic.py line" in lines[1] and "forward" not in "".join(lines)


SIZES = {0: "0 B", 999: "999 B", 6144: "6.14 kB", 98304: "98.3 kB", 999_999: "1 MB", 3.2e9: "3.2 GB"}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_units_in_powers_of_ten(size):
    """Bytes are told in B, kB, MB and GB."""
    assert size_in_words(size) == SIZES[size]
