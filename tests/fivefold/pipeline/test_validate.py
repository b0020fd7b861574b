"""Broken schedules are found, with the rank, the action and the reason."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest
from fivefold.pipeline import (
    Backward,
    Forward,
    InputGradient,
    InvalidSchedule,
    Overlapped,
    Receive,
    Schedule,
    Send,
    Value,
    WeightGradient,
    dualpipe,
    find_faults,
    interleaved,
    one_f_one_b,
    order_messages,
    straight,
    validate,
    zb_h1,
    zb_v,
)
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = [one_f_one_b(4, 6), interleaved(3, 6, 2), zb_h1(4, 8), zb_v(3, 6), dualpipe(4, 8)]


def changed(schedule: Schedule, rank: int, edit: Callable[[list], object]) -> Schedule:
    """The schedule after `edit` has changed one rank's list in place."""
    lists = [list(actions) for actions in schedule.actions]
    edit(lists[rank])
    return Schedule(schedule.name, schedule.num_microbatches, schedule.routes, lists)


@st.composite
def places(draw) -> tuple[Schedule, int, int]:
    """A good schedule, a rank, and the index of one of its actions."""
    schedule = draw(st.sampled_from(GOOD))
    rank = draw(st.integers(0, schedule.num_ranks - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.actions[rank]) - 1))


@settings(max_examples=200, deadline=None)
@given(places())
def test_dropped(place):
    """Every dropped action is said to be missing, by its kind, micro-batch and rank, and nothing else is."""
    schedule, rank, index = place
    faults = find_faults(changed(schedule, rank, lambda actions: actions.pop(index)))
    steps = schedule.actions[rank][index].steps
    assert len(faults) == len(steps)
    for fault, step in zip(faults, sorted(steps, key=lambda step: step.stage), strict=True):
        assert str(fault).startswith(f"rank {rank}: {step.title} of micro-batch {step.microbatch}")
        assert str(fault).endswith("is missing")


@settings(max_examples=200, deadline=None)
@given(places())
def test_duplicated(place):
    """An action done twice is found at its second place."""
    schedule, rank, index = place
    faults = find_faults(changed(schedule, rank, lambda actions: actions.append(actions[index])))
    at = len(schedule.actions[rank])
    for fault in faults:
        assert str(fault).startswith(f"rank {rank}, action {at}: ")
        assert str(fault).endswith(f"a second time, after action {index}")
    assert len(faults) == len(schedule.actions[rank][index].steps)


@settings(max_examples=300, deadline=None)
@given(places(), st.integers(0, 30))
def test_moved(place, target):
    """A list in another order is valid exactly when program order and data dependencies together have no circle."""
    schedule, rank, index = place
    moved = changed(schedule, rank, lambda actions: actions.insert(target, actions.pop(index)))
    graph, made = {}, {}
    for r, actions in enumerate(moved.actions):
        for k, action in enumerate(actions):
            graph[r, k] = {(r, k - 1)} if k else set()
            made.update({(type(s) is Forward, s.stage, s.microbatch): (r, k) for s in action.steps if s.letter != "W"})
    for r, actions in enumerate(moved.actions):
        for k, step in ((k, step) for k, action in enumerate(actions) for step in action.steps):
            s, i, forward = step.stage, step.microbatch, type(step) is Forward
            needs = [(True, s - 1, i)] if forward else [(True, s, i), (False, s + 1, i)]
            needs = [(False, s, i)] if step.letter == "W" else needs
            graph[r, k] |= {made[need] for need in needs if need in made}
    try:
        TopologicalSorter(graph).prepare()
        possible = True
    except CycleError:
        possible = False
    assert (find_faults(moved) == []) == possible


def test_the_sentence():
    """An input gradient moved before its forward: rank, action, reason, and the error that says the first."""
    schedule = changed(zb_h1(4, 8), 2, lambda actions: actions.insert(5, actions.pop(12)))
    assert str(zb_h1(4, 8).actions[2][12]) == "2I4"
    assert [str(fault) for fault in find_faults(schedule)] == [
        "rank 2, action 5: input gradient of micro-batch 4 before its forward"
    ]
    with pytest.raises(InvalidSchedule, match="^ZB-H1 is not valid: rank 2, action 5: input gradient") as caught:
        validate(schedule)
    assert caught.value.faults[0].index == 5
    validate(zb_h1(4, 8))


F, B, G, W = Forward, Backward, InputGradient, WeightGradient


@pytest.mark.parametrize(
    ("lists", "reasons"),
    [
        (
            [[F(0, 0), F(0, 1), W(0, 0), G(0, 0), B(0, 1)], one_f_one_b(2, 2).actions[1]],
            ["rank 0, action 2: weight gradient of micro-batch 0 before its input gradient"],
        ),
        (
            [[F(0, 0), F(0, 1), B(0, 0), W(0, 0), B(0, 1)], one_f_one_b(2, 2).actions[1]],
            ["rank 0, action 3: weight gradient of micro-batch 0, which its whole backward does already"],
        ),
        (
            [[F(0, 0), F(0, 1), B(1, 0), B(0, 0), B(0, 1)], one_f_one_b(2, 2).actions[1]],
            ["rank 0, action 2: backward of micro-batch 0 on stage 1, which is on rank 1"],
        ),
        (
            [[F(0, 0), F(0, 1), F(0, 2), F(2, 0), "0B0", Overlapped(B(0, 0), F(0, 1))], one_f_one_b(2, 2).actions[1]],
            [
                "rank 0, action 2: there is no micro-batch 2: the last is 1",
                "rank 0, action 3: there is no stage 2: the last is 1",
                "rank 0, action 4: '0B0' is not an action",
                "rank 0, action 5: Overlapped(forward=Backward(stage=0, microbatch=0), "
                "backward=Forward(stage=0, microbatch=1)) is not an action",
            ],
        ),
        (
            [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]],
            [
                "rank 0, action 1: backward of micro-batch 0 waits for the gradient of stage 1, micro-batch 0, "
                "which rank 1 has only after action 2",
                "rank 1, action 1: forward of micro-batch 1 waits for the activation of stage 0, micro-batch 1, "
                "which rank 0 has only after action 2",
            ],
        ),
        (
            [[], one_f_one_b(2, 2).actions[1]],
            [f"rank 0: {what} of micro-batch {i} is missing" for i in (0, 1) for what in ("forward", "backward")],
        ),
    ],
)
def test_each_rule(lists, reasons):
    """Two ranks, two micro-batches: each rule broken once, and what is said."""
    assert [str(fault) for fault in find_faults(Schedule("mine", 2, straight(2), lists))] == reasons


def test_a_rank_that_waits_for_itself():
    """ZB-V's turning point: rank 2 swaps the forwards of its two stages, and only it is blamed."""
    schedule = changed(zb_v(3, 6), 2, lambda actions: actions.insert(4, actions.pop(5)))
    assert [str(fault) for fault in find_faults(schedule)] == [
        "rank 2, action 4: forward of micro-batch 2 on stage 3 waits for the activation of stage 2, micro-batch 2, "
        "which it has only after action 5"
    ]


def message_faults(rank: int, edit: Callable[[list], object]) -> list[str]:
    return [str(fault) for fault in find_faults(changed(order_messages(one_f_one_b(2, 2)), rank, edit))]


def test_messages_that_are_wrong():
    """1F1B with messages: a send dropped, doubled, sent to a wrong rank; two receives exchanged; a receive too late."""
    good = order_messages(one_f_one_b(2, 2))
    assert [str(a) for a in good.actions[0]] == "0F0 0a0>1 0F1 0a1>1 1g0<1 0B0 1g1<1 0B1".split()
    assert [str(a) for a in good.actions[1]] == "0a0<0 1F0 0a1<0 1B0 1g0>0 1F1 1B1 1g1>0".split()
    activation = "the activation of stage 0, micro-batch"
    assert message_faults(0, lambda a: a.pop(1)) == [f"rank 0: send {activation} 0 to rank 1 is missing"]
    assert message_faults(0, lambda a: a.insert(2, a[1])) == [
        f"rank 0, action 2: send {activation} 0 to rank 1, a second time"
    ]
    assert message_faults(1, lambda a: a.insert(0, Send(Value("gradient", 1, 0), 5)))[0] == (
        "rank 1, action 0: send the gradient of stage 1, micro-batch 0 to rank 5, which nobody needs"
    )
    assert message_faults(1, lambda a: a.insert(0, a.pop(2))) == [
        f"rank 1, action 0: receive {activation} 1 from rank 0, which sends {activation} 0 first"
    ]
    assert message_faults(1, lambda a: a.insert(1, a.pop(0))) == [
        f"rank 1, action 0: forward of micro-batch 0 waits for {activation} 0, which it has only after action 1"
    ]
    assert Receive(Value("activation", 0, 0), 0) == good.actions[1][0]


def test_both_neighbours_send_first():
    """Each rank sends right after it computes and receives right before: the classic deadlock, named on both ranks."""
    lists = [
        "0F0 0a0>1 0F1 0a1>1 1g0<1 0B0 0F2 0a2>1 1g1<1 0B1 1g2<1 0B2".split(),
        "0a0<0 1F0 1B0 1g0>0 0a1<0 1F1 1B1 1g1>0 0a2<0 1F2 1B2 1g2>0".split(),
    ]
    by_name = {str(a): a for actions in order_messages(one_f_one_b(2, 3)).actions for a in actions}
    schedule = Schedule("mine", 3, straight(2), [[by_name[name] for name in names] for names in lists])
    activation, gradient = "the activation of stage 0, micro-batch 1", "the gradient of stage 1, micro-batch 0"
    assert [str(fault) for fault in find_faults(schedule)] == [
        f"rank 0, action 3: send {activation} to rank 1 waits for rank 1, which is at action 3",
        f"rank 1, action 3: send {gradient} to rank 0 waits for rank 0, which is at action 3",
    ]
