"""Every fault of `torch.distributed` on a CPU ends in a named report: no hang, no wrong number, no silent abort."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime.errors import BadResult, Deadlock, LaunchError, Mismatch, RankFailed, RankKilled, RunTimeout


def rank_missing():
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def receive_without_send():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(3), 1)


def everyone_sends_first():
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(6), (rank + 1) % n)
    dist.recv(torch.ones(6), (rank - 1) % n)


def everyone_receives_first():
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.ones(6)
    dist.irecv(received, (rank - 1) % n).wait()
    dist.send(received, (rank + 1) % n)


def collective_against_message():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), 1)
    else:
        dist.all_reduce(torch.ones(2))


def groups_crossed():
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        for group in (a, b) if dist.get_rank() == 0 else (b, a):
            dist.all_reduce(torch.ones(2), group=group)


def wrong_tag():
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=1)
    elif rank == 1:
        dist.recv(torch.ones(2), 0, tag=2)


def new_group_by_members_only():
    if dist.get_rank() < 2:
        dist.new_group([0, 1])


DEADLOCKS = [
    (rank_missing, r"rank 0 .*all_reduce in world.*waits for rank 1: rank 1 finished"),
    (receive_without_send, r"rank 0 .*receive from rank 1.*it has finished"),
    (everyone_sends_first, "Everyone sends first"),
    (everyone_receives_first, "Everyone receives first"),
    (collective_against_message, r"receive from rank 1[^\n]*waits for rank 1 to send"),
    (groups_crossed, "same order"),
    (wrong_tag, "send to rank 1"),
    (new_group_by_members_only, "new_group in world"),
]


@pytest.mark.parametrize("program, says", DEADLOCKS, ids=lambda item: getattr(item, "__name__", ""))
def test_a_deadlock_is_seen_at_once_and_says_who_waits_for_whom(program, says):
    """The report comes long before the time limit, names the ranks, what they wait for, and the line."""
    with pytest.raises(Deadlock, match=says) as caught:
        run(program, 3, timeout=50)
    assert "test_faults.py line" in str(caught.value)
    assert "Deadlock after" in str(caught.value)


def dtype_differs():
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32))


def shape_differs():
    dist.all_reduce(torch.ones(4 if dist.get_rank() == 2 else 3))


def large_shape_differs():
    dist.all_reduce(torch.ones(100_000 if dist.get_rank() == 2 else 1_000_000))


def reduction_differs():
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM)


def another_collective():
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def another_root():
    dist.broadcast(torch.ones(4), src=min(dist.get_rank(), 1))


def another_order():
    x, y = torch.ones(3), torch.ones(5)
    for t in (x, y) if dist.get_rank() else (y, x):
        dist.all_reduce(t)


def buffer_too_large():
    _message(torch.ones(4), torch.ones(6))


def buffer_too_small():
    _message(torch.ones(6), torch.ones(4))


def buffer_of_another_dtype():
    _message(torch.ones(4), torch.ones(4, dtype=torch.int32))


def _message(sent, buffer):
    if dist.get_rank() == 0:
        dist.send(sent, 1)
    elif dist.get_rank() == 1:
        dist.recv(buffer, 0)


def splits_do_not_match():
    rank = dist.get_rank()
    sends = [1, 2, 3] if rank == 0 else [2, 2, 2]
    dist.all_to_all_single(torch.empty(6), torch.ones(6), [2, 2, 2], sends)


def groups_made_in_another_order():
    for ranks in ([0, 1], [1, 2]) if dist.get_rank() else ([1, 2], [0, 1]):
        dist.new_group(ranks)


MISMATCHES = [
    (dtype_differs, r"rank 1 +all_reduce +int32 \(4,\)"),
    (shape_differs, r"rank 2 +all_reduce +float32 \(4,\)"),
    (large_shape_differs, r"rank 2 +all_reduce +float32 \(100000,\)"),
    (reduction_differs, "reduction max"),
    (another_collective, "rank 0 +broadcast"),
    (another_root, "root 1"),
    (another_order, "operation 0 in group world"),
    (buffer_too_large, r"rank 1 +receives +float32 \(6,\)"),
    (buffer_too_small, r"rank 0 +sends +float32 \(6,\)"),
    (buffer_of_another_dtype, "receives +int32"),
    (splits_do_not_match, r"sends \[1, 2, 3\]"),
    (groups_made_in_another_order, r"ranks \[1, 2\]"),
]


@pytest.mark.parametrize("program, says", MISMATCHES, ids=lambda item: getattr(item, "__name__", ""))
def test_a_disagreement_stops_the_run_before_it_becomes_a_wrong_number(program, says):
    """What differs is shown by rank; nothing is executed that gloo would answer with garbage or an abort."""
    with pytest.raises(Mismatch, match=says) as caught:
        run(program, 3, timeout=50)
    assert "test_faults.py line" in str(caught.value)


def raises():
    dist.barrier()
    if dist.get_rank() == 2:
        raise KeyError("the learner's own")
    dist.all_reduce(torch.ones(2))


def test_the_first_real_exception_is_raised_with_the_learners_line():
    """Peers that only lose their connection are noise and left out."""
    with pytest.raises(RankFailed, match="the learner's own") as caught:
        run(raises, 3)
    assert (caught.value.rank, caught.value.ranks, caught.value.kind) == (2, (2,), "KeyError")
    assert "raise KeyError" in caught.value.traceback and "test_faults.py" in caught.value.traceback
    assert "Connection closed" not in str(caught.value)


def all_raise():
    raise NotImplementedError("not yet")


def test_ranks_that_raise_the_same_are_told_together():
    """One traceback, and the list of ranks that raised it."""
    with pytest.raises(RankFailed) as caught:
        run(all_raise, 4)
    assert caught.value.ranks == (0, 1, 2, 3) and caught.value.kind == "NotImplementedError"


def dies_by(number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_rank_that_dies_by_a_signal_is_named_with_it(number):
    """Not "connection closed" on its peers."""
    with pytest.raises(RankKilled, match=number.name) as caught:
        run(dies_by, 2, number, echo=False)
    assert caught.value.rank == 1


def leaves():
    if dist.get_rank() == 0:
        os._exit(0)
    dist.barrier()


def test_a_rank_that_leaves_early_is_a_failure_even_with_exit_code_0():
    """An exit code alone is no result."""
    with pytest.raises(RankKilled, match="exit code 0"):
        run(leaves, 2)


def loops():
    while dist.get_rank() == 0:
        pass
    dist.barrier()


def test_the_report_of_a_timeout_says_where_each_rank_is():
    """A rank that computes for ever is shown with its line, one that waits with what it waits for."""
    with pytest.raises(RunTimeout) as caught:
        run(loops, 2, timeout=1)
    assert "longer than 1 s" in str(caught.value)
    assert "waits in barrier" in str(caught.value)
    assert "test_faults.py" in str(caught.value).split("rank 1")[0]


def test_a_result_that_is_neither_data_nor_tensor_is_refused_by_place_and_type():
    """Nothing that comes back can execute code in the caller."""
    with pytest.raises(BadResult, match=r"result\['f'\]\[1\] is a builtins.function"):
        run(lambda: {"f": [1, all_raise]}, 2)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ((3, 2), "needs a function"),
        ((raises, 0), "world_size is 0"),
        ((raises, True), "world_size is True"),
        ((raises, 2.0), "world_size is 2.0"),
        ((raises, 100_000), "world_size is 100000"),
    ],
)
def test_wrong_arguments_are_one_clear_line(arguments, says):
    """Before any rank starts."""
    with pytest.raises(LaunchError, match=says) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_sent_is_said_before_any_rank_starts():
    """A lock, a socket: the report names the function."""
    lock = threading.Lock()
    with pytest.raises(LaunchError, match="lambda.* cannot be sent to the ranks"):
        run(lambda: lock.locked(), 2)


def nested():
    run(all_raise, 2)


def test_a_run_inside_a_rank_is_refused():
    """It would start ranks from ranks."""
    with pytest.raises(RankFailed, match="run was called on a rank"):
        run(nested, 2)
