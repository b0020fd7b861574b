"""How busy experts are: their load as training goes on, and what is dropped at each capacity factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from fivefold.plots.style import EXPERT, INK, PAPER, RC, RULE, SOFT, Figure, Sheet

SHADES = LinearSegmentedColormap.from_list("expert", [PAPER, EXPERT, "#5A3E00"])
LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


@matplotlib.rc_context(RC)
def expert_load(loads: Mapping[str, Sequence[Sequence[float]]], title: str = "") -> Figure:
    """The share of all choices that fell on each expert (rows) in each step (left to right), a panel for each name.

    `loads` maps a name to a list of steps, each with a number for every expert; numbers of a step are divided by their
    sum. Darker is busier. Beside each row stands the expert's share in the last step. Raises ValueError where a panel
    has no step, or a step no choice.
    """
    shares = {name: [_shares(step) for step in steps] for name, steps in loads.items()}
    if not shares or not all(shares.values()):
        raise ValueError("there is no step to draw: give each name at least one")
    most = max(max(step) for steps in shares.values() for step in steps)
    experts = max(len(steps[0]) for steps in shares.values())
    row, gap = min(0.24, 2.4 / experts), 0.46
    sheet = Sheet(title or _title(shares), 9.0, len(shares) * (experts * row + gap), left=0, right=0, bottom=0.42)
    tall = len(shares) * (experts * row + gap)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, 9.0), ylim=(tall, 0))
    for place, (name, steps) in enumerate(shares.items()):
        _panel(axes, place * (experts * row + gap) + 0.3, row, name, steps, most)
    _key(axes, tall + 0.2, most, max(map(len, shares.values())))
    return Figure(sheet.figure, _alt(shares))


@matplotlib.rc_context(RC)
def dropped_choices(factors: Sequence[float], shares: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """The share of choices that find no room (up) against the capacity factor (right), a line for each name.

    Raises ValueError where a line has another number of points than there are factors.
    """
    for name, line in shares.items():
        if len(line) != len(factors):
            raise ValueError(f"{name} has {len(line)} points for {len(factors)} factors: give one for each")
    sheet = Sheet(title or _drop_title(factors, shares), 9.0, 2.6, left=0.75, right=2.3, bottom=0.55)
    axes = sheet.axes
    top = max(max(max(line) for line in shares.values()) * 100, 1)
    axes.set(xlim=(min(factors), max(factors)), ylim=(0, top * 1.06))
    axes.set(xlabel="capacity factor", ylabel="choices dropped, %")
    axes.grid(color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    ends = _apart([line[-1] * 100 for line in shares.values()], 0.075 * top)
    for (name, line), style, end in zip(shares.items(), LINES * len(shares), ends, strict=False):
        colour = EXPERT if style == "-" else INK
        axes.plot(factors, [100 * share for share in line], color=colour, linewidth=2, linestyle=style, clip_on=False)
        where = {"textcoords": "offset points", "va": "center", "ha": "left", "color": INK, "fontsize": 8.5}
        axes.annotate(f"{name}, {line[-1]:.0%} at {factors[-1]:g}", (factors[-1], end), (8, 0), **where)
    return Figure(sheet.figure, _drop_alt(factors, shares))


def _shares(step: Sequence[float]) -> list[float]:
    total = sum(step)
    if not total:
        raise ValueError("in one step no expert was chosen: there is no share to draw")
    return [float(number) / float(total) for number in step]


def _panel(axes: Axes, top: float, row: float, name: str, steps: list[list[float]], most: float) -> None:
    left, right, experts = 1.0, 7.6, len(steps[0])
    wide = (right - left) / len(steps)
    _text(axes, 0.12, top - 0.14, name, ha="left", weight="bold")
    _text(axes, right + 0.1, top - 0.14, "last step", ha="left", colour=SOFT)
    for expert in range(experts):
        if experts <= 16 or expert % 8 == 0:
            _text(axes, left - 0.08, top + (expert + 0.5) * row, f"expert {expert}", ha="right", colour=SOFT)
            _text(axes, right + 0.1, top + (expert + 0.5) * row, f"{steps[-1][expert]:.1%}", ha="left")
        for place, step in enumerate(steps):
            where = (left + place * wide, top + expert * row)
            colour = SHADES(step[expert] / most)
            axes.add_patch(Rectangle(where, wide, row * 0.94, facecolor=colour, edgecolor=colour, linewidth=0.3))
    frame = (left, top), right - left, experts * row
    axes.add_patch(Rectangle(*frame, facecolor="none", edgecolor=SOFT, linewidth=0.7))


def _key(axes: Axes, middle: float, most: float, steps: int) -> None:
    _text(axes, 1.0, middle, f"{steps} steps of training →", ha="left", colour=SOFT, clip_on=False)
    _text(axes, 5.0, middle, "share of all choices: 0%", ha="right", colour=SOFT, clip_on=False)
    for place in range(20):
        where = (5.1 + place * 0.08, middle - 0.07)
        axes.add_patch(Rectangle(where, 0.082, 0.14, facecolor=SHADES(place / 19), linewidth=0, clip_on=False))
    axes.add_patch(Rectangle((5.1, middle - 0.07), 1.6, 0.14, facecolor="none", edgecolor=SOFT, linewidth=0.5,
                             clip_on=False))  # fmt: skip
    _text(axes, 6.8, middle, f"{most:.0%}", ha="left", colour=SOFT, clip_on=False)


def _text(axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, **more: object) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=8.5, **more)


def _apart(heights: list[float], least: float) -> list[float]:
    """Heights moved up where they would stand on one another, in the same order."""
    placed: dict[int, float] = {}
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        placed[index] = max(heights[index], max(placed.values(), default=-least) + least)
    return [placed[index] for index in range(len(heights))]


def _title(shares: dict[str, list[list[float]]]) -> str:
    words = [f"{max(steps[-1]):.0%} {name}" for name, steps in shares.items()]
    return f"The busiest expert's share in the last step: {', '.join(words)}"


def _alt(shares: dict[str, list[list[float]]]) -> str:
    words = []
    for name, steps in shares.items():
        own = ", ".join(f"expert {expert} {share:.0%}" for expert, share in enumerate(steps[-1][:16]))
        words.append(f"{name}, after {len(steps)} steps: {own}")
    return f"Heat map of the share of choices by expert and step. {'; '.join(words)}."


def _drop_title(factors: Sequence[float], shares: Mapping[str, Sequence[float]]) -> str:
    nearest = min(range(len(factors)), key=lambda i: abs(factors[i] - 1))
    words = [f"{line[nearest]:.0%} {name}" for name, line in shares.items()]
    return f"Dropped at a capacity factor of {factors[nearest]:g}: {', '.join(words)}"


def _drop_alt(factors: Sequence[float], shares: Mapping[str, Sequence[float]]) -> str:
    words = [
        f"{name}: {', '.join(f'{share:.0%} at {factor:g}' for factor, share in zip(factors, line, strict=True))}"
        for name, line in shares.items()
    ]
    return f"Lines of the share of choices that are dropped, by capacity factor. {'; '.join(words)}."
