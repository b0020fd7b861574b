"""The three limits of data parallelism, as ranks are added: memory, batch, and the gradient sync."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import matplotlib.figure
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from fivefold.plots.style import DATA, INK, RC, RULE, SOFT, Figure, counted
from fivefold.runtime.traffic import size

WIDTH, TALL = 9.0, 3.0


@matplotlib.rc_context(RC)
def data_parallel_limits(
    ranks: Sequence[int], states: Sequence[float], activations: Sequence[float], smallest_batch: Sequence[int],
    sync_over_compute: Sequence[float], batch: int, gpu_bytes: float, title: str,
) -> Figure:  # fmt: skip
    """Draw, over the number of `ranks`, what each limit is: one value for each of them.

    Left: bytes on a rank, `states` (parameters, gradients, optimizer) and the `activations` of one sequence, beside a
    GPU's memory. Middle: the smallest batch, in sequences, beside the `batch` that training has. Right: seconds of
    gradient sync over seconds of computation; where the line is crossed, half of the time or more is sync.
    Raises ValueError where the sequences are not of one length.
    """
    if len({len(ranks), len(states), len(activations), len(smallest_batch), len(sync_over_compute)}) != 1:
        raise ValueError("the limits are of unlike lengths: give one value for each number of ranks")
    figure = matplotlib.figure.Figure((WIDTH, TALL))
    lines = "\n".join(textwrap.wrap(title, 100))
    figure.text(0.013, 0.97, lines, ha="left", va="top", fontweight="bold", fontsize=10.5)
    left, middle, right = (figure.add_axes([x, 0.2, 0.2, 0.52]) for x in (0.085, 0.405, 0.725))
    _panel(left, ranks, {"states": states, "activations": activations}, "1  bytes on a rank", size)
    _line(left, gpu_bytes, f"GPU {size(gpu_bytes)}", ranks, right=True)
    _panel(middle, ranks, {"smallest": smallest_batch}, "2  sequences a step", lambda n: f"{n:,.0f}")
    _line(middle, batch, f"batch {batch:,}", ranks, below=False)
    _panel(right, ranks, {"sync": sync_over_compute}, "3  sync over computing", lambda share: f"{share:g}")
    _line(right, 1, "as long as computing", ranks)
    return Figure(figure, _alt(ranks, states, activations, smallest_batch, sync_over_compute, batch, gpu_bytes))


def _panel(axes: Axes, ranks: Sequence[int], curves: Mapping[str, Sequence], heading: str, words: Callable) -> None:
    axes.set_title(heading, loc="left", fontsize=9, color=INK)
    axes.set(xscale="log", yscale="log", xlabel="ranks n")
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    for (name, values), style in zip(curves.items(), ("-", "--"), strict=False):
        shown = [(n, value) for n, value in zip(ranks, values, strict=True) if value]  # a logarithm has no place for 0
        axes.plot(*zip(*shown, strict=True), style, color=DATA, linewidth=1.8, marker="o", markersize=3)
        if len(curves) > 1:
            first = name == "states"
            place = {"xytext": (7, 2), "ha": "left"} if first else {"xytext": (0, -12), "ha": "right"}
            end = 0 if first else -1
            axes.annotate(name, (ranks[end], values[end]), textcoords="offset points", fontsize=8.5, **place)
    axes.set_xlim(0.75 * ranks[0], 1.35 * ranks[-1])
    ticks = [n for n in ranks if n in (ranks[0], ranks[-1]) or n in (8, 64)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def _line(axes: Axes, value: float, words: str, ranks: Sequence[int], right: bool = False, below: bool = True) -> None:
    axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    place = {"textcoords": "offset points", "xytext": (0, 3 if below else -11), "fontsize": 8.5, "color": SOFT}
    axes.annotate(words, (ranks[-1 if right else 0], value), ha="right" if right else "left", **place)


def _alt(
    ranks: Sequence[int], states: Sequence[float], activations: Sequence[float], smallest: Sequence[int],
    sync: Sequence[float], batch: int, gpu: float,
) -> str:  # fmt: skip
    rows = [
        f"{counted(n, 'rank')}: states {size(states[i])}, activations {size(activations[i])}, "
        f"{smallest[i]:,} sequences, sync {sync[i]:.2g} of computing"
        for i, n in enumerate(ranks)
    ]
    return f"Three panels over the number of ranks. {'; '.join(rows)}. A GPU has {size(gpu)}, the batch {batch:,}."
