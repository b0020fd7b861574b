"""A ring all-reduce, step by step: which sums each rank holds of each piece, and what it hands on."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fivefold.plots.style import INK, OTHER, PAPER, RC, RULE, SOFT, WORK, Figure, Sheet, counted

WIDTH, LEFT, PIECES, NARROW = 9.0, 0.8, 5.7, 0.5  # inches: of all, left of the pieces, of all pieces, of an empty one
HEAD, GAP = 0.6, 0.24  # inches: above the ranks, and between two of them, where the arrows are

Held = list[list[tuple[int, ...]]]  # by rank and piece: the ranks whose numbers are in it; none where it was handed on


@matplotlib.rc_context(RC)
def ring_all_reduce(n: int, step: int, numbers: int = 12) -> Figure:
    """Draw what each of `n` ranks holds after `step` of the 2(n - 1) steps, of a tensor of so many `numbers`.

    A column is a piece, as wide as it has numbers; those that n does not divide make pieces of two sizes, some of them
    empty. The arrows are the messages of that step. Raises ValueError for a step that there is not.
    """
    steps = 2 * (n - 1)
    if not 0 <= step <= steps:
        raise ValueError(f"a ring of {n} ranks has no step {step}: choose 0 to {steps}")
    sizes = piece_sizes(n, numbers)
    held = held_after(n, step)
    tall = 0.42 if n <= 5 else 0.28
    sheet = Sheet(_title(n, step), WIDTH, HEAD + n * (tall + GAP), left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(HEAD + n * (tall + GAP), 0))
    edges = _edges(sizes)
    _heads(axes, edges, sizes, n)
    for rank in range(n):
        top = HEAD + rank * (tall + GAP)
        _text(axes, 0.12, top + tall / 2, f"rank {rank}", ha="left")
        for piece in range(n):
            arrived = step > 0 and sent_piece(n, step, (rank - 1) % n) == piece
            _cell(axes, edges[piece], top, tall, held[rank][piece], n, arrived)
            if sizes[piece]:
                _words(axes, edges[piece], top + tall / 2, held[rank][piece], n)
        if step:
            piece = sent_piece(n, step, rank)
            words = f"piece {piece} to rank {(rank + 1) % n}{'' if sizes[piece] else ': empty'}"
            _text(axes, LEFT + PIECES + 0.2, top + tall / 2, words, ha="left", colour=SOFT)
            _arrow(axes, edges[piece], top + tall, last=rank == n - 1)
    return Figure(sheet.figure, _alt(n, step, sizes, held))


def piece_sizes(n: int, numbers: int) -> list[int]:
    """How many of the numbers each piece has: as even as can be, the first ones larger."""
    return [numbers // n + (piece < numbers % n) for piece in range(n)]


def sent_piece(n: int, step: int, rank: int) -> int:
    """The piece that `rank` hands on in a step, counted from 1: first those on their way to a sum, then the sums."""
    return (rank - step) % n if step < n else (rank - (step - n)) % n


def held_after(n: int, step: int) -> Held:
    """What each rank holds of each piece after `step` steps."""
    held: Held = [[(rank,)] * n for rank in range(n)]
    for number in range(1, step + 1):
        moving = [held[rank][sent_piece(n, number, rank)] for rank in range(n)]
        for rank, content in enumerate(moving):
            piece, right = sent_piece(n, number, rank), (rank + 1) % n
            held[right][piece] = (*content, right) if number < n else content
            if number < n:
                held[rank][piece] = ()
    return held


def _edges(sizes: list[int]) -> list[tuple[float, float]]:
    """Left edge and width of each column."""
    empty = sum(size == 0 for size in sizes)
    inch = (PIECES - empty * NARROW) / max(sum(sizes), 1)
    edges, at = [], LEFT
    for size in sizes:
        wide = size * inch if size else NARROW
        edges.append((at, wide))
        at += wide
    return edges


def _heads(axes: Axes, edges: list[tuple[float, float]], sizes: list[int], n: int) -> None:
    short = n > 5 or 0 in sizes
    for piece, ((left, wide), size) in enumerate(zip(edges, sizes, strict=True)):
        _text(axes, left + wide / 2, 0.1, f"{piece}" if short else f"piece {piece}")
        _text(
            axes,
            left + wide / 2,
            0.29,
            "empty" if not size else f"{size}" if n > 5 else counted(size, "number"),
            colour=SOFT,
        )
    if short:
        _text(axes, 0.12, 0.1, "piece", ha="left")
    if n > 5:
        _text(axes, 0.12, 0.29, "numbers", ha="left", colour=SOFT)


def _cell(
    axes: Axes, edge: tuple[float, float], top: float, tall: float, content: tuple[int, ...], n: int, arrived: bool
) -> None:
    """Light for a part of a sum, dark for the whole sum, an outline for what was handed on."""
    left, wide = edge[0] + 0.03, edge[1] - 0.06
    whole = len(content) == n
    fill = WORK["B"] if whole else WORK["F"] if content else PAPER
    look = {"edgecolor": INK if content else RULE, "linewidth": 2.0 if arrived else 0.7, "zorder": 3 if arrived else 2}
    axes.add_patch(Rectangle((left, top), wide, tall, facecolor=fill, **look))


def _words(axes: Axes, edge: tuple[float, float], middle: float, content: tuple[int, ...], n: int) -> None:
    """Whose numbers are in the sum, in the order in which they were added, or how many where that is too long."""
    whole, words = len(content) == n, "+".join(map(str, content))
    if whole or len(words) * 0.075 > edge[1] - 0.12:
        words = "sum" if whole else f"{len(content)} of {n}"
    if len(words) * 0.07 <= edge[1] - 0.08:
        _text(axes, edge[0] + edge[1] / 2, middle, words, colour=PAPER if whole else INK, zorder=4)


def _arrow(axes: Axes, edge: tuple[float, float], bottom: float, last: bool) -> None:
    """The arrow below the piece that a rank hands on; the last rank's goes round, and comes in at the top."""
    x, tall = edge[0] + edge[1] / 2, GAP - 0.03
    style = {"arrowstyle": "-|>", "color": OTHER, "linewidth": 1.8, "mutation_scale": 10, "shrinkA": 0, "shrinkB": 0}
    for top in (bottom + 0.02, HEAD - GAP + 0.02) if last else (bottom + 0.02,):
        axes.annotate("", (x, top + tall), (x, top), arrowprops=style)


def _text(axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, **more: object) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=8.5, **more)


def _title(n: int, step: int) -> str:
    steps = 2 * (n - 1)
    if step == 0:
        return f"The start: each of {n} ranks has its own numbers, cut into {n} pieces"
    if step == steps:
        return f"Step {step} of {steps}: now every rank has every sum"
    if step == n - 1:
        return f"Step {step} of {steps}: each sum is complete, on one rank"
    if step < n:
        return f"Step {step} of {steps}: each rank hands on one piece, and adds its own numbers to the one that arrives"
    return f"Step {step} of {steps}: each rank hands on a sum, and keeps a copy"


def _alt(n: int, step: int, sizes: list[int], held: Held) -> str:
    words = []
    for rank, own in enumerate(held):
        sums = [f"the sum of piece {piece}" for piece, content in enumerate(own) if len(content) == n]
        partial = [f"piece {piece} of ranks {'+'.join(map(str, c))}" for piece, c in enumerate(own) if 1 < len(c) < n]
        alone = sum(len(content) == 1 < n for content in own)
        parts = [*sums, *partial] + ([counted(alone, "piece") + " of its own"] if alone else [])
        words.append(f"rank {rank} holds {', '.join(parts)}")
    start = f"{n} ranks after step {step} of {2 * (n - 1)} of a ring all-reduce, pieces of {', '.join(map(str, sizes))}"
    return f"{start} numbers. {'; '.join(words).capitalize()}."
