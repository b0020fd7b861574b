"""Checks of lesson 01: servers, coordinates and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from fivefold.mesh import Coordinates

from autograde.check import Check
from autograde.checks.cube import ORDER, Layouts, asked, compare_calls, drawn, places, refusal
from autograde.verdict import Finding


class Servers(Check):
    exercise = "mesh.servers"
    points = {"full": 1, "partly filled": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        """The servers' sizes are the arguments; None leaves the argument out."""
        if level == "hidden":
            return [
                asked("full", "dp12,tp4 pp3,cp4,tp8,ep2", (4, 16), seed),
                asked("partly filled", drawn(seed), (5, 7)),
            ]
        return [
            asked("full", "dp4,pp2,tp4 tp16 dp2,cp2,pp2,tp2,ep4", (None, 4)),
            asked("partly filled", "dp3,tp3 tp5 dp5,cp2,ep10 dp1", (None, 6)),
        ]

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        found = {}
        for layout, size in product(case.layouts, case.arguments):
            if size is None:
                found[f"servers({layout})"] = solution(layout)
            else:
                found[f"servers({layout}, {size})"] = solution(layout, gpus_per_server=size)
        return found

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected = {}
        for layout, size in product(case.layouts, case.arguments):
            name = f"servers({layout})" if size is None else f"servers({layout}, {size})"
            expected[name] = len({gpu // (size or 8) for gpu in range(layout.world_size)})
        look = "How many ranks has the layout? How many of them does the last server hold?"
        if any(isinstance(got, float) for got in outcomes[0].values()):
            look = "Servers are counted: of which type is the number that the docstring promises?"
        yield compare_calls(case.properties[0], outcomes[0], expected, look)


BOUNDS = "The docstring says which error, and where."


class Place(Check):
    exercise = "mesh.coordinates"
    points = {"places": 2, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        texts = "tp3,cp2 dp2,pp3 dp2,cp3,pp4,tp5,ep3".split() if level == "visible" else drawn(seed, 4, 6)
        return [asked("places", texts, seed=seed), asked("refusal", texts, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        found: dict[str, Any] = {}
        for layout in case.layouts:
            n = layout.world_size
            if case.properties == ("refusal",):
                found |= {
                    f"coordinates({r}, {layout})": refusal(lambda r=r, at=layout: solution(r, at)) for r in (-1, n)
                }
                continue
            for r in range(n):
                at = solution(r, layout)
                named = [f"{axis}={getattr(at, axis, 'missing')}" for axis in ("dp", "pp", "cp", "tp")]
                plain = isinstance(at, tuple) and not hasattr(at, "_fields")
                found[f"coordinates({r}, {layout})"] = "a plain tuple" if plain else ", ".join(named)
        return found

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,), expected = case.properties, {}
        for layout in case.layouts:
            for r, at in enumerate(places(layout)) if name == "places" else ():
                words = [f"{axis}={i}" for axis, i in zip(ORDER, at, strict=True)]
                expected[f"coordinates({r}, {layout})"] = ", ".join(words)
            if name == "refusal":
                expected |= {f"coordinates({r}, {layout})": "LayoutError" for r in (-1, layout.world_size)}
        look = BOUNDS if name == "refusal" else "Which axis changes first, when you go from a rank to the next?"
        if "a plain tuple" in outcomes[0].values():
            look = "Return Coordinates(dp=…, pp=…, cp=…, tp=…): in a plain tuple the places have no names."
        yield compare_calls(name, outcomes[0], expected, look)


class Rank(Check):
    exercise = "mesh.rank"
    points = {"ranks": 2, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        texts = "tp3,cp2 dp2,pp3 dp2,cp3,pp4,tp5,ep3".split() if level == "visible" else drawn(seed, 4, 6)
        return [asked("ranks", texts, seed=seed), asked("refusal", texts, seed=seed)]

    @staticmethod
    def _calls(case: Layouts) -> Iterator[tuple[str, Coordinates, Any]]:
        """The call in words, the place, the layout: every place, or every axis just outside."""
        for layout in case.layouts:
            degrees = [getattr(layout, axis) for axis in ("dp", "pp", "cp", "tp")]
            if case.properties == ("ranks",):
                at = [Coordinates(*place) for place in product(*map(range, degrees))]
            else:
                zero = Coordinates(0, 0, 0, 0)
                at = [
                    zero._replace(**{axis: place})
                    for axis, degree in zip(zero._fields, degrees, strict=True)
                    for place in (-1, degree)
                ]
            for place in at:
                words = ", ".join(f"{axis}={i}" for axis, i in place._asdict().items())
                yield f"rank of ({words}) in {layout}", place, layout

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        calls = Rank._calls(case)
        if case.properties == ("ranks",):
            return {name: solution(place, layout) for name, place, layout in calls}
        return {name: refusal(lambda p=place, at=layout: solution(p, at)) for name, place, layout in calls}

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected: dict[str, Any] = {}
        for name, place, layout in self._calls(case):
            right = "LayoutError" if case.properties == ("refusal",) else places(layout).index(list(place))
            expected[name] = right
        look = BOUNDS if case.properties == ("refusal",) else "Is it the way back from `coordinates`, on every rank?"
        yield compare_calls(case.properties[0], outcomes[0], expected, look)
