"""Ring attention, step by step: which block each rank has, and the running maximum and sum of one of its rows."""

from __future__ import annotations

import math
import random

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fivefold.plots.style import CONTEXT, INK, PAPER, RC, RULE, SOFT, WORK, Figure, Sheet

WIDTH, LEFT, BLOCKS = 9.0, 1.5, 3.9  # inches: of all, left of the blocks, of all blocks
HEAD, GAP = 0.62, 0.26  # inches: above the ranks, and between two of them, where the arrows are
MASKS = ("no mask", "causal", "causal, zig-zag")

Row = list[tuple[int, float, float, float]]  # by step: block, largest score in it (-inf: sees nothing), maximum, sum


@matplotlib.rc_context(RC)
def ring_attention(n: int, step: int, mask: str = "no mask", slope: float = 0.0) -> Figure:
    """Draw `n` ranks after `step` of the n - 1 transfers: the block that is here, those that were, one row's m and sum.

    Each rank holds two tokens, and the row is that of its last query. Scores are random, and larger by
    `slope` with each key of the sequence. Raises ValueError for a step or a mask that there is not.
    """
    if mask not in MASKS or not 0 <= step < n:
        raise ValueError(f"step {step} of {n} ranks, {mask!r}: choose 0 to {n - 1}, and one of {', '.join(MASKS)}")
    rows = [row_of(rank, n, mask, slope) for rank in range(n)]
    tall = 0.44 if n <= 4 else 0.34
    height = HEAD + n * (tall + GAP)
    sheet = Sheet(_title(n, step, mask, rows), WIDTH, height, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    wide = BLOCKS / n
    _heads(axes, n, wide)
    for rank, row in enumerate(rows):
        top = HEAD + rank * (tall + GAP)
        _text(axes, 0.12, top + tall / 2, f"rank {rank}", ha="left", weight="bold")
        _text(axes, 0.72, top + tall / 2, f"query {tokens_of(rank, n, mask)[-1]}", ha="left", colour=SOFT)
        seen = {block: (when, largest) for when, (block, largest, _, _) in enumerate(row[: step + 1])}
        for block in range(n):
            _cell(axes, LEFT + block * wide, top, wide, tall, seen.get(block), step)
        _numbers(axes, top + tall / 2, row, step)
        if step < n - 1:
            _arrow(axes, LEFT + (row[step][0] + 0.5) * wide, top + tall, last=rank == n - 1)
    return Figure(sheet.figure, _alt(n, step, mask, rows))


def tokens_of(rank: int, n: int, mask: str) -> tuple[int, int]:
    """The two tokens of a rank, by their place in the sequence."""
    return (rank, 2 * n - 1 - rank) if mask == "causal, zig-zag" else (2 * rank, 2 * rank + 1)


def scores_of(query: int, n: int, slope: float) -> list[float]:
    """The scores of a query over all 2n keys: the same for every mask."""
    draw = random.Random(100 * n + query)
    return [draw.uniform(-1, 1) + slope * key for key in range(2 * n)]


def row_of(rank: int, n: int, mask: str, slope: float) -> Row:
    """How the running maximum m and the sum of exp(score - m) of the rank's last query go, block by block."""
    query = tokens_of(rank, n, mask)[-1]
    scores, row = scores_of(query, n, slope), []
    largest, total = -math.inf, 0.0
    for step in range(n):
        block = (rank - step) % n
        seen = [scores[key] for key in tokens_of(block, n, mask) if mask == "no mask" or key <= query]
        raised = max([largest, *seen])
        if seen:
            total = total * math.exp(largest - raised) + sum(math.exp(score - raised) for score in seen)
        largest = raised
        row.append((block, max(seen, default=-math.inf), largest, total))
    return row


def _heads(axes: Axes, n: int, wide: float) -> None:
    _text(axes, LEFT - 0.1, 0.16, "block of rank", ha="right", colour=SOFT)
    for block in range(n):
        _text(axes, LEFT + (block + 0.5) * wide, 0.16, f"{block}")
    left = LEFT + BLOCKS
    for x, words in ((0.62, "largest m"), (1.5, "sum"), (2.5, "sum rescaled by")):
        _text(axes, left + x, 0.16, words, colour=SOFT)


def _cell(
    axes: Axes, left: float, top: float, wide: float, tall: float, seen: tuple[int, float] | None, step: int
) -> None:
    """Dark is the block that is here, light one that was; an outline is one that is still to come."""
    here, was = seen is not None and seen[0] == step, seen is not None
    hidden = was and math.isinf(seen[1])
    fill = CONTEXT if here and not hidden else WORK["F"] if was and not hidden else PAPER
    look = {"edgecolor": INK if was else RULE, "linewidth": 2.0 if here else 0.7}
    if here and hidden:
        look |= {"edgecolor": CONTEXT}
    axes.add_patch(Rectangle((left + 0.03, top), wide - 0.06, tall, facecolor=fill, zorder=2, **look))
    if was:
        words = "hidden" if hidden and wide > 0.6 else "–" if hidden else f"{seen[1] + 0.0:.1f}".replace("-", "−")
        colour = PAPER if here and not hidden else SOFT if hidden else INK
        _text(
            axes, left + wide / 2, top + tall / 2, words, colour=colour, zorder=4, weight="bold" if here else "normal"
        )


def _numbers(axes: Axes, middle: float, row: Row, step: int) -> None:
    _, _, largest, total = row[step]
    before = row[step - 1][2] if step else -math.inf
    left = LEFT + BLOCKS
    _text(axes, left + 0.62, middle, "−∞" if math.isinf(largest) else f"{largest:.2f}".replace("-", "−"))
    _text(axes, left + 1.5, middle, f"{total:.3f}")
    scaled = "" if math.isinf(before) else "1" if before == largest else f"{math.exp(before - largest):.2g}"
    weight = "bold" if scaled not in ("", "1") else "normal"
    _text(axes, left + 2.5, middle, scaled or "nothing before", colour=INK if scaled else SOFT, weight=weight)


def _arrow(axes: Axes, x: float, bottom: float, last: bool) -> None:
    """The block goes to the next rank; that of the last one comes in at the top."""
    tall = GAP - 0.03
    style = {"arrowstyle": "-|>", "color": CONTEXT, "linewidth": 1.8, "mutation_scale": 10, "shrinkA": 0, "shrinkB": 0}
    for top in (bottom + 0.02, HEAD - GAP + 0.02) if last else (bottom + 0.02,):
        axes.annotate("", (x, top + tall), (x, top), arrowprops=style)


def _text(axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, **more: object) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=8.5, **more)


def _title(n: int, step: int, mask: str, rows: list[Row]) -> str:
    hidden = sum(math.isinf(row[step][1]) for row in rows)
    raised = sum(step > 0 and row[step][2] > row[step - 1][2] > -math.inf for row in rows)
    if step == 0:
        start = "The start: each rank attends to its own block"
    else:
        start = f"Step {step} of {n - 1}: each rank attends to the block that has come"
    if hidden:
        return f"{start}; {hidden} of {n} rows see nothing of it"
    if raised:
        return f"{start}; {raised} of {n} rows find a larger score, and rescale"
    return start + (", and every row has seen every block" if step == n - 1 else ", while it goes on to the next")


def _alt(n: int, step: int, mask: str, rows: list[Row]) -> str:
    words = []
    for rank, row in enumerate(rows):
        block, largest, raised, total = row[step]
        sees = "sees nothing of it" if math.isinf(largest) else f"its largest score is {largest:.1f}"
        so_far = "has seen nothing yet" if math.isinf(raised) else f"m is {raised:.2f}, the sum {total:.3f}"
        words.append(f"rank {rank} has the block of rank {block}, {sees}, {so_far}")
    return f"Ring attention of {n} ranks after {step} of {n - 1} transfers, {mask}: {'; '.join(words)}."
