"""The schedule explorer: a pipeline's schedule, its sizes and durations; step by step, with what each rank keeps."""

from __future__ import annotations

from typing import Any

from fivefold import pipeline, plots
from fivefold.pipeline import Durations, Schedule, simulate
from fivefold.widgets.live import choice, explore

WITH_CHUNKS = "interleaved"
SCHEDULES = {
    "naive": pipeline.naive,
    "GPipe": pipeline.gpipe,
    "1F1B": pipeline.one_f_one_b,
    WITH_CHUNKS: pipeline.interleaved,
    "ZB-H1": pipeline.zb_h1,
    "ZB-H2": pipeline.zb_h2,
    "ZB-V": pipeline.zb_v,
    "DualPipe": pipeline.dualpipe,
}
LENGTHS = [0.5, 1, 1.5, 2, 3]
END = 1000  # of the slider of steps: further than any schedule here goes


def schedules(name: str = "1F1B", p: int = 4, m: int = 8, v: int = 2) -> None:
    """Show a schedule on p ranks with m micro-batches, with controls for all of it and for how long actions take.

    v, the chunks a rank, is for the interleaved one alone. Times are those of a p-th of the model's layers: a stage of
    half as many takes half as long, so that schedules can be compared. The play button goes from one moment at which
    some action starts to the next; the square one goes back to the first, and the last one is the whole. Sizes for
    which there is no such schedule are told in a line.
    """
    from ipywidgets import IntSlider, Play

    controls = {
        "name": choice("schedule", {key: key for key in SCHEDULES}, name),
        "p": choice("ranks p", [1, 2, 3, 4, 6, 8], p),
        "m": choice("micro-batches m", [1, 2, 3, 4, 6, 8, 12, 16], m),
        "v": choice("chunks v", [1, 2, 3, 4], v),
        "forward": choice("forward F", LENGTHS, 1),
        "input_gradient": choice("input gradient I", LENGTHS, 1),
        "weight_gradient": choice("weight gradient W", LENGTHS, 1),
        "communication": choice("message", [0, 0.1, 0.25, 0.5, 1], 0),
    }
    last = _last(controls)
    step = IntSlider(value=last, min=0, max=last, description="moment", continuous_update=False)
    play = Play(value=0, min=0, max=last, interval=700, show_repeat=False)
    play.observe(lambda change: setattr(step, "value", change["new"]), "value")
    for control in controls.values():  # before the figure is drawn again: its observers come later
        control.observe(lambda _: _restart(step, play, _last(controls)), "value")
    explore(draw, controls | {"step": step}, also=[play])


def draw(
    name: str, p: int, m: int, v: int, forward: float, input_gradient: float, weight_gradient: float,
    communication: float, step: int = END,
) -> plots.Figure:  # fmt: skip
    """The figure for one position of the controls; raises ValueError where there is no such schedule."""
    made = make(name, p, m, v)
    durations = of_stages(made, forward, input_gradient, weight_gradient, communication)
    times = moments(made, durations)
    if step >= len(times):
        return plots.schedule(made, durations)
    words = f"{made.name} at step {times[step]:.4g}: {_now(made, durations, times[step])}"
    return plots.schedule(made, durations, words, until=times[step] + 1e-9)


def make(name: str, p: int, m: int, v: int) -> Schedule:
    """The schedule of that name; raises ValueError for sizes that it is not for."""
    return SCHEDULES[name](p, m, v) if name == WITH_CHUNKS else SCHEDULES[name](p, m)


def of_stages(made: Schedule, forward: float, input_gradient: float, weight_gradient: float, wire: float) -> Durations:
    """Times of a p-th of the model, as those of the schedule's stages, of which there may be more than ranks."""
    share = made.num_ranks / made.num_stages
    return Durations(forward * share, input_gradient * share, weight_gradient * share, wire)


def moments(made: Schedule, durations: Durations) -> list[float]:
    """The times at which some action starts, in order."""
    run = simulate(made, durations)
    return sorted({round(event.start, 9) for events in run.events for event in events})


def _now(made: Schedule, durations: Durations, time: float) -> str:
    """How many ranks compute at that moment, and how many activations they keep together."""
    run = simulate(made, durations)
    busy = sum(e.start <= time + 1e-9 < e.end for events in run.events for e in events)
    kept = sum([a for t, a in run.memory(rank) if t <= time + 1e-9][-1] for rank in range(made.num_ranks))
    return f"{busy} of {made.num_ranks} ranks compute, {kept:g} activation{'' if kept == 1 else 's'} in all"


def _last(controls: dict[str, Any]) -> int:
    """How many steps there are; 0 where there is no such schedule."""
    values = {key: control.value for key, control in controls.items()}
    times = [values.pop(key) for key in ("forward", "input_gradient", "weight_gradient", "communication")]
    try:
        made = make(**values)
        return len(moments(made, of_stages(made, *times)))
    except ValueError:
        return 0


def _restart(step: Any, play: Any, last: int) -> None:
    """Another schedule has other steps; all of it is shown first."""
    play.max = step.max = max(last, 1)
    play.value, step.value = 0, last
