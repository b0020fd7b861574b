"""Checks of lesson 01: blocks of work, and what stays inside a server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from autograde.check import Check
from autograde.checks.cube import Layouts, asked, compare_calls, drawn, folded, places, slices
from autograde.verdict import Finding

EDGES = ("sequences", "tokens", "layers")


class BlocksOfWork(Check):
    exercise = "mesh.blocks_of_work"
    points = {"even": 1, "uneven": 1, "shared": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        """The arguments are the cube: its sequences, tokens and layers."""
        if level == "hidden":
            sizes = (5 + seed % 4, 7, 9 + seed % 3), (0, 2, 5)
            even, shared = asked("even", "dp3,cp4,pp2,tp2", ((6, 16, 8),)), asked("shared", "pp3,tp5", ((4, 4, 6),))
            return [even, asked("uneven", drawn(seed), sizes), shared]
        return [
            asked("even", "dp2,cp3 pp4,cp2 dp2,cp2,pp2", ((4, 12, 8),)),
            asked("uneven", "dp4,cp3 cp2,pp3 dp3,cp2,pp2", ((10, 7, 5), (2, 1, 0))),
            asked("shared", "dp2,tp3 pp2,tp4 dp2,cp2,pp2,tp2,ep4", ((8, 16, 4),)),
        ]

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        found: dict[str, Any] = {}
        for layout, sizes in product(case.layouts, case.arguments):
            blocks, name = solution(layout, *sizes), f"blocks_of_work({layout}, {', '.join(map(str, sizes))})"
            if not isinstance(blocks, list | tuple):
                found[f"{name}, in all"] = f"a {type(blocks).__name__}"
                continue
            found[f"{name}, in all"] = len(blocks)
            for rank, block in enumerate(blocks):
                for edge in ("sequences", "tokens", "layers"):
                    part = getattr(block, edge, None)
                    shown = repr(part) if isinstance(part, range) else f"a {type(part).__name__}"
                    if isinstance(part, range) and not part:
                        shown = "empty"
                    found[f"{name}[{rank}].{edge}"] = shown
        return found

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected: dict[str, Any] = {}
        for layout, sizes in product(case.layouts, case.arguments):
            name = f"blocks_of_work({layout}, {', '.join(map(str, sizes))})"
            expected[f"{name}, in all"] = layout.world_size
            split = [(sizes[0], layout.dp, 0), (sizes[1], layout.cp, 2), (sizes[2], layout.pp, 1)]
            for rank, at in enumerate(places(layout)):
                for edge, (size, degree, axis) in zip(EDGES, split, strict=True):
                    piece = torch.arange(size).tensor_split(degree)[at[axis]].tolist()
                    expected[f"{name}[{rank}].{edge}"] = repr(range(piece[0], piece[-1] + 1)) if piece else "empty"
        look = "Which axis cuts this edge, and where does the rank stand on it? Where do the numbers left over go?"
        yield compare_calls(case.properties[0], outcomes[0], expected, look)


class InsideServer(Check):
    exercise = "mesh.inside_server"
    points = {"tensor": 1, "other axes": 1, "odd sizes": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        """The arguments are pairs of a server's size and an axis; None leaves the argument out."""
        if level == "hidden":
            every = tuple(product((2 + seed % 3, 6, 9), ("tp", "cp", "pp", "dp", "ep")))
            sizes = tuple((size, None) for size in (None, 3, 4))
            others, odd = (asked(name, drawn(seed + i, 5), every) for i, name in ((1, "other axes"), (2, "odd sizes")))
            return [asked("tensor", drawn(seed, 6), sizes), others, odd]
        eight = tuple((None, axis) for axis in ("cp", "pp", "dp", "ep"))
        return [
            asked("tensor", "dp4,pp2,tp4 tp8,dp2 tp16 tp16,dp2", ((None, None), (16, None), (4, None))),
            asked("other axes", "cp2,tp4 cp2,tp8 pp4,tp2 pp2,cp2,tp4 dp2,tp4 dp4,cp2,tp2,ep2 dp4,cp2,tp2,ep8", eight),
            asked(
                "odd sizes", "dp2,tp3 dp3,tp3 dp2,tp5 dp5,tp6 pp3,cp3", ((None, None), (5, None), (9, "cp"), (6, "pp"))
            ),
        ]

    @staticmethod
    def _calls(case: Layouts) -> Iterator[tuple[str, Any, dict]]:
        for layout, (size, axis) in product(case.layouts, case.arguments):
            given = {} if size is None else {"gpus_per_server": size}
            given |= {} if axis is None else {"axis": axis}
            words = "".join(f", {name}={value!r}" for name, value in given.items())
            yield f"inside_server({layout}{words})", layout, given

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        return {name: solution(layout, **given) for name, layout, given in InsideServer._calls(case)}

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected: dict[str, Any] = {}
        for name, layout, given in self._calls(case):
            size, axis = given.get("gpus_per_server", 8), given.get("axis", "tp")
            spread = folded(layout)[0] if axis == "ep" else slices(layout, axis)
            expected[name] = all(len({rank // size for rank in ranks}) == 1 for ranks in spread)
        look = "Write the ranks of each group, and the server of each rank. One group that spills is enough."
        yield compare_calls(case.properties[0], outcomes[0], expected, look)
