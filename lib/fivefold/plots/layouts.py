"""Layouts side by side: what a rank keeps, what it sends along each axis, and where its time goes."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fivefold.plots.style import INK, PAPER, RC, SOFT, WORK, Figure, Sheet, axis_stripes, duration, joined
from fivefold.runtime.cluster import Cluster
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.replay import replay
from fivefold.runtime.traffic import size

KEPT = {
    "weights": {"facecolor": WORK["F"]},
    "gradients": {"facecolor": WORK["W"]},
    "optimizer": {"facecolor": WORK["B"]},
    "kept for backward": {"facecolor": WORK["compute"], "edgecolor": SOFT, "hatch": "....", "linewidth": 0.4},
}
TIME = {
    "computes": {"facecolor": WORK["F"]},
    "stands still for a transfer": {"facecolor": PAPER, "edgecolor": SOFT, "hatch": "/////", "linewidth": 0.4},
    "waits for another rank": {"facecolor": PAPER, "edgecolor": SOFT, "linewidth": 0.6},
}
ROW, GAP = 0.42, 0.3  # inches


@matplotlib.rc_context(RC)
def layouts(ledgers: Mapping[str, Ledger], cluster: Cluster, widen: float = 1.0, title: str = "") -> Figure:
    """A row for each measured run, by name: three bars, each as long as the largest of its column.

    Left: the bytes that a rank keeps, the most of any: weights, gradients, optimizer state, and what waits for
    backward. Middle: the bytes that leave a rank, the mean over ranks, by the axis along which they go. Right: the time
    of the run replayed on `cluster`, mean over ranks. `widen` as in `replay`. Raises ValueError without a measured run.
    """
    kept = {name: kept_bytes(ledger) for name, ledger in ledgers.items()}
    if not any(sum(bars.values()) for bars in kept.values()):
        raise ValueError("no run here was measured: run with measure=True")
    columns = (
        ("a rank keeps at most", kept, KEPT, size),
        ("leaves a rank, by axis", {name: sent_bytes(ledger) for name, ledger in ledgers.items()}, None, size),
        (f"time on {cluster.gpu.name}s", {n: times(led, cluster, widen) for n, led in ledgers.items()}, TIME, duration),
    )
    height = ROW * len(ledgers) + GAP
    sheet = Sheet(title or _title(columns[2][1]), 9.6, height, left=1.55, right=0.2, bottom=0.62)
    sheet.axes.axis("off")
    place = sheet.axes.get_position()
    for number, (heading, bars, looks, words) in enumerate(columns):
        wide = place.width / len(columns)
        axes = sheet.figure.add_axes([place.x0 + number * wide, place.y0, wide * 0.94, place.height])
        _column(axes, heading, bars, looks, words, names=number == 0)
    _keys(sheet, columns[1][1])
    return Figure(sheet.figure, _alt(columns))


def kept_bytes(ledger: Ledger) -> dict[str, float]:
    """By kind, for the rank that keeps the most in all."""
    each = [
        {
            "weights": rank.memory.parameters,
            "gradients": rank.memory.gradients,
            "optimizer": rank.memory.optimizer,
            "kept for backward": rank.memory.peak_saved,
        }
        for rank in ledger.ranks
    ]
    return max(each, key=lambda kinds: sum(kinds.values()))


def sent_bytes(ledger: Ledger) -> dict[str, float]:
    """By group, the mean over ranks of what leaves a rank."""
    sent: dict[str, float] = {}
    for rank in ledger.ranks:
        for call in rank.communications:
            if call.sent:
                sent[call.group] = sent.get(call.group, 0.0) + call.sent / len(ledger.ranks)
    return dict(sorted(sent.items()))


def times(ledger: Ledger, cluster: Cluster, widen: float = 1.0) -> dict[str, float]:
    """Seconds of the replayed run: computing, standing still for a transfer, waiting for somebody who is late."""
    done = replay(ledger, cluster, widen=widen)
    ranks = range(done.num_ranks)
    ways = (done.busy, done.exposed, done.idle)
    return {name: sum(map(way, ranks)) / len(ranks) for name, way in zip(TIME, ways, strict=True)}


def _column(axes: Axes, heading: str, bars: Mapping, looks: Mapping | None, words, names: bool) -> None:
    most = max(sum(parts.values()) for parts in bars.values()) or 1.0
    axes.set_xlim(0, most * 1.38)
    axes.set_ylim(len(bars) + 0.1, -GAP / ROW)
    axes.axis("off")
    axes.annotate(heading, (0, -0.35), fontsize=8.5, color=SOFT, va="center")
    for row, (name, parts) in enumerate(bars.items()):
        begin = 0.0
        for part, value in parts.items():
            look = looks[part] if looks else axis_stripes(part)
            axes.barh(row + 0.45, value, 0.56, left=begin, **({"linewidth": 0} | look))
            begin += value
        text = words(begin) if begin else "nothing"
        axes.annotate(text, (begin, row + 0.45), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
        if names:
            where = (0, row + 0.45), (-8, 0)
            axes.annotate(name, *where, textcoords="offset points", ha="right", va="center", color=INK)


def _keys(sheet: Sheet, sent: Mapping[str, Mapping[str, float]]) -> None:
    """Two lines: what is kept and how time goes; the axes."""
    width, height = sheet.figure.get_size_inches()
    groups = sorted({group for parts in sent.values() for group in parts})
    look = {"frameon": False, "fontsize": 8, "handlelength": 1.3, "handleheight": 0.9, "columnspacing": 1.2}
    kinds = [Patch(label=name, **of) for name, of in (KEPT | TIME).items()]
    axes = [Patch(label=name, **axis_stripes(name)) for name in groups]
    for line, handles in enumerate((axes, kinds)):
        if handles:
            place = {"loc": "lower left", "bbox_to_anchor": (0.04 / width, (0.02 + 0.24 * line) / height)}
            sheet.figure.add_artist(sheet.figure.legend(handles=handles, ncols=len(handles), **place, **look))


def _title(time: Mapping[str, Mapping[str, float]]) -> str:
    rows = list(time.items())
    (last, parts), (first, before) = rows[-1], rows[-2] if len(rows) > 1 else rows[-1]
    ratio = sum(parts.values()) / sum(before.values())
    if len(rows) == 1:
        return f"{last} takes {duration(sum(parts.values()))}"
    return f"{last} takes {ratio:.2g} times as long as {first}"


def _alt(columns: tuple) -> str:
    sentences = []
    for name in columns[0][1]:
        said = [f"{heading}: {_parts(bars[name], words)}" for heading, bars, _, words in columns]
        sentences.append(f"{name}: {'; '.join(said)}")
    return f"Bars for each layout. {'. '.join(sentences)}."


def _parts(parts: Mapping[str, float], words) -> str:
    shown = [f"{name} {words(value)}" for name, value in parts.items() if value]
    return joined(shown) if shown else "nothing"
