"""A causal mask cut into chunks: which of it each rank computes, with contiguous parts and in zig-zag order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from fivefold.plots.style import CONTEXT, INK, OTHER, PAPER, RC, RULE, SOFT, STRIPES, WORK, Figure, Sheet, joined

WIDTH, TALL = 9.0, 3.9  # inches of the drawing
LEFT, TOP, SIDE = 1.55, 0.42, 3.3  # of the mask
BARS, ROOM = 5.95, 1.9  # of the bars
ORDERS = ("contiguous", "zig-zag")


@matplotlib.rc_context(RC)
def causal_work(n: int, order: str = "contiguous", rank: int = 0) -> Figure:
    """Draw the mask of a sequence in 2n chunks, and the work of each of n ranks; what `rank` computes stands out.

    A row is a chunk of queries, and belongs to the rank that holds it; a column is a chunk of keys. The work is in
    whole chunk pairs: one on the diagonal counts half. Raises ValueError for another order, and for a rank that there
    is not.
    """
    if order not in ORDERS or not 0 <= rank < n:
        raise ValueError(f"order {order!r}, rank {rank} of {n}: choose one of {', '.join(ORDERS)}, rank 0 to {n - 1}")
    work = chunk_work(n, order)
    sheet = Sheet(_title(n, order, work), WIDTH, TALL, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(TALL, 0))
    _mask(axes, n, order, rank)
    _bars(axes, n, work, rank)
    return Figure(sheet.figure, _alt(n, order, rank, work))


@matplotlib.rc_context(RC)
def work_by_rank(work: Mapping[str, Sequence[float]], title: str = "", unit: str = "MFLOP") -> Figure:
    """Draw each rank's work in several orders, side by side; the line is an even share.

    `work` maps the name of an order to the work of every rank. The share of the ideal speed, mean over maximum, stands
    under each.
    """
    n, most = len(next(iter(work.values()))), max(max(amounts) for amounts in work.values())
    row, panel, left = min(0.3, 2.6 / n), 3.1, 0.95
    height = 0.3 + n * row + 0.35
    shares = {name: sum(amounts) / n / max(amounts) for name, amounts in work.items()}
    words = title or "; ".join(f"{name}: {share:.1%} of the ideal speed" for name, share in shares.items())
    sheet = Sheet(words[0].upper() + words[1:], WIDTH, height, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    for place, (name, amounts) in enumerate(work.items()):
        at, mean = left + place * (panel + 1.1), sum(amounts) / n
        scale = panel / most * 0.85
        _text(axes, at, 0.12, f"{name}, {unit}", ha="left", weight="bold")
        for rank, amount in enumerate(amounts):
            middle = 0.3 + (rank + 0.5) * row
            axes.add_patch(Rectangle((at, middle - row * 0.34), amount * scale, row * 0.68, facecolor=CONTEXT))
            _text(axes, at - 0.08, middle, f"rank {rank}", ha="right", size=8)
            box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
            _text(axes, at + amount * scale + 0.08, middle, f"{amount:.3g}", ha="left", size=8, zorder=5, bbox=box)
        axes.plot([at + mean * scale] * 2, [0.26, 0.32 + n * row], color=INK, linewidth=1.2, linestyle=(0, (3, 2)))
        _text(axes, at + mean * scale, 0.44 + n * row, f"even: {mean:.3g}", colour=OTHER)
    each = "; ".join(
        f"{name}: {', '.join(f'{amount:.3g}' for amount in amounts)}, {shares[name]:.1%} of the ideal speed"
        for name, amounts in work.items()
    )
    return Figure(sheet.figure, f"Work of {n} ranks, in {unit}, by order of the tokens. {each}.")


def chunks_of(rank: int, n: int, order: str) -> tuple[int, int]:
    """The two of 2n chunks that a rank holds."""
    return (rank, 2 * n - 1 - rank) if order == "zig-zag" else (2 * rank, 2 * rank + 1)


def chunk_work(n: int, order: str) -> list[float]:
    """Work of each rank: a chunk of queries over every chunk before it, and half of a pair over itself."""
    return [sum(chunk + 0.5 for chunk in chunks_of(rank, n, order)) for rank in range(n)]


def _mask(axes: Axes, n: int, order: str, rank: int) -> None:
    cell = SIDE / (2 * n)
    owner = {chunk: r for r in range(n) for chunk in chunks_of(r, n, order)}
    _text(axes, LEFT + SIDE / 2, TOP - 0.26, "chunks of keys, early to late", colour=SOFT)
    for row in range(2 * n):
        mine, top = owner[row] == rank, TOP + row * cell
        look = (
            {"facecolor": CONTEXT, "hatch": STRIPES[CONTEXT], "edgecolor": PAPER} if mine else {"facecolor": WORK["F"]}
        )
        for column in range(row):
            axes.add_patch(Rectangle((LEFT + column * cell, top), cell, cell, linewidth=0, **look))
        corners = [(LEFT + row * cell, top), (LEFT + row * cell, top + cell), (LEFT + (row + 1) * cell, top + cell)]
        axes.add_patch(Polygon(corners, linewidth=0, **look))
        words = f"chunk {row} · rank {owner[row]}" if n <= 4 else f"{row} · rank {owner[row]}"
        style = {"size": 8.5 if n <= 4 else 7.5, "weight": "bold" if mine else "normal"}
        _text(axes, LEFT - 0.08, top + cell / 2, words, ha="right", **style)
    for line in range(2 * n + 1):
        axes.plot([LEFT, LEFT + SIDE], [TOP + line * cell] * 2, color=RULE, linewidth=0.6)
        axes.plot([LEFT + line * cell] * 2, [TOP, TOP + SIDE], color=RULE, linewidth=0.6)
    _text(axes, LEFT - 0.08, TOP - 0.1, "queries", ha="right", colour=SOFT)


def _bars(axes: Axes, n: int, work: list[float], rank: int) -> None:
    mean, most, row = sum(work) / n, max(work), SIDE / n
    scale = ROOM / most
    _text(axes, BARS, TOP - 0.26, "work of each rank, in pairs of chunks", ha="left", colour=SOFT)
    for r, amount in enumerate(work):
        middle, tall, mine = TOP + (r + 0.5) * row, min(0.34, row * 0.62), r == rank
        look = (
            {"facecolor": CONTEXT, "hatch": STRIPES[CONTEXT], "edgecolor": PAPER} if mine else {"facecolor": WORK["F"]}
        )
        axes.add_patch(Rectangle((BARS, middle - tall / 2), amount * scale, tall, linewidth=0, **look))
        weight = "bold" if mine else "normal"
        _text(axes, BARS - 0.08, middle, f"rank {r}", ha="right", weight=weight)
        _text(axes, BARS + amount * scale + 0.08, middle, f"{amount:g}", ha="left", weight=weight)
    axes.plot(
        [BARS + mean * scale] * 2, [TOP - 0.06, TOP + SIDE + 0.03], color=INK, linewidth=1.2, linestyle=(0, (3, 2))
    )
    _text(axes, BARS + mean * scale, TOP + SIDE + 0.12, f"the same for all: {mean:g}", colour=OTHER)


def _text(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, size: float = 8.5, **more: object
) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=size, **more)


def _title(n: int, order: str, work: list[float]) -> str:
    share = sum(work) / n / max(work)
    if n == 1:
        return "One rank has all the work"
    if order == "zig-zag":
        return f"Zig-zag: an early and a late chunk each, and all {n} ranks have the same work"
    return (
        f"Contiguous parts: the last of {n} ranks has {max(work) / min(work):.0f} times the work of the first, "
        f"and all go at {share:.1%} of the ideal speed"
    )


def _alt(n: int, order: str, rank: int, work: list[float]) -> str:
    each = joined([f"rank {r} has {amount:g}" for r, amount in enumerate(work)])
    own = joined([str(chunk) for chunk in chunks_of(rank, n, order)])
    return (
        f"A causal mask of {2 * n} by {2 * n} chunks over {n} ranks, {order}: the lower triangle, a row for each chunk "
        f"of queries. Rank {rank} computes rows {own}. Work in pairs of chunks: {each}; the mean is {sum(work) / n:g}."
    )
