"""The traffic table: which operations a run made in which groups, how often, and how many bytes left each rank."""

from __future__ import annotations

import html
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.runtime.ledger import Communication, Ledger


@dataclass(frozen=True)
class Row:
    """One operation in the groups of one name; calls and bytes are those of one rank, the most that any has."""

    op: str
    group: str
    groups: tuple[tuple[int, ...], ...]  # the ranks of each group of that name
    calls: int
    backward: int  # how many of the calls were made in backward
    bytes: float  # that leave a rank
    even: bool  # all ranks make the same number of calls and send the same bytes


@dataclass(frozen=True)
class Traffic:
    """Rows by operation and group. `print` it, or let a notebook show it."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, ledger: Ledger) -> Traffic:
        calls: dict[tuple[str, str], dict[int, list[Communication]]] = defaultdict(lambda: defaultdict(list))
        for rank in ledger.ranks:
            for call in rank.communications:
                calls[call.op, call.group][rank.rank].append(call)
        return cls(tuple(_row(op, group, by_rank) for (op, group), by_rank in calls.items()))

    def __str__(self) -> str:
        if not self.rows:
            return "no traffic: the ranks sent each other nothing"
        return "\n".join("   ".join(cells).rstrip() for cells in _aligned([HEAD, *map(_cells, self.rows)]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{self}</p>"
        head = "".join(f'<th scope="col" style="text-align:left">{name}</th>' for name in HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in self.rows
        )
        return f"<table><caption>Traffic</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


HEAD = ("operation", "group", "calls", "bytes from each rank")


def size(count: float) -> str:
    """Bytes in powers of ten, two or three digits: 6.1 kB, 98 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if count >= 99.5 or count == int(count) else f"{count:.2g} {unit}"
        count /= 1000
    raise AssertionError


def _row(op: str, group: str, by_rank: dict[int, list[Communication]]) -> Row:
    counts = {len(calls) for calls in by_rank.values()}
    sent = {sum(call.sent for call in calls) for calls in by_rank.values()}
    members = sorted({call.ranks for calls in by_rank.values() for call in calls})
    backward = max(sum(call.backward for call in calls) for calls in by_rank.values())
    everyone = {rank for ranks in members for rank in ranks} == set(by_rank)
    return Row(op, group, tuple(members), max(counts), backward, max(sent), everyone and len(counts) == len(sent) == 1)


def _cells(row: Row) -> tuple[str, ...]:
    groups = " ".join(f"[{' '.join(map(str, ranks))}]" for ranks in row.groups[:3])
    more = f" and {len(row.groups) - 3} more" if len(row.groups) > 3 else ""
    calls = f"{row.calls}" + (f", {row.backward} in backward" if row.backward else "")
    return row.op, f"{row.group} {groups}{more}", calls, size(row.bytes) + ("" if row.even else " at most")


def _aligned(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [tuple(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
