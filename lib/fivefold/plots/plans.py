"""Plans side by side: where the time of a step goes, and what a rank keeps. And a planner against what was reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from fivefold.plan import Choice, Seconds
from fivefold.plots.style import DATA, INK, PAPER, PIPELINE, RC, RULE, SOFT, WORK, Figure, Sheet, axis_stripes, duration
from fivefold.runtime.traffic import size

WIDTH, ROW, BAR = 9.0, 0.33, 0.2  # inches: of the drawing, of a row, of a bar in it
NAMES, TIME, MEMORY, ROOM = 0.12, 3.5, 6.95, 1.2  # where columns begin, and how wide the bars of memory are
COMPUTE = {"facecolor": WORK["F"], "edgecolor": PAPER, "linewidth": 0}
WAITING = {"facecolor": PAPER, "edgecolor": SOFT, "linewidth": 0.8}
STYLES = {"compute": COMPUTE, "bubble": WAITING} | {name: axis_stripes(name) for name in ("tp", "cp", "ep", "pp", "dp")}


@matplotlib.rc_context(RC)
def plans(choices: Sequence[Choice], title: str = "", most: int = 8) -> Figure:
    """Draw up to `most` plans, a row each: the seconds of a step by part, and the memory beside the GPU's.

    The title is a sentence about the first where none is given. Raises ValueError where there is no plan.
    """
    if not choices:
        raise ValueError("nothing fits: take more GPUs, another batch or a shorter context")
    shown = list(choices[:most])
    tall = ROW * len(shown) + 0.4
    first = shown[0]
    sheet = Sheet(title or _title(first), WIDTH, tall, left=0, right=0, bottom=0.34)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(tall, 0))
    for x, word in ((NAMES, "plan"), (TIME, "a step"), (MEMORY, f"memory, of {size(first.memory.limit)}")):
        _text(axes, x, 0.14, word, colour=SOFT)
    scale = (MEMORY - TIME - 0.75) / max(choice.seconds.total for choice in shown)
    fastest = min(choice.seconds.total for choice in shown)
    for number, choice in enumerate(shown):
        _row(axes, 0.42 + ROW * number, choice, scale, "bold" if choice.seconds.total == fastest else "normal")
    used = [name for name in Seconds._fields if any(getattr(choice.seconds, name) for choice in shown)]
    words = {"compute": "computing", "bubble": "bubble"}
    sheet.key([Patch(label=words.get(name, name.upper()), **STYLES[name]) for name in used])
    return Figure(sheet.figure, _alt(shown))


def _row(axes: Axes, middle: float, choice: Choice, scale: float, weight: str) -> None:
    _text(axes, NAMES, middle, str(choice.plan).replace(" recomputation", ""), weight=weight)
    left = TIME
    for name, seconds in choice.seconds._asdict().items():
        axes.add_patch(Rectangle((left, middle - BAR / 2), seconds * scale, BAR, **STYLES[name]))
        left += seconds * scale
    _text(axes, left + 0.06, middle, duration(choice.seconds.total), weight=weight)
    share = min(1.0, choice.memory.total / choice.memory.limit)
    axes.add_patch(Rectangle((MEMORY, middle - BAR / 2), ROOM, BAR, facecolor=PAPER, edgecolor=SOFT, linewidth=0.8))
    axes.add_patch(Rectangle((MEMORY, middle - BAR / 2), ROOM * share, BAR, facecolor=WORK["W"], linewidth=0))
    _text(axes, MEMORY + ROOM + 0.06, middle, size(choice.memory.total))


def _title(choice: Choice) -> str:
    seconds = choice.seconds
    parts = {name: part for name, part in seconds._asdict().items() if name != "compute"}
    name, part = max(parts.items(), key=lambda item: item[1])
    if not part:
        return f"{choice.plan}: {duration(seconds.total)} a step, all of it computing"
    if part < 0.005 * seconds.total:
        return f"{choice.plan.layout} is fastest: {duration(seconds.total)} a step, nearly all of it computing"
    what = "the bubble" if name == "bubble" else f"what {name.upper()} exposes"
    return (
        f"{choice.plan.layout} is fastest: {duration(seconds.total)} a step, {seconds.compute / seconds.total:.0%} "
        f"computing; {what} is next with {part / seconds.total:.0%}"
    )


def _alt(shown: Sequence[Choice]) -> str:
    rows = []
    for plan, memory, seconds in shown:
        parts = ", ".join(f"{name} {part / seconds.total:.0%}" for name, part in seconds._asdict().items() if part)
        rows.append(f"{plan}: {duration(seconds.total)} ({parts}), {size(memory.total)} of {size(memory.limit)}")
    return f"Bars of {len(shown)} plans by part of the step, and of their memory. " + "; ".join(rows)


@matplotlib.rc_context(RC)
def bytes_moved(moved: Callable[[int], tuple[float, float]], tokens: Sequence[int], marks: dict[str, int]) -> Figure:
    """Draw the bytes that a rank sends in a step, in a pipeline and with ZeRO-3, by tokens a step.

    `moved(tokens)` gives the two; `marks` are batches to point at, by name.
    """
    pairs = [moved(count) for count in tokens]
    crossing = _crossing(moved, min(tokens), max(tokens))
    where = "nowhere here" if crossing is None else f"at {crossing / 1e6:.1f} million tokens a step"
    title = f"ZeRO-3 moves the same whatever the batch; the pipeline catches up {where}"
    sheet = Sheet(title, WIDTH, 2.7, left=0.9, right=1.6, bottom=0.5)
    axes = sheet.axes
    axes.loglog(tokens, [pair[0] for pair in pairs], color=PIPELINE, linewidth=2)
    axes.loglog(tokens, [pair[1] for pair in pairs], color=DATA, linewidth=2, linestyle=(0, (5, 2)))
    for number, (name, colour) in enumerate((("pipeline", PIPELINE), ("ZeRO-3", DATA))):
        axes.annotate(
            name, (tokens[-1], pairs[-1][number]), (6, 0), textcoords="offset points", va="center", color=colour,
            fontweight="bold",
        )  # fmt: skip
    for name, count in marks.items():
        axes.axvline(count, color=RULE, linewidth=1)
        axes.annotate(name, (count, axes.get_ylim()[0]), (4, 4), textcoords="offset points", color=SOFT, fontsize=8)
    if crossing is not None:
        axes.plot([crossing], [moved(round(crossing))[1]], "o", color=INK, markersize=5)
    axes.set_xlabel("tokens a step")
    axes.set_ylabel("bytes from each rank")
    first, last = pairs[0], pairs[-1]
    alt = (
        f"Bytes a rank sends over tokens a step. Pipeline: {size(first[0])} at {tokens[0]:,} tokens, {size(last[0])} "
        f"at {tokens[-1]:,}. ZeRO-3: {size(first[1])} and {size(last[1])}. They cross {where}."
    )
    return Figure(sheet.figure, alt)


def _crossing(moved: Callable[[int], tuple[float, float]], low: float, high: float) -> float | None:
    """By halving: where the pipeline begins to move more."""

    def ahead(tokens: float) -> bool:
        pipeline, zero3 = moved(round(tokens))
        return pipeline < zero3

    if ahead(low) == ahead(high):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ahead(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Point:
    """A run: what was reported and what was predicted, in the same unit; `group` gives its mark."""

    name: str
    reported: float
    predicted: float
    group: str


MARKERS = "osD^v"


@matplotlib.rc_context(RC)
def predictions(points: Sequence[Point], unit: str = "TFLOPS a GPU") -> Figure:
    """Draw predicted over reported, with the band of 10% either way, a mark for each group."""
    errors = sorted(abs(point.predicted / point.reported - 1) for point in points)
    half = len(errors) // 2
    median = errors[half] if len(errors) % 2 else (errors[half - 1] + errors[half]) / 2
    title = f"Half of {len(points)} published runs are predicted within {median:.1%}, all within {errors[-1]:.1%}"
    sheet = Sheet(title, 5.6, 4.2, left=0.75, right=0.3, bottom=0.5)
    axes = sheet.axes
    ends = [0.8 * min(point.reported for point in points), 1.2 * max(point.reported for point in points)]
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=RULE, alpha=0.7, linewidth=0
    )
    axes.plot(ends, ends, color=SOFT, linewidth=0.8)
    groups = list(dict.fromkeys(point.group for point in points))
    colours = (INK, DATA, PIPELINE, "#E69F00", "#009E73")
    for marker, colour, group in zip(MARKERS, colours, groups, strict=False):
        own = [point for point in points if point.group == group]
        axes.plot(
            [point.reported for point in own], [point.predicted for point in own], marker, color=colour, label=group,
            markersize=5, alpha=0.85,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"reported, {unit}", ylabel=f"predicted, {unit}")
    ticks = [tick for tick in (50, 100, 150, 200, 300, 400) if ends[0] < tick < ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
        axis.set_major_formatter(matplotlib.ticker.FixedFormatter([str(tick) for tick in ticks]))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.text(ends[1] * 0.97, ends[1] * 0.76, "±10%", ha="right", color=SOFT, fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    worst = max(points, key=lambda point: abs(point.predicted / point.reported - 1))
    alt = (
        f"Predicted over reported {unit} of {len(points)} runs, close to the diagonal. The furthest is {worst.name}: "
        f"{worst.reported:.0f} reported, {worst.predicted:.0f} predicted. Groups: {', '.join(groups)}."
    )
    return Figure(sheet.figure, alt)


def _text(axes: Axes, x: float, y: float, text: str, colour: str = INK, **more: object) -> None:
    axes.text(x, y, text, ha="left", va="center", color=colour, fontsize=8, **more)
