"""The eight schedules: valid whatever the durations, as fast as the papers say, within the memory that they state."""

from __future__ import annotations

import re

import pytest
from fivefold.pipeline import (
    Durations,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
    dualpipe,
    find_faults,
    gpipe,
    in_order,
    interleaved,
    marginal_idle,
    naive,
    one_f_one_b,
    simulate,
    straight,
    zb_h1,
    zb_h2,
    zb_v,
)
from hypothesis import given, settings
from hypothesis import strategies as st

sizes = st.integers(1, 6)
ticks = st.integers(1, 9)


@st.composite
def schedules(draw) -> Schedule:
    """Any of the eight with any sizes that it takes, m smaller than p and p = 1 among them."""
    p, few = draw(sizes), draw(st.integers(1, 9))
    return draw(
        st.sampled_from(
            [
                lambda: naive(p, few),
                lambda: gpipe(p, few),
                lambda: one_f_one_b(p, few),
                lambda: interleaved(p, p * (1 + few % 3), draw(st.integers(1, 4))),
                lambda: zb_h1(p, few),
                lambda: zb_h2(p, few),
                lambda: zb_v(p, 2 * p - 2 + few),
                lambda: dualpipe(p + p % 2, 2 * (p + p % 2 + few - 1)),
            ]
        )
    )()


@settings(max_examples=1500, deadline=None)
@given(schedules(), st.randoms(use_true_random=False), st.floats(0, 3))
def test_is_valid_under_random_durations(schedule, random, communication):
    """No rule is broken, and in time every value is made, and has travelled, before the action that needs it starts."""
    assert find_faults(schedule) == []
    forward, inputs, weights = ([random.uniform(0.1, 5) for _ in range(schedule.num_stages)] for _ in range(3))
    run = simulate(schedule, Durations(forward, inputs, weights, communication))
    assert not run.waiting
    start, end, last = {}, {}, schedule.num_stages - 1
    for rank, events in enumerate(run.events):
        assert [event.action for event in events] == list(schedule.actions[rank])
        assert all(a.end <= b.start for a, b in zip(events, events[1:], strict=False))
        for event in events:
            for step in event.action.steps:
                for letter in "IW" if step.letter == "B" else step.letter:
                    key = letter, step.stage, step.microbatch
                    assert key not in start
                    start[key], end[key] = event.start, event.end
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_microbatches):
            before = [(("F", stage - 1, i), ("F", stage, i))] if stage > 0 else []
            before += [(("I", stage + 1, i), ("I", stage, i))] if stage < last else []
            for made, used in before:
                same_rank = schedule.rank_of(made[1], i) == schedule.rank_of(used[1], i)
                assert start[used] >= end[made] + (0 if same_rank else communication)
            assert start["I", stage, i] >= end["F", stage, i]
            assert start["W", stage, i] >= start["I", stage, i]
    assert len(start) == 3 * schedule.num_stages * schedule.num_microbatches


@settings(max_examples=300, deadline=None)
@given(schedules(), ticks, ticks, ticks)
def test_busy_time(schedule, f, i, w):
    """Every rank works m(T_F + T_I + T_W) in all, T being the time of all its stages together."""
    per_rank = schedule.num_stages // schedule.num_ranks
    assert set(simulate(schedule, Durations(f, i, w)).busy) == {schedule.num_microbatches * per_rank * (f + i + w)}


@settings(max_examples=300, deadline=None)
@given(sizes, st.integers(1, 16), ticks, ticks, ticks)
def test_bubble_of_naive_gpipe_and_1f1b(p, m, f, i, w):
    """By makespan: naive takes m·p(T_F + T_B); GPipe and 1F1B lose (p-1)(T_F + T_B), with m below p too."""
    time = Durations(f, i, w)
    assert simulate(naive(p, m), time).makespan == m * p * (f + i + w)
    assert set(simulate(gpipe(p, m), time).idle_by_makespan) == {(p - 1) * (f + i + w)}
    assert simulate(one_f_one_b(p, m), time).makespan == simulate(gpipe(p, m), time).makespan


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 3), st.integers(1, 4), ticks, ticks, ticks)
def test_bubble_of_interleaved(p, rounds, v, f, i, w):
    """By makespan (p-1)(T_F + T_B) of one chunk: 1/v of 1F1B's, whose stage is v chunks (Narayanan 2021)."""
    run = simulate(interleaved(p, p * rounds, v), Durations(f, i, w))
    assert set(run.idle_by_makespan) == {(p - 1) * (f + i + w)}


@settings(max_examples=300, deadline=None)
@given(sizes, st.integers(0, 8), ticks, ticks, ticks)
def test_bubble_of_zb_h1(p, extra, f, i, w):
    """By makespan (p-1)(T_F + T_I - T_W) where W is no longer than F and I (Qi 2023, section 2); else never below."""
    idle = set(simulate(zb_h1(p, p + extra), Durations(f, i, w)).idle_by_makespan)
    stated = (p - 1) * (f + i - w)
    assert idle == {stated} if w <= min(f, i) else min(idle) >= stated


@settings(max_examples=300, deadline=None)
@given(sizes, st.integers(0, 8), ticks, ticks, ticks)
def test_bubble_of_zb_h2(p, extra, f, i, w):
    """In the longest window (p-1)(T_F + T_I - 2T_W) where W is no longer than F and I (Qi 2023, section 2)."""
    run = simulate(zb_h2(p, 2 * p - 1 + extra), Durations(f, i, w))
    stated = (p - 1) * (f + i - 2 * w)
    assert max(run.idle_in_window) == stated if w <= min(f, i) else max(run.idle_in_window) >= stated


@pytest.mark.parametrize("p", range(1, 7))
def test_zero_is_zero_only_without_the_flush(p):
    """ZB-H2, ZB-V at unit times: nothing idle in a window or in one more iteration, by makespan as much as ZB-H1."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        for schedule in (zb_h2(p, m), zb_v(p, m)):
            run = simulate(schedule)
            assert max(run.idle_in_window) == 0
            assert max(marginal_idle(schedule)) == 0
            assert set(run.idle_by_makespan) == {p - 1} == set(simulate(zb_h1(p, m)).idle_by_makespan)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.integers(0, 5), ticks, ticks, st.floats(0, 1))
def test_bubble_of_dualpipe(half, extra, f, w, hidden):
    """By makespan (p/2-1)(T_F&B + T_B - 3T_W), T_B = T_I + T_W, where T_F = T_I >= T_W (DeepSeek-V3, table 2).

    Ranks do more or fewer overlapped pairs, so where a pair is faster than its parts the longest idle is meant.
    """
    p, w = 2 * half, min(f, w)
    pair = 2 * f + w - round(hidden * f)  # from T_B, all of the forward hidden, to T_F + T_B
    idle = simulate(dualpipe(p, 2 * (p + extra)), Durations(f, f, w, overlapped=pair)).idle_by_makespan
    assert max(idle) == (half - 1) * (pair + (f + w) - 3 * w)
    if pair == 2 * f + w:
        assert len(set(idle)) == 1


def test_bubbles_of_the_table_at_p4_m8():
    """Unit times, 4 ranks, 8 micro-batches: 9 idle for 1F1B, 3 for ZB-H1, 2 for DualPipe."""
    bubbles = {s.name: max(simulate(s).idle_by_makespan) for s in (one_f_one_b(4, 8), zb_h1(4, 8), dualpipe(4, 8))}
    assert bubbles == {"1F1B": 9, "ZB-H1": 3, "DualPipe": 2}


@settings(max_examples=300, deadline=None)
@given(sizes, st.integers(1, 16))
def test_peak_activations_of_one_stage_a_rank(p, m):
    """Naive keeps 1, GPipe m, 1F1B min(p-r, m) on rank r; ZB-H1 and ZB-H2, from F to W, min(p, m) and min(2p-1, m)."""
    assert simulate(naive(p, m)).peak_memory() == (1,) * p
    assert simulate(gpipe(p, m)).peak_memory() == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_memory() == tuple(min(p - r, m) for r in range(p))
    assert simulate(zb_h1(p, m)).peak_memory() == (min(p, m),) * p
    assert simulate(zb_h2(p, m)).peak_memory() == (min(2 * p - 1, m),) * p


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(0, 3), st.integers(1, 4))
def test_peak_activations_of_several_stages_a_rank(p, extra, v):
    """Interleaved keeps min((v+1)p-1, mv) chunks on rank 0, ZB-V 2p half stages, DualPipe p+1 stages."""
    m = p * (1 + extra)
    assert simulate(interleaved(p, m, v)).peak_memory()[0] == min((v + 1) * p - 1, m * v)
    assert set(simulate(zb_v(p, 2 * p + extra)).peak_memory()) == {2 * p}
    even = p + p % 2
    assert set(simulate(dualpipe(even, 2 * (even + extra))).peak_memory()) == {even + 1}


def test_interleaved_with_one_chunk_is_as_fast_as_1f1b():
    """v = 1 is a 1F1B with a longer warm-up."""
    assert simulate(interleaved(3, 6, 1)).makespan == simulate(one_f_one_b(3, 6)).makespan


def test_one_rank_is_never_idle():
    """p = 1: every schedule that takes one rank is plain gradient accumulation."""
    for schedule in (naive(1, 5), gpipe(1, 5), one_f_one_b(1, 5), interleaved(1, 5, 3), zb_h1(1, 5), zb_h2(1, 5)):
        assert simulate(schedule).idle_by_makespan == (0,)
    assert simulate(zb_v(1, 1)).idle_by_makespan == (0,)


def test_where_the_stages_are():
    """Each placement, from both sides: the rank of a stage and the stages of a rank."""
    assert [interleaved(3, 3, 2).stages_of(r) for r in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [zb_v(3, 5).stages_of(r) for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
    twice = dualpipe(4, 8)
    assert [twice.stages_of(r) for r in range(4)] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert [twice.ranks_of(s) for s in range(4)] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert [zb_v(3, 5).ranks_of(s) for s in range(6)] == [[0], [1], [2], [2], [1], [0]]
    assert [twice.rank_of(1, i) for i in (0, 3, 4, 7)] == [1, 1, 2, 2]


def test_dualpipe_by_hand():
    """p = 4, m = 8: the eight steps of DeepSeek's own program, followed on paper for an outer and a middle rank."""
    outer = "0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3&3B5 3F6&0B0 3B6 3F7&0B1 3B7 0I2 0W2 0I3 0W3"
    middle = "1F0 2F4 1F1 2F5 1F2 2B4 2F6&1B0 1F3&2B5 2F7&1B1 2B6 1B2 2I7 1I3 2W7 1W3"
    lists = [" ".join(map(str, actions)) for actions in dualpipe(4, 8).actions]
    assert lists[:2] == [outer, middle]
    mirror = str.maketrans("04152637", "40516273")
    mirrored = [re.sub(r"[0-7](?!\w)", lambda i: i[0].translate(mirror), text) for text in lists[:2]]
    assert lists[2:] == mirrored[::-1]


def test_prints_and_compares():
    """A schedule is text that a person can read; equal lists are equal schedules, whatever their names."""
    assert str(one_f_one_b(2, 2)) == (
        "1F1B: 2 ranks, 2 stages, 2 micro-batches\nrank 0  0F0 0F1 0B0 0B1\nrank 1  1F0 1B0 1F1 1B1"
    )
    assert gpipe(3, 1) == one_f_one_b(3, 1) != gpipe(3, 2)
    by_hand = [[Forward(0, 0), InputGradient(0, 0), WeightGradient(0, 0)]]
    assert Schedule("mine", 1, straight(1), by_hand) == zb_h1(1, 1)


def test_papers_notation():
    """W alone pays the oldest debt of any stage, W1 the oldest of that stage; B and I share their counter."""
    words = "F0 F1 F1 I1 B1 I0 W0 W".split()
    assert [str(action) for action in in_order(words, [2, 5], first=[0, 7])] == (
        "2F0 5F7 5F8 5I7 5B8 2I0 2W0 5W7".split()
    )
    with pytest.raises(ValueError, match="^W has no input gradient before it"):
        in_order(["F", "W"], [0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: interleaved(4, 6, 2), "a multiple of 4 micro-batches on 4 ranks, 6 were given: choose 8"),
        (lambda: interleaved(4, 8, 0), "at least 1 rank and 1 chunk, 4 and 0 were given"),
        (lambda: zb_v(4, 6), "at least 7 micro-batches on 4 ranks, 6 were given"),
        (lambda: dualpipe(3, 8), "even number of ranks, 3 were given: choose 4"),
        (lambda: dualpipe(4, 9), "even number of micro-batches, 8 or more on 4 ranks: 9 were given"),
        (lambda: dualpipe(4, 6), "8 or more on 4 ranks: 6 were given"),
        (lambda: one_f_one_b(2, 0), "at least 1 micro-batch, 0 were given"),
        (lambda: zb_h1(2, -1), "at least 1 micro-batch, -1 were given"),
        (lambda: gpipe(0, 3), "at least 1 rank, 0 were given"),
        (lambda: interleaved(0, 3, 2), "at least 1 rank and 1 chunk, 0 and 2 were given"),
        (lambda: zb_v(0, 3), "at least 1 rank, 0 were given"),
        (lambda: dualpipe(0, 4), "at least 1 rank, 0 were given"),
        (lambda: Schedule("mine", 2, straight(3), [[], []]), "on 3 ranks, but there are lists for 2"),
    ],
)
def test_wrong_sizes_get_one_line(wrong, words):
    """A size that a schedule cannot take is named, with what to choose."""
    with pytest.raises(ValueError) as caught:
        wrong()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
