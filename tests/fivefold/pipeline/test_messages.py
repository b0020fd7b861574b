"""Sends and receives put into a schedule: complete, in one order at both ends, never a deadlock."""

from __future__ import annotations

import random

import pytest
from fivefold.pipeline import (
    Backward,
    Forward,
    Receive,
    Schedule,
    Send,
    dualpipe,
    find_faults,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    order_messages,
    straight,
    zb_h1,
    zb_h2,
    zb_v,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def schedules(draw) -> Schedule:
    p, few = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    one_stage = st.sampled_from([naive, gpipe, one_f_one_b, zb_h1, zb_h2]).map(lambda make: make(p, few))
    others = [interleaved(p, p * (1 + few % 2), 1 + few % 3), zb_v(p, 2 * p - 2 + few)]
    return draw(one_stage | st.sampled_from([*others, dualpipe(p + p % 2, 2 * (p + p % 2 + few // 2))]))


def run_blocking(schedule: Schedule, seed: int) -> list[int]:
    """Run the lists with blocking sends, at each moment a random one of the things that can happen; how far ranks got.

    Computation never waits here: data that has not arrived is an error.
    """
    at, chance = [0] * schedule.num_ranks, random.Random(seed)
    held = [set() for _ in at]

    def head(rank):
        actions = schedule.actions[rank]
        return actions[at[rank]] if at[rank] < len(actions) else None

    def can_go_on(rank):
        action = head(rank)
        if isinstance(action, Send):
            return head(action.peer) == Receive(action.value, rank)
        return action is not None and not isinstance(action, Receive)

    while able := [rank for rank in range(len(at)) if can_go_on(rank)]:
        rank = chance.choice(able)
        action = head(rank)
        at[rank] += 1
        if isinstance(action, Send):
            assert action.value in held[rank]
            held[action.peer].add(action.value)
            at[action.peer] += 1
            continue
        for step in action.steps:
            assert held[rank].issuperset(schedule.needs(step)), f"{step} before its data"
        held[rank].update(value for value in map(schedule.makes, action.steps) if value)
    return at


@settings(max_examples=250, deadline=None)
@given(schedules(), st.integers(0, 10**6))
def test_blocking_sends_never_deadlock(schedule, seed):
    """Whatever happens first where several things can, every rank comes to its end with its data in time."""
    whole = order_messages(schedule)
    assert run_blocking(whole, seed) == [len(actions) for actions in whole.actions]
    assert find_faults(whole) == []


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_complete_and_in_one_order(schedule):
    """Computation is as it was; between any two ranks sends and receives are the same values in the same order."""
    whole = order_messages(schedule)
    sent, received = {}, {}
    for rank, actions in enumerate(whole.actions):
        assert [a for a in actions if not isinstance(a, Send | Receive)] == list(schedule.actions[rank])
        for action in actions:
            if isinstance(action, Send):
                sent.setdefault((rank, action.peer), []).append(action.value)
            if isinstance(action, Receive):
                received.setdefault((action.peer, rank), []).append(action.value)
    assert sent == received
    values = [value for pair in sent.values() for value in pair]
    crossings = sum(a != b for route in schedule.routes for a, b in zip(route, route[1:], strict=False))
    assert len(values) == len(set(values)) == 2 * crossings * schedule.num_microbatches // len(schedule.routes)


def test_two_ranks_are_each_others_next_and_previous():
    """p = 2 interleaved: activations and gradients go both ways between the same two ranks, and still in order."""
    whole = order_messages(interleaved(2, 4, 2))
    kinds = {(rank, a.value.kind) for rank, actions in enumerate(whole.actions) for a in actions if isinstance(a, Send)}
    assert kinds == {(0, "activation"), (0, "gradient"), (1, "activation"), (1, "gradient")}
    assert all(run_blocking(whole, seed) == [len(actions) for actions in whole.actions] for seed in range(20))


def test_the_machine_of_this_test_does_find_deadlocks():
    """Send right after computing, receive right before: 1F1B on two ranks stops."""
    good = order_messages(one_f_one_b(2, 3))
    late = []
    for actions in good.actions:
        receives = {a.value: a for a in actions if isinstance(a, Receive)}
        rest = [a for a in actions if not isinstance(a, Receive)]
        late.append(
            [b for a in rest for b in [*(receives[v] for s in a.steps for v in good.needs(s) if v in receives), a]]
        )
    assert run_blocking(Schedule("late", 3, straight(2), late), 0) == [3, 3]


def test_a_schedule_that_cannot_run_has_no_order():
    """One line, with where to look."""
    lists = [[Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)], gpipe(2, 2).actions[1]]
    with pytest.raises(ValueError, match="^mine cannot reach its end, so its messages have no order: find_faults"):
        order_messages(Schedule("mine", 2, straight(2), lists))
