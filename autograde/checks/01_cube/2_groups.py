"""Checks of lesson 01: the groups of an axis, and those of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fivefold.layout import Layout

from autograde.check import Check
from autograde.checks.cube import Layouts, asked, compare_calls, drawn, folded, listed, refusal, slices
from autograde.compare import compare
from autograde.verdict import Finding

ONE = ("dp", "cp", "pp", "tp")
SOME = (("tp", "dp"), ("dp", "cp"), ("cp", "pp"), ("tp", "cp", "dp"), ("pp", "tp", "cp", "dp"))
UNKNOWN = ("ep", "data", ("dp", "ep"), ("tp", "sp"))


class Groups(Check):
    exercise = "mesh.groups"
    points = {"one axis": 2, "several axes": 1, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        texts = ["cp3,tp2", "dp2,cp3,pp2,tp4,ep2"] if level == "visible" else drawn(seed)
        plans = {"one axis": (*ONE, ("cp",)), "several axes": SOME, "refusal": UNKNOWN}
        return [asked(name, texts, axes, seed) for name, axes in plans.items()]

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        found: dict[str, Any] = {}
        for layout in case.layouts:
            for axes in case.arguments:
                given = axes if isinstance(axes, str) else list(axes) if len(axes) == 3 else axes
                if case.properties == ("refusal",):
                    found[f"groups({layout}, {axes})"] = refusal(lambda given=given, at=layout: solution(at, given))
                else:
                    found[f"groups({layout}, {axes})"] = listed(solution(layout, given))
        return found

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected: dict[str, Any] = {}
        for layout in case.layouts:
            for axes in case.arguments:
                names = (axes,) if isinstance(axes, str) else axes
                right = "LayoutError" if case.properties == ("refusal",) else slices(layout, *names)
                expected[f"groups({layout}, {axes})"] = right
        look = "Two ranks are in one group when all coordinates but those of `axes` are equal."
        yield compare_calls(case.properties[0], outcomes[0], expected, "" if "refusal" in case.properties else look)


def _plans(seed: int, level: str) -> dict[str, list[str]]:
    """Layouts whose expert groups need no more than CP, those that reach over DP, and those of one rank."""
    if level == "hidden":
        alone = [text.rpartition(",")[0] for text in drawn(seed)]
        return {"within CP": drawn(seed, wide=False), "over DP": drawn(seed, wide=True), "ep1": alone}
    within = ["dp2,cp2,tp2,ep2", "dp3,cp4,tp2,ep2", "dp2,cp3,pp2,tp3,ep3"]
    over = ["dp4,tp2,ep2", "dp2,cp2,pp2,tp2,ep4", "dp6,cp2,pp3,ep4", "dp4,cp3,pp2,tp2,ep6"]
    return {"within CP": within, "over DP": over, "ep1": ["dp2,cp2,tp2", "pp2,tp3"]}


FOLDED = "Write the ranks of a DP x CP group into lines of ep. Which are a line, and which a column?"


def _judge(case: Layouts, outcome: dict, which: int) -> Finding:
    name = ("expert_groups", "expert_data_groups")[which]
    expected = {f"{name}({layout})": folded(layout)[which] for layout in case.layouts}
    alike = all(_in_any_order(outcome[call]) == _in_any_order(wanted) for call, wanted in expected.items())
    look = "These are the groups. In which order are they to be listed, and the ranks in them?" if alike else FOLDED
    return compare_calls(case.properties[0], outcome, expected, look)


def _in_any_order(lists: Any) -> Any:
    """What groups are the same in, whatever the order in which they and their ranks are listed."""
    return sorted(sorted(map(str, ranks)) for ranks in lists) if isinstance(lists, list) else lists


class ExpertGroups(Check):
    exercise = "mesh.expert_groups"
    points = {"within CP": 1, "over DP": 1, "ep1": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        return [asked(name, texts, seed=seed) for name, texts in _plans(seed, level).items()]

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        return {f"expert_groups({layout})": listed(solution(layout)) for layout in case.layouts}

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        yield _judge(case, outcomes[0], 0)


def _gradients(layout: Layout, seed: int) -> torch.Tensor:
    """What each rank wants of its expert: random, of float64, a row for each rank."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(layout.world_size, 3, generator=generator, dtype=torch.float64)


class ExpertDataGroups(Check):
    exercise = "mesh.expert_data_groups"
    points = {"within CP": 1, "over DP": 1, "ep1": 1, "gradient": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        """Lists of groups; then, on real ranks, groups made of them and gradients summed over these."""
        cases = [asked(name, texts, seed=seed) for name, texts in _plans(seed, level).items()]
        for text in ("dp4,tp2,ep2",) if level == "visible" else ("dp3,cp2,pp2,ep2",):
            layout = Layout.parse(text)
            made = {"world_size": layout.world_size, "layouts": (layout,)}
            cases.append(Layouts(**made, seed=seed, properties=("gradient",)))
        return cases

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        if case.properties != ("gradient",):
            return {f"expert_data_groups({layout})": listed(solution(layout)) for layout in case.layouts}
        (layout,) = case.layouts
        gradient = _gradients(layout, case.seed)[dist.get_rank()]
        for ranks in solution(layout):
            group = dist.new_group(list(ranks), group_desc="ep_dp")
            if dist.get_rank() in ranks:
                dist.all_reduce(gradient, group=group)
        return {"gradient": gradient}

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.properties != ("gradient",):
            yield _judge(case, outcomes[0], 1)
            return
        (layout,) = case.layouts
        rows, expected = _gradients(layout, case.seed), [None] * layout.world_size
        for ranks in folded(layout)[1]:
            for rank in ranks:
                expected[rank] = rows[ranks].sum(0)
        look = "Which ranks hold a copy of this rank's experts? Theirs are the gradients to add."
        yield compare("gradient", "the expert's gradient", [o["gradient"] for o in outcomes], expected, look=look)
