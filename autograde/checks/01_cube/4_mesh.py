"""Check of lesson 01: process groups on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fivefold.layout import Layout
from torch.distributed import distributed_c10d as c10d

from autograde.check import Check
from autograde.checks.cube import Layouts, compare_calls, folded, places, refusal, slices
from autograde.compare import compare
from autograde.verdict import Finding

NAMES = ("tp", "cp", "pp", "dp", "dp_cp", "ep", "ep_dp", "tied")


def _number(rank: int, name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + NAMES.index(name))
    return torch.randn(2, generator=generator, dtype=torch.float64)


def _members(layout: Layout) -> dict[str, list[list[int]]]:
    """The ranks of each group, by the group's name; a rank that is in no tied group has none."""
    found = {axis: slices(layout, axis) for axis in ("tp", "cp", "pp", "dp")}
    found["dp_cp"] = slices(layout, "dp", "cp")
    found["ep"], found["ep_dp"] = folded(layout)
    found["tied"] = [[ranks[0], ranks[-1]] for ranks in found["pp"] if len(ranks) > 1]
    return found


class MakeMesh(Check):
    exercise = "mesh.make_mesh"
    points = {"order": 1, "groups": 2, "names": 1, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Layouts]:
        """In pp3 every rank is in the first groups; the one of the tied embedding is without rank 1."""
        texts = ["pp3", "dp2,cp2,tp2,ep2", "pp3,tp2"]
        texts = texts if level == "visible" else ["dp2,cp3,pp2,ep2", "dp3,cp2,ep3"]
        layouts = [Layout.parse(text) for text in texts]
        return [Layouts(world_size=one.world_size, seed=seed, layouts=(one,)) for one in layouts]

    @staticmethod
    def program(solution: Any, case: Layouts) -> dict:
        """A sum over each group; every call of `new_group`, but those that other ranks need not hear of."""
        (layout,), me, calls, new_group = case.layouts, dist.get_rank(), [], dist.new_group

        def recorded(ranks: Any = None, *args: Any, **named: Any) -> Any:
            if not named.get("use_local_synchronization"):
                calls.append([named.get("group_desc"), None if ranks is None else list(ranks)])
            return new_group(ranks, *args, **named)

        dist.new_group = c10d.new_group = recorded
        try:
            wrong = Layout(dp=case.world_size + 1)
            refused = {f"make_mesh({wrong}) on {case.world_size} ranks": refusal(lambda: solution(wrong))}
            mesh = solution(layout)
        finally:
            dist.new_group = c10d.new_group = new_group
        sums, members, names = {}, {}, {}
        for name in NAMES:
            group = getattr(mesh, name)
            members[name] = None if group is None else dist.get_process_group_ranks(group)
            names[name] = None if group is None else group.group_desc
            value = _number(me, name, case.seed)
            if group is not None:
                dist.all_reduce(value, group=group)
            sums[name] = value
        place = [mesh.coordinates.dp, mesh.coordinates.pp, mesh.coordinates.cp, mesh.coordinates.tp]
        own = {"rank": mesh.rank, "coordinates": place, "expert_rank": mesh.expert_rank, "world": mesh.world.size()}
        return {"sums": sums, "members": members, "names": names, "refused": refused, "own": own, "calls": calls}

    def judge(self, case: Layouts, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (layout,), every = case.layouts, range(case.world_size)
        yield self._order(outcomes)
        for name, lists in _members(layout).items():
            own = {rank: ranks for ranks in lists for rank in ranks}
            look = f"Over which ranks is mesh.{name}?"
            got = [o["members"][name] for o in outcomes]
            yield compare("groups", f"mesh.{name}", got, [own.get(rank) for rank in every], look=look)
            sums = [sum(_number(r, name, case.seed) for r in own.get(rank, [rank])) for rank in every]
            yield compare("groups", f"the sum over mesh.{name}", [o["sums"][name] for o in outcomes], sums, look=look)
            yield self._names(case, outcomes, name, own)
        at = places(layout)
        for rank in every:
            expert = next(ranks.index(rank) for ranks in folded(layout)[0] if rank in ranks)
            own = {"rank": rank, "coordinates": at[rank], "expert_rank": expert, "world": case.world_size}
            yield compare_calls("groups", outcomes[rank]["own"], own)
            wrong = f"make_mesh(dp{case.world_size + 1}) on {case.world_size} ranks"
            yield compare_calls("refusal", outcomes[rank]["refused"], {wrong: "LayoutError"})

    def _order(self, outcomes: list) -> Finding:
        first = outcomes[0]["calls"]
        for rank, outcome in enumerate(outcomes):
            if outcome["calls"] != first:
                return Finding("order", False, f"rank {rank} makes other groups than rank 0, or in another order")
        twice = [call for i, call in enumerate(first) if call in first[:i]]
        if twice:
            return Finding("order", False, f"group {twice[0][1]} is made twice under the name {twice[0][0]}")
        if not first:
            return Finding("order", True, "each group made by its members alone")
        return Finding("order", True, f"{len(first)} groups, made in one order on all ranks")

    def _names(self, case: Layouts, outcomes: list, name: str, own: dict[int, list[int]]) -> Finding:
        """Groups of more than one rank are called by their axis; dp_cp and ep_dp by another where they are the same."""
        members = _members(case.layouts[0])
        for rank, ranks in own.items():
            alike = {other for other, lists in members.items() if ranks in lists and other in ("dp", "dp_cp", "ep_dp")}
            called, allowed = outcomes[rank]["names"][name], {name} | (alike if name in ("dp_cp", "ep_dp") else set())
            if len(ranks) > 1 and called not in allowed:
                seen = f"mesh.{name} is called {called!r} on rank {rank}, expected {name!r}"
                return Finding("names", False, seen, look="Figures take a group's colour from its name.")
        return Finding("names", True, f"{len(NAMES)} names")
