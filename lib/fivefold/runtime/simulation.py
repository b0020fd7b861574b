"""The events of a replay: ranks that come and go on, operations that begin and end, links that are taken and freed."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace

from fivefold.runtime import timing
from fivefold.runtime.cluster import Cluster, Link
from fivefold.runtime.ledger import Communication, Computation, Ledger
from fivefold.runtime.operations import Operation, match


class Simulation:
    """Runs a ledger on a cluster; `costs[rank][index]` is what a computation takes.

    Afterwards `times` holds begin and end of every entry by rank, `begun` the operations in the order of their begin.
    """

    def __init__(self, ledger: Ledger, cluster: Cluster, costs: list[dict[int, float]], widen: float):
        self.entries = [rank.entries for rank in ledger.ranks]
        self.costs, self.of = costs, match(ledger)
        self.links = Links(cluster, widen)
        self.times: list[list[tuple[float, float]]] = [[] for _ in self.entries]
        self.begun: list[Operation] = []
        self._since = [0.0] * len(self.entries)  # since when a rank stands still
        self._standing: dict[int, list[int]] = {}  # operation -> ranks that stand still for it
        self._events: list[tuple[float, int, Operation | int]] = []
        self._count = 0

    def run(self) -> None:
        """Raises ValueError where a rank never gets to its end."""
        for rank in range(len(self.entries)):
            self._at(0.0, rank)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, Operation):
                self._end(now, what)
            else:
                self._go_on(now, what)
        for rank, (own, times) in enumerate(zip(self.entries, self.times, strict=True)):
            if len(times) < len(own):
                line = getattr(own[len(times)], "line", "") or f"entry {len(times)}"
                raise ValueError(f"rank {rank} never gets past {line}: replay the ledger of a run that ended")

    def _at(self, when: float, what: Operation | int) -> None:
        """What happens at the same time happens in the order in which it was foreseen."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def _go_on(self, now: float, rank: int) -> None:
        """Take a rank to its next computation, or to an operation that it must wait for."""
        own, times, of, costs = self.entries[rank], self.times[rank], self.of[rank], self.costs[rank]
        while (index := len(times)) < len(own):
            entry = own[index]
            if isinstance(entry, Computation):
                times.append((now, now + costs[index]))
                if costs[index]:
                    return self._at(now + costs[index], rank)
                continue
            operation = of[index if isinstance(entry, Communication) else entry.of]
            if isinstance(entry, Communication):
                self._come(now, rank, operation)
                if entry.asynchronous:
                    times.append((now, now))
                    continue
            if not operation.ended:
                self._since[rank] = now
                self._standing.setdefault(id(operation), []).append(rank)
                return None
            times.append((now, now))

    def _come(self, now: float, rank: int, operation: Operation) -> None:
        operation.missing -= 1
        if not operation.missing:
            operation.ready, operation.last = now, rank
            self._count += 1
            operation.order = self._count
            self._begin(now, operation)

    def _begin(self, now: float, operation: Operation) -> None:
        if self.links.take(now, operation):
            self.begun.append(operation)
            self._at(operation.end, operation)

    def _end(self, now: float, operation: Operation) -> None:
        operation.ended = True
        for waiting in self.links.release(operation):
            self._begin(now, waiting)
        for rank in self._standing.pop(id(operation), ()):
            since = self._since[rank]
            operation.exposed[rank] = operation.exposed.get(rank, 0.0) + now - max(since, operation.start)
            self.times[rank].append((since, now))
            self._go_on(now, rank)


class Links:
    """Which operation occupies which end of which link, and which ones wait for it."""

    def __init__(self, cluster: Cluster, widen: float):
        # Messages `widen` times as large take as long as on links so many times slower.
        inside, between = _slower(cluster.inside, widen), _slower(cluster.between, widen)
        self._cluster, self._widen = replace(cluster, inside=inside, between=between), widen
        self._known: dict[tuple, tuple[float, list, timing.Bytes]] = {}
        self._busy: dict[tuple, Operation] = {}
        self._queues: dict[tuple, list[Operation]] = {}
        self._uses: Counter = Counter()

    def take(self, now: float, operation: Operation) -> bool:
        """Begin the operation if everything that it needs is free; else let it wait for the first thing that is not."""
        seconds, needed, _ = self._known[self._key(operation)]
        for port in needed:
            if port in self._busy:
                operation.blocker = self._busy[port]
                self._queues.setdefault(port, []).append(operation)
                return False
        for port in needed:
            self._busy[port] = operation
        self._uses[operation.key] += 1
        operation.start, operation.end = now, now + seconds
        return True

    def release(self, operation: Operation) -> list[Operation]:
        """Free what it held; answers with those that waited for that, the one that was ready first, first."""
        waiting: list[Operation] = []
        for port in self._known[operation.key][1]:
            del self._busy[port]
            waiting += self._queues.pop(port, ())
        return sorted(waiting, key=lambda other: other.order)

    def bytes(self) -> timing.Bytes:
        """What has been moved so far, by (from, to)."""
        total: timing.Bytes = {}
        for key, uses in self._uses.items():
            for pair, size in self._known[key][2].items():
                total[pair] = total.get(pair, 0.0) + uses * size * self._widen
        return total

    def _key(self, operation: Operation) -> tuple:
        """Operations of one kind and size on the same ranks take the same; the sums are done once."""
        if operation.key:
            return operation.key
        calls = operation.calls
        sizes = tuple([call.splits or call.bytes for call in calls])
        key = operation.key = (operation.op, operation.group, operation.ranks, calls[0].peer, sizes)
        if key not in self._known:
            needed: list = timing.ports(calls, self._cluster)
            if operation.op != "send":
                needed.append((operation.group, operation.ranks))  # a group does one thing at a time
            self._known[key] = timing.seconds(calls, self._cluster), needed, timing.moved(calls, self._cluster)
        return key


def _slower(link: Link, times: float) -> Link:
    return replace(link, bandwidth=link.bandwidth / times)
