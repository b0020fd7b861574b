"""Judge what ranks sent: the ledger against the calls that were allowed.

A check lists the calls it expects and everything else on the ledger is one too many, a barrier as well: it moves no
data, but every rank stands still for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.runtime.ledger import Communication, Ledger

from autograde.verdict import Finding, in_words

NOUNS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Calls:
    """Calls of one operation that every rank is to make; a number can also be a sequence with one for each rank.

    `bytes` is what a rank hands in at each call, as `Communication.bytes`; None accepts any size. `groups` are the
    groups in which the call may be made, as sequences of global ranks; None is the group of all ranks. A message (send,
    recv) is between two ranks, whatever the group.
    """

    op: str
    forward: int | Sequence[int] = 0
    backward: int | Sequence[int] = 0
    bytes: int | Sequence[int] | None = None
    groups: Sequence[Sequence[int]] | None = None

    def holds(self, call: Communication, world_size: int) -> bool:
        """Whether `call` is of this operation and in one of these groups."""
        if call.op != self.op or self.op in ("send", "recv"):
            return call.op == self.op
        groups = [range(world_size)] if self.groups is None else self.groups
        return sorted(call.ranks) in [sorted(group) for group in groups]


def expect(property: str, ledger: Ledger, *expected: Calls, look: str = "") -> Finding:
    """Whether every rank made exactly the expected calls, forward and backward, with as many bytes in each."""
    for rank in range(len(ledger)):
        calls = ledger[rank].communications
        for item in expected:
            held = [call for call in calls if item.holds(call, len(ledger))]
            alike = [other for other in expected if (other.op, other.groups) == (item.op, item.groups)]
            problem, way = _counts(alike, held, rank) or _sizes(alike, held, rank)
            if problem:
                others = [call for call in calls if call not in held and _way(call) == way]
                own = [list(group) for group in item.groups or () if rank in group]
                wanted = f" over {in_words(own)}" if own and others else ""
                shown = [call for call in held if _way(call) == way] or others
                return Finding(property, False, f"{problem}{wanted}{_besides(others)}", _where(shown), look)
        extra = [call for call in calls if not any(item.holds(call, len(ledger)) for item in expected)]
        if extra:
            among = f"{_article(extra[0].op)} in ranks {list(extra[0].ranks)}"
            seen = f"{among} that should not be there, {_way(extra[0])} on rank {rank}"
            return Finding(property, False, seen, _where(extra), look)
    return Finding(property, True, _summary(expected), sent_in_words(ledger))


def sent_in_words(ledger: Ledger) -> str:
    """Bytes that leave a rank: `6.1 kB a rank`, `at most 6.1 kB a rank` where ranks differ, `nothing sent`."""
    sent = [sum(call.sent for call in rank.communications) for rank in ledger.ranks]
    if not any(sent):
        return "nothing sent"
    return f"{'at most ' if max(sent) > min(sent) else ''}{size_in_words(max(sent))} a rank"


def size_in_words(size: float) -> str:
    """Bytes with a unit, in powers of ten."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5 or (unit == "B" and size < 1000):
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def table(ledger: Ledger) -> str:
    """Every call of every rank in order, for a reader who wants to see it all."""
    both = any(call.backward for rank in ledger.ranks for call in rank.communications)
    lines = []
    for rank in ledger.ranks:
        lines += [f"rank {rank.rank}" + ("" if rank.communications else "  nothing")]
        for call in rank.communications:
            way = f"{_way(call):8}  " if both else ""
            size = "" if call.op in ("recv", "barrier") else size_in_words(call.bytes)
            where = call.line or "called by the check"
            lines.append(f"  {way}{_with_peer(call):14} {str(list(call.ranks)):16} {size:>8}  {where}")
    return "\n".join(lines)


def _with_peer(call: Communication) -> str:
    """`send to 1`, `recv from 0`; of a collective its name."""
    between = {"send": "to", "recv": "from"}.get(call.op)
    return f"{call.op} {between} {call.peer}" if between else call.op


def fingerprint(ledger: Ledger) -> list[list[Any]]:
    """What each rank handed in, without times and lines: equal for two programs with the same traffic."""
    return [
        sorted(
            [c.op, list(c.ranks), c.bytes, c.backward, -1 if c.peer is None else c.peer] for c in rank.communications
        )
        for rank in ledger.ranks
    ]


def _counts(alike: list[Calls], held: list[Communication], rank: int) -> tuple[str, str] | None:
    """Of a way in which there are too many calls or too few: what to say, and the way."""
    for way in ("forward", "backward"):
        wanted = sum(_of(getattr(item, way), rank) for item in alike)
        number = sum(_way(call) == way for call in held)
        if number != wanted:
            return f"{_plural(number, alike[0].op)} {way} on rank {rank}, expected {wanted}", way
    return None


def _sizes(alike: list[Calls], held: list[Communication], rank: int) -> tuple[str, str]:
    """Of calls whose numbers are right, the first whose size is not among those expected that way."""
    for way in ("forward", "backward"):
        wanted = [_of(item.bytes, rank) for item in alike for _ in range(_of(getattr(item, way), rank))]
        if None in wanted:
            continue
        for call in [call for call in held if _way(call) == way]:
            if call.bytes in wanted:
                wanted.remove(call.bytes)
                continue
            seen = f"{_article(call.op)} {way} of {size_in_words(call.bytes)} on rank {rank}"
            times = f" ({call.bytes / wanted[0]:.3g} times)" if wanted[0] else ""
            return f"{seen}, expected {size_in_words(wanted[0])}{times}", way
    return "", ""


def _besides(calls: Sequence[Communication]) -> str:
    """`; seen: all-gather over [0, 1]`."""
    kinds = dict.fromkeys(f"{NOUNS.get(call.op, call.op)} over {list(call.ranks)}" for call in calls)
    return f"; seen: {in_words(kinds)}" if kinds else ""


def _way(call: Communication) -> str:
    return "backward" if call.backward else "forward"


def _summary(expected: Sequence[Calls]) -> str:
    """`1 all-reduce forward, 0 backward`."""
    if not expected:
        return "no communication"
    parts = []
    for item in expected:
        forward, backward = (_range(number) for number in (item.forward, item.backward))
        noun = NOUNS.get(item.op, item.op)
        parts.append(f"{forward} {noun}{'' if forward == '1' else 's'} forward, {backward} backward")
    return "; ".join(parts)


def _where(calls: Sequence[Communication]) -> str:
    lines = list(dict.fromkeys(call.line for call in calls if call.line))
    return f"called at {in_words(lines[:3])}" if lines else ""


def _of(number: Any, rank: int) -> Any:
    return number[rank] if isinstance(number, Sequence) else number


def _range(number: int | Sequence[int]) -> str:
    if isinstance(number, int):
        return str(number)
    return str(min(number)) if min(number) == max(number) else f"{min(number)} to {max(number)}"


def _plural(number: int, op: str) -> str:
    return f"{number} {NOUNS.get(op, op)}{'' if number == 1 else 's'}"


def _article(op: str) -> str:
    noun = NOUNS.get(op, op)
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
