"""The watched group: every operation of `torch.distributed` gives gloo's answer and is recorded once, counted right."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn as nn
from fivefold import run
from fivefold.runtime.errors import RankFailed

N = 3


def pieces(rank, n, seed=0):
    """n random pieces that are this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(n)]


def all_collectives():
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = pieces(rank, n)
    out = {}
    out["all_reduce"] = mine[0].clone()
    dist.all_reduce(out["all_reduce"])
    out["max"] = mine[0].clone()
    dist.all_reduce(out["max"], op=dist.ReduceOp.MAX)
    out["broadcast"] = mine[1].clone()
    dist.broadcast(out["broadcast"], src=1)
    out["all_gather"] = [torch.empty_like(mine[0]) for _ in range(n)]
    dist.all_gather(out["all_gather"], mine[2])
    out["single"] = torch.empty(2 * n, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(out["single"], mine[2])
    out["reduce_scatter"] = torch.empty_like(mine[0])
    dist.reduce_scatter(out["reduce_scatter"], [piece.clone() for piece in mine])
    out["scattered"] = torch.empty_like(mine[0])
    dist.reduce_scatter_tensor(out["scattered"], torch.cat(mine))
    out["all_to_all"] = [torch.empty_like(mine[0]) for _ in range(n)]
    dist.all_to_all(out["all_to_all"], mine)
    out["reduce"] = mine[0].clone()
    dist.reduce(out["reduce"], dst=0)
    gathered = [torch.empty_like(mine[0]) for _ in range(n)] if rank == 2 else None
    dist.gather(mine[1], gathered, dst=2)
    out["gather"] = gathered
    out["scatter"] = torch.empty_like(mine[0])
    dist.scatter(out["scatter"], mine if rank == 1 else None, src=1)
    out["functional"] = functional.all_reduce(mine[0], "sum", dist.group.WORLD) + 0
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    out["objects"] = objects
    dist.barrier()
    return out


def test_every_collective_gives_the_answer_computed_without_it():
    """Against sums and rearrangements of the same numbers in one process."""
    everyone = [pieces(rank, N) for rank in range(N)]
    for rank, out in enumerate(run(all_collectives, N).results):
        total = sum(own[0] for own in everyone)
        torch.testing.assert_close(out["all_reduce"], total)
        torch.testing.assert_close(out["functional"], total)
        assert torch.equal(out["max"], torch.stack([own[0] for own in everyone]).amax(0))
        assert torch.equal(out["broadcast"], everyone[1][1])
        assert torch.equal(torch.cat(out["all_gather"]), torch.cat([own[2] for own in everyone]))
        assert torch.equal(out["single"], torch.cat(out["all_gather"]))
        torch.testing.assert_close(out["reduce_scatter"], sum(own[rank] for own in everyone))
        torch.testing.assert_close(out["scattered"], out["reduce_scatter"])
        assert torch.equal(torch.stack(out["all_to_all"]), torch.stack([own[rank] for own in everyone]))
        if rank == 0:
            torch.testing.assert_close(out["reduce"], total)
        if rank == 2:
            assert torch.equal(torch.stack(out["gather"]), torch.stack([own[1] for own in everyone]))
        assert torch.equal(out["scatter"], everyone[1][rank])
        assert out["objects"] == [{"rank": r} for r in range(N)]


def uneven():
    rank, n = dist.get_rank(), dist.get_world_size()
    counts = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]  # zeros among them
    mine = torch.arange(sum(counts[rank]) * 2.0).view(-1, 2) + 100 * rank
    received = torch.empty(sum(counts[i][rank] for i in range(n)), 2)
    dist.all_to_all_single(received, mine, [counts[i][rank] for i in range(n)], counts[rank])
    return received, counts


def test_uneven_all_to_all_is_exact_and_counts_what_leaves_the_rank():
    """Zero pieces too; what a rank keeps for itself is no traffic."""
    found = run(uneven, 4)
    counts = found.results[0][1]
    for rank, (received, _) in enumerate(found.results):
        expected = [torch.arange(sum(counts[i]) * 2.0).view(-1, 2) + 100 * i for i in range(4)]
        parts = [torch.split(x, counts[i])[rank] for i, x in enumerate(expected)]
        assert torch.equal(received, torch.cat(parts))
        (call,) = found.ledger[rank].communications
        assert call.splits == tuple(8 * n for n in counts[rank])
        assert call.sent == 8 * (sum(counts[rank]) - counts[rank][rank])


def messages():
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    received = torch.empty(4)
    sending = dist.isend(torch.full((4,), float(rank)), right)
    dist.recv(received, left)
    sending.wait()
    batch = torch.empty(2)
    operations = [dist.P2POp(dist.isend, torch.full((2,), 10.0 + rank), right), dist.P2POp(dist.irecv, batch, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    tagged = torch.empty(1), torch.empty(1)
    works = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):  # asked for in the other order
        dist.recv(tagged[tag - 1], left, tag=tag)
    for work in works:
        work.wait()
    anyone = torch.empty(1)
    source = None
    if rank == 0:
        source = dist.recv(anyone)
    elif rank == n - 1:
        dist.send(torch.tensor([9.0]), 0)
    return received, batch, tagged, source


def test_messages_meet_by_pair_and_tag():
    """isend with recv, batches, tags out of order, any source."""
    for rank, (received, batch, tagged, source) in enumerate(run(messages, N).results):
        left = (rank - 1) % N
        assert received.tolist() == [left] * 4 and batch.tolist() == [10.0 + left] * 2
        assert [t.item() for t in tagged] == [1.0, 2.0]
        assert source == (N - 1 if rank == 0 else None)


def overlapping():
    """An operation begun early does not hold up the messages that are made before its wait."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(5) * rank
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.ones(1), 1)
    else:
        if rank == 1:
            dist.recv(torch.ones(1), 0)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x.tolist() == [n * (n - 1) / 2] * 5, work.is_completed()


def test_an_asynchronous_operation_does_not_block_its_caller():
    """A program that is right on gloo is not called a deadlock."""
    assert run(overlapping, N).results == [(True, True)] * N


def forgets_its_sends():
    rank, n = dist.get_rank(), dist.get_world_size()
    got = torch.empty(3)
    for step in range(20):
        dist.isend(torch.full((3,), float(10 * step + rank)), (rank + 1) % n)
        dist.recv(got, (rank - 1) % n)
    return got


def test_a_message_whose_handle_is_dropped_arrives():
    """gloo forgets a send nobody holds; here it is the check that tells a learner to wait, and no hang."""
    done = run(forgets_its_sends, N, timeout=20)
    assert [result[0].item() for result in done.results] == [190 + (rank - 1) % N for rank in range(N)]


def test_what_was_received_is_freed_when_the_program_lets_it_go():
    def program() -> bool:
        from torch.multiprocessing.reductions import StorageWeakRef

        x, peer = torch.full((3,), float(dist.get_rank())), 1 - dist.get_rank()
        got = torch.empty(3)
        storage = StorageWeakRef(got.untyped_storage())
        handles = [dist.isend(x, peer), dist.irecv(got, peer)]
        for handle in handles:
            handle.wait()
        del handles, handle, got
        gc.collect()
        return storage.expired()

    assert run(program, 2).results == [True, True]


def test_the_ledger_says_which_calls_were_asynchronous_and_where_they_were_waited_for():
    """Program order: the call, what came between, the wait."""

    def program():
        x, y = torch.ones(3), torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        work.wait()

    for rank in run(program, 2).ledger.ranks:
        first, second, wait = rank.entries
        assert (first.asynchronous, second.asynchronous, wait.of) == (True, False, 0)
        assert (first.bytes, second.bytes, first.sequence, second.sequence) == (12, 16, 0, 1)
        assert first.begin <= second.begin <= second.end <= wait.end and "work = dist.all_reduce" in first.line


def test_calls_made_in_backward_are_marked():
    """By where autograd runs them, not by who wrote them."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dist.all_reduce(x.clone())
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad)
            return grad

    def program():
        x = torch.ones(3, requires_grad=True)
        Sum.apply(x).sum().backward()

    assert [call.backward for call in run(program, 2).ledger[0].communications] == [False, True]


def alone():
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = torch.arange(3.0)
    dist.all_reduce(x, group=group)
    gathered = torch.empty(3)
    dist.all_gather_into_tensor(gathered, x, group=group)
    out = torch.empty(3)
    dist.all_to_all_single(out, x, group=group)
    return x, gathered, out, dist.get_rank(group), dist.get_world_size(group)


def test_in_a_group_of_one_every_operation_works_and_nothing_is_sent():
    """So code for n ranks needs no special case for one."""
    found = run(alone, 2)
    for x, gathered, out, rank, n in found.results:
        assert x.tolist() == gathered.tolist() == out.tolist() == [0.0, 1.0, 2.0] and (rank, n) == (0, 1)
    assert found.ledger[0].entries == []


def test_the_traffic_table_counts_by_operation_and_group():
    """2(n-1)/n of the bytes for an all-reduce, by the name the group was given."""

    def program():
        pairs = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [2, 3])]
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(500), group=pairs[dist.get_rank() // 2])

    traffic = run(program, 4).ledger.traffic()
    assert [(row.op, row.group, row.calls, row.bytes) for row in traffic.rows] == [
        ("all_reduce", "world", 1, 6000),
        ("all_reduce", "tp", 1, 2000),
    ]
    assert "tp [0 1] [2 3]" in str(traffic) and "6 kB" in str(traffic)
    assert "<td>6 kB</td>" in traffic._repr_html_()
    assert str(run(len, 2, ()).ledger.traffic()).startswith("no traffic")


def with_ddp():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    parallel = nn.parallel.DistributedDataParallel(model)
    x = pieces(dist.get_rank(), 1)[0]
    parallel(torch.cat([x, x[:, :2]], 1)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_torchs_own_data_parallel_runs_on_the_watched_group():
    """DDP's C++ reducer goes through it as well, and averages the gradients of one process."""
    found = run(with_ddp, N)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    inputs = [pieces(rank, 1)[0] for rank in range(N)]
    sum(model(torch.cat([x, x[:, :2]], 1)).square().mean() / N for x in inputs).backward()
    for mine, expected in zip(found.results[0], model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.grad)
    assert any(call.op == "all_reduce" and call.backward for call in found.ledger[0].communications)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2)), r"they have \[2, 3\]"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)), "a first dimension that 2 ranks divide"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], [2, 2]), "with the sum 3"),
    ],
)
def test_wrong_buffers_are_one_clear_line(call, says):
    """Said by the call itself, before it reaches another rank."""
    with pytest.raises(RankFailed, match=says):
        run(call, 2)
