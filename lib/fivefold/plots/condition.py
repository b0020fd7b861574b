"""How long a block of ring attention must be for its transfer to hide behind its computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes

from fivefold.cost import min_ring_block
from fivefold.plots.style import CONTEXT, INK, PAPER, RC, RULE, SOFT, WORK, Figure, Sheet, joined

HEIGHT, LINES = 3.3, ("-", (0, (5, 2)), (0, (1, 1.5)))


@dataclass(frozen=True)
class Published:
    """A row that a paper states: the tokens of the smallest block that hides, on a link of `bandwidth` bytes a second.

    None where the bandwidth is not known here: then the row is a mark on the margin.
    """

    name: str
    block: float
    bandwidth: float | None = None


@dataclass(frozen=True)
class Tried:
    """A replay: a block of so many tokens on a link, and the share of its transfers that was hidden."""

    bandwidth: float
    block: float
    hidden: float


@matplotlib.rc_context(RC)
def overlap_condition(
    gpus: Mapping[str, float], published: Sequence[Published] = (), tried: Sequence[Tried] = (), title: str = ""
) -> Figure:
    """Draw the smallest block, in tokens, against the link's bandwidth: FLOPS / bandwidth, a line for each GPU.

    `gpus` maps names to floating point operations a second. Published rows are squares, replays circles: filled where
    every transfer was hidden. Both axes are logarithmic. (Ring Attention, Liu et al. 2023, section 3 and table 2.)
    """
    sheet = Sheet(title or _title(), 9.0, HEIGHT, left=0.85, right=2.25, bottom=0.75)
    axes = sheet.axes
    known = [row.bandwidth for row in published if row.bandwidth] + [one.bandwidth for one in tried]
    low, high = min([10e9, *known]) / 1.6, max([900e9, *known]) * 1.6
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    for (name, flops), line in zip(gpus.items(), LINES, strict=False):
        ends = [min_ring_block(flops, x) for x in (low, high)]
        axes.plot([low, high], ends, color=CONTEXT, linewidth=1.8, linestyle=line, zorder=2)
        _note(axes, f"{name}, {flops / 1e12:.0f} TFLOPS", high, ends[1], (6, 0))
    slowest = [min_ring_block(max(gpus.values()), x) for x in (low, high)]
    axes.fill_between([low, high], slowest, [max(slowest) * 4] * 2, color=WORK["compute"], linewidth=0, zorder=0)
    middle = (low * high) ** 0.5
    _note(axes, "longer blocks: every transfer is hidden", middle * 1.4, max(slowest) * 0.9, (0, 0), SOFT)
    for one in tried:
        fill = INK if one.hidden >= 1 else PAPER
        axes.plot(one.bandwidth, one.block, "o", markersize=6, markerfacecolor=fill, markeredgecolor=INK, zorder=4)
    for row in published:
        if row.bandwidth:
            axes.plot(row.bandwidth, row.block, "s", markersize=7, color=CONTEXT, markeredgecolor=INK, zorder=3)
            _note(axes, f"{row.name}: {row.block:,.0f}", row.bandwidth, row.block, (9, 9), boxed=True)
    _margin(axes, [row for row in published if not row.bandwidth], high)
    lowest = [min_ring_block(flops, high) for flops in gpus.values()]
    axes.set_ylim(min([*lowest, *(one.block for one in tried)]) / 1.3, max(slowest) * 2)
    _ticks(axes, low, high)
    return Figure(sheet.figure, _alt(gpus, published, tried))


def _margin(axes: Axes, rows: Sequence[Published], right: float) -> None:
    for row in rows:
        axes.plot([right / 1.06, right], [row.block] * 2, color=INK, linewidth=1.6, clip_on=False, zorder=5)
    if rows:
        highest = max(row.block for row in rows)
        words = "\n".join(f"{row.name}: {row.block:,.0f}" for row in sorted(rows, key=lambda row: -row.block))
        _note(axes, words, right, highest, (12, 14))


def _ticks(axes: Axes, low: float, high: float) -> None:
    marks = [m for m in (10e9, 25e9, 50e9, 100e9, 300e9, 900e9, 2700e9, 8100e9) if low <= m <= high]
    axes.set_xticks(marks, [f"{mark / 1e9:g}" for mark in marks])
    bottom, top = axes.get_ylim()
    marks = [m for m in (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000) if bottom <= m <= top]
    axes.set_yticks(marks, [f"{mark:,}" for mark in marks])
    axes.minorticks_off()
    axes.grid(color=RULE, linewidth=0.6, zorder=0)
    axes.set_xlabel("bandwidth of the link, one direction, GB/s", fontsize=8.5)
    axes.set_ylabel("tokens in a block", fontsize=8.5)


def _note(
    axes: Axes, text: str, x: float, y: float, offset: tuple[float, float], colour: str = INK, boxed: bool = False
) -> None:
    box = {"bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.85}, "zorder": 6} if boxed else {}
    style = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": colour}
    axes.annotate(text, (x, y), offset, annotation_clip=False, **style, **box)


def _title() -> str:
    return "Transfers are hidden from FLOPS / bandwidth tokens in a block on: a slow link needs long blocks"


def _alt(gpus: Mapping[str, float], published: Sequence[Published], tried: Sequence[Tried]) -> str:
    lines = joined([f"{name}, {flops / 1e12:.0f} TFLOPS" for name, flops in gpus.items()])
    at = [
        f"{row.name} {row.block:,.0f}" + (f" at {row.bandwidth / 1e9:g} GB/s" if row.bandwidth else "")
        for row in published
    ]
    hidden = sum(one.hidden >= 1 for one in tried)
    replays = f" {hidden} of {len(tried)} replays hid every transfer." if tried else ""
    rows = f" Published: {'; '.join(at)}." if at else ""
    start = "Tokens in the smallest block that hides its transfer, against bandwidth: falling lines"
    return f"{start} for {lines}.{rows}{replays}"
