"""What a rank keeps of a transformer layer for backward, by number of ranks, and what it costs to keep less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fivefold.cost import activation_bytes
from fivefold.plots.style import INK, PAPER, RC, SOFT, WORK, Figure, Sheet, axis_stripes, counted
from fivefold.runtime.traffic import size

WIDTH, TALL = 9.0, 2.65  # inches of the drawing
LEFT, ROOM, TOP, ROWS = 0.75, 6.9, 0.34, 1.95  # of the bars
TOKENS = ("whole", "split", "gathered again")
RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class Layer:
    """A transformer layer on a micro-batch: b sequences of s tokens, hidden size h, a heads."""

    b: int
    s: int
    h: int
    a: int


@matplotlib.rc_context(RC)
def activation_memory(
    t: int, layer: Layer, tokens: str = "whole", recompute: str = "none", degrees: Sequence[int] = (1, 2, 4, 8, 16)
) -> Figure:
    """Draw what one of t ranks keeps of `layer`, a bar for each of `degrees`; outlines are tensor parallelism alone.

    `tokens` outside the pairs of split layers are "whole" on every rank, "split", or split and "gathered again" in
    backward; `recompute` is "none", "selective" or "full". Under the bars stands the price: operations and bytes of a
    step, beside those of tensor parallelism alone. Raises ValueError for other words, and where t is not one of the
    degrees.
    """
    if tokens not in TOKENS or recompute not in RECOMPUTED:
        words = f"{', '.join(TOKENS)}; {', '.join(RECOMPUTED)}"
        raise ValueError(f"tokens {tokens!r} with recompute {recompute!r}: choose one of each of {words}")
    if t not in degrees:
        raise ValueError(f"{t} ranks are not among {tuple(degrees)}: add them to the degrees")
    kept = {n: kept_bytes(n, layer, tokens, recompute) for n in degrees}
    plain = {n: sum(kept_bytes(n, layer).values()) for n in degrees}
    sheet = Sheet(_title(t, tokens, recompute, kept, plain), WIDTH, TALL, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(TALL, 0))
    _bars(axes, t, kept, plain)
    _key(axes, kept[t])
    _text(axes, LEFT, TALL - 0.12, _price(t, layer, tokens, recompute), ha="left", colour=SOFT)
    return Figure(sheet.figure, _alt(t, tokens, recompute, kept, plain, _price(t, layer, tokens, recompute)))


def kept_bytes(t: int, layer: Layer, tokens: str = "whole", recompute: str = "none") -> dict[str, float]:
    """Bytes that a rank keeps, by where they are: `activation_bytes`, with what a program of this library does beside.

    Without a second gathering, the inputs of the two pairs, 4sbh of the 10sbh outside, are whole. With tokens split,
    full recomputation keeps the rank's tokens of the layer's input.
    """
    b, s, h, a = layer.b, layer.s, layer.h, layer.a
    split = tokens != "whole"
    sizes = {way: activation_bytes(b, s, h, a, t, split, way) for way in RECOMPUTED}
    if recompute == "full":
        return {"the layer's input": sizes["full"] / (t if split else 1)}
    inside = 24 * s * b * h / t
    outside = sizes["selective"] - inside
    if tokens == "split":
        outside += 4 * s * b * h * (1 - 1 / t)
    core = sizes["none"] - sizes["selective"]
    parts = {"norms, dropouts, inputs of pairs": outside, "inside the pairs": inside}
    return parts | ({"attention core": core} if recompute == "none" else {})


def more_computing(layer: Layer, recompute: str) -> float:
    """Operations of a layer's step that recomputation adds, as a share of those without it: matrix products only."""
    core, others = 4 * layer.s, 24 * layer.h  # of forward, in units of b·s·h
    return {"none": 0.0, "selective": core, "full": core + others}[recompute] / (3 * (core + others))


def more_sent(t: int, tokens: str, recompute: str) -> float:
    """Bytes of a layer's step, as a multiple of tensor parallelism's 8 passes round the ring."""
    if t == 1:
        return 1.0
    passes = 8 + (2 if tokens == "gathered again" else 0) + (4 if recompute == "full" else 0)
    return passes / 8


STYLES = {
    "norms, dropouts, inputs of pairs": axis_stripes("tp"),
    "inside the pairs": {"facecolor": WORK["F"], "edgecolor": PAPER, "linewidth": 0},
    "attention core": {"facecolor": WORK["W"], "edgecolor": PAPER, "linewidth": 0},
    "the layer's input": {"facecolor": WORK["B"], "edgecolor": PAPER, "linewidth": 0},
}


def _bars(axes: Axes, t: int, kept: dict[int, dict[str, float]], plain: dict[int, float]) -> None:
    """A row for each number of ranks; that of `t` in ink, the others muted."""
    scale, row = ROOM / max(*plain.values(), *(sum(parts.values()) for parts in kept.values())), ROWS / len(kept)
    _text(axes, LEFT - 0.08, TOP - 0.12, "ranks", ha="right", colour=SOFT)
    for place, (n, parts) in enumerate(kept.items()):
        middle, tall, left = TOP + (place + 0.5) * row, row * 0.62, LEFT
        weight = "bold" if n == t else "normal"
        _text(axes, LEFT - 0.08, middle, f"{n}", ha="right", weight=weight)
        for name, amount in parts.items():
            patch = Rectangle((left, middle - tall / 2), amount * scale, tall, **STYLES[name])
            patch.set_alpha(1 if n == t else 0.5)
            axes.add_patch(patch)
            left += amount * scale
        style = {"facecolor": "none", "edgecolor": INK if n == t else SOFT, "linewidth": 0.8, "linestyle": (0, (2, 2))}
        axes.add_patch(Rectangle((LEFT, middle - tall / 2), plain[n] * scale, tall, **style))
        end = max(left, LEFT + plain[n] * scale)
        _text(axes, end + 0.08, middle, size(sum(parts.values())), ha="left", weight=weight)


def _key(axes: Axes, parts: dict[str, float]) -> None:
    left = LEFT
    for name in [*parts, "tensor parallelism alone"]:
        style = STYLES.get(name, {"facecolor": "none", "edgecolor": INK, "linewidth": 0.8, "linestyle": (0, (2, 2))})
        axes.add_patch(Rectangle((left, 0.05), 0.16, 0.11, **style))
        _text(axes, left + 0.22, 0.105, name, ha="left")
        left += 0.5 + 0.0735 * len(name)


def _text(axes: Axes, x: float, y: float, text: str, ha: str, colour: str = INK, **more: object) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=8.5, **more)


def _title(t: int, tokens: str, recompute: str, kept: dict[int, dict[str, float]], plain: dict[int, float]) -> str:
    now = sum(kept[t].values())
    if tokens == "whole" and recompute == "none":
        if t == 1:
            return f"One rank keeps {size(now)} of a layer for backward"
        return f"{t} ranks, tensor parallelism alone: each keeps {now / plain[1]:.0%} of the layer, not 1/{t}"
    each = f"{t} ranks keep {size(now)} each" if t > 1 else f"One rank keeps {size(now)}"
    return f"{each}, {now / plain[t]:.0%} of what tensor parallelism alone keeps"


def _price(t: int, layer: Layer, tokens: str, recompute: str) -> str:
    """What is done to keep less, and what a step takes more."""
    more, sent = more_computing(layer, recompute), more_sent(t, tokens, recompute)
    what = {"whole": "tokens whole on every rank", "split": "tokens split", "gathered again": "tokens gathered again"}
    again = {"none": "", "selective": ", core computed again", "full": ", layer computed again"}
    computing = f"{more:.1%} more computing" if more else "no more computing"
    bytes_sent = f"{sent:g} times the bytes" if sent > 1 else "the same bytes"
    return f"{what[tokens].capitalize()}{again[recompute]}: {computing}, {bytes_sent} to send."


def _alt(
    t: int, tokens: str, recompute: str, kept: dict[int, dict[str, float]], plain: dict[int, float], price: str
) -> str:
    parts = "; ".join(f"{name} {size(amount)}" for name, amount in kept[t].items())
    rows = "; ".join(f"{counted(n, 'rank')} {size(sum(kept[n].values()))}, outlined {size(plain[n])}" for n in kept)
    return (
        f"Bars of what a rank keeps of one layer, by number of ranks, tokens {tokens}, recomputation {recompute}: "
        f"{rows}. With {counted(t, 'rank')}: {parts}. {price}"
    )
