"""A column-row pair of matrices over t ranks: what each rank holds, what travels, and what more ranks bring."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fivefold.plots.style import INK, PAPER, RC, SOFT, TENSOR, WORK, Figure, Sheet, axis_stripes, duration
from fivefold.runtime import timing
from fivefold.runtime.cluster import Cluster
from fivefold.runtime.ledger import Communication
from fivefold.runtime.traffic import size

WIDTH, TALL = 9.0, 3.0  # inches of the drawing
LANES = 4  # ranks that are drawn: with more, the first two, and the last
X, A, INNER, B, Y = 0.98, 1.72, 3.05, 3.92, 4.62  # left edges
BARS = 6.55
DARK_TENSOR = "#AD4C00"  # the axis's colour, dark enough for text on paper


@matplotlib.rc_context(RC)
def column_row_pair(
    t: int, tokens: int, h: int, cluster: Cluster, way: str = "forward", degrees: Sequence[int] = (1, 2, 4, 8, 16)
) -> Figure:
    """Draw X·A·B over `t` ranks, A (h, 4h) cut by columns, B (4h, h) by rows, numbers of 2 bytes.

    On the left the ranks' parts and the one exchange, at Y in the `way` "forward", at X in "backward". On the right
    the time of that pass for each of `degrees` on `cluster`: computing, then the exchange. `tokens` is b·s.
    Raises ValueError for another way, and where t is not one of the degrees.
    """
    if way not in ("forward", "backward"):
        raise ValueError(f"there is no way {way!r}: choose forward or backward")
    if t not in degrees:
        raise ValueError(f"{t} ranks are not among {tuple(degrees)}: add them to the degrees")
    times = {n: _times(n, tokens, h, cluster, way) for n in degrees}
    sheet = Sheet(_title(t, cluster, times), WIDTH, TALL, left=0, right=0, bottom=0.12)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(TALL, 0))
    _lanes(axes, t, way)
    _exchange(axes, t, tokens, h, way)
    _sizes(axes, t, tokens, h, way)
    _bars(axes, t, times)
    return Figure(sheet.figure, _alt(t, tokens, h, way, times))


def pushed_bytes(t: int, tokens: int, h: int) -> float:
    """Bytes that each rank sends for one all-reduce of tokens·h 2-byte numbers."""
    return 2 * (t - 1) / t * tokens * h * 2


def _times(t: int, tokens: int, h: int, cluster: Cluster, way: str) -> tuple[float, float]:
    """Seconds of computing, 2mnk for each product and twice that backward, and of the all-reduce."""
    flops = (1 if way == "forward" else 2) * 2 * (2 * tokens * h * 4 * h) / t
    ranks = tuple(range(t))
    calls = [Communication(0, "all_reduce", "tp", ranks, 0, 2 * tokens * h) for _ in ranks]
    return cluster.compute_seconds(flops), timing.seconds(calls, cluster)


def _lanes(axes: Axes, t: int, way: str) -> None:
    shown = list(range(t)) if t <= LANES else [0, 1, t - 1]
    places = list(range(len(shown))) if t <= LANES else [0, 1, 3]
    height = min(2.2 / min(t, LANES), 0.9)
    top = 0.2 + (2.2 - min(t, LANES) * height) / 2
    for place, rank in zip(places, shown, strict=True):
        _lane(axes, top + place * height, height, rank, t, way)
    if t > LANES:
        _text(axes, 0.3, top + 2.5 * height, "⋮", size=12)
        _text(axes, 3.0, top + 2.5 * height, f"{t - 3} more ranks, each with its own 1/{t}", colour=SOFT)


def _lane(axes: Axes, top: float, height: float, rank: int, t: int, way: str) -> None:
    """One rank's row: its part of each matrix is filled, the whole is an outline."""
    middle, tall = top + height / 2, height * 0.74
    tone = WORK["F"] if way == "forward" else WORK["W"]
    _text(axes, 0.12, middle, f"rank {rank}", ha="left")
    inner = max(0.5 / t, 0.05)
    for left, wide in ((X, 0.36), (INNER + (0.5 - inner) / 2, inner), (Y, 0.36)):
        _box(axes, left, middle - tall / 2, wide, tall, tone)
    _box(axes, A, middle - tall * 0.3, 0.95, tall * 0.6, PAPER, SOFT)
    _box(axes, A + 0.95 * rank / t, middle - tall * 0.3, 0.95 / t, tall * 0.6, TENSOR)
    _box(axes, B, middle - tall / 2, 0.36, tall, PAPER, SOFT)
    _box(axes, B, middle - tall / 2 + tall * rank / t, 0.36, tall / t, TENSOR)
    signs = "·→·=" if way == "forward" else "←←←←"
    for left, sign in zip((X + 0.55, A + 1.14, INNER + 0.69, B + 0.53), signs, strict=True):
        _text(axes, left, middle, sign, size=13 if sign == "·" else 10)


def _exchange(axes: Axes, t: int, tokens: int, h: int, way: str) -> None:
    """The arrow between the ranks at one end of the pair; at the other end nothing travels."""
    for left, name, busy in ((0.82, "f", way == "backward"), (5.2, "g", way == "forward")):
        colour = DARK_TENSOR if busy and t > 1 else SOFT
        _text(axes, left, 0.08, name, colour=colour, size=10.5, style="italic")
        if busy and t > 1:
            style = {"arrowstyle": "<|-|>", "color": TENSOR, "linewidth": 2.5, "mutation_scale": 14}
            axes.annotate("", (left, 0.18), (left, 2.42), arrowprops=style)
        else:
            axes.plot([left] * 2, [0.24, 2.36], color=SOFT, linewidth=1, linestyle=(0, (2, 3)))
    end = "here" if way == "forward" else "at f"
    words = (
        f"all-reduce {end}:\n{size(pushed_bytes(t, tokens, h))}\nfrom each rank" if t > 1 else "one rank sends\nnothing"
    )
    _text(axes, 5.34, 1.3, words, ha="left", colour=DARK_TENSOR if t > 1 else SOFT)


def _sizes(axes: Axes, t: int, tokens: int, h: int, way: str) -> None:
    weight, x = 2 * 4 * h * h, 2 * tokens * h
    names = ("X", "GELU(X·A)", "part of Y") if way == "forward" else ("part of ∂X", "∂(X·A)", "∂Y")
    if t == 1:
        names = tuple(name.removeprefix("part of ") for name in names)
    share = "whole" if t == 1 else f"1/{t}"
    columns = [
        (X + 0.18, names[0], x), (A + 0.475, f"A, {share}", weight / t), (INNER + 0.25, names[1], 4 * x / t),
        (B + 0.18, f"B, {share}", weight / t), (Y + 0.18, names[2], x),
    ]  # fmt: skip
    for middle, name, amount in columns:
        _text(axes, middle, 2.62, name)
        _text(axes, middle, 2.82, size(amount), colour=SOFT)


def _bars(axes: Axes, t: int, times: dict[int, tuple[float, float]]) -> None:
    """A row for each number of ranks; that of `t` in ink, the others muted."""
    longest = max(sum(pair) for pair in times.values())
    row, room = 2.2 / len(times), WIDTH - BARS - 0.75
    _text(axes, BARS, 0.08, "computing", ha="left", colour=SOFT)
    _text(axes, BARS + 0.75, 0.08, "and the all-reduce", ha="left", colour=DARK_TENSOR)
    for place, (n, (compute, push)) in enumerate(times.items()):
        middle, tall = 0.24 + (place + 0.5) * row, row * 0.5
        now = n == t
        _text(axes, BARS - 0.08, middle, f"{n}", ha="right", weight="bold" if now else "normal")
        ends = compute / longest * room, push / longest * room
        _box(axes, BARS, middle - tall / 2, ends[0], tall, WORK["B"] if now else WORK["W"])
        if push:
            patch = Rectangle((BARS + ends[0], middle - tall / 2), ends[1], tall, **axis_stripes("tp"))
            patch.set_alpha(1 if now else 0.55)
            axes.add_patch(patch)
        total = duration(compute + push)
        _text(axes, BARS + sum(ends) + 0.07, middle, total, ha="left", weight="bold" if now else "normal")
    _text(axes, BARS - 0.08, 2.62, "ranks", ha="right", colour=SOFT)
    _text(axes, BARS, 2.62, "time of one pass, as modelled", ha="left", colour=SOFT)


def _box(axes: Axes, x: float, y: float, wide: float, tall: float, fill: str, edge: str = INK) -> None:
    axes.add_patch(Rectangle((x, y), wide, tall, facecolor=fill, edgecolor=edge, linewidth=0.7))


def _text(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, size: float = 8.5, **more: object
) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=size, **more)


def _title(t: int, cluster: Cluster, times: dict[int, tuple[float, float]]) -> str:
    if t == 1:
        return "One rank holds both matrices whole, and has nobody to wait for"
    compute, push = times[t]
    servers = len(cluster.servers(range(t)))
    where = f", over {servers} servers" if servers > 1 else ""
    still = push / (compute + push)
    return f"{t} ranks{where}: each computes 1/{t} of the work, and stands still for {still:.0%} of its time"


def _alt(t: int, tokens: int, h: int, way: str, times: dict[int, tuple[float, float]]) -> str:
    end = "after the second matrix" if way == "forward" else "before the first matrix"
    moved = "nothing travels" if t == 1 else f"one all-reduce {end}, {size(pushed_bytes(t, tokens, h))} from each rank"
    words = [
        f"{n} ranks {duration(a)} computing and {duration(b)} in the all-reduce"
        if b
        else f"1 rank {duration(a)} computing"
        for n, (a, b) in times.items()
    ]
    held = f"over {t} ranks, {way}: each rank has 1/{t} of both" if t > 1 else f"on 1 rank, {way}: it has both whole"
    return f"Two matrices {held}; {moved}. Modelled time: {'; '.join(words)}."
