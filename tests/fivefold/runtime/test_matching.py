"""The referee, without processes: right programs always come to their end, broken ones never pass in silence."""

import random

import pytest
from fivefold.runtime.matching import Call, Disagreement, Referee, Stuck
from hypothesis import given, settings
from hypothesis import strategies as st


def collective(op, ranks, **more):
    return [(rank, {"op": op, "group": str(ranks), "name": f"g {ranks}", "ranks": ranks, **more}) for rank in ranks]


def message(source, target, tag):
    common = {"group": "world", "name": "world", "ranks": (source, target), "tag": tag, "dtype": "f", "shape": (4,)}
    return [(source, {"op": "send", "peer": target, **common}), (target, {"op": "recv", "peer": source, **common})]


@st.composite
def programs(draw):
    """Operations in one global order; each rank calls those it takes part in, in that order, and waits for each."""
    n = draw(st.integers(2, 6))
    rng = random.Random(draw(st.integers(0, 10**6)))
    steps = []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.5:
            ranks = tuple(sorted(rng.sample(range(n), rng.randint(2, n))))
            steps.append(collective(rng.choice(["all_reduce", "broadcast"]), ranks, shape=(rng.randint(1, 3),)))
        else:
            steps.append(message(*rng.sample(range(n), 2), tag=rng.randint(0, 1)))
    calls = {rank: [call for step in steps for who, call in step if who == rank] for rank in range(n)}
    return n, calls, rng


def play(n, calls, rng):
    """Let ranks run in random order, each blocked in its current call until it is matched; returns how many ended."""
    referee = Referee(n)
    place = dict.fromkeys(range(n), 0)
    free = set(range(n))
    while free:
        rank = rng.choice(sorted(free))
        if place[rank] == len(calls[rank]):
            free.discard(rank)
            referee.finish(rank)
        else:
            index = place[rank]
            place[rank] += 1
            free.discard(rank)
            freed = list(referee.call(Call(rank=rank, index=index, line="", **calls[rank][index])))
            referee.wait(rank, index)
            free |= {who for who, _, _ in freed}
        referee.check()
    return len(referee.finished)


@settings(max_examples=300, deadline=None)
@given(programs())
def test_a_right_program_ends_in_any_order_of_its_ranks(program):
    """No false alarm, whatever the timing."""
    n, calls, rng = program
    assert play(n, calls, rng) == n


@settings(max_examples=300, deadline=None)
@given(programs())
def test_a_program_that_lacks_a_call_is_never_passed_over(program):
    """One call left out on one rank: a deadlock or a disagreement is reported in every order of the ranks."""
    n, calls, rng = program
    rank = rng.choice([r for r in range(n) if calls[r]])
    dropped = calls[rank].pop(rng.randrange(len(calls[rank])))
    # The same operation may stand again right where its twin was dropped, on fewer ranks: still one is left over.
    with pytest.raises((Stuck, Disagreement)):
        play(n, calls, rng)
    assert dropped


@settings(max_examples=300, deadline=None)
@given(programs())
def test_a_changed_shape_is_never_passed_over(program):
    """One rank's collective of another shape, or buffer of another size."""
    n, calls, rng = program
    rank = rng.choice([r for r in range(n) if calls[r]])
    index = rng.randrange(len(calls[rank]))
    calls[rank][index] = calls[rank][index] | {"shape": (99,)}
    with pytest.raises(Disagreement):
        play(n, calls, rng)


def test_messages_of_one_pair_meet_in_order_and_by_tag():
    """The first send of a tag meets the first receive of it, also from any source."""
    referee = Referee(3)
    common = {"group": "w", "name": "w", "ranks": (0, 1, 2), "line": "", "dtype": "f", "shape": (1,)}
    assert list(referee.call(Call(0, 0, "send", peer=2, tag=1, **common))) == []
    assert list(referee.call(Call(1, 0, "send", peer=2, tag=1, **common))) == []
    assert list(referee.call(Call(2, 0, "recv", peer=1, tag=1, **common))) == [(1, 0, 2), (2, 0, 1)]
    assert list(referee.call(Call(2, 1, "recv", peer=None, tag=2, **common))) == []
    assert list(referee.call(Call(2, 2, "recv", peer=None, tag=1, **common))) == [(0, 0, 2), (2, 2, 0)]


def test_a_rank_that_still_computes_is_no_deadlock():
    """Others may wait for it as long as it takes."""
    referee = Referee(2)
    assert not list(referee.call(Call(rank=0, index=0, line="", **collective("all_reduce", (0, 1))[0][1])))
    referee.wait(0, 0)
    referee.check()
    referee.finish(1)
    with pytest.raises(Stuck, match="rank 1 finished"):
        referee.check()


def waiting(referee, rank, op, peer=None, line="cell [1] line 2", wait=""):
    ranks = tuple(range(referee.world_size))
    call = Call(rank, 0, op, "w", "world", ranks, line, peer=peer, dtype="f", shape=(1,))
    list(referee.call(call))
    referee.wait(rank, 0, wait)


def test_a_barrier_that_is_not_the_programs_is_no_line_of_a_deadlock():
    """Whoever put the barrier behind the program: the rank in it has finished, and the others wait for one that has."""
    referee = Referee(3)
    waiting(referee, 0, "barrier", line="")
    waiting(referee, 1, "send", peer=2)
    waiting(referee, 2, "send", peer=0)
    with pytest.raises(Stuck) as caught:
        referee.check()
    report = str(caught.value)
    assert "barrier" not in report and "rank 0   finished" in report
    assert "waits for rank 0 to receive: it has finished" in report
    waiting(other := Referee(2), 0, "barrier")
    waiting(other, 1, "send", peer=0)
    with pytest.raises(Stuck, match="barrier in world"):
        other.check()


def test_a_deadlock_shows_the_line_that_waits():
    """A send that was started in one line and is waited for in another stands in the second."""
    referee = Referee(2)
    waiting(referee, 0, "send", peer=1, wait="cell [1] line 3: sending.wait()")
    waiting(referee, 1, "send", peer=0)
    with pytest.raises(Stuck) as caught:
        referee.check()
    assert "rank 0   send to rank 1   waits for rank 1 to receive   cell [1] line 3: sending.wait()" in str(
        caught.value
    )
    assert "cell [1] line 2" in str(caught.value)
