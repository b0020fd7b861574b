"""Time a ledger on a modelled cluster: the timeline that the same program would have there.

A deterministic simulation of events. Every rank goes through its entries in order. A computation takes its time; a
blocking communication holds the rank until it has ended; an asynchronous one runs beside it, until the program waits
for it. An operation begins when all its ranks have come and the links that it needs are free: one message at a time in
each direction of a link, one operation at a time in each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fivefold.runtime.cluster import Cluster
from fivefold.runtime.ledger import Communication, Computation, Ledger, Wait
from fivefold.runtime.operations import Operation
from fivefold.runtime.simulation import Simulation
from fivefold.runtime.timeline import Span, Timeline

Compute = str | Mapping[str, float] | Callable[[Computation], float]


@dataclass
class Replay(Timeline):
    """The timeline of a ledger on a cluster."""

    operations: list[Operation] = field(default_factory=list)  # in the order in which they began
    link_bytes: dict[tuple[int, int], float] = field(default_factory=dict)  # (from, to) -> bytes
    times: list[list[tuple[float, float]]] = field(default_factory=list)  # begin and end of every entry, by rank
    critical_path: list[Span] = field(default_factory=list)  # spans without a gap, from 0 to the makespan

    def overlap(self, op: str | None = None, group: str | None = None) -> list[Overlap]:
        """How much of each operation was hidden behind computation, in the order in which they began."""
        chosen = [o for o in self.operations if op in (None, o.op) and group in (None, o.group)]
        return [Overlap(o, o.exposed_share, max(o.exposed.values(), default=0.0)) for o in chosen if o.seconds]


@dataclass(frozen=True)
class Overlap:
    """How far one operation was hidden behind computation."""

    operation: Operation
    share: float  # of its time, on the rank that stood still for it longest: 0 is hidden, 1 is exposed
    seconds: float  # the same as time

    def hidden(self, allowed: float = 0.05) -> bool:
        return self.share <= allowed

    def describe(self, name: str | None = None, allowed: float = 0.05) -> str:
        """A sentence for a verdict: "the all-reduce of bucket 2 was not overlapped: 83% of it is exposed"."""
        name = name or f"the {self.operation}"
        if self.hidden(allowed):
            return f"{name} was overlapped: {self.share:.0%} of it is exposed"
        word = "not" if self.share >= 0.5 else "not fully"
        return f"{name} was {word} overlapped: {self.share:.0%} of it is exposed"


def replay(ledger: Ledger, cluster: Cluster, compute: Compute = "flops", widen: float = 1.0) -> Replay:
    """Time `ledger` on `cluster`. Times are seconds, or steps where unit costs are given.

    `compute` says what a computation costs: "flops" (counted FLOPs at the GPU's rate), "roofline" (the larger of that
    and its bytes at the memory's rate), "measured" (as on the machine that ran it), unit costs by kind such as
    {"F": 1, "B": 2} (other kinds cost nothing; a block of work costs it once, however often communications divide it),
    or a function of a `Computation`. `widen` asks what if every hidden size were so many times larger: messages grow
    with it, FLOPs with its square. Raises ValueError for another word, and for a ledger whose operations do not match.
    """
    simulation = Simulation(ledger, cluster, _costs(ledger, cluster, compute, widen), widen)
    simulation.run()
    return _result(simulation, unit="" if isinstance(compute, Mapping) else "s")


def _costs(ledger: Ledger, cluster: Cluster, compute: Compute, widen: float) -> list[dict[int, float]]:
    works = [[entry for entry in rank.entries if isinstance(entry, Computation)] for rank in ledger.ranks]
    if isinstance(compute, Mapping):
        return [_unit_costs(own, compute) for own in works]
    rules: dict[str, Callable[[Computation], float]] = {
        "flops": lambda work: cluster.compute_seconds(work.flops * widen**2),
        "roofline": lambda work: max(cluster.compute_seconds(work.flops), work.bytes / cluster.gpu.memory_bandwidth),
        "measured": lambda work: work.seconds,
    }
    rule = compute if callable(compute) else rules.get(compute)
    if rule is None or widen != 1 and compute in ("roofline", "measured"):
        raise ValueError(f"compute={compute!r}, widen={widen}: choose {', '.join(rules)}; only flops can be widened")
    return [{work.index: rule(work) for work in own} for own in works]


def _unit_costs(works: list[Computation], units: Mapping[str, float]) -> dict[int, float]:
    """A block's cost is shared out by FLOPs, or evenly where none were counted."""
    blocks: dict[int, list[Computation]] = {}
    for place, work in enumerate(works):
        blocks.setdefault(work.block or -1 - place, []).append(work)
    costs: dict[int, float] = {}
    for block in blocks.values():
        total = sum(work.flops for work in block)
        for work in block:
            costs[work.index] = units.get(work.kind, 0) * (work.flops / total if total else 1 / len(block))
    return costs


def _result(simulation: Simulation, unit: str) -> Replay:
    times, begun = simulation.times, simulation.begun
    ends = [own[-1][1] for own in times if own] + [operation.end for operation in begun]
    spans = [span for rank in range(len(times)) for span in _own_spans(simulation, rank)]
    for operation in begun:
        if operation.seconds:
            first = _transfer(operation, operation.ranks[0], operation.start, operation.end, "link", _detail(operation))
            spans += [first, *(replace(first, rank=rank) for rank in operation.ranks[1:])]
    return Replay(
        spans, len(times), max(ends, default=0.0), unit, begun, simulation.links.bytes(), times, _path(simulation)
    )


def _own_spans(simulation: Simulation, rank: int) -> list[Span]:
    """What the rank itself did: computed, or stood still for a transfer. Waiting for other ranks leaves a gap."""
    spans = []
    for entry, (begin, end) in zip(simulation.entries[rank], simulation.times[rank], strict=True):
        if end == begin:
            continue
        if isinstance(entry, Computation):
            spans.append(Span(rank, begin, end, kind_of(entry), entry.label, detail=entry.phase))
            continue
        operation = _operation(simulation, rank, entry)
        if end > operation.ready:
            spans.append(_transfer(operation, rank, max(begin, operation.ready), end, "rank"))
    return spans


def kind_of(work: Computation) -> str:
    """F, B, I or W as the program said, else by what is known of it: it ran in backward, or in a phase of that name."""
    if work.kind:
        return work.kind
    if work.backward or work.phase == "backward":
        return "B"
    return "F" if work.phase == "forward" else "compute"


def _operation(simulation: Simulation, rank: int, entry: Communication | Wait) -> Operation:
    return simulation.of[rank][entry.of if isinstance(entry, Wait) else entry.index]


def _transfer(operation: Operation, rank: int, begin: float, end: float, lane: str, detail: str = "") -> Span:
    return Span(rank, begin, end, "comm", operation.op.replace("_", "-"), operation.group, lane, detail=detail)


def _detail(operation: Operation) -> str:
    call = operation.calls[0]
    return f"{operation}, {call.bytes:,} bytes from rank {operation.ranks[0]}. {call.line}".rstrip()


def _path(simulation: Simulation) -> list[Span]:
    """Backwards from what ended last: each thing began when another ended, on its own rank or on one it waited for."""
    entries, times = simulation.entries, simulation.times
    rank = max(range(len(times)), key=lambda r: times[r][-1][1] if times[r] else 0.0, default=0)
    index = len(times[rank]) - 1 if times else -1
    latest = max(simulation.begun, key=lambda operation: operation.end, default=None)
    path: list[Span] = []
    if latest is not None and latest.end > (times[rank][-1][1] if times[rank] else 0.0):
        rank, index = _walk_back(latest, path)  # nobody waited for it
    while index >= 0:
        (begin, end), entry = times[rank][index], entries[rank][index]
        if end > begin and not isinstance(entry, Computation):
            rank, index = _walk_back(_operation(simulation, rank, entry), path)
            continue
        if end > begin:
            path.append(Span(rank, begin, end, kind_of(entry), entry.label))
        index -= 1
    return path[::-1]


def _walk_back(operation: Operation, path: list[Span]) -> tuple[int, int]:
    """Add an operation, and those that kept its links from it; answers with what went before: a rank and an index."""
    while True:
        path.append(_transfer(operation, operation.last, operation.start, operation.end, "link"))
        if operation.start == operation.ready:
            place = operation.ranks.index(operation.last)
            return operation.last, operation.calls[place].index - 1
        operation = operation.blocker
