"""What only GPUs need of a group, as far as a CPU can show it: staging through host memory, messages in one batch.

On CPU tensors staging changes nothing but the way: so everything must come out as without it.
"""

import time

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.runtime import staging
from fivefold.runtime.group import WatchedGroup
from fivefold.runtime.link import Recorder
from fivefold.train import Job, train


def stage_everything():
    """From here on, on this rank, all operations run on copies, as if the tensors were on a GPU that ranks share."""
    make = WatchedGroup.make
    WatchedGroup.make = lambda self, device: (make(self, device)[0], True)


def operations(stage):
    """One of each kind of operation, asynchronous ones too; the results, and how often each input was written to."""
    if stage:
        stage_everything()
    rank, n = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(n * 2, 3, generator=generator)
    inputs = [x.clone() for _ in range(6)]
    summed, out, piece = x.clone(), [torch.empty_like(x) for _ in range(n)], x.new_empty(2, 3)
    work = dist.all_reduce(summed, async_op=True)
    dist.all_gather(out, inputs[0])
    dist.reduce_scatter(piece, list(inputs[1].chunk(n)))
    work.wait()
    traded, uneven = torch.empty_like(x), x.new_empty(sum(range(n)) if rank == n - 1 else 0, 3)
    dist.all_to_all_single(traded, inputs[2])
    sends = [0] * (n - 1) + [rank]
    receives = list(range(n)) if rank == n - 1 else [0] * n
    dist.all_to_all_single(uneven, inputs[3][:rank], receives, sends)
    told = x.clone()
    dist.broadcast(told, src=1)
    passed = torch.empty_like(x)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, inputs[4], (rank + 1) % n), dist.P2POp(dist.irecv, passed, (rank - 1) % n)
    ])  # fmt: skip
    for work in works:
        work.wait()
    gathered = [torch.empty_like(x) for _ in range(n)] if rank == 0 else None
    dist.gather(inputs[5], gathered, dst=0)
    dist.barrier()
    versions = [tensor._version for tensor in inputs]
    return [summed, *out, piece, traded, uneven, told, passed, *(gathered or [])], versions


def test_staged_operations_give_what_the_real_ones_give_and_write_to_outputs_only():
    """Bit by bit the same; inputs are never written to, which autograd would take for a change of what it saved."""
    plain, staged = (run(operations, 3, stage).results for stage in (False, True))
    for (expected, before), (found, after) in zip(plain, staged, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert after == before


def staged_training(job, steps):
    stage_everything()
    return [report.loss for report in train(job, steps)]


def test_training_on_all_axes_works_when_every_tensor_is_staged():
    """Forward, backward, pipeline messages, ring, experts and ZeRO, in the form in which ranks would share a GPU."""
    model = GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, ffn=8, dtype=torch.float64)
    sizes = {"batch": 4, "num_microbatches": 2, "sequence": 16, "sequence_parallel": True}
    job = Job(Layout.parse("cp2,pp2,tp2,ep2"), model, **sizes)
    expected = [report["loss"] for report in run(train, 8, job, 2).results[0]]
    assert run(staged_training, 8, job, 2).results[3] == pytest.approx(expected, rel=1e-13, abs=0)


def test_outputs_are_copied_back_when_the_program_waits_and_not_before():
    """With tensors inside lists, and an output that is also an input."""

    class Work:
        def wait(self):
            return True

    a, b, c = torch.zeros(2), torch.ones(2), torch.full((2,), 5.0)

    def start(lists, other):
        lists[0].add_(10)
        other.add_(10)
        return Work()

    work = staging.on_host(start, ([a, b], c), [a])
    assert a.tolist() == [0, 0] and not work.is_completed()
    work.wait()
    assert (a.tolist(), b.tolist(), c.tolist()) == ([10, 10], [1, 1], [5, 5])
    assert staging.device_of(([], [3, [a]])) == "cpu" and staging.device_of([1, None]) == ""


class FakeNCCL:
    """A real group as NCCL is one: it starts one thing after the other, and knows a batch."""

    supports_coalescing = True

    def __init__(self):
        self.log = []

    def send(self, tensors, peer, tag):
        self.log.append(f"send {peer}")

    def recv(self, tensors, peer, tag):
        self.log.append(f"recv {peer}")

    def _start_coalescing(self):
        self.log.append("start")

    def _end_coalescing(self):
        self.log.append("end")
        return self

    def wait(self):
        self.log.append("wait")


def test_messages_of_a_batch_start_together_where_no_supervisor_orders_them(monkeypatch):
    """Two ranks that both send first would hang on NCCL: between start and end it does both at one time."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    fake = FakeNCCL()
    group = WatchedGroup(Recorder(None, time.monotonic()), 0, [0, 1], lambda device: (fake, False))
    with group.batch("cpu"):
        works = [group.send([torch.zeros(1)], 1), group.recv([torch.zeros(1)], 1)]
    assert fake.log == ["start", "send 1", "recv 1", "end"]
    for work in works:
        work.wait()
    assert fake.log[4:] == ["wait", "wait"]
    group.recv([torch.zeros(1)], 1)
    assert fake.log[6:] == ["recv 1"]
