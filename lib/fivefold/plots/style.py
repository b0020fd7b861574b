"""One look for all figures: colours, type, the paper they stand on, and the words for numbers.

Axes have the colours of Okabe and Ito (2008), which stay apart for colour-blind eyes. Computation is one blue-grey hue
in steps of lightness, which stay apart in grey print. Whatever has a colour also has a word, a pattern or a place.
"""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from pathlib import Path

import matplotlib
import matplotlib.figure
from matplotlib.axes import Axes

INK, SOFT, RULE, PAPER = "#1B2430", "#5B6672", "#DDE2E8", "#FFFFFF"
DATA, TENSOR, CONTEXT, PIPELINE, EXPERT, OTHER = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#6B7280"
AXES = {
    "dp": DATA, "data": DATA, "zero": DATA, "tp": TENSOR, "tensor": TENSOR, "sp": TENSOR, "cp": CONTEXT,
    "context": CONTEXT, "pp": PIPELINE, "pipeline": PIPELINE, "ep": EXPERT, "expert": EXPERT,
}  # fmt: skip
STRIPES = {DATA: "\\\\\\\\\\", TENSOR: "/////", CONTEXT: "xxxx", PIPELINE: "||||", EXPERT: "....", OTHER: "----"}
WORK = {"compute": "#EDF0F4", "F": "#D0DAE6", "B": "#3A516E", "I": "#3A516E", "W": "#90A4BC"}
WORK_NAMES = {"compute": "other work", "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

RC = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.edgecolor": SOFT, "axes.labelcolor": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "hatch.linewidth": 1.0, "svg.hashsalt": "fivefold", "figure.dpi": 144,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.unicode_minus": True,
}  # fmt: skip


class Figure:
    """A figure and its alt text. `figure` is matplotlib's, for whoever wants to change something."""

    def __init__(self, figure: matplotlib.figure.Figure, alt: str):
        self.figure, self.alt = figure, alt

    def save(self, path: str | Path) -> Path:
        """Write it in the format that the path's ending names: png, svg or pdf."""
        with matplotlib.rc_context(RC):
            self.figure.savefig(path, facecolor=PAPER)
        return Path(path)

    def png(self) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context(RC):
            self.figure.savefig(buffer, format="png", facecolor=PAPER)
        return buffer.getvalue()

    def to_html(self) -> str:
        """An image with its alt text, on white paper whatever the theme, never wider than the page."""
        data = base64.b64encode(self.png()).decode()
        width = round(self.figure.get_figwidth() * 96)
        style = f"width:{width}px;max-width:100%;height:auto;background:{PAPER};border-radius:4px"
        return f'<img alt="{html.escape(self.alt)}" style="{style}" src="data:image/png;base64,{data}">'

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": self.alt}


class Sheet:
    """An empty figure with a title, and axes placed in inches: `left`, `right`, `bottom` are the margins."""

    def __init__(self, title: str, width: float, height: float, left: float, right: float = 0.2, bottom: float = 0.5):
        lines = textwrap.wrap(title, max(30, int((width - 0.3) * 11.5)))
        top = 0.16 + 0.19 * len(lines)
        total = height + bottom + top
        self.figure = matplotlib.figure.Figure((width, total))
        box = [left / width, bottom / total, (width - left - right) / width, height / total]
        self.axes: Axes = self.figure.add_axes(box)
        place = {"ha": "left", "va": "top", "fontweight": "bold", "fontsize": 10.5}
        self.figure.text(0.12 / width, 1 - 0.1 / total, "\n".join(lines), **place)
        self.points = (width - left - right) * 72  # width of the axes in points

    def key(self, handles: list) -> None:
        """Names of what is drawn, under it: in one line, or in as many as `key_lines` says."""
        width, height = self.figure.get_size_inches()
        columns = max(1, -(-len(handles) // key_lines(handles, width)))
        place = {"loc": "lower left", "bbox_to_anchor": (0.06 / width, 0.02 / height), "frameon": False}
        look = {"handlelength": 1.3, "handleheight": 0.9, "columnspacing": 1.4, "fontsize": 8.5}
        self.figure.legend(handles=handles, ncols=columns, **place, **look)


def key_lines(handles: list, width: float) -> int:
    """How many lines a key needs in a figure of `width` inches, about: it is filled column by column."""
    inches = [0.5 + 0.07 * len(handle.get_label()) for handle in handles]
    for lines in range(1, len(inches) + 1):
        columns = [max(inches[start : start + lines]) for start in range(0, len(inches), lines)]
        if sum(columns) <= width - 0.2:
            return lines
    return max(1, len(inches))


def axis_colour(group: str) -> str:
    """The colour of a group's axis, by the name it starts with: "tp", "dp_cp", "tensor"; grey for any other."""
    name = group.lower()
    for axis, colour in AXES.items():
        if name == axis or name.startswith((axis + "_", axis + "-", axis + " ")):
            return colour
    return OTHER


def axis_stripes(group: str) -> dict:
    """The pattern that goes with the axis's colour, for those who see no colour, as matplotlib's arguments."""
    colour = axis_colour(group)
    return {"facecolor": colour, "hatch": STRIPES[colour], "edgecolor": PAPER, "linewidth": 0}


def duration(value: float, unit: str = "s") -> str:
    """A time in words: "1.2 ms", "3 steps"."""
    if unit != "s":
        return f"{value:.5g} {unit}" if unit else counted(float(f"{value:.5g}"), "step")
    for name, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if value >= scale or name == "ns":
            return f"{value / scale:.3g} {name}"
    raise AssertionError


def round_length(most: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is not above `most`: a scale bar's length."""
    if most <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(most))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= most * (1 + 1e-9))


def counted(number: float, noun: str) -> str:
    """A number with its noun: "1 rank", "1,024 ranks", "2.5 activations"."""
    words = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{words} {noun}{'' if number == 1 else 's'}"


def joined(names: list[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
