"""The simulation: times and memory worked out by hand, and the three ways to count idle time."""

from __future__ import annotations

import pytest
from fivefold.pipeline import (
    Backward,
    Durations,
    Forward,
    Schedule,
    dualpipe,
    gpipe,
    interleaved,
    marginal_idle,
    one_f_one_b,
    order_messages,
    simulate,
    straight,
    zb_h1,
    zb_h2,
    zb_v,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def spans(events) -> list[tuple[str, float, float]]:
    return [(str(event.action), event.start, event.end) for event in events]


def test_1f1b_on_two_ranks_by_hand():
    """F 2, B 3 + 1, communication 0.5, two micro-batches: every start and end as drawn on paper."""
    run = simulate(one_f_one_b(2, 2), Durations(2, 3, 1, 0.5))
    assert spans(run.events[0]) == [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 9, 13), ("0B1", 15, 19)]
    assert spans(run.events[1]) == [("1F0", 2.5, 4.5), ("1B0", 4.5, 8.5), ("1F1", 8.5, 10.5), ("1B1", 10.5, 14.5)]
    assert run.makespan == 19
    assert run.busy == (12, 12)
    assert run.idle_by_makespan == (7, 7)
    assert run.idle_in_window == (7, 0)
    assert not run.waiting


def test_a_split_backward_lets_the_rank_before_start_sooner():
    """ZB-H1 on the same numbers: the gradient leaves after 3, not after 4."""
    run = simulate(zb_h1(2, 2), Durations(2, 3, 1, 0.5))
    assert spans(run.events[1])[:2] == [("1F0", 2.5, 4.5), ("1I0", 4.5, 7.5)]
    assert spans(run.events[0])[2:4] == [("0I0", 8, 11), ("0W0", 11, 12)]


def test_stages_of_unequal_length():
    """One slow stage sets the pace: m times its work, and the way to it and from it for one micro-batch."""
    run = simulate(gpipe(3, 5), Durations([1, 4, 2], [1, 6, 2], [0, 2, 1]))
    assert run.busy == (10, 60, 25)
    assert run.makespan == 1 + 5 * 4 + 2 + (2 + 1) + 5 * 8 + 1


def test_memory_by_hand():
    """What a stage keeps: m_b from the forward's start to the input gradient's end, m_w on to the weight gradient's."""
    run = simulate(zb_h1(1, 2), Durations(1, 2, 3))
    curve = [(0, 0), (0, 5), (3, 2), (6, 0), (6, 5), (9, 2), (12, 0)]
    assert run.memory(0, m_b=5, m_w=2) == curve
    assert run.peak_memory(5, 2) == (5,)
    whole = simulate(gpipe(1, 2)).memory(0, m_b=5)
    assert whole == [(0, 0), (0, 5), (1, 10), (4, 5), (6, 0)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 10), st.floats(0, 1))
def test_memory_ends_empty_and_lies_between_its_bounds(p, m, m_w):
    """ZB-H1: with m_w 0 the peak is 1F1B's, min(p-r, m); with 1 it is min(p, m); it always ends at nothing."""
    run, plain = simulate(zb_h1(p, m)), simulate(one_f_one_b(p, m))
    assert run.peak_memory(m_w=0) == plain.peak_memory()
    for rank in range(p):
        assert run.memory(rank, m_w=m_w)[-1][1] == pytest.approx(0)
        assert plain.peak_memory()[rank] <= run.peak_memory(m_w=m_w)[rank] + 1e-9 <= min(p, m) + 2e-9


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(4, 8), interleaved(4, 8, 2), zb_h1(4, 8), zb_h2(4, 8), zb_v(4, 8), dualpipe(4, 8)],
    ids=lambda s: s.name,
)
def test_one_more_iteration_against_many(schedule):
    """The marginal idle time is the slope of the makespan over many iterations."""
    time = Durations(2, 3, 1, 0.25)
    slope = (simulate(schedule, time, 30).makespan - simulate(schedule, time, 20).makespan) / 10
    busy = simulate(schedule, time).busy
    assert marginal_idle(schedule, time) == pytest.approx([slope - b for b in busy])
    assert max(marginal_idle(schedule, time)) <= max(simulate(schedule, time).idle_by_makespan) + 1e-9


def test_the_three_metrics_differ_for_zb_h2():
    """p = 4, m = 8, unit times: 3 by makespan, 0 in the window, 0 for one more iteration; 9, 9, 9 for 1F1B."""
    metrics = [
        (max(simulate(s).idle_by_makespan), max(simulate(s).idle_in_window), max(marginal_idle(s)))
        for s in (zb_h2(4, 8), one_f_one_b(4, 8))
    ]
    assert metrics == [(3, 0, 0), (9, 9, 9)]


def test_a_broken_schedule_is_run_as_far_as_it_goes():
    """Rank 0 wants its backward too early: rank 1 does what it can, both stand, nothing is raised."""
    lists = [[Forward(0, 0), Backward(0, 1), Backward(0, 0), Forward(0, 1)], one_f_one_b(2, 2).actions[1]]
    broken = Schedule("broken", 2, straight(2), lists)
    run = simulate(broken)
    assert [len(events) for events in run.events] == [1, 2]
    assert run.waiting == {0: 1, 1: 2}
    with pytest.raises(ValueError, match="broken cannot reach its end"):
        marginal_idle(broken)


def test_what_is_not_an_action_stops_its_rank():
    """An entry of another kind, or on the wrong rank, is where the rank stands; the rest is still drawn."""
    for wrong in ("0B0", Forward(9, 0), Forward(0, 9), Forward(1, 0)):
        run = simulate(Schedule("broken", 2, straight(2), [[Forward(0, 0), wrong], [Forward(1, 0)]]))
        assert run.waiting == {0: 1}
        assert spans(run.events[1]) == [("1F0", 1, 2)]


def test_blocking_messages_take_time_on_both_sides():
    """With Send and Receive in the lists both ranks spend the communication time, and the sender waits to be heard."""
    run = simulate(order_messages(gpipe(2, 2)), Durations(1, 2, 0, 0.5))
    assert spans(run.events[0])[:4] == [("0F0", 0, 1), ("0a0>1", 1, 1.5), ("0F1", 1.5, 2.5), ("0a1>1", 2.5, 3)]
    assert spans(run.events[1])[:4] == [("0a0<0", 1, 1.5), ("1F0", 1.5, 2.5), ("0a1<0", 2.5, 3), ("1F1", 3, 4)]
    assert run.busy == (6, 6)


def test_durations_for_another_number_of_stages():
    """A list of durations must have one for each stage."""
    with pytest.raises(ValueError, match="^durations of 3 stages for a schedule of 2: give 2$"):
        simulate(gpipe(2, 2), Durations(forward=[1, 1, 1]))
