"""Tokens on their way to experts, stage by stage: scores, choices, capacity, the way there, the way back."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from fivefold.expert import Routing, capacity, route, within_capacity
from fivefold.plots.style import EXPERT, INK, PAPER, RC, RULE, SOFT, WORK, Figure, Sheet, joined

STAGES = ("scores", "top-k", "capacity", "dispatch", "combine")
ROUTERS = {"even": 0.0, "skewed": 1.6}  # added to the logits of expert 1
WORDS = (
    "The", "pass", "statement", "is", "a", "null", "operation", "when", "it", "is", "executed", "nothing", "happens",
    "it", "is", "useful",
)  # fmt: skip
EACH, EXPERTS = 4, 4  # tokens a rank; experts in all
WIDTH, ROW, GAP = 9.0, 0.21, 0.12  # inches
SCORES, CELL, BOXES, ROOM = 1.55, 0.4, 5.0, 3.85  # left edge and width of a score; left edge and width of all slots
DARK_EXPERT = "#8A5F00"  # the axis's colour, dark enough for text on paper


@dataclass(frozen=True)
class Routes:
    """Who goes where: tensors (ranks, tokens, top_k), and the room that an expert has for the rows of one rank."""

    routing: list[Routing]  # one for each rank
    keep: Tensor
    limit: int

    @property
    def experts(self) -> Tensor:
        return torch.stack([own.experts for own in self.routing])

    @property
    def ranks(self) -> int:
        return len(self.routing)

    def home(self, expert: int) -> int:
        """The rank that holds an expert."""
        return expert * self.ranks // EXPERTS

    def rows(self, expert: int, rank: int) -> list[int]:
        """The tokens of a rank that an expert takes."""
        taken = (self.experts[rank] == expert) & self.keep[rank]
        return taken.any(1).nonzero().flatten().tolist()

    def sent(self) -> list[list[int]]:
        """Rows from each rank to each."""
        table = [[0] * self.ranks for _ in range(self.ranks)]
        for rank in range(self.ranks):
            for expert in range(EXPERTS):
                table[rank][self.home(expert)] += len(self.rows(expert, rank))
        return table


def routes(ranks: int, top_k: int, factor: float, router: str) -> Routes:
    """What the library's router and capacity make of the words; a word has the same scores wherever it stands."""
    if EXPERTS % ranks or ranks * EACH > len(WORDS):
        raise ValueError(f"{ranks} ranks cannot share {EXPERTS} experts: choose 1, 2 or 4")
    if router not in ROUTERS:
        raise ValueError(f"there is no router {router!r}: choose {' or '.join(ROUTERS)}")
    routing = [route(logits(router)[rank * EACH : (rank + 1) * EACH], top_k) for rank in range(ranks)]
    limit = capacity(EACH, EXPERTS, top_k, factor)
    keep = torch.stack([within_capacity(own.experts, EXPERTS, limit) for own in routing])
    return Routes(routing, keep, limit)


def logits(router: str) -> Tensor:
    """(words, experts)."""
    known = {
        word: 1.3 * torch.randn(EXPERTS, generator=_generator(number)) for number, word in enumerate(set_of(WORDS))
    }
    scores = torch.stack([known[word] for word in WORDS])
    scores[:, 1] += ROUTERS[router]
    return scores


def set_of(words: tuple[str, ...]) -> list[str]:
    """Each word once, in order."""
    return list(dict.fromkeys(words))


@matplotlib.rc_context(RC)
def tokens_to_experts(stage: str, ranks: int = 4, top_k: int = 2, factor: float = 1.0, router: str = "even") -> Figure:
    """Draw one of the STAGES: four tokens on each of `ranks` (1, 2 or 4), four experts, spread over the ranks.

    `factor` is the capacity factor, `router` one of ROUTERS. Raises ValueError for other names and numbers.
    """
    if stage not in STAGES:
        raise ValueError(f"there is no stage {stage!r}: choose {joined(list(STAGES))}")
    way, at = routes(ranks, top_k, factor, router), STAGES.index(stage)
    tall = max(ranks * (EACH * ROW + GAP), 2.4) + 0.3
    sheet = Sheet(_title(way, stage, top_k), WIDTH, tall, left=0, right=0, bottom=0.1)
    axes = sheet.axes
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(tall, 0))
    _text(axes, SCORES + 2 * CELL, 0.1, "what it gets" if stage == "combine" else "experts 0 to 3", colour=SOFT)
    for rank in range(ranks):
        top = _top(rank, ranks, tall)
        _text(axes, 0.12, top + EACH * ROW / 2, f"rank {rank}", ha="left")
        for token in range(EACH):
            _token(axes, top + (token + 0.5) * ROW, way, (rank, token), at)
    _boxes(axes, way, tall, at)
    if at >= 3:
        _lines(axes, way, tall, back=at == 4)
    return Figure(sheet.figure, _alt(way, stage, top_k))


def _top(rank: int, ranks: int, tall: float) -> float:
    """Upper edge of a rank's tokens."""
    block = EACH * ROW + GAP
    return 0.25 + (tall - 0.3 - ranks * block) / 2 + rank * block


def _box_top(expert: int, tall: float) -> float:
    """Upper edge of an expert's box."""
    return 0.25 + (tall - 0.3) / EXPERTS * (expert + 0.5) - 0.14


def _token(axes: Axes, middle: float, way: Routes, place: tuple[int, int], at: int) -> None:
    """The word, and its scores or what comes of them."""
    rank, token = place
    probs, experts, gates = (part[token].tolist() for part in way.routing[rank])
    keep = way.keep[rank, token].tolist()
    _text(axes, SCORES - 0.1, middle, WORDS[rank * EACH + token], ha="right")
    if at == 4:
        terms = [f"{gate:.2f} · e{e}" for e, gate, kept in zip(experts, gates, keep, strict=True) if kept]
        words = " + ".join(terms) or "nothing: it passes by"
        _text(axes, SCORES, middle, words, ha="left", colour=INK if terms else DARK_EXPERT)
        return
    for expert, prob in enumerate(probs):
        left, chosen = SCORES + expert * CELL, expert in experts
        shade = 1 - 0.55 * prob
        colour = (shade, shade + 0.02 * prob, min(shade + 0.06, 1))
        look = {"facecolor": colour, "edgecolor": PAPER, "linewidth": 0.8}
        axes.add_patch(Rectangle((left, middle - ROW * 0.46), CELL, ROW * 0.92, **look))
        number = f".{round(100 * prob):02d}" if prob < 0.995 else "1.0"
        if at >= 1 and chosen:
            choice = experts.index(expert)
            dropped = at >= 2 and not keep[choice]
            edge = {"edgecolor": SOFT if dropped else EXPERT, "linewidth": 1.0 if dropped else 1.8, "zorder": 3}
            axes.add_patch(
                Rectangle((left + 0.02, middle - ROW * 0.42), CELL - 0.04, ROW * 0.84, facecolor="none", **edge)
            )
            if dropped:
                axes.plot([left + 0.05, left + CELL - 0.05], [middle + 0.07, middle - 0.07], color=INK, linewidth=1.2)
            number = f"{'①②③④'[choice]} {number}" if len(experts) > 1 else number
        _text(axes, left + CELL / 2, middle, number, size=7.5, colour=INK if at == 0 or chosen else SOFT)


def _boxes(axes: Axes, way: Routes, tall: float, at: int) -> None:
    """An expert's room, a block for each rank: how many want to come, then its slots, filled where a row has come."""
    slots = min(way.limit, EACH)  # more than all tokens of a rank never come
    wide = min(ROOM / (way.ranks * slots), 0.34)
    for expert in range(EXPERTS):
        top = _box_top(expert, tall)
        _text(axes, BOXES - 0.02, top - 0.11, f"expert {expert}, on rank {way.home(expert)}", ha="left")
        for rank in range(way.ranks):
            start = BOXES + rank * slots * wide
            if at >= 3:
                _slots(axes, (start, top), (slots, wide), way, (expert, rank))
            else:
                _wanted(axes, (start, top), slots * wide, way, (expert, rank), at)
            if expert == 0:
                name = f"from rank {rank}" if slots * wide > 0.75 else f"r{rank}"
                _text(axes, start + slots * wide / 2, 0.1, name, size=7.5, colour=SOFT)


def _wanted(axes: Axes, corner: tuple[float, float], wide: float, way: Routes, who: tuple[int, int], at: int) -> None:
    """How many rows of a rank chose an expert, and, once that is known, how many of them find room."""
    expert, rank = who
    wanted, fit = int((way.experts[rank] == expert).sum()), len(way.rows(expert, rank))
    _slot(axes, corner, wide, PAPER, SOFT if at else RULE)
    if at and wanted:
        over = at == 2 and fit < wanted
        words = f"{fit} of {wanted}" if over else f"{wanted}"
        look = {"size": 7.5, "colour": DARK_EXPERT if over else INK}
        _text(axes, corner[0] + wide / 2, corner[1] + 0.12, words, **look)


def _slots(axes: Axes, corner: tuple[float, float], size: tuple[int, float], way: Routes, who: tuple[int, int]) -> None:
    """The rows of a rank that came to an expert: orange from another rank, blue-grey from its own."""
    (start, top), (slots, wide), (expert, rank) = corner, size, who
    rows = way.rows(expert, rank)
    for slot in range(slots):
        full = slot < len(rows)
        fill = EXPERT if full and way.home(expert) != rank else WORK["F"] if full else PAPER
        _slot(axes, (start + slot * wide, top), wide, fill, SOFT)
        if full and wide > 0.2:
            word = WORDS[rank * EACH + rows[slot]]
            _text(axes, start + (slot + 0.5) * wide, top + 0.12, word[:3] if wide > 0.3 else word[:2], size=7)


def _slot(axes: Axes, corner: tuple[float, float], wide: float, fill: str, edge: str) -> None:
    where = (corner[0] + 0.015, corner[1]), wide - 0.03, 0.24
    axes.add_patch(Rectangle(*where, facecolor=fill, edgecolor=edge, linewidth=0.7))


def _lines(axes: Axes, way: Routes, tall: float, back: bool) -> None:
    """A line for each row that is taken: orange where it leaves its rank, grey where it stays."""
    begin, end = SCORES + 4 * CELL + 0.06, BOXES - 0.1
    for rank in range(way.ranks):
        top = _top(rank, way.ranks, tall)
        for token in range(EACH):
            for expert, kept in zip(way.experts[rank, token].tolist(), way.keep[rank, token].tolist(), strict=True):
                if not kept:
                    continue
                away = way.home(expert) != rank
                ends = (begin, top + (token + 0.5) * ROW), (end, _box_top(expert, tall) + 0.12)
                style = {"color": EXPERT if away else SOFT, "linewidth": 1.4 if away else 0.9, "mutation_scale": 7,
                         "shrinkA": 0, "shrinkB": 0, "linestyle": "-" if away else (0, (3, 2))}  # fmt: skip
                arrow = style | {"arrowstyle": "<|-" if back else "-|>"}
                axes.annotate("", ends[1], ends[0], arrowprops=arrow)


def _text(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", colour: str = INK, size: float = 8.5, **more: object
) -> None:
    axes.text(x, y, text, ha=ha, va="center", color=colour, fontsize=size, **more)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(40 + seed)


def _counts(way: Routes) -> tuple[int, int, int, int]:
    """Choices, those dropped, rows that leave their rank, tokens that no expert took."""
    sent = way.sent()
    away = sum(number for i, row in enumerate(sent) for j, number in enumerate(row) if i != j)
    return way.keep.numel(), int((~way.keep).sum()), away, int((~way.keep.any(-1)).sum())


def _title(way: Routes, stage: str, top_k: int) -> str:
    choices, dropped, away, lost = _counts(way)
    loads = torch.bincount(way.experts.flatten(), minlength=EXPERTS)
    most = int(loads.max())
    rows = "row" if way.limit == 1 else "rows"
    tokens = "token gets" if lost == 1 else "tokens get"
    experts = "likeliest expert" if top_k == 1 else f"{top_k} likeliest experts"
    return {
        "scores": f"Scores: for every token, a probability for each of {EXPERTS} experts",
        "top-k": f"Top {top_k}: each token chooses its {experts}; the busiest expert gets {most} of {choices} choices",
        "capacity": f"Capacity: an expert has room for {way.limit} {rows} from each rank; "
        f"{dropped} of {choices} choices are dropped",
        "dispatch": f"Dispatch, one all-to-all: {away} of {choices - dropped} rows leave their rank",
        "combine": f"Combine, one all-to-all back: each token adds up what it gets; {lost} {tokens} nothing",
    }[stage]


def _alt(way: Routes, stage: str, top_k: int) -> str:
    choices, dropped, away, lost = _counts(way)
    ranks = "1 rank" if way.ranks == 1 else f"{way.ranks} ranks"
    words = [f"{ranks} with {EACH} tokens each, {EXPERTS} experts, top {top_k}, stage {stage}"]
    if stage != "scores":
        loads = torch.bincount(way.experts.flatten(), minlength=EXPERTS).tolist()
        words.append(f"choices by expert {', '.join(map(str, loads))}")
    if stage in STAGES[2:]:
        words.append(f"room for {way.limit} rows from each rank, {dropped} of {choices} choices dropped")
    if stage in STAGES[3:]:
        table = "; ".join(f"rank {i} to ranks 0 on {' '.join(map(str, row))}" for i, row in enumerate(way.sent()))
        words.append(f"rows sent: {table}; {away} of them leave their rank")
    if stage == "combine":
        words.append(f"{lost} token{'' if lost == 1 else 's'} without any expert")
    return ". ".join(words) + "."
