"""What travels: from every rank to every other, and by axis beside the formula."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from fivefold.plots.style import INK, RC, RULE, SOFT, Figure, Sheet, axis_colour, joined
from fivefold.runtime import timing
from fivefold.runtime.cluster import Cluster
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.operations import operations
from fivefold.runtime.traffic import size

NUMBERS_UP_TO = 16  # ranks: more, and numbers no longer fit into the cells
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@matplotlib.rc_context(RC)
def traffic(ledger: Ledger, cluster: Cluster | None = None, title: str = "") -> Figure:
    """Bytes from every rank (rows) to every other (columns), collectives taken as rings; darker is more.

    A cell has the colour of the axis that sends most through it. With a `cluster`, rings are taken apart by server, as
    `timing` does. Raises ValueError where nothing was sent.
    """
    sent = _pairs(ledger, cluster)
    if not sent:
        raise ValueError("no rank sent anything to another: there is no traffic to draw")
    n, totals = len(ledger), {pair: sum(axes.values()) for pair, axes in sent.items()}
    side = min(7.0, max(2.2, 0.56 * n))
    sheet = Sheet(title or _title(totals, n), side + 1.6, side, left=0.9, right=0.7, bottom=0.75)
    unit, scale = next((u for u in UNITS if u[1] <= max(totals.values())), UNITS[-1])
    for (a, b), axes in sent.items():
        _cell(sheet.axes, (a, b), axes, max(totals.values()), scale if n <= NUMBERS_UP_TO else 0, names=n <= 8)
    _grid(sheet.axes, n)
    groups = {group for axes in sent.values() for group in axes}
    note = Patch(facecolor="none", label=f"numbers in {unit}" if n <= NUMBERS_UP_TO else f"most: {_most(totals)}")
    sheet.key([Patch(facecolor=axis_colour(group), label=group) for group in sorted(groups)] + [note])
    return Figure(sheet.figure, _alt(totals, n))


@matplotlib.rc_context(RC)
def traffic_by_axis(
    ledger: Ledger, formulas: Mapping[tuple[str, str], tuple[float, str]] | None = None, title: str = ""
) -> Figure:
    """Bytes that leave each rank, a bar for each operation and group, with the formula's value as a mark on the bar.

    `formulas` maps (operation, group) to (bytes, the formula in words). Where ranks differ, a bar is the most that any
    sends. Raises ValueError where nothing was sent.
    """
    rows = sorted((row for row in ledger.traffic().rows if row.bytes), key=lambda row: -row.bytes)
    if not rows:
        raise ValueError("no rank sent anything to another: there is no traffic to draw")
    formulas = formulas or {}
    expected = [formulas.get((row.op, row.group), (None, "")) for row in rows]
    sheet = Sheet(title or _bars_title(rows, expected), 9.0, 0.5 * len(rows) + 0.1, left=1.75, right=3.4, bottom=0.2)
    axes, most = sheet.axes, max([row.bytes for row in rows] + [value or 0 for value, _ in expected])
    axes.axis("off")
    axes.set_xlim(0, most)
    axes.set_ylim(len(rows), -0.1)
    for place, (row, (value, words)) in enumerate(zip(rows, expected, strict=True)):
        axes.barh(place + 0.45, row.bytes, 0.52, color=axis_colour(row.group))
        name = f"{row.op.replace('_', '-')}, {row.group}"
        axes.annotate(name, (0, place + 0.45), (-6, 0), textcoords="offset points", ha="right", va="center")
        if value is not None:
            axes.plot([value] * 2, [place + 0.1, place + 0.8], color=INK, linewidth=2, clip_on=False)
        where = (max(row.bytes, value or 0), place + 0.45), (7, 0)
        axes.annotate(_bar_words(row, value, words), *where, textcoords="offset points", ha="left", va="center")
    return Figure(sheet.figure, _bars_alt(rows, expected))


def _pairs(ledger: Ledger, cluster: Cluster | None) -> dict[tuple[int, int], dict[str, float]]:
    sent: dict[tuple[int, int], dict[str, float]] = {}
    for operation in operations(ledger):
        for pair, count in timing.moved(operation.calls, cluster).items():
            if count:
                axes = sent.setdefault(pair, {})
                axes[operation.group] = axes.get(operation.group, 0.0) + count
    return sent


def _cell(axes: Axes, pair: tuple[int, int], sent: dict[str, float], most: float, scale: float, names: bool) -> None:
    """From paper to the axis's colour with the share of the largest; a cell with traffic never looks empty."""
    (a, b), total = pair, sum(sent.values())
    full = to_rgb(axis_colour(max(sent, key=sent.get)))
    depth = 0.18 + 0.82 * total / most
    colour = [1 - depth * (1 - channel) for channel in full]
    axes.add_patch(Rectangle((b, a), 1, 1, facecolor=colour, linewidth=0))
    if scale:
        dark = sum(w * c for w, c in zip((0.299, 0.587, 0.114), colour, strict=True)) < 0.55
        text = f"{total / scale:.3g}" if total / scale >= 0.1 else "<0.1"
        name = "\n" + " ".join(sorted(sent)) if names else ""
        style = {"ha": "center", "va": "center", "fontsize": 8, "linespacing": 1.3}
        axes.text(b + 0.5, a + 0.5, text + name, color="white" if dark else INK, **style)


def _grid(axes: Axes, n: int) -> None:
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xlabel="to rank", ylabel="from rank")
    for line in range(n + 1):
        axes.plot([0, n], [line, line], [line, line], [0, n], color=RULE, linewidth=0.6, clip_on=False)
    every = 1 if n <= 32 else 8
    ticks = list(range(0, n, every))
    axes.set_xticks([tick + 0.5 for tick in ticks], ticks)
    axes.set_yticks([tick + 0.5 for tick in ticks], ticks)
    axes.tick_params(length=0, labelcolor=SOFT)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _most(totals: dict[tuple[int, int], float]) -> str:
    (a, b), count = max(totals.items(), key=lambda item: item[1])
    return f"{size(count)} from rank {a} to rank {b}"


def _title(totals: dict[tuple[int, int], float], n: int) -> str:
    used, possible = len(totals), n * (n - 1)
    return f"{used} of {possible} pairs of ranks exchange {size(sum(totals.values()))}"


def _alt(totals: dict[tuple[int, int], float], n: int) -> str:
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    words = [f"{size(count)} from rank {a} to rank {b}" for (a, b), count in ranked[:8]]
    more = f", and {len(ranked) - 8} smaller or equal ones" if len(ranked) > 8 else ""
    return f"Matrix of the bytes that {n} ranks send to each other: {'; '.join(words)}{more}."


def _agrees(measured: float, value: float) -> bool:
    return abs(measured - value) <= 1e-6 * max(measured, value)


def _bar_words(row, value: float | None, words: str) -> str:
    text = f"{size(row.bytes)} in {row.calls} call{'s' if row.calls != 1 else ''}"
    if value is None:
        return text
    return f"{text}  {'✓' if _agrees(row.bytes, value) else f'✗ {size(value)} by formula'}\n{words}".rstrip()


def _bars_title(rows, expected) -> str:
    known = [(row, value) for row, (value, _) in zip(rows, expected, strict=True) if value is not None]
    wrong = [f"{row.op.replace('_', '-')} in {row.group}" for row, value in known if not _agrees(row.bytes, value)]
    if wrong:
        return f"Traffic differs from the formula: {joined(wrong)}"
    whole = f"{size(sum(row.bytes for row in rows))} leave each rank"
    return f"{whole}, as the formulas say" if known else whole


def _bars_alt(rows, expected) -> str:
    words = [
        f"{row.op.replace('_', '-')} in {row.group} {size(row.bytes)}" + (f", formula {size(value)}" if value else "")
        for row, (value, _) in zip(rows, expected, strict=True)
    ]
    return f"Bars of the bytes that leave each rank: {'; '.join(words)}."
