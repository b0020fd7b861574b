"""The work cube: sequences x tokens x layers cut into blocks, and the servers whose GPUs work on them."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from fivefold import mesh
from fivefold.layout import Layout, LayoutError, check_sizes
from fivefold.plots.style import AXES, INK, PAPER, RC, RULE, SOFT, WORK, Figure, Sheet, joined

WIDTH, TALL, LINE = 9.0, 3.25, 0.235  # inches: of all, of the cube and the servers, of a line of the table
FRONT, DEPTH = (2.05, 1.75), (1.0, 0.85)  # inches: the cube's front, and how far its back is shifted
CORNER = (1.05, 2.75)  # where rank 0's block begins: front, lower left
SERVERS, LISTED, MOST = 5.0, 16, 4_096  # left edge; servers in a column; GPUs that are drawn at all
NAMES = {"tp": "Tensor", "cp": "Context", "pp": "Pipeline", "dp": "Data", "ep": "Expert"}  # innermost first
LETTERS = {"tp": "T", "cp": "C", "pp": "P", "dp": "D", "ep": "E"}
DARK = {"tp": "#AD4C00", "cp": "#00795A", "pp": "#A24D7B", "dp": "#0072B2", "ep": "#8A6100"}  # for text on paper


@dataclass(frozen=True)
class Work:
    """The edges of the cube: what one step of training goes through."""

    sequences: int = 64
    tokens: int = 8192
    layers: int = 12


@dataclass(frozen=True)
class Numbers:
    """What a layout comes to. `groups` has the groups of each axis, `spans` the most servers that one of them is in."""

    gpus: int
    servers: int
    blocks: int
    groups: dict[str, list[list[int]]]
    inside: dict[str, bool]
    spans: dict[str, int]


def numbers(layout: Layout, work: Work, gpus_per_server: int = 8) -> Numbers:
    """Count GPUs, servers and blocks of work with the functions of `fivefold.mesh`. Raises LayoutError.

    For a layout that cannot be, for fewer layers than stages or sequences than dp, and for more GPUs than are drawn.
    """
    if layout.world_size > MOST:
        raise LayoutError(f"layout {layout} has {layout.world_size:,} GPUs: this picture ends at {MOST:,}")
    check_sizes(layout, layers=work.layers)
    for what, size, axis in (("sequences", work.sequences, "dp"), ("tokens", work.tokens, "cp")):
        if size < (degree := getattr(layout, axis)):
            raise LayoutError(f"{size} {what} leave ranks of {axis}{degree} without work: take {axis}{size} or less")
    groups = {axis: mesh.groups(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
    groups["ep"] = mesh.expert_groups(layout)
    return Numbers(
        gpus=layout.world_size,
        servers=mesh.servers(layout, gpus_per_server),
        blocks=len(set(mesh.blocks_of_work(layout, work.sequences, work.tokens, work.layers))),
        groups=groups,
        inside={axis: mesh.inside_server(layout, gpus_per_server, axis) for axis in groups},
        spans={axis: max(len({r // gpus_per_server for r in g}) for g in lists) for axis, lists in groups.items()},
    )


@matplotlib.rc_context(RC)
def work_cube(layout: Layout, rank: int = 0, work: Work | None = None, gpus_per_server: int = 8) -> Figure:
    """Draw the cube cut by `layout`, and its GPUs in servers; of `rank`, its block and its group on each axis.

    Below, a line for each axis: what it cuts, its groups, and whether all of them stay inside a server. EP cuts no edge
    of the cube and takes no GPUs of its own. Raises LayoutError where the layout is none, does not fit the cube, or has
    no such rank.
    """
    work = work or Work()
    counted, at = numbers(layout, work, gpus_per_server), mesh.coordinates(rank, layout)
    lines = len(NAMES) + 1
    sheet = Sheet(_title(layout, counted), WIDTH, TALL + lines * LINE, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(TALL + lines * LINE, 0))
    _cube(axes, layout, at, work)
    own = {axis: next(ranks for ranks in lists if rank in ranks) for axis, lists in counted.groups.items()}
    _servers(axes, counted, rank, own, gpus_per_server)
    _table(axes, layout, counted, rank, own, work)
    return Figure(sheet.figure, _alt(layout, counted, rank, own, work))


def _cube(axes: Axes, layout: Layout, at: mesh.Coordinates, work: Work) -> None:
    """Boxes from back to front; those that others hide are left out, but for the rank's own, which gets an outline."""
    dp, cp, pp = layout.dp, layout.cp, layout.pp
    mine = (at.dp, at.cp, at.pp)
    for c in reversed(range(cp)):
        for p in range(pp):
            for d in range(dp):
                if (d, c, p) != mine and (c == 0 or p == pp - 1 or d == dp - 1):
                    _box(axes, layout, (d, c, p), (WORK["compute"], "#F8F9FB", WORK["F"]))
                if (d, c, p) == mine:
                    _box(axes, layout, mine, (WORK["W"], WORK["F"], WORK["B"]))
                    _slices(axes, layout, mine, at.tp)
    hidden = at.cp > 0 and at.pp < pp - 1 and at.dp < dp - 1
    if hidden or at.cp > 0:
        for face in _faces(layout, mine):
            style = {"fill": False, "edgecolor": INK, "linewidth": 1.1, "linestyle": (0, (3, 2)), "zorder": 5}
            axes.add_patch(Polygon(face, **style))
    left, bottom = CORNER
    words = {"dp": f"{work.sequences:,} sequences", "cp": f"{work.tokens:,} tokens", "pp": f"{work.layers:,} layers"}
    spots = {
        "dp": (left + FRONT[0] / 2, bottom + 0.16, "center"),
        "cp": (left + FRONT[0] + DEPTH[0] / 2 + 0.12, bottom - DEPTH[1] / 2 + 0.2, "left"),
        "pp": (left - 0.1, bottom - FRONT[1] / 2, "right"),
    }
    for axis, (x, y, ha) in spots.items():
        name = f"{NAMES[axis]} {getattr(layout, axis)}"
        _text(axes, x, y, words[axis], ha=ha, colour=DARK[axis])
        _text(axes, x, y + 0.19, name, ha=ha, colour=DARK[axis], weight="bold")


def _corner(layout: Layout, place: tuple[int, int, int], ends: tuple[float, float, float]) -> tuple[float, float]:
    """A point of a block on paper: `ends` are 0 to 1 along its sequences, tokens and layers."""
    u, v, w = (
        (i + 0.04 * (degree > 1) + e * (1 - 0.08 * (degree > 1))) / degree
        for i, e, degree in zip(place, ends, (layout.dp, layout.cp, layout.pp), strict=True)
    )
    return CORNER[0] + u * FRONT[0] + v * DEPTH[0], CORNER[1] - w * FRONT[1] - v * DEPTH[1]


def _faces(layout: Layout, place: tuple[int, int, int]) -> list[list[tuple[float, float]]]:
    """Front, top and right side of a block."""
    corners = (
        ((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1)),
        ((0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)),
        ((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)),
    )
    return [[_corner(layout, place, ends) for ends in face] for face in corners]


def _box(axes: Axes, layout: Layout, place: tuple[int, int, int], fills: tuple[str, str, str]) -> None:
    small = max(layout.dp, layout.cp, layout.pp) > 16
    for face, fill in zip(_faces(layout, place), fills, strict=True):
        axes.add_patch(Polygon(face, facecolor=fill, edgecolor=SOFT, linewidth=0.25 if small else 0.6))


def _slices(axes: Axes, layout: Layout, place: tuple[int, int, int], own: int) -> None:
    """TP cuts inside the block: a strip of its front for each rank, that of the rank itself in full colour."""
    if layout.tp == 1:
        return
    for i in range(layout.tp):
        strip = [(i / layout.tp, 0, w) for w in (0, 1)] + [((i + 1) / layout.tp, 0, w) for w in (1, 0)]
        face = [_corner(layout, place, ends) for ends in strip]
        fill = AXES["tp"] if i == own else "#F6D9C2"
        axes.add_patch(Polygon(face, facecolor=fill, edgecolor=PAPER, linewidth=0.5))
    front = _faces(layout, place)[0]
    axes.add_patch(Polygon(front, fill=False, edgecolor=INK, linewidth=0.8))


def _servers(axes: Axes, counted: Numbers, rank: int, own: dict[str, list[int]], size: int) -> None:
    """Servers as lines of GPUs. Those that share a group with the rank have the axis's letter and colour."""
    columns = 1 if counted.servers <= 8 else 2
    shown = min(counted.servers, columns * LISTED)
    first = min(max(0, rank // size - shown // 2), counted.servers - shown)
    rows = -(-shown // columns)
    tall, room = min(0.36, 2.72 / rows), (WIDTH - SERVERS - 0.1) / columns
    wide = (room - 0.62) / size
    some = f"servers {first} to {first + shown - 1} of {counted.servers:,}" if shown < counted.servers else "servers"
    _text(axes, SERVERS, 0.1, f"{some}, {size} GPUs each", ha="left", colour=SOFT)
    of = {r: axis for axis in ("dp", "pp", "cp", "tp") for r in own[axis]}
    for line in range(shown):
        left, top = SERVERS + (line // rows) * room, 0.27 + (line % rows) * tall
        _text(axes, left + 0.5, top + tall / 2, f"{first + line}", ha="right", colour=SOFT, size=min(8.5, tall * 40))
        for slot in range(size):
            gpu, x = (first + line) * size + slot, left + 0.56 + slot * wide
            _gpu(
                axes,
                (x, top, wide, tall),
                gpu,
                rank,
                of.get(gpu),
                gpu in own["ep"] and len(own["ep"]) > 1,
                gpu < counted.gpus,
            )
        frame = {"fill": False, "edgecolor": SOFT, "linewidth": 1.0}
        axes.add_patch(Rectangle((left + 0.56, top + 0.02), size * wide, tall - 0.04, **frame))


def _gpu(
    axes: Axes, box: tuple[float, float, float, float], gpu: int, rank: int, axis: str | None, expert: bool, used: bool
) -> None:
    x, top, wide, tall = box
    fill = INK if gpu == rank else AXES[axis] if axis else WORK["compute"] if used else PAPER
    look = {"facecolor": fill, "edgecolor": RULE, "linewidth": 0.5}
    axes.add_patch(Rectangle((x + 0.01, top + 0.04), wide - 0.02, tall - 0.08, **look))
    if not used:
        axes.plot([x + 0.03, x + wide - 0.03], [top + tall - 0.06, top + 0.06], color=RULE, linewidth=0.8)
        return
    if expert:
        edge = {"fill": False, "edgecolor": AXES["ep"], "linewidth": 2.2, "zorder": 4}
        axes.add_patch(Rectangle((x + 0.025, top + 0.055), wide - 0.05, tall - 0.11, **edge))
    letter = LETTERS[axis] if axis else LETTERS["ep"] if expert else ""
    words = letter if letter and gpu != rank else f"{gpu}"
    if wide >= 0.075 * len(words) + 0.05 and tall >= 0.15:
        colour = PAPER if gpu == rank or axis in ("dp", "tp", "cp") else INK
        heavy = "bold" if letter else "normal"
        muted = SOFT if not letter and gpu != rank else colour
        _text(axes, x + wide / 2, top + tall / 2, words, colour=muted, size=7.5, weight=heavy, zorder=5)


def _table(axes: Axes, layout: Layout, counted: Numbers, rank: int, own: dict[str, list[int]], work: Work) -> None:
    """A line for each axis, in the order in which ranks are numbered."""
    columns = (0.12, 1.42, 3.75, 5.5)
    heads = ("axis, innermost first", "", "groups", "where they are")
    for x, head in zip(columns, heads, strict=True):
        _text(axes, x, TALL + LINE / 2, head, ha="left", colour=SOFT)
    _text(axes, 7.15, TALL + LINE / 2, f"rank {rank} (black) is with", ha="left", colour=SOFT)
    for line, (axis, name) in enumerate(NAMES.items(), 1):
        y, degree = TALL + (line + 0.5) * LINE, getattr(layout, axis)
        muted = INK if degree > 1 else SOFT
        outline = axis == "ep"
        patch = {
            "facecolor": PAPER if outline else AXES[axis],
            "edgecolor": AXES[axis],
            "linewidth": 2.0 if outline else 0,
        }
        axes.add_patch(Rectangle((0.14, y - 0.08), 0.17, 0.16, **patch))
        _text(
            axes, 0.225, y, LETTERS[axis], colour=PAPER if axis in ("dp", "tp", "cp") else INK, size=7.5, weight="bold"
        )
        _text(axes, 0.4, y, f"{name} {degree}", ha="left", colour=muted, weight="bold" if degree > 1 else "normal")
        _text(axes, columns[1], y, _cuts(axis, degree, work), ha="left", colour=muted)
        if degree == 1:
            continue
        lists = counted.groups[axis]
        _text(axes, columns[2], y, f"{len(lists):,} group{'s' * (len(lists) > 1)} of {degree} ranks", ha="left")
        inside = counted.inside[axis]
        where = "✓ each in one server" if inside else f"✗ in up to {counted.spans[axis]} servers"
        _text(axes, columns[3], y, where, ha="left", weight="normal" if inside else "bold")
        _text(axes, 7.15, y, _others(own[axis], rank), ha="left")


def _cuts(axis: str, degree: int, work: Work) -> str:
    """What an axis does to the cube, in a few words."""
    if degree == 1:
        return "not used"
    edges = {"dp": ("sequences", work.sequences), "cp": ("tokens", work.tokens), "pp": ("layers", work.layers)}
    if axis == "tp":
        return f"cuts matrices: 1/{degree} of each"
    if axis == "ep":
        return "folded over DP × CP, no GPUs"
    what, size = edges[axis]
    return f"cuts {what}: {'' if size % degree == 0 else 'up to '}{-(-size // degree):,} each"


def _others(ranks: list[int], rank: int) -> str:
    others = [f"{r}" for r in ranks if r != rank]
    return ", ".join(others) if len(", ".join(others)) <= 26 else f"{', '.join(others[:3])}, … {others[-1]}"


def _title(layout: Layout, counted: Numbers) -> str:
    used = [
        f"{NAMES[axis]} {getattr(layout, axis)}" for axis in ("dp", "cp", "pp", "tp", "ep") if getattr(layout, axis) > 1
    ]
    what = ", ".join(used) or "One rank"
    sizes = (
        f"{_many(counted.gpus, 'GPU')}, {_many(counted.servers, 'server')}, {_many(counted.blocks, 'block')} of work"
    )
    spill = "" if counted.inside["tp"] else f"; Tensor spills over {_few(counted.spans['tp'])} servers"
    return f"{what}: {sizes}{spill}"


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _few(number: int) -> str:
    return {2: "two", 3: "three", 4: "four"}.get(number, f"{number}")


def _alt(layout: Layout, counted: Numbers, rank: int, own: dict[str, list[int]], work: Work) -> str:
    places = []
    for axis, name in NAMES.items():
        if (degree := getattr(layout, axis)) > 1:
            where = "each inside one server" if counted.inside[axis] else f"in up to {counted.spans[axis]} servers"
            places.append(f"{name} {degree} in {_many(len(counted.groups[axis]), 'group')}, {where}")
    cube = f"A cube of {work.sequences:,} sequences, {work.tokens:,} tokens and {work.layers:,} layers"
    gpus, servers = _many(counted.gpus, "GPU"), _many(counted.servers, "server")
    cut = f"cut into {_many(counted.blocks, 'block')} for {gpus} in {servers}"
    with_whom = [f"{NAMES[axis]} with {_others(ranks, rank)}" for axis, ranks in own.items() if len(ranks) > 1]
    groups = f" {'; '.join(places)}. Rank {rank} shares {joined(with_whom)}." if places else ""
    return f"{cube}, {cut}.{groups}"


def _text(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, size: float = 8.5, **more: object
) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=size, **more)
