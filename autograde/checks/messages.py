"""Judge the messages of a run: who sent how much to whom, in how many rounds, and whether anybody waited for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.runtime.ledger import Communication, Ledger, Wait
from fivefold.runtime.marks import now

from autograde.traffic import NOUNS, size_in_words
from autograde.verdict import Finding, in_words, numbered

Groups = Sequence[Sequence[int]]


def expect_messages(
    property: str,
    ledger: Ledger,
    groups: Groups,
    messages: Sequence[int] | None = None,
    sent: Sequence[float] | None = None,
    ring: bool = False,
    look: str = "",
) -> Finding:
    """Whether the ranks of each group used messages alone, and each sent as many as it should, of as many bytes in all.

    `messages` and `sent` have a number for each rank; None takes any. In a `ring` a rank sends to one neighbour only,
    the next or the one before.
    """
    for ranks in groups:
        for rank in ranks:
            calls = [call for call in ledger[rank].communications if call.op != "barrier"]
            sends = [call for call in calls if call.op == "send"]
            problem = (
                _foreign(rank, calls)
                or (ring and _astray(rank, ranks, sends))
                or _number(rank, sends, messages)
                or _size(rank, sends, sent)
            )
            if problem:
                return Finding(property, False, problem, _where(sends or calls), look)
    number = max(len(_sends(ledger, rank)) for ranks in groups for rank in ranks)
    most = max(sum(call.bytes for call in _sends(ledger, rank)) for ranks in groups for rank in ranks)
    return Finding(property, True, f"{numbered(number, 'message')} a rank", f"{size_in_words(most)} a rank")


def rounds(ledger: Ledger) -> int:
    """Rounds that the messages take where a rank sends one message a round, in the order of its program.

    A message that a rank passes on goes out in a later round than the one in which it came.
    """
    busy, arrives = [0] * len(ledger), dict[tuple, int]()
    programs = [_steps(rank.entries) for rank in ledger.ranks]
    number = [dict[tuple, int]() for _ in programs]
    went_on = True
    while went_on:
        went_on = False
        for rank, program in enumerate(programs):
            while program:
                call = program[0]
                pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                key = (*pair, call.tag, number[rank].get((call.op, *pair), 0))
                if call.op == "recv" and key not in arrives:
                    break
                number[rank][call.op, *pair] = key[-1] + 1
                if call.op == "send":
                    arrives[key] = busy[rank] = busy[rank] + 1
                else:
                    busy[rank] = max(busy[rank], arrives[key])
                program.pop(0)
                went_on = True
    return max(busy)


def left_open(entries: Sequence[Any]) -> list[str]:
    """The operations that the program started and never waited for."""
    waited = {entry.of for entry in entries if isinstance(entry, Wait)}
    started = [entry for entry in entries if isinstance(entry, Communication) and entry.asynchronous]
    return [entry.op for entry in started if entry.index not in waited]


def unwaited(entries: Sequence[Any]) -> int:
    """How many asynchronous communications the program started and never waited for."""
    return len(left_open(entries))


def entries_here() -> list[Any]:
    """What this rank's ledger holds so far."""
    return now.recorder.entries


def log_rounds(n: int) -> int:
    """⌈log₂ n⌉: the fewest rounds in which n ranks can learn what one of them knows."""
    return (n - 1).bit_length()


def _steps(entries: Sequence[Any]) -> list[Communication]:
    """The messages in the order in which a program needs them: an asynchronous receive where it is waited for."""
    waits = {entry.of: place for place, entry in enumerate(entries) if isinstance(entry, Wait)}
    found = []
    for place, entry in enumerate(entries):
        if isinstance(entry, Communication) and entry.op in ("send", "recv"):
            late = entry.op == "recv" and entry.asynchronous
            found.append((waits.get(entry.index, place) if late else place, entry))
    return [entry for _, entry in sorted(found, key=lambda step: step[0])]


def _sends(ledger: Ledger, rank: int) -> list[Communication]:
    return [call for call in ledger[rank].communications if call.op == "send"]


def _foreign(rank: int, calls: list[Communication]) -> str:
    for call in calls:
        if call.op not in ("send", "recv"):
            noun = NOUNS.get(call.op, call.op)
            return f"rank {rank} calls {'an' if noun[0] in 'aeiou' else 'a'} {noun}: here it is to be made of messages"
    return ""


def _astray(rank: int, ranks: Sequence[int], sends: list[Communication]) -> str:
    place, n = list(ranks).index(rank), len(ranks)
    peers = sorted({call.peer for call in sends})
    neighbours = {ranks[(place + 1) % n], ranks[place - 1]}
    if len(peers) <= 1 and neighbours.issuperset(peers):
        return ""
    noun = "rank" if len(peers) == 1 else "ranks"
    return f"rank {rank} sends to {noun} {in_words(peers)}: in a ring it has one neighbour to send to"


def _number(rank: int, sends: list[Communication], messages: Sequence[int] | None) -> str:
    if messages is None or len(sends) == messages[rank]:
        return ""
    return f"rank {rank} sends {numbered(len(sends), 'message')}, expected {messages[rank]}"


def _size(rank: int, sends: list[Communication], sent: Sequence[float] | None) -> str:
    total = sum(call.bytes for call in sends)
    if sent is None or total == sent[rank]:
        return ""
    times = f" ({total / sent[rank]:.3g} times)" if sent[rank] else ""
    return f"rank {rank} sends {size_in_words(total)}, expected {size_in_words(sent[rank])}{times}"


def _where(calls: list[Communication]) -> str:
    lines = list(dict.fromkeys(call.line for call in calls if call.line))
    return f"called at {in_words(lines[:3])}" if lines else ""
