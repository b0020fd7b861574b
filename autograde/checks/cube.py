"""Cases of layouts, and where their ranks stand by an array of ranks: what checks of the work cube compare with.

Cases travel to the ranks, so this file imports next to nothing. It uses nothing of `fivefold.mesh`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fivefold.layout import Layout, LayoutError

from autograde.case import Case
from autograde.verdict import Finding, numbered

ORDER = ("dp", "pp", "cp", "tp")  # outermost first


@dataclass(frozen=True, kw_only=True)
class Layouts(Case):
    """Layouts for a function that is arithmetic, and more arguments for it, in the form that its check has."""

    layouts: tuple[Layout, ...]
    arguments: tuple = ()

    def __str__(self) -> str:
        return f"{'layout' if len(self.layouts) == 1 else 'layouts'} {' · '.join(map(str, self.layouts))}"


def asked(
    properties: str | tuple[str, ...], texts: str | Sequence[str], arguments: tuple = (), seed: int = 0
) -> Layouts:
    """A case for some properties, of layouts written as text with blanks between them."""
    names = (properties,) if isinstance(properties, str) else properties
    layouts = tuple(map(Layout.parse, texts.split() if isinstance(texts, str) else texts))
    return Layouts(world_size=1, seed=seed, properties=names, layouts=layouts, arguments=arguments)


def drawn(seed: int, number: int = 3, most: int = 4, wide: bool | None = None) -> list[str]:
    """Random layouts with an ep that divides dp·cp; `wide` asks for one above cp, or for one of 2 up to cp."""
    draw, found = random.Random(seed), []
    while len(found) < number:
        dp, cp, pp, tp = (draw.randint(1, most) for _ in range(4))
        choices = [d for d in range(1, dp * cp + 1) if dp * cp % d == 0]
        if wide is not None:
            choices = [d for d in choices if (d > cp if wide else 1 < d <= cp)]
        if choices and dp * cp * pp * tp > 3:
            found.append(f"dp{dp},cp{cp},pp{pp},tp{tp},ep{draw.choice(choices)}")
    return found


def cube(layout: Layout) -> torch.Tensor:
    """The ranks in an array [dp, pp, cp, tp]."""
    return torch.arange(layout.world_size).view([getattr(layout, axis) for axis in ORDER])


def places(layout: Layout) -> list[list[int]]:
    """The place of each rank in that array."""
    return [(cube(layout) == rank).nonzero()[0].tolist() for rank in range(layout.world_size)]


def slices(layout: Layout, *axes: str) -> list[list[int]]:
    """The ranks that differ in these axes only, by first rank."""
    inside = [i for i, axis in enumerate(ORDER) if axis in axes]
    moved = cube(layout).movedim(inside, list(range(4 - len(inside), 4)))
    return sorted(moved.reshape(-1, math.prod(getattr(layout, axis) for axis in set(axes))).tolist())


def folded(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """Expert groups and expert-data groups: rows and columns of each DP x CP group written ep wide."""
    rows, columns = [], []
    for ranks in slices(layout, "dp", "cp"):
        table = torch.tensor(ranks).view(-1, layout.ep)
        rows += table.tolist()
        columns += table.T.tolist()
    return sorted(rows), sorted(columns)


def refusal(call: Callable[[], Any]) -> str:
    """What comes of a call that should raise a LayoutError."""
    try:
        result = call()
    except LayoutError:
        return "LayoutError"
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    name = type(result).__name__
    return f"returns {'an' if name[0] in 'aeiou' else 'a'} {name}"


def listed(result: Any) -> Any:
    """Groups as lists of plain numbers; what is not a list of lists of ranks, in words."""
    if not isinstance(result, list | tuple):
        return f"a {type(result).__name__}"
    strange = [item for item in result if not isinstance(item, list | tuple | range)]
    if strange:
        return f"a list with {_brief(strange[0])} in it"
    return [[r if type(r) is int else f"a {type(r).__name__}" for r in item] for item in result]


def compare_calls(property: str, got: dict[str, Any], expected: dict[str, Any], look: str = "") -> Finding:
    """Calls by what they are in words: the first whose result differs, or how many there were."""
    for call, wanted in expected.items():
        result = got.get(call)
        if type(result) is not type(wanted) or result != wanted:
            where = next(differing(result, wanted), "")
            verb = "" if isinstance(result, str) and result.startswith("returns ") else "is "
            seen = f"{call} {verb}{_brief(result)}, expected {_brief(wanted)}"
            short = not where or len(seen) < 160
            return Finding(property, False, seen if short else f"{call}: {where}", where if short else "", look)
    return Finding(property, True, numbered(len(expected), "call"))


def differing(result: Any, wanted: Any) -> Iterator[str]:
    """The first place in which two lists differ, in words."""
    if not isinstance(result, list) or not isinstance(wanted, list):
        return
    if len(result) != len(wanted):
        yield f"{len(result)} in the list, expected {len(wanted)}"
    for i, (one, other) in enumerate(zip(result, wanted, strict=False)):
        if one != other:
            yield f"at [{i}] {_brief(one)}, expected {_brief(other)}"


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 70 else text[:67] + "..."
