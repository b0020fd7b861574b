"""Bytes saved for backward, as the program goes on: a small curve for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes

from fivefold.plots.style import INK, RC, RULE, SOFT, WORK, Figure, Sheet, duration, round_length
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.replay import Replay
from fivefold.runtime.traffic import size

Curve = Sequence[tuple[float, float]]  # (time, amount that holds from then on)
MOST_ROWS = 16


@matplotlib.rc_context(RC)
def memory(
    source: Ledger | Mapping[str, Curve], replay: Replay | None = None, title: str = "", amount: str = "bytes",
    end: float | None = None,
) -> Figure:  # fmt: skip
    """Draw what each rank keeps for backward, from a measured ledger or from curves by name.

    The horizontal axis is the program's entries, or time where a `replay` of the same ledger is given. Ranks with the
    same curve share a row. `amount` names what curves of one's own count, such as "micro-batches"; `end` is where their
    axis ends. Raises ValueError where nothing was kept.
    """
    curves = _curves(source, replay) if isinstance(source, Ledger) else dict(source)
    rows = _shared_rows(curves)
    most = max((value for curve in curves.values() for _, value in curve), default=0)
    if not most:
        raise ValueError("nothing was saved for backward: run with measure=True a program that needs gradients")
    last = end or (replay.makespan if replay else max(curve[-1][0] for curve in curves.values()))
    shown = dict(list(rows.items())[:MOST_ROWS])
    names, peaks = max(map(len, shown)), max(len(_amount(most, amount)), 7)
    margins = {"left": 0.3 + 0.075 * names, "right": 0.62 + 0.075 * peaks, "bottom": 0.16}
    sheet = Sheet(title or _title(curves, amount), 9.0, 0.62 * len(shown) + 0.25, **margins)
    axes = sheet.axes
    axes.axis("off")
    axes.set_xlim(0, last)
    axes.set_ylim(len(shown) + 0.35, -0.05)
    for place, (name, curve) in enumerate(shown.items()):
        _row(axes, place, name, [*curve, (max(last, curve[-1][0]), curve[-1][1])], most, amount)
    _scale_bar(axes, len(shown), last, replay, isinstance(source, Ledger))
    return Figure(sheet.figure, _alt(rows, amount))


def _curves(ledger: Ledger, replay: Replay | None) -> dict[str, Curve]:
    return {
        f"rank {own.rank}": spread(own.memory.timeline, replay.times[own.rank] if replay else None)
        for own in ledger.ranks
        if own.memory.timeline
    }


def spread(points: Curve, times: Sequence[tuple[float, float]] | None) -> Curve:
    """A rank's `memory.timeline` over time, from the begin and end of its entries; without these, over entries.

    Points inside one entry stand evenly between its begin and its end.
    """
    inside: dict[float, list[float]] = {}
    for index, value in points:
        inside.setdefault(index, []).append(value)
    curve = []
    for index, values in inside.items():
        begin, end = (index, index + 1) if times is None else times[min(int(index), len(times) - 1)]
        curve += [(begin + (end - begin) * (k + 0.5) / len(values), value) for k, value in enumerate(values)]
    return [(0.0, 0.0), *curve]


def _shared_rows(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """One row for ranks whose curves agree: "rank 0, 1, 2"."""
    same: dict[tuple, list[str]] = {}
    for name, curve in curves.items():
        same.setdefault(tuple(curve), []).append(name)
    return {_together(names): curve for curve, names in same.items()}


def _together(names: list[str]) -> str:
    if len(names) == 1 or not all(name.startswith("rank ") for name in names):
        return ", ".join(names)
    numbers = [int(name.removeprefix("rank ")) for name in names]
    in_a_row = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
    return f"ranks {numbers[0]}–{numbers[-1]}" if in_a_row else "ranks " + ", ".join(map(str, numbers))


def _row(axes: Axes, place: int, name: str, curve: Curve, most: float, amount: str) -> None:
    bottom = place + 0.96
    steps = dict(curve)  # of several values at one time the last one holds
    x = list(steps)
    y = [bottom - 0.78 * value / most for value in steps.values()]
    axes.fill_between(x, y, bottom, step="post", color=WORK["F"], linewidth=0)
    axes.step(x, y, where="post", color=WORK["B"], linewidth=1.1)
    axes.axhline(bottom, color=RULE, linewidth=0.8)
    peak = max(value for _, value in curve)
    when = next(time for time, value in curve if value == peak)
    axes.plot([when, x[-1]], [bottom - 0.78 * peak / most] * 2, color=SOFT, linewidth=0.7, linestyle=(0, (2, 2)))
    style = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
    axes.annotate(name, (0, place + 0.6), (-6, 0), ha="right", **style)
    words = _amount(peak, amount)
    axes.annotate(f"peak {words}", (x[-1], bottom - 0.78 * peak / most), (6, 0), ha="left", color=INK, **style)


def _scale_bar(axes: Axes, rows: int, last: float, replay: Replay | None, is_ledger: bool) -> None:
    height = rows + 0.22
    if replay is None and is_ledger:
        text = "the program goes on →"
        axes.annotate(text, (0, height), (0, 0), textcoords="offset points", va="center", fontsize=8.5, color=SOFT)
        return
    length = round_length(last / 5)
    axes.plot([last - length, last], [height] * 2, color=INK, linewidth=1.6, solid_capstyle="butt")
    text = duration(length, replay.unit if replay else "")
    where = (last - length, height), (-5, 0)
    axes.annotate(text, *where, textcoords="offset points", ha="right", va="center", fontsize=8.5)


def _amount(value: float, amount: str) -> str:
    return size(value) if amount == "bytes" else f"{value:g} {amount}"


def _title(curves: Mapping[str, Curve], amount: str) -> str:
    peaks = {name: max(value for _, value in curve) for name, curve in curves.items()}
    high, low = max(peaks, key=peaks.get), min(peaks, key=peaks.get)
    if peaks[high] == peaks[low]:
        return f"Every rank keeps at most {_amount(peaks[high], amount)} for backward"
    return f"{high.capitalize()} keeps most for backward, {_amount(peaks[high], amount)}; {low} least, " + _amount(
        peaks[low], amount
    )


def _alt(rows: Mapping[str, Curve], amount: str) -> str:
    words = [f"{name} at most {_amount(max(value for _, value in curve), amount)}" for name, curve in rows.items()]
    return f"Curves of what each rank keeps for backward over time: {'; '.join(words[:8])}."
