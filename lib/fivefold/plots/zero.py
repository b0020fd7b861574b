"""What a rank keeps of the states of training with ZeRO: by stage, by number of ranks, and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fivefold.cost import zero_bytes, zero_traffic
from fivefold.plots.style import INK, PAPER, RC, SOFT, WORK, Figure, Sheet, axis_stripes, counted

WIDTH, TALL = 9.0, 2.75  # inches of the drawing
MIDDLE, ROOM, TOP, ROWS = 4.75, 2.85, 0.62, 1.75
STAGES = {0: "no ZeRO", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
PARTS = ("parameters", "gradients", "optimizer")
STYLES = {
    "parameters": {"facecolor": WORK["B"], "edgecolor": PAPER, "linewidth": 0},
    "gradients": {"facecolor": WORK["W"], "edgecolor": PAPER, "linewidth": 0},
    "optimizer": axis_stripes("dp"),
}


def kept_states(parameters: float, ranks: int, stage: int, optimizer_bytes: float = 12) -> dict[str, float]:
    """Bytes on a rank of parameters, gradients and optimizer states, which together are `cost.zero_bytes`."""
    shares = {"parameters": (2, 3), "gradients": (2, 2), "optimizer": (optimizer_bytes, 1)}
    return {name: each * parameters / (ranks if stage >= first else 1) for name, (each, first) in shares.items()}


@matplotlib.rc_context(RC)
def zero_memory(
    parameters: float, ranks: int, stage: int = 2, optimizer_bytes: float = 12, gpu_bytes: float = 80e9,
    degrees: Sequence[int] = (1, 4, 16, 64, 256, 1024),
) -> Figure:  # fmt: skip
    """Draw what a rank keeps of the states of `parameters` parameters (Ψ): parameters, gradients, optimizer states.

    On the left the four stages on `ranks` ranks, on the right `stage` on each of `degrees` ranks; a line stands where
    a GPU of `gpu_bytes` is full. Under them what a rank sends in a step. Raises ValueError for a stage that there is
    not, and where ranks is not one of the degrees (ZeRO, Rajbhandari et al. 2020, figure 1 and table 1).
    """
    if stage not in STAGES:
        raise ValueError(f"ZeRO has no stage {stage}: choose 0, 1, 2 or 3")
    if ranks not in degrees:
        raise ValueError(f"{ranks} ranks are not among {tuple(degrees)}: add them to the degrees")
    by_stage = {s: kept_states(parameters, ranks, s, optimizer_bytes) for s in STAGES}
    by_ranks = {n: kept_states(parameters, n, stage, optimizer_bytes) for n in degrees}
    totals = {s: zero_bytes(parameters, ranks, s, optimizer_bytes) for s in STAGES}
    sheet = Sheet(_title(parameters, ranks, stage, totals, gpu_bytes), WIDTH, TALL, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(TALL, 0))
    most = max(sum(parts.values()) for parts in [*by_stage.values(), *by_ranks.values()])
    _key(axes)
    names = {s: (name, s == stage) for s, name in STAGES.items()}
    _rows(axes, 0.85, f"{counted(ranks, 'rank')}, by stage", by_stage, names, most, gpu_bytes)
    counts = {n: (f"{n:,}", n == ranks) for n in degrees}
    _rows(axes, MIDDLE + 0.6, f"{STAGES[stage]}, by number of ranks", by_ranks, counts, most, gpu_bytes)
    price = _price(parameters, ranks, stage)
    _text(axes, 0.12, TALL - 0.12, price, colour=SOFT)
    return Figure(sheet.figure, _alt(parameters, ranks, stage, by_stage, by_ranks, gpu_bytes, price))


@matplotlib.rc_context(RC)
def kept_by_stage(measured: Mapping[str, Mapping[str, float]], formula: Mapping[str, float], title: str) -> Figure:
    """Draw measured bytes of "parameters", "gradients" and "optimizer", a bar for each name, beside a formula's total.

    The formula's is the outline. Raises ValueError where the two have other names.
    """
    if measured.keys() != formula.keys():
        raise ValueError(f"measured are {', '.join(measured)}, the formula is for {', '.join(formula)}: give the same")
    rows, tall = len(measured), 0.36 * len(measured)
    sheet = Sheet(title, WIDTH, tall + 0.45, left=0, right=0, bottom=0.1)
    axes, left, room = sheet.axes, 1.15, 6.0
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(tall + 0.45, 0))
    _key(axes, outline="formula")
    scale = room / max(*(sum(parts.values()) for parts in measured.values()), *formula.values())
    for place, (name, parts) in enumerate(measured.items()):
        middle = 0.4 + (place + 0.5) * tall / rows
        _text(axes, left - 0.1, middle, name, ha="right")
        _bar(axes, left, middle, 0.22, parts, scale)
        _outline(axes, left, middle, 0.22, formula[name] * scale, INK)
        end = left + max(sum(parts.values()), formula[name]) * scale
        words = f"{size(sum(parts.values()))}, formula {size(formula[name])}"
        _text(axes, end + 0.08, middle, words)
    words = "; ".join(
        f"{name} {', '.join(f'{part} {size(amount)}' for part, amount in parts.items())}, formula {size(formula[name])}"
        for name, parts in measured.items()
    )
    return Figure(sheet.figure, f"Bars of what a rank holds at its peak: {words}.")


def size(amount: float) -> str:
    """Bytes with three digits, as in the paper's table: "31.4 GB"."""
    for unit, scale, least in (("TB", 1e12, 1e12), ("GB", 1e9, 1e8), ("MB", 1e6, 1e6)):
        if amount >= least:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount / 1e3:.3g} kB"


def _rows(
    axes: Axes, left: float, heading: str, rows: Mapping, names: Mapping[int, tuple[str, bool]], most: float, gpu: float
) -> None:
    """Bars on one scale; the chosen one in full colour; a dotted line where the GPU is full."""
    scale, row = ROOM / most, ROWS / len(rows)
    _text(axes, left, TOP - 0.17, heading, colour=SOFT)
    for place, (key, parts) in enumerate(rows.items()):
        name, chosen = names[key]
        middle, weight = TOP + (place + 0.5) * row, "bold" if chosen else "normal"
        _text(axes, left - 0.08, middle, name, ha="right", weight=weight)
        _bar(axes, left, middle, row * 0.6, parts, scale, 1 if chosen else 0.5)
        total = sum(parts.values())
        _text(axes, left + total * scale + 0.06, middle, size(total), weight=weight)
    if gpu < most:
        axes.plot([left + gpu * scale] * 2, [TOP - 0.05, TOP + ROWS], color=INK, linewidth=0.9, linestyle=(0, (1, 2)))


def _bar(axes: Axes, left: float, middle: float, tall: float, parts: Mapping, scale: float, alpha: float = 1) -> None:
    for name in PARTS:
        wide = parts[name] * scale
        patch = Rectangle((left, middle - tall / 2), wide, tall, **STYLES[name])
        patch.set_alpha(alpha)
        axes.add_patch(patch)
        left += wide


def _outline(axes: Axes, left: float, middle: float, tall: float, wide: float, colour: str) -> None:
    style = {"facecolor": "none", "edgecolor": colour, "linewidth": 1.0, "linestyle": (0, (2, 2))}
    axes.add_patch(Rectangle((left, middle - tall * 0.7), wide, tall * 1.4, **style))


def _key(axes: Axes, outline: str = "") -> None:
    left = 0.85
    for name in PARTS:
        axes.add_patch(Rectangle((left, 0.06), 0.18, 0.12, **STYLES[name]))
        _text(axes, left + 0.24, 0.12, name)
        left += 0.55 + 0.085 * len(name)
    if outline:
        _outline(axes, left, 0.12, 0.09, 0.18, INK)
        _text(axes, left + 0.24, 0.12, outline)
    else:
        axes.plot([left + 0.09] * 2, [0.04, 0.2], color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
        _text(axes, left + 0.2, 0.12, "a GPU's memory")


def _text(axes: Axes, x: float, y: float, text: str, ha: str = "left", colour: str = INK, **more: object) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=8.5, **more)


def _billions(parameters: float) -> str:
    return f"{parameters / 1e12:g}T" if parameters >= 1e12 else f"{parameters / 1e9:g}B"


def _title(parameters: float, ranks: int, stage: int, totals: Mapping[int, float], gpu: float) -> str:
    now, fits = totals[stage], "fits" if totals[stage] <= gpu else "does not fit"
    saved = f" instead of {size(totals[0])}" if stage and ranks > 1 else ""
    each = "it keeps" if ranks == 1 else "each keeps"
    over = counted(ranks, "rank")
    return f"A {_billions(parameters)} model, {STAGES[stage]}, {over}: {each} {size(now)}{saved}, which {fits}"


def _price(parameters: float, ranks: int, stage: int) -> str:
    sent = 2 * zero_traffic(parameters, ranks, stage)
    passes = "3Ψ" if stage == 3 else "2Ψ"
    if ranks == 1:
        return "One rank sends nothing. Activations are not counted."
    return f"Each rank sends {size(sent)} a step, {passes}(n−1)/n numbers of 2 bytes. Activations are not counted."


def _alt(
    parameters: float, ranks: int, stage: int, by_stage: Mapping, by_ranks: Mapping, gpu: float, price: str
) -> str:
    stages = "; ".join(f"{STAGES[s]} {size(sum(parts.values()))}" for s, parts in by_stage.items())
    counts = "; ".join(f"{n:,} {size(sum(parts.values()))}" for n, parts in by_ranks.items())
    parts = ", ".join(f"{name} {size(amount)}" for name, amount in by_stage[stage].items())
    over = counted(ranks, "rank")
    return (
        f"Bars of what a rank keeps of a {_billions(parameters)} model's states. On {over}: {stages}. "
        f"{STAGES[stage].capitalize()} by number of ranks: {counts}. Parts: {parts}. A GPU has {size(gpu)}. {price}"
    )
