"""Matching: does every operation of a run meet its counterparts on the other ranks?

The referee hears of each operation before it is executed. It says "go" when all that take part have called it and
agree, so a disagreement is a report instead of garbage, and a deadlock is seen the moment it exists: every unfinished
rank waits for an operation that nobody can match any more. It knows nothing of processes; the supervisor feeds it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Call:
    """An operation as a rank announces it."""

    rank: int
    index: int  # the rank's own number for it
    op: str  # "all_reduce", "send", "recv", "new_group", …
    group: str  # key of the group, the same on all its ranks
    name: str  # how a report names the group
    ranks: tuple[int, ...]  # global ranks that take part
    line: str
    peer: int | None = None  # global rank of the other end; None for any source
    tag: int = 0
    device: str = "cpu"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    agree: tuple = ()  # what must be equal on all ranks besides: reduction, root, shapes of a list
    sends: tuple[int, ...] = ()  # all-to-all: elements for each rank of the group
    receives: tuple[int, ...] = ()

    def describe(self) -> str:
        shape = f" {tuple(self.shape)}" if self.dtype else ""
        more = "".join(f"  {key} {_plain(value)}" for key, value in self.agree if value not in (None, "sum"))
        splits = f" sends {list(self.sends)} receives {list(self.receives)}" if self.sends or self.receives else ""
        return f"{self.op}  {self.dtype}{shape}{more}{splits}".rstrip()


class Disagreement(Exception):
    """Ranks disagree; the text is the report."""


class Stuck(Exception):
    """A deadlock; the text is the report."""


@dataclass
class Referee:
    """Matches the calls of `world_size` ranks."""

    world_size: int
    collectives: dict[tuple[str, int], dict[int, Call]] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    messages: dict[tuple[str, int], deque[Call]] = field(default_factory=lambda: defaultdict(deque))
    unmatched: dict[tuple[int, int], Call] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # rank -> index of the call it waits for
    lines: dict[int, str] = field(default_factory=dict)  # rank -> the line in which it waits
    finished: set[int] = field(default_factory=set)

    def call(self, call: Call) -> Iterator[tuple[int, int, int | None]]:
        """Take an operation; yield `(rank, index, source)` for each that may now go on. Raises Disagreement."""
        self.unmatched[call.rank, call.index] = call
        matched = self._message(call) if call.op in ("send", "recv") else self._collective(call)
        for done in matched:
            del self.unmatched[done.rank, done.index]
            if self.waiting.get(done.rank) == done.index:
                del self.waiting[done.rank]
            yield done.rank, done.index, done.peer

    def wait(self, rank: int, index: int, line: str = "") -> None:
        """The rank does nothing until its call `index` has been matched; `line` is where its program waits."""
        if (rank, index) in self.unmatched:
            self.waiting[rank] = index
            self.lines[rank] = line or self.unmatched[rank, index].line

    def finish(self, rank: int) -> None:
        self.finished.add(rank)

    def check(self) -> None:
        """Raises Disagreement or Stuck when no rank can go on any more."""
        if not self.waiting or len(self.waiting) + len(self.finished) < self.world_size:
            return
        for key, calls in self.collectives.items():
            if len({_contract(call) for call in calls.values()}) > 1:
                raise Disagreement(_disagreement(key[1], list(calls.values())))
        raise Stuck(self._deadlock())

    def _collective(self, call: Call) -> list[Call]:
        sequence = self.counts[call.group, call.rank]
        self.counts[call.group, call.rank] += 1
        calls = self.collectives.setdefault((call.group, sequence), {})
        calls[call.rank] = call
        if len(calls) < len(call.ranks):
            return []
        del self.collectives[call.group, sequence]
        if len({_contract(other) for other in calls.values()}) > 1 or _splits_differ(calls, call.ranks):
            raise Disagreement(_disagreement(sequence, [calls[rank] for rank in call.ranks]))
        return [calls[rank] for rank in call.ranks]

    def _message(self, call: Call) -> list[Call]:
        """Messages meet in the order in which they were called, for each pair and tag, as in MPI."""
        if call.op == "send":
            waiting = self.messages[call.group, call.peer]
            other = next((c for c in waiting if c.op == "recv" and _meets(call, c)), None)
            send, receive = call, other
        else:
            waiting = self.messages[call.group, call.rank]
            other = next((c for c in waiting if c.op == "send" and _meets(c, call)), None)
            send, receive = other, call
        if other is None:
            waiting.append(call)
            return []
        waiting.remove(other)
        if (send.dtype, _size(send)) != (receive.dtype, _size(receive)):
            raise Disagreement(_message_disagreement(send, receive))
        receive.peer = send.rank
        return [send, receive]

    def _deadlock(self) -> str:
        calls = [self.unmatched[rank, index] for rank, index in sorted(self.waiting.items())]
        self.finished |= {call.rank for call in calls if _at_the_end(call)}
        calls = [call for call in calls if not _at_the_end(call)]
        rows = [(f"rank {c.rank}", _what(c), self._why(c), self.lines[c.rank]) for c in calls]
        text = ["nobody can go on.", *table(rows)]
        idle = sorted(self.finished)
        if idle:
            text.append(f"  {_ranks(idle)}   finished")
        needed = {rank for c in calls for rank in ([c.peer] if c.op in ("send", "recv") else c.ranks)}
        return "\n".join([*text, _advice(calls, bool(needed & self.finished))])

    def _why(self, call: Call) -> str:
        if call.op in ("send", "recv"):
            verb = "receive" if call.op == "send" else "send"
            if call.peer is None:
                return "waits for any rank to send"
            ended = ": it has finished" if call.peer in self.finished else ""
            return f"waits for rank {call.peer} to {verb}{ended}"
        sequence = self.counts[call.group, call.rank] - 1
        pending = next(
            (s for (g, s), c in self.collectives.items() if g == call.group and call in c.values()), sequence
        )
        missing = [rank for rank in call.ranks if rank not in self.collectives[call.group, pending]]
        ended = [rank for rank in missing if rank in self.finished]
        return f"waits for {_ranks(missing)}" + (f": {_ranks(ended)} finished" if ended else "")


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _at_the_end(call: Call) -> bool:
    """Whether a rank is through with its program, and waits for the others in a barrier that is not the program's."""
    return call.op == "barrier" and not call.line


def _contract(call: Call) -> tuple:
    return call.op, call.dtype, call.shape, call.agree, call.ranks


def _splits_differ(calls: dict[int, Call], ranks: tuple[int, ...]) -> bool:
    if not any(call.sends or call.receives for call in calls.values()):
        return False
    return any(calls[a].sends[j] != calls[b].receives[i] for i, a in enumerate(ranks) for j, b in enumerate(ranks))


def _meets(send: Call, receive: Call) -> bool:
    return send.peer == receive.rank and receive.peer in (None, send.rank) and send.tag == receive.tag


def _size(call: Call) -> int:
    size = 1
    for extent in call.shape:
        size *= extent
    return size


def _what(call: Call) -> str:
    if call.op == "send":
        return f"send to rank {call.peer}"
    if call.op == "recv":
        return "receive from any rank" if call.peer is None else f"receive from rank {call.peer}"
    return f"{call.op} in {call.name}"


def _disagreement(sequence: int, calls: list[Call]) -> str:
    same: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda c: c.rank):
        same[f"{call.describe()} {call.ranks if call.op == 'new_group' else ''}"].append(call)
    name = calls[0].name
    rows = [
        (_ranks([c.rank for c in some]), "finished" if _at_the_end(some[0]) else some[0].describe(), some[0].line)
        for some in same.values()
    ]
    rows.sort(key=lambda row: -len(row[0]))
    text = [f"Ranks disagree about operation {sequence} in group {name}:", *table(rows)]
    return "\n".join([*text, "Every rank of a group must call the same operations, alike, in the same order."])


def _message_disagreement(send: Call, receive: Call) -> str:
    rows = [
        (f"rank {send.rank}", f"sends     {send.dtype} {send.shape}", send.line),
        (f"rank {receive.rank}", f"receives  {receive.dtype} {receive.shape}", receive.line),
    ]
    text = [f"Ranks {send.rank} and {receive.rank} disagree about a message:", *table(rows)]
    return "\n".join([*text, "A receive needs a buffer of the size and dtype of what is sent."])


def _advice(calls: list[Call], finished: bool) -> str:
    ops = {call.op for call in calls}
    if ops == {"send"} and not finished:
        return "Everyone sends first, so nobody receives. Let one rank receive first, or start both and wait for both."
    if ops == {"recv"} and not finished:
        return "Everyone receives first, so nobody sends. Let one rank send first, or start both and wait for both."
    if finished:
        return (
            "A rank that has finished cannot take part. Does every rank make the same calls, however little its work?"
        )
    if len(ops) > 1 or len({call.group for call in calls}) > 1:
        return "Each waits for a call that the other makes only later. Do all ranks make their calls in the same order?"
    return "Does every rank of the group make this call?"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
