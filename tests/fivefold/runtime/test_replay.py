"""Replays against closed forms: rings, pipelines, ring attention, bucketed gradients; and laws of every replay."""

from __future__ import annotations

import json
import random

import pytest
from fivefold.runtime.cluster import A100, NVLINK3, Cluster, Link, cluster
from fivefold.runtime.ledger import Communication, Computation, Ledger, RankLedger, Wait
from fivefold.runtime.operations import operations
from fivefold.runtime.replay import replay

ALPHA, BETA = 3.0, 2.0
LINKED = Cluster(inside=Link("test", ALPHA, BETA), gpus_per_server=64)
INSTANT = cluster("instant")


class Program:
    """Writes the ledger of one rank, call by call."""

    def __init__(self, rank, world):
        self.rank, self.world, self.entries, self.blocks = rank, tuple(range(world)), [], 0

    def compute(self, seconds=0.0, kind="", label="", **fields):
        self._add(Computation(0, seconds=seconds, kind=kind, label=str(label), **fields))

    def call(self, op, size=0.0, group="world", ranks=None, wait=True, **fields):
        entry = Communication(0, op, group, ranks or self.world, 0, size, asynchronous=not wait, **fields)
        return self._add(entry)

    def send(self, peer, size=0.0, wait=True):
        return self.call("send", size, peer=peer, wait=wait)

    def recv(self, peer, wait=True):
        return self.call("recv", peer=peer, wait=wait)

    def wait(self, *handles):
        for handle in handles:
            self._add(Wait(0, handle))

    def _add(self, entry):
        entry.index = len(self.entries)
        self.entries.append(entry)
        return entry.index


def ledger(world, program):
    ranks = []
    for rank in range(world):
        own = Program(rank, world)
        program(own)
        ranks.append(RankLedger(rank, own.entries))
    return Ledger(ranks)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_a_ring_all_reduce_equals_the_same_ring_written_in_messages(n):
    """2(n−1) steps of α + M/(nβ): once as a collective, once as messages to the right while receiving from the left."""
    m = 120.0

    def messages(own):
        for _ in range(2 * (n - 1)):
            sent = own.send((own.rank + 1) % n, m / n, wait=False)
            own.recv((own.rank - 1) % n)
            own.wait(sent)

    expected = 2 * (n - 1) * (ALPHA + m / n / BETA)
    assert replay(ledger(n, messages), LINKED).makespan == pytest.approx(expected)
    result = replay(ledger(n, lambda own: own.call("all_reduce", m)), LINKED)
    assert result.makespan == pytest.approx(expected)
    assert [result.exposed(rank) for rank in range(n)] == pytest.approx([expected] * n)


def pipeline(p, m, schedule):
    """A pipeline's ledger: forward and backward blocks, messages between neighbours."""

    def program(own):
        r, handles = own.rank, []

        def block(kind, microbatch):
            source, target = (r - 1, r + 1) if kind == "F" else (r + 1, r - 1)
            if 0 <= source < p:
                own.recv(source)
            own.compute(kind=kind, label=microbatch)
            if 0 <= target < p:
                handles.append(own.send(target, wait=False))

        for kind, microbatch in schedule(r, p, m):
            block(kind, microbatch)
        own.wait(*handles)

    return ledger(p, program)


def gpipe(r, p, m):
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


def one_f_one_b(r, p, m):
    warm = min(p - 1 - r, m)
    steady = [action for i in range(m - warm) for action in (("F", warm + i), ("B", i))]
    return [("F", i) for i in range(warm)] + steady + [("B", i) for i in range(m - warm, m)]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (8, 32), (5, 3)])
def test_pipelines_have_their_bubble(schedule, p, m):
    """GPipe and 1F1B: makespan (m+p−1)(F+B), bubble (p−1)/(m+p−1) of it; p=8, m=32 gives 17.9%."""
    result = replay(pipeline(p, m, schedule), INSTANT, {"F": 1, "B": 2})
    assert result.makespan == 3 * (m + p - 1)
    assert result.share("idle") == pytest.approx((p - 1) / (m + p - 1))
    if (p, m) == (8, 32):
        assert round(100 * result.share("idle"), 1) == 17.9
    assert all(result.busy(rank) == 3 * m for rank in range(p))


@pytest.mark.parametrize("block", [900, 1030, 1050, 2000])
def test_ring_attention_hides_its_messages_when_blocks_are_long_enough(block):
    """Liu et al. 2023, section 3: hidden if and only if c ≥ FLOPS/bandwidth, 1040 tokens on an A100 with NVLink."""
    n, d = 4, 128
    machine = Cluster(A100, Link("no latency", 0.0, NVLINK3.bandwidth), gpus_per_server=n)
    flops, size = 4 * d * block**2, 4 * block * d  # one block of scores and values; K and V in two bytes a number

    def program(own):
        for step in range(n):
            handles = []
            if step < n - 1:
                handles = [own.send((own.rank + 1) % n, size, wait=False), own.recv((own.rank - 1) % n, wait=False)]
            own.compute(flops=flops)
            own.wait(*handles)

    result = replay(ledger(n, program), machine)
    compute, transfer = flops / A100.flops, size / NVLINK3.bandwidth
    assert result.makespan == pytest.approx(compute + (n - 1) * max(compute, transfer))
    assert (result.share("exposed") == pytest.approx(0, abs=1e-12)) == (block >= A100.flops / NVLINK3.bandwidth)


@pytest.mark.parametrize("waits_at_once", [False, True])
@pytest.mark.parametrize("size", [8.0, 80.0])
def test_bucketed_gradients_hide_behind_backward(size, waits_at_once):
    """k buckets, backward b each, all-reduce a: kb + a where a ≤ b, else b + ka; waiting at once k(a+b)."""
    n, k, b = 4, 5, 30.0
    a = 2 * (n - 1) * (ALPHA + size / n / BETA)

    def program(own):
        handles = []
        for _ in range(k):
            own.compute(b)
            handles.append(own.call("all_reduce", size, "dp", wait=False))
            if waits_at_once:
                own.wait(handles[-1])
        own.wait(*handles)

    result = replay(ledger(n, program), LINKED, "measured")
    shares = [overlap.share for overlap in result.overlap("all_reduce", "dp")]
    if waits_at_once:
        assert result.makespan == pytest.approx(k * (a + b))
        assert shares == [1.0] * k
        said = result.overlap()[2].describe("the all-reduce of bucket 2")
        assert said == "the all-reduce of bucket 2 was not overlapped: 100% of it is exposed"
    else:
        assert result.makespan == pytest.approx(k * b + a if a <= b else b + k * a)
        assert shares[:-1] == pytest.approx([0.0] * (k - 1)) if a <= b else shares[0] == pytest.approx(0)
        assert shares[-1] == 1.0


def test_a_finding_names_the_operation_and_the_share():
    """A wait in the middle of the transfer leaves 5/6 of it exposed."""
    a = 2 * (ALPHA + 9)  # 24 seconds

    def program(own):
        handle = own.call("all_reduce", 36.0, "dp", wait=False)
        own.compute(a / 6)
        own.wait(handle)

    (found,) = replay(ledger(2, program), LINKED, "measured").overlap()
    assert found.share == pytest.approx(5 / 6) and found.seconds == pytest.approx(a * 5 / 6)
    assert found.describe() == "the all-reduce 0 in group dp [0, 1] was not overlapped: 83% of it is exposed"


def test_a_link_carries_one_message_at_a_time_in_each_direction():
    """Two messages out of one rank queue; two that pass each other, or belong to different ranks, do not."""
    one = ALPHA + 10 / BETA

    def two_out(own):
        if own.rank == 0:
            own.wait(own.send(1, 10.0, wait=False), own.send(2, 10.0, wait=False))
        else:
            own.recv(0)

    def exchange(own):
        sent = own.send(own.rank ^ 1, 10.0, wait=False)
        own.recv(own.rank ^ 1)
        own.wait(sent)

    assert replay(ledger(3, two_out), LINKED).makespan == pytest.approx(2 * one)
    assert replay(ledger(4, exchange), LINKED).makespan == pytest.approx(one)


def test_a_message_inside_the_server_does_not_wait_for_one_on_the_network():
    """Rank 0 sends to rank 1 over NVLink and to rank 2 over its network card: two links, one time."""
    machine = Cluster(inside=Link("a", 0.0, 2.0), between=Link("b", 0.0, 1.0), gpus_per_server=2)

    def program(own):
        if own.rank == 0:
            own.wait(own.send(2, 10.0, wait=False), own.send(1, 10.0, wait=False))
        elif own.rank in (1, 2):
            own.recv(0)

    result = replay(ledger(3, program), machine)
    assert [result.times[rank][-1][1] for rank in (1, 2)] == [5.0, 10.0]
    assert result.link_bytes == {(0, 1): 10.0, (0, 2): 10.0}


def test_groups_on_different_ranks_work_at_once_and_on_the_same_ranks_one_by_one():
    """Two tp groups side by side take the time of one; tp and dp of the same ranks share their links."""
    one = 2 * (ALPHA + 8 / 2 / BETA)

    def side_by_side(own):
        pair = (own.rank // 2 * 2, own.rank // 2 * 2 + 1)
        own.call("all_reduce", 8.0, "tp", pair)

    def both(own):
        own.wait(own.call("all_reduce", 8.0, "tp", wait=False), own.call("all_reduce", 8.0, "dp", wait=False))

    def two_roots(own):  # the two gathers use different links, but a group does one thing at a time
        own.wait(own.call("gather", 8.0, peer=0, wait=False), own.call("gather", 8.0, peer=1, wait=False))

    assert replay(ledger(2, two_roots), LINKED).makespan == pytest.approx(2 * (ALPHA + 8 / BETA))
    assert replay(ledger(4, side_by_side), LINKED).makespan == pytest.approx(one)
    assert replay(ledger(2, both), LINKED).makespan == pytest.approx(2 * one)


def test_waiting_for_others_is_idle_and_waiting_for_the_transfer_is_exposed():
    """Rank 1 computes 10 longer: rank 0 idles 10, both are exposed for the transfer."""
    transfer = 2 * (ALPHA + 8 / 2 / BETA)

    def program(own):
        own.compute(5.0 + 10 * own.rank)
        own.call("all_reduce", 8.0)

    result = replay(ledger(2, program), LINKED, "measured")
    assert [result.idle(r) for r in (0, 1)] == pytest.approx([10, 0])
    assert [result.exposed(r) for r in (0, 1)] == pytest.approx([transfer] * 2)
    assert result.operations[0].exposed == pytest.approx({0: transfer, 1: transfer})
    assert result.overlap()[0].share == pytest.approx(1)
    assert [(s.kind, s.rank) for s in result.critical_path] == [("compute", 1), ("comm", 1)]


def test_of_operations_that_wait_for_links_the_first_that_was_ready_begins_first():
    """A message keeps the links of two all-reduces, one ready at 1, one at 2; they share the links of rank 2."""

    def program(own):
        handles = []
        if own.rank < 2:
            handles.append(own.send(1, 20.0, wait=False) if own.rank == 0 else own.recv(0, wait=False))
        own.compute(1.0)
        if own.rank > 0:
            handles.append(own.call("all_reduce", 2.0, "first", (1, 2), wait=False))
        own.compute(1.0)
        if own.rank != 1:
            handles.append(own.call("all_reduce", 2.0, "second", (0, 2), wait=False))
        own.wait(*handles)

    message, first, second = replay(ledger(3, program), LINKED, "measured").operations
    assert (first.group, second.group) == ("first", "second")
    assert first.start == message.end and second.start == first.end


def test_the_critical_path_of_a_pipeline_goes_down_and_up():
    """One micro-batch on three ranks: F on 0, 1, 2, then B on 2, 1, 0, with the messages between."""
    result = replay(pipeline(3, 1, gpipe), LINKED, {"F": 1, "B": 2})
    assert [(s.rank, s.kind) for s in result.critical_path if s.kind != "comm"] == [
        (0, "F"), (1, "F"), (2, "F"), (2, "B"), (1, "B"), (0, "B"),
    ]  # fmt: skip
    assert result.makespan == 9 + 4 * ALPHA


def test_flops_and_rooflines_and_efficiency():
    """A second's worth of FLOPs takes a second, two at half efficiency; a memory-bound work takes its bytes' time."""
    machine = cluster("h100")

    def program(own):
        own.compute(flops=int(machine.gpu.flops), bytes=int(3 * machine.gpu.memory_bandwidth))

    recorded = ledger(1, program)
    assert replay(recorded, machine).makespan == pytest.approx(1)
    assert replay(recorded, cluster("h100", efficiency=0.5)).makespan == pytest.approx(2)
    assert replay(recorded, machine, "roofline").makespan == pytest.approx(3)
    assert replay(recorded, machine, lambda work: 7.0).makespan == 7
    with pytest.raises(ValueError, match="choose flops, roofline, measured"):
        replay(recorded, machine, "guess")


def test_wider_models_compute_quadratically_and_send_linearly():
    """`widen=w`: messages take α + wM/β, products w² FLOPs."""

    def program(own):
        own.compute(flops=10**12)
        own.call("all_reduce", 8.0)

    machine = Cluster(inside=Link("test", ALPHA, BETA))
    result = replay(ledger(2, program), machine, widen=4)
    assert result.busy(0) == pytest.approx(16 * 10**12 / machine.gpu.flops)
    assert result.exposed(0) == pytest.approx(2 * (ALPHA + 4 * 8 / 2 / BETA))
    assert result.link_bytes == {(0, 1): 32.0, (1, 0): 32.0}


def test_a_block_of_work_costs_its_unit_once():
    """A forward divided by an all-reduce is one forward, shared out by FLOPs."""

    def program(own):
        own.compute(kind="F", flops=300, block=1)
        own.call("all_reduce", 0.0)
        own.compute(kind="F", flops=100, block=1)
        own.compute(kind="W", block=2)
        own.compute(kind="W", block=3)
        own.compute()

    result = replay(ledger(2, program), INSTANT, {"F": 4, "W": 1})
    assert result.busy(0) == 6
    assert result.times[0][0] == (0, 3)


def test_a_ledger_that_does_not_match_is_refused():
    """A missing rank, a message that nobody receives, two ranks that wait for each other."""

    def lacks_one(own):
        if own.rank != 2:
            own.call("all_reduce", 8.0)

    def unreceived(own):
        if own.rank == 0:
            own.send(1, 4.0)

    def crossed(own):
        own.send(own.rank ^ 1, 4.0)
        own.recv(own.rank ^ 1)

    with pytest.raises(ValueError, match=r"all-reduce 0 in group world \[0, 1, 2\] lacks rank 2"):
        replay(ledger(3, lacks_one), LINKED)
    with pytest.raises(ValueError, match="message 0 from rank 0 to rank 1 lacks rank 1"):
        replay(ledger(2, unreceived), LINKED)
    with pytest.raises(ValueError, match="rank 0 never gets past"):
        replay(ledger(2, crossed), LINKED)


def random_ledger(seed):
    """Ranks in two groups that compute, reduce and pass messages to the right, blocking or not, in random order."""
    world, choice = 4, random.Random(seed)
    steps = [(choice.choice("crsm"), choice.random() < 0.5, choice.randrange(1, 50)) for _ in range(40)]

    def program(own):
        uneven, open_handles = random.Random(seed * 100 + own.rank), []
        pair = (own.rank // 2 * 2, own.rank // 2 * 2 + 1)
        for kind, wait, size in steps:
            own.compute(uneven.random() * 20, flops=1)
            if kind == "r":
                open_handles.append(own.call("all_reduce", size, wait=wait))
            elif kind == "s":
                open_handles.append(own.call("all_gather", size, "pair", pair, wait=wait))
            elif kind == "m":
                sent = own.send((own.rank + 1) % world, size, wait=False)
                open_handles += [sent, own.recv((own.rank - 1) % world, wait=wait)]
            elif open_handles:
                own.wait(open_handles.pop(size % len(open_handles)))

    return ledger(world, program)


@pytest.mark.parametrize("seed", range(12))
def test_laws_of_every_replay(seed):
    """Time adds up on a rank; the critical path has no gap; twice the costs take twice the time; nothing is chance."""
    recorded = random_ledger(seed)
    machine = Cluster(inside=Link("a", 1.0, 3.0), between=Link("b", 2.0, 1.0), gpus_per_server=2)
    slower = Cluster(inside=Link("a", 2.0, 1.5), between=Link("b", 4.0, 0.5), gpus_per_server=2)
    result = replay(recorded, machine, "measured")
    for rank in range(4):
        assert result.idle(rank) > -1e-9
        own = sorted((s for s in result.spans if s.rank == rank and s.lane == "rank"), key=lambda s: s.begin)
        assert all(a.end <= b.begin + 1e-9 for a, b in zip(own, own[1:], strict=False))
    path = result.critical_path
    assert path[0].begin == 0 and path[-1].end == result.makespan
    assert all(a.end == b.begin for a, b in zip(path, path[1:], strict=False))
    assert replay(random_ledger(seed), machine, "measured").times == result.times
    assert replay(recorded, slower, lambda work: 2 * work.seconds).makespan == pytest.approx(2 * result.makespan)
    assert result.makespan <= sum(o.seconds for o in result.operations) + sum(
        e.seconds for r in recorded.ranks for e in r.entries if isinstance(e, Computation)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_two_operations_use_one_end_of_a_link_at_once(seed):
    """In each direction of each rank's link, transfers follow one another, whoever they belong to."""
    from fivefold.runtime import timing

    machine = Cluster(inside=Link("a", 1.0, 3.0), between=Link("b", 2.0, 1.0), gpus_per_server=2)
    used = {}
    for operation in replay(random_ledger(seed), machine, "measured").operations:
        for port in timing.ports(operation.calls, machine):
            used.setdefault(port, []).append((operation.start, operation.end))
    assert used
    for times in used.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(times), sorted(times)[1:], strict=False))


def test_operations_of_a_ledger_are_listed_once():
    """An all-reduce of three ranks and a message are two operations."""

    def program(own):
        own.call("all_reduce", 8.0)
        if own.rank < 2:
            own.recv(1) if own.rank == 0 else own.send(0, 4.0)

    assert [str(o) for o in operations(ledger(3, program))] == [
        "all-reduce 0 in group world [0, 1, 2]",
        "message 0 from rank 1 to rank 0",
    ]


def test_a_trace_is_what_perfetto_reads(tmp_path):
    """Complete events in microseconds with process and thread names; one event a span, none with negative length."""
    result = replay(pipeline(2, 2, gpipe), LINKED, {"F": 1, "B": 2})
    result.unit = "s"
    trace = json.loads(result.save_chrome_trace(tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(result.spans)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(result.makespan * 1e6)
    assert {event["name"] for event in events} >= {"F0", "F1", "B0", "B1", "send"}
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert all(event["dur"] >= 0 for event in events)
