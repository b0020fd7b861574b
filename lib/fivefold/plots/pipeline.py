"""A pipeline schedule: who does what when, and under it what each rank keeps; a wrong one too, with what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from fivefold.pipeline import Durations, Event, Fault, Schedule, Simulation, find_faults, marginal_idle, simulate
from fivefold.plots.gantt import draw_row, key_of, scale_bar, timeline_of_schedule
from fivefold.plots.style import INK, PAPER, RC, RULE, SOFT, WORK, Figure, Sheet, counted, joined, key_lines
from fivefold.runtime.timeline import Timeline

WRONG = "#B3261E"
BAR, CURVE = (0.04, 0.6), (0.68, 0.98)  # of a row: top and height of the work, top and bottom of the memory curve
MOST_RANKS, MARGINAL_AT_MOST = 32, 20_000  # rows; actions in which one more iteration is looked for


@matplotlib.rc_context(RC)
def schedule(
    schedule: Schedule, durations: Durations | None = None, title: str = "", until: float | None = None
) -> Figure:
    """Draw a schedule as it would run: a row for each rank, and under it how many activations the rank keeps.

    With `until`, a time, what starts later is an outline. A schedule that breaks a rule is drawn as far as it goes, the
    rest of each list as outlines; the first broken rule is in the title and its action is crossed out. Durations are
    unit times where None. Raises ValueError where there is nothing to draw, and for more than 32 ranks.
    """
    ranks = schedule.num_ranks
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks} ranks are too many rows to read: draw {MOST_RANKS} or fewer")
    if not any(schedule.actions):
        raise ValueError(f"{schedule.name} has no actions: nothing to draw")
    fault = next(iter(find_faults(schedule)), None)
    run = simulate(schedule, durations)
    spans = timeline_of_schedule(run).spans
    ghosts = _ghosts(run, durations or Durations())
    whole = max([run.makespan, *(ghost.end for ghost in ghosts)])
    shown = Timeline([s for s in spans if until is None or s.begin < until], ranks, whole, unit="")
    later = [span for span in spans if span not in shown.spans]
    row = min(0.58, 8.0 / ranks)
    words = title or (f"Not valid: {fault}" if fault else _title(run))
    key = key_of(spans)
    if any(len(event.action.steps) > 1 for events in run.events for event in events):
        key.append(Patch(facecolor="none", edgecolor=INK, label="a pair, done as one piece"))
    bottom = 0.22 + 0.2 * key_lines(key, 9.0)
    sheet = Sheet(words, 9.0, row * ranks + 0.3, left=0.75, right=0.95, bottom=bottom)
    axes, scale = sheet.axes, sheet.points / (whole or 1)
    axes.axis("off")
    axes.set(xlim=(0, whole), ylim=(ranks + 0.35, -0.15))
    most = max(max(run.peak_memory()), 1)
    for rank in range(ranks):
        draw_row(axes, rank, [s for s in shown.spans if s.rank == rank], BAR, scale, row * 72)
        _outlines(axes, rank, [(s.begin, s.end, s.label) for s in later if s.rank == rank], scale, row * 72)
        _memory(axes, rank, run, most, run.makespan if until is None else min(until, run.makespan))
        _sides(axes, rank, run, whole, row * 72)
    for ghost in ghosts:
        _outlines(axes, ghost.rank, [(ghost.start, ghost.end, _word(ghost))], scale, row * 72, dashed=True)
    if fault:
        _cross_out(axes, fault, [*(event for events in run.events for event in events), *ghosts], run)
    if until is not None:
        axes.plot([until] * 2, [0, ranks], color=INK, linewidth=1.0, zorder=6)
    scale_bar(axes, Timeline([], ranks, whole, unit=""), ranks)
    if not fault:
        style = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": SOFT}
        axes.annotate(_metrics(run, durations), (0, ranks + 0.2), (0, 0), **style)
    _frame_pairs(axes, run, until)
    sheet.key(key)
    return Figure(sheet.figure, _alt(run, fault))


def schedule_of(
    make: Callable[..., Schedule], *sizes: int, durations: Durations | None = None, title: str = ""
) -> Figure | Line:
    """Draw the schedule `make(*sizes)`; where there is none, a line that says so: not written yet, or no schedule."""
    name = getattr(make, "__name__", "this function")
    call = f"{name}({', '.join(map(str, sizes))})"
    try:
        made = make(*sizes)
        if not isinstance(made, Schedule):
            return Line(f"{call} gives {type(made).__name__}, not a Schedule: there is nothing to draw.")
        return schedule(made, durations, title)
    except NotImplementedError:
        return Line(f"{name} is not written yet: there is nothing to draw.")
    except Exception as error:  # a learner's first try: what it raises is said, and the notebook goes on
        return Line(f"{call} stopped with {type(error).__name__}: {error}")


class Line:
    """A line in the place of a figure."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _frame_pairs(axes: Axes, run: Simulation, until: float | None) -> None:
    """A frame around each forward and backward that a rank does as one piece."""
    for event in (event for events in run.events for event in events if len(event.action.steps) > 1):
        if until is None or event.start < until:
            corner, size = (event.start, event.rank + BAR[0]), (event.end - event.start, BAR[1])
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=INK, linewidth=1.1, zorder=4))


def _ghosts(run: Simulation, durations: Durations) -> list[Event]:
    """Actions that were never reached, one after the other behind what their rank has done."""
    ghosts = []
    for rank, first in run.waiting.items():
        clock = run.events[rank][-1].end if run.events[rank] else 0.0
        for index, action in enumerate(run.schedule.actions[rank][first:], first):
            try:
                length = durations.of(action) or 0.5
            except (AttributeError, IndexError, KeyError):
                length = 1.0  # no action, or of a stage that there is not
            ghosts.append(Event(rank, index, action, clock, clock + length))
            clock += length
    return ghosts


def _word(event: Event) -> str:
    steps = getattr(event.action, "steps", ())
    return "&".join(f"{step.letter}{step.microbatch}" for step in steps) or "✉"


def _outlines(
    axes: Axes, rank: int, boxes: list[tuple[float, float, str]], scale: float, height: float, dashed: bool = False
) -> None:
    size = min(8.0, height * BAR[1] * 0.62)
    for begin, end, word in boxes:
        look = {"facecolor": "none", "edgecolor": SOFT if dashed else RULE, "linewidth": 0.7}
        axes.add_patch(Rectangle((begin, rank + BAR[0]), end - begin, BAR[1], linestyle=":" if dashed else "-", **look))
        if size >= 4 and (end - begin) * scale >= size * 0.66 * len(word) + 1.5:
            style = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": SOFT}
            axes.text((begin + end) / 2, rank + BAR[0] + BAR[1] / 2, word, **style)


def _memory(axes: Axes, rank: int, run: Simulation, most: float, last: float) -> None:
    top, bottom = rank + CURVE[0], rank + CURVE[1]
    curve = dict((time, amount) for time, amount in run.memory(rank) if time <= last)  # the last of those at one time
    x, y = [*curve, last], [*curve.values(), list(curve.values())[-1]]
    heights = [bottom - (bottom - top) * amount / most for amount in y]
    axes.fill_between(x, heights, bottom, step="post", color=WORK["F"], linewidth=0)
    axes.step(x, heights, where="post", color=WORK["B"], linewidth=0.9)
    axes.plot([0, axes.get_xlim()[1]], [bottom] * 2, color=RULE, linewidth=0.6, zorder=0)


def _sides(axes: Axes, rank: int, run: Simulation, whole: float, height: float) -> None:
    size = 8.5 if height > 24 else max(5.0, height / 3)
    style = {"textcoords": "offset points", "va": "center", "fontsize": size}
    axes.annotate(f"rank {rank}", (0, rank + 0.4), (-6, 0), ha="right", **style)
    share = run.busy[rank] / run.makespan if run.makespan else 0
    axes.annotate(f"{share:.0%} busy", (whole, rank + 0.32), (6, 0), ha="left", color=SOFT, **style)
    peak = f"keeps {run.peak_memory()[rank]:g}"
    axes.annotate(peak, (whole, rank + 0.84), (6, 0), ha="left", color=SOFT, **style)


def _cross_out(axes: Axes, fault: Fault, events: list[Event], run: Simulation) -> None:
    place = next((e for e in events if (e.rank, e.index) == (fault.rank, fault.index)), None)
    if place is None:  # an action that is missing
        ends = [event.end for event in events if event.rank == fault.rank]
        begin = max(ends, default=0.0)
        end, word = min(begin + 1, axes.get_xlim()[1]) if begin < axes.get_xlim()[1] else begin, "missing ✗"
        style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": WRONG, "fontweight": "bold"}
        side = {"ha": "left", "xytext": (3, 0)} if end > begin else {"ha": "right", "xytext": (-3, 0)}
        box = {"facecolor": PAPER, "edgecolor": WRONG, "boxstyle": "round,pad=0.2", "linewidth": 1.2}
        axes.annotate(word, (begin, fault.rank + 0.38), zorder=8, bbox=box, **side, **style)
        return
    begin, end, top, bottom = place.start, place.end, fault.rank + BAR[0], fault.rank + BAR[0] + BAR[1]
    box = Rectangle((begin, top), end - begin, BAR[1], facecolor="none", edgecolor=WRONG, linewidth=2.4, zorder=7)
    axes.add_patch(box)
    for left, right in ((top, bottom), (bottom, top)):
        axes.plot([begin, end], [left, right], color=WRONG, linewidth=1.4, zorder=7)


def _metrics(run: Simulation, durations: Durations | None) -> str:
    """Idle time by the three metrics, the mean over ranks."""
    mean = [sum(idle) / len(idle) for idle in (run.idle_by_makespan, run.idle_in_window)]
    words = f"idle, mean of the ranks: {mean[0]:.3g} by makespan, {mean[1]:.3g} in its own window"
    actions = sum(map(len, run.schedule.actions)) * 2 * len(run.schedule.actions)
    if actions <= MARGINAL_AT_MOST:
        more = marginal_idle(run.schedule, durations)
        words += f", {sum(more) / len(more):.3g} marginal"
    return words


def _title(run: Simulation) -> str:
    makespan = run.makespan or 1
    share = sum(run.idle_by_makespan) / len(run.busy) / makespan
    most = counted(max(run.peak_memory()), "activation") + _of_what(run.schedule)
    return f"{run.schedule.name}: ranks idle for {share:.1%} of {makespan:.4g} steps, and keep at most {most}"


def _of_what(made: Schedule) -> str:
    """What a stage is, where a rank has several of them: " of half its layers"."""
    chunks = made.num_stages // made.num_ranks
    return "" if chunks < 2 else " of half its layers" if chunks == 2 else f" of 1/{chunks} of its layers"


def _alt(run: Simulation, fault: Fault | None) -> str:
    made = run.schedule
    start = f"{made.name}, {made.num_ranks} ranks, {made.num_stages} stages, {made.num_microbatches} micro-batches."
    if fault:
        return f"{start} Not valid: {fault}. Drawn as far as it can run, to {run.makespan:.4g} steps."
    peaks = run.peak_memory()
    rows = [
        f"rank {rank} is busy for {busy / run.makespan:.0%} and keeps at most {counted(peaks[rank], 'activation')}"
        for rank, busy in list(enumerate(run.busy))[:8]
    ]
    return f"Timeline of {start} It takes {run.makespan:.4g} steps; {joined(rows)}."
