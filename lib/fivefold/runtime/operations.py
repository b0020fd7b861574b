"""The operations of a ledger: which entries of which ranks are one all-reduce, one message, one barrier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fivefold.runtime.ledger import Communication, Computation, Ledger, RankLedger, Wait

Entry = Communication | Wait | Computation


@dataclass(slots=True, eq=False)
class Operation:
    """One collective or one message: a call on each of its ranks, and, after a replay, when it took place.

    Times are seconds of the modelled cluster. `exposed` is, by rank, how long the rank stood still for it while it was
    under way; what a rank waited before, for the others to come, is not in it.
    """

    op: str
    group: str
    ranks: tuple[int, ...]  # of a message: sender, receiver
    number: int  # the how-manieth of its group, or of its sender and receiver, from 0
    calls: list[Communication | None]  # one for each of `ranks`
    missing: int  # ranks that have not come yet
    ready: float = -1.0  # the last rank has come
    start: float = -1.0  # its links are free
    end: float = -1.0
    last: int = 0  # the rank that came last
    order: int = 0  # among operations, by when they were ready
    blocker: Operation | None = None  # the operation that kept its links busy
    ended: bool = False
    key: tuple = ()  # the same for operations that take the same time and the same links
    exposed: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def exposed_share(self) -> float:
        """The part of its time that was not hidden behind computation, on the rank where that is largest."""
        return max(self.exposed.values(), default=0.0) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        if self.op in ("send", "recv"):
            return f"message {self.number} from rank {self.ranks[0]} to rank {self.ranks[1]}"
        name = self.op.replace("_", "-")
        return f"{name} {self.number} in group {self.group} {list(self.ranks)}"


def match(ledger: Ledger) -> list[dict[int, Operation]]:
    """For each rank: index of a Communication -> its operation.

    The k-th collective of a rank in a group is the k-th of every other rank in it; the k-th message from one rank to
    another with one tag is the k-th that is received from there. Raises ValueError where an operation lacks a rank.
    """
    known: dict[tuple, Operation] = {}
    found: list[dict[int, Operation]] = []
    for own in ledger.ranks:
        counts: dict[tuple, int] = {}
        found.append({})
        for call in own.communications:
            key, ranks, place = _identity(own.rank, call)
            number = counts[key] = counts.get(key, -1) + 1
            operation = known.get((key, number))
            if operation is None:
                operation = Operation(call.op, call.group, ranks, number, [None] * len(ranks), len(ranks))
                known[key, number] = operation
            operation.calls[place] = call
            found[-1][call.index] = operation
    for operation in known.values():
        _check(operation)
    return found


def operations(ledger: Ledger) -> Iterator[Operation]:
    """Every operation once, in the order in which the lowest rank in it calls it."""
    seen: set[int] = set()
    for own in match(ledger):
        for operation in own.values():
            if id(operation) not in seen:
                seen.add(id(operation))
                yield operation


def name_groups(ledger: Ledger, names: Mapping[str, str]) -> Ledger:
    """The same ledger with groups named otherwise: {"world": "tp"} where all ranks are one tensor-parallel group."""
    return Ledger([RankLedger(own.rank, [_renamed(e, names) for e in own.entries], own.memory) for own in ledger.ranks])


def _renamed(entry: Entry, names: Mapping[str, str]) -> Entry:
    return replace(entry, group=names[entry.group]) if getattr(entry, "group", None) in names else entry


def _identity(rank: int, call: Communication) -> tuple[tuple, tuple[int, ...], int]:
    """What the calls of one operation have in common, its ranks, and the place of `rank` among them."""
    if call.op == "send":
        return ("message", rank, call.peer, call.tag, call.group), (rank, call.peer), 0
    if call.op == "recv":
        return ("message", call.peer, rank, call.tag, call.group), (call.peer, rank), 1
    return ("collective", call.group, call.ranks), call.ranks, call.ranks.index(rank)


def _check(operation: Operation) -> None:
    absent = [rank for rank, call in zip(operation.ranks, operation.calls, strict=True) if call is None]
    if absent:
        names = ", ".join(map(str, absent))
        raise ValueError(f"{operation} lacks rank {names}: replay the ledger of a run that ended")
    if operation.op == "recv":
        operation.op = "send"  # the receiver was met first
    kinds = {call.op for call in operation.calls}
    if len(kinds - {"send", "recv"}) > 1:
        raise ValueError(f"{operation} is not the same on all ranks ({', '.join(sorted(kinds))}): record it again")
