"""The timeline: a row for each rank, time to the right, what is empty is idle."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fivefold.plots.style import (
    INK,
    PAPER,
    RC,
    RULE,
    SOFT,
    WORK,
    WORK_NAMES,
    Figure,
    Sheet,
    axis_colour,
    axis_stripes,
    duration,
    joined,
    key_lines,
    round_length,
)
from fivefold.runtime.timeline import Span, Timeline

MOST_ROWS = 64


@matplotlib.rc_context(RC)
def timeline(
    timeline: Timeline,
    title: str = "",
    ranks: Sequence[int] | None = None,
    width: float = 9.0,
    until: float | None = None,
) -> Figure:
    """Draw a timeline, of a replay or of a simulated schedule.

    A row's upper part is what the rank does: computation with its micro-batch number, and, striped in the colour of the
    axis, the time in which it stands still for a transfer. The thin strip below it shows transfers, hidden ones too.
    `ranks` chooses rows (all, up to 64, where None). `until` is where the axis of time ends, in the timeline's unit, so
    that two timelines can have one scale; earlier than the makespan it changes nothing. Raises ValueError where there
    is nothing to draw.
    """
    shown = list(ranks if ranks is not None else range(min(timeline.num_ranks, MOST_ROWS)))
    spans = [span for span in timeline.spans if span.rank in set(shown)]
    if not spans or timeline.makespan <= 0:
        raise ValueError("nothing in this timeline takes any time: measure the run, or give unit costs")
    row = min(0.42, 11.0 / len(shown))
    key = key_of(spans)
    bottom = 0.22 + 0.2 * key_lines(key, width)
    sheet = Sheet(title or _title(timeline), width, row * len(shown) + 0.3, left=0.75, right=0.95, bottom=bottom)
    whole = max(timeline.makespan, until or 0.0)
    points_a_second = sheet.points / whole
    _rows(sheet.axes, timeline, shown, whole)
    has_links = any(span.lane == "link" for span in spans)
    for place, rank in enumerate(shown):
        bar = (0.06, 0.64 if has_links else 0.82)
        draw_row(sheet.axes, place, [s for s in spans if s.rank == rank], bar, points_a_second, row * 72)
    scale_bar(sheet.axes, timeline, len(shown), whole)
    sheet.key(key)
    return Figure(sheet.figure, _alt(timeline, shown))


def timeline_of_schedule(simulation: object) -> Timeline:
    """The timeline of a simulated pipeline schedule, `fivefold.pipeline.simulate`'s result, in steps."""
    spans = []
    for rank, events in enumerate(simulation.events):
        stages = sorted({step.stage for event in events for step in event.action.steps})
        for event in events:
            steps, begin = event.action.steps, event.start
            if not steps and event.end > event.start:
                spans.append(Span(rank, event.start, event.end, "comm", str(event.action), "pp"))
            for step in steps:  # two steps that overlap are drawn side by side
                end = begin + (event.end - event.start) / len(steps)
                chunk = stages.index(step.stage)
                spans.append(Span(rank, begin, end, step.letter, str(step.microbatch), chunk=chunk, detail=str(step)))
                begin = end
    return Timeline(spans, len(simulation.events), simulation.makespan, unit="")


def _rows(axes: Axes, timeline: Timeline, shown: list[int], whole: float) -> None:
    axes.set_xlim(0, whole)
    axes.set_ylim(len(shown) + 0.35, -0.15)
    axes.axis("off")
    every = max(1, round(0.13 * len(shown) / 4.2)) if len(shown) > 32 else 1
    for place, rank in enumerate(shown):
        axes.plot([0, timeline.makespan], [place + 0.93] * 2, color=RULE, linewidth=0.6, zorder=0)
        if place % every == 0:
            share = timeline.busy(rank) / timeline.makespan
            style = {"va": "center", "fontsize": 8.5 if len(shown) <= 24 else 6.5}
            axes.annotate(f"rank {rank}", (0, place + 0.45), (-6, 0), textcoords="offset points", ha="right", **style)
            where = (whole, place + 0.45), (6, 0)
            axes.annotate(f"{share:.0%} busy", *where, textcoords="offset points", ha="left", color=SOFT, **style)


def draw_row(axes: Axes, place: int, spans: list[Span], bar: tuple[float, float], scale: float, height: float) -> None:
    """What a rank does: computation, and standing still, in `bar`, the top and the height of it in the row; below it,
    transfers. `scale` is points a second, `height` that of the row in points."""
    top, tall = place + bar[0], bar[1]
    groups: dict[tuple, list[Span]] = {}
    for span in spans:
        groups.setdefault((span.lane, span.kind, span.axis if span.kind == "comm" else ""), []).append(span)
    for (lane, kind, axis), group in groups.items():
        bars = [(span.begin, span.seconds) for span in group]
        gaps = 0.5 if min(width for _, width in bars) * scale > 3 else 0.0
        if lane == "link":
            axes.broken_barh(bars, (top + tall + 0.03, 0.15), color=axis_colour(axis), linewidth=0)
        elif kind == "comm":
            axes.broken_barh(bars, (top, tall), **axis_stripes(axis))
        else:
            edge = (SOFT, 0.4) if kind == "compute" else (PAPER, gaps)  # the lightest tone needs an outline
            axes.broken_barh(bars, (top, tall), facecolor=WORK[kind], edgecolor=edge[0], linewidth=edge[1])
    size = min(8.0, height * tall * 0.62)
    for span in spans:
        if span.lane == "rank" and span.kind != "comm" and size >= 4:
            _write(axes, span, top, tall, size, scale)


def _write(axes: Axes, span: Span, top: float, tall: float, size: float, scale: float) -> None:
    """The micro-batch number, where it fits; a bar under it for every chunk after the rank's first."""
    colour = PAPER if span.kind in ("B", "I") else INK
    text = span.label.split(".")[0]
    if text and span.seconds * scale >= size * 0.66 * len(text) + 1.5:
        middle = (span.begin + span.end) / 2
        axes.text(middle, top + tall * 0.5, text, ha="center", va="center_baseline", fontsize=size, color=colour)
    chunk = span.chunk or int(span.label.partition(".")[2] or 0)
    if chunk and span.seconds * scale >= 4:
        inset = span.seconds * 0.22
        for line in range(chunk):
            height = top + tall * (0.88 - 0.12 * line)
            axes.plot([span.begin + inset, span.end - inset], [height] * 2, color=colour, linewidth=1.2)


def scale_bar(axes: Axes, timeline: Timeline, rows: int, whole: float | None = None) -> None:
    """A length of time, below the rows; `whole` is where the axis ends, the makespan where None."""
    end, height = whole or timeline.makespan, rows + 0.2
    length = round_length(end / 5)
    axes.plot([end - length, end], [height] * 2, color=INK, linewidth=1.6, solid_capstyle="butt", clip_on=False)
    text = duration(length, timeline.unit)
    where = (end - length, height), (-5, 0)
    axes.annotate(text, *where, textcoords="offset points", ha="right", va="center", fontsize=8.5)


def key_of(spans: list[Span]) -> list[Patch]:
    """What stands for what, of these spans; not what takes too little time to be seen."""
    seen = max((span.end for span in spans), default=0.0) * 1e-3
    spans = [span for span in spans if span.end - span.begin > seen or span.kind != "comm"]
    kinds = {span.kind for span in spans if span.kind != "comm"}
    handles = [Patch(facecolor=WORK[kind], label=WORK_NAMES[kind]) for kind in WORK if kind in kinds]
    for handle in handles:
        if handle.get_label() == WORK_NAMES["compute"]:
            handle.set(edgecolor=SOFT, linewidth=0.4)
    lanes: dict[str, set[str]] = {}
    for span in spans:
        if span.kind == "comm":
            lanes.setdefault(span.axis, set()).add(span.lane)
    for axis, found in sorted(lanes.items()):
        name = f"{axis} " if axis else ""
        if "link" in found:
            handles.append(Patch(facecolor=axis_colour(axis), label=f"{name}transfer"))
        if "rank" in found:
            handles.append(Patch(label=f"stands still for {name or 'a '}transfer", **axis_stripes(axis)))
    if any(span.chunk or "." in span.label for span in spans):
        handles.append(Patch(facecolor="none", label="bar under the number: a later chunk"))
    return handles


def _title(timeline: Timeline) -> str:
    busy, exposed, idle = (timeline.share(what) for what in ("busy", "exposed", "idle"))
    parts = [f"Ranks compute for {busy:.0%} of {duration(timeline.makespan, timeline.unit)}"]
    if round(exposed, 2):
        parts.append(f"stand still for transfers for {exposed:.0%}")
    if round(idle, 2):
        parts.append(f"wait for each other for {idle:.0%}")
    return joined(parts)


def _alt(timeline: Timeline, shown: list[int]) -> str:
    whole = timeline.makespan
    ranks_by_words: dict[str, list[int]] = {}
    for rank in shown:
        words = (
            f"{timeline.busy(rank) / whole:.0%} computing, {timeline.exposed(rank) / whole:.0%} standing still for "
            f"transfers, {max(0.0, timeline.idle(rank)) / whole:.0%} idle"
        )
        ranks_by_words.setdefault(words, []).append(rank)
    parts = [f"{_ranks(ranks, shown)} {words}" for words, ranks in list(ranks_by_words.items())[:8]]
    return f"Timeline of {timeline.num_ranks} ranks over {duration(whole, timeline.unit)}: {'; '.join(parts)}."


def _ranks(ranks: list[int], shown: list[int]) -> str:
    if ranks == shown and len(shown) > 1:
        return "every rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {joined([str(rank) for rank in ranks])}"
