"""Messages judged: counts, bytes, neighbours and rounds of ledgers that are written down here, and of real runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime.ledger import Communication, Ledger, RankLedger, Wait

from autograde.checks.messages import expect_messages, log_rounds, rounds, unwaited


def ledger(*programs):
    """A ledger of programs such as "1> 2<": send to rank 1, receive from rank 2, eight bytes each."""
    ranks = []
    for rank, program in enumerate(programs):
        calls = [
            Communication(i, "send" if way == ">" else "recv", "world", (), 0, 8 * (way == ">"), peer=int(peer))
            for i, (peer, way) in enumerate(program.split())
        ]
        ranks.append(RankLedger(rank, calls))
    return Ledger(ranks)


RING = ledger("1> 2<", "2> 0<", "0> 1<")


def test_a_ring_passes():
    """One message each, eight bytes, to one neighbour."""
    finding = expect_messages("traffic", RING, [[0, 1, 2]], [1] * 3, [8] * 3, ring=True)
    assert finding.passed and finding.seen == "1 message a rank"


@pytest.mark.parametrize(
    ("found", "options", "words"),
    [
        (RING, {"messages": [1, 2, 1]}, "rank 1 sends 1 message, expected 2"),
        (RING, {"sent": [8, 8, 4]}, "rank 2 sends 8 B, expected 4 B (2 times)"),
        (ledger("1> 2>", "0<", "0<"), {"ring": True}, "rank 0 sends to ranks 1 and 2"),
        (Ledger([RankLedger(0, [Communication(0, "all_reduce", "world", (0, 1), 0, 8)]), RankLedger(1)]), {},
         "rank 0 calls an all-reduce"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(found, options, words):
    """The first rank that differs, what it does and what was expected."""
    groups = [list(range(len(found)))]
    finding = expect_messages("traffic", found, groups, **options)
    assert not finding.passed and words in finding.seen


def test_ranks_far_apart_are_no_neighbours():
    """In a ring of four, the rank two places further is none; in a group of two, the other one is."""
    across = ledger("2>", "", "0<", "")
    assert not expect_messages("traffic", across, [[0, 1, 2, 3]], ring=True).passed
    assert expect_messages("traffic", across, [[0, 2], [1, 3]], ring=True).passed


@pytest.mark.parametrize(
    ("found", "number"),
    [
        (ledger("1> 2> 3>", "0<", "0<", "0<"), 3),  # one after the other
        (ledger("1> 2>", "0< 3>", "0<", "1<"), 2),  # a tree
        (ledger("1>", "0< 2>", "1< 3>", "2<"), 3),  # a chain
        (ledger("1> 3<", "2> 0<", "3> 1<", "0> 2<"), 1),  # all at once
        (ledger("", ""), 0),
    ],
)
def test_rounds_are_those_that_one_message_at_a_time_takes(found, number):
    """By hand."""
    assert rounds(found) == number


def test_an_early_receive_holds_up_nothing_before_its_wait():
    """An asynchronous receive counts where the program waits for it."""

    def program():
        rank, n, x, y = dist.get_rank(), dist.get_world_size(), torch.ones(1), torch.empty(1)
        coming = dist.irecv(y, (rank - 1) % n)
        dist.send(x, (rank + 1) % n)
        coming.wait()

    assert rounds(run(program, 3).ledger) == 1


def test_a_message_that_nobody_waits_for_is_counted():
    """By its index: one of two asynchronous ones has a wait."""
    calls = [Communication(i, "send", "world", (), 0, 8, peer=1, asynchronous=i < 2) for i in range(3)]
    assert unwaited([*calls, Wait(3, of=1)]) == 1 and unwaited([*calls, Wait(3, of=1), Wait(4, of=0)]) == 0


def test_the_depth_of_a_tree():
    """The smallest k with 2ᵏ ≥ n."""
    assert [log_rounds(n) for n in (1, 2, 3, 4, 5, 8, 9, 64, 65)] == [0, 1, 2, 2, 3, 3, 4, 6, 7]
