"""The check of lesson 02 on ZeRO, stage 3: parameters that are there only while their module runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.zero import Shard
from torch import Tensor, nn

from autograde.check import Check
from autograde.checks.among import APART, FIVE, Among
from autograde.checks.replicas import NUMBER, expect_waits
from autograde.checks.shards import measured
from autograde.checks.training import group_of
from autograde.compare import compare, compare_all
from autograde.traffic import Calls, expect, size_in_words
from autograde.verdict import Finding

MOVED = 0.25  # what a step adds to every weight


class Unit(nn.Module):
    """Two matrices of unlike sizes and a norm; notes which shards are gathered while its forward runs.

    The norm is the first to run and the last to get its gradient, but neither the first nor the last to be registered.
    With `spare` there is a parameter more, which only scales the output where `scales`.
    """

    def __init__(self, width: int, inner: int, spare: bool):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, inner), nn.LayerNorm(width), nn.Linear(inner, width)
        self.spare = nn.Parameter(torch.linspace(0.5, 1.5, width)) if spare else None
        self.scales = False
        self.shards: list[Shard] = []
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(gathered(self.shards))
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x * self.spare if self.scales else x


@dataclass(frozen=True, kw_only=True)
class Units(Among):
    """A chain of modules with a shard each, of `inner` features. With `unused`, all have a parameter that the first
    backward leaves out; the first module uses it from the second step on, and nobody that of the others."""

    inner: tuple[int, ...]
    width: int = 5
    unused: bool = False

    def __str__(self) -> str:
        more = ", parameters that a backward leaves out" if self.unused else ""
        return f"{super().__str__()}, modules of {' and '.join(map(str, self.sizes()))} parameters{more}"

    def modules(self) -> list[Unit]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return [Unit(self.width, inner, self.unused).double() for inner in self.inner]

    def sizes(self) -> list[int]:
        return [sum(p.numel() for p in unit.parameters()) for unit in self.modules()]

    def x(self, rank: int, step: int) -> Tensor:
        return torch.randn(2 + rank % 2, self.width, generator=self._generator(rank, step), dtype=torch.float64)

    def alone(self, rank: int, step: int, whole: list[Unit]) -> dict[str, Tensor | None]:
        """What one rank's own sequences give in one process: the output, and the gradient of each parameter."""
        x = self.x(rank, step)
        whole[0].scales = self.unused and step > 0
        for unit in whole:
            unit.zero_grad()
            x = unit(x)
        F.softplus(x).sum().backward()
        grads = {f"gradient of parameter {k} of module {i}, step {step}": p.grad
                 for i, unit in enumerate(whole) for k, p in enumerate(unit.parameters())}  # fmt: skip
        return {f"the output of step {step}": x.detach()} | grads

    def _generator(self, rank: int, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + 10 * rank + step)


def gathered(shards: list[Shard]) -> list[int]:
    """The numbers of the shards whose parameters stand in memory."""
    return [i for i, shard in enumerate(shards) if shard.full.untyped_storage().nbytes()]


def _two_steps(solution: Any, case: Units) -> dict:
    """Two steps, in which each rank changes its own pieces, and a forward without gradients."""
    (group, _), rank, units, shards = group_of(case.groups), dist.get_rank(), case.modules(), []
    for unit in units:
        shards.append(Shard(list(unit.parameters()), group, stage=3))
        solution(unit, shards[-1])
    for unit in units:
        unit.shards = shards
    found, kept = {}, {"before forward": gathered(shards)}
    for step in (0, 1):
        x = case.x(rank, step)
        units[0].scales = case.unused and step > 0
        for unit in units:
            x = unit(x)
        kept[f"after forward {step}"] = gathered(shards)
        F.softplus(x).sum().backward()
        kept[f"after backward {step}"] = gathered(shards)
        found[f"the output of step {step}"] = x.detach().clone()
        for i, unit in enumerate(units):
            for k, p in enumerate(unit.parameters()):
                found[f"gradient of parameter {k} of module {i}, step {step}"] = p.grad
                p.grad = None
        for shard in shards:
            shard.piece += MOVED
    with torch.no_grad():
        x = case.x(rank, 2)
        for unit in units:
            x = unit(x)
    kept["after a forward without gradients"] = gathered(shards)
    found["the output without gradients"] = x.clone()
    return {"found": found, "kept": kept, "during": [list(unit.seen) for unit in units]}


class GatherParameters(Check):
    exercise = "zero.gather_parameters"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 2}

    def cases(self, seed: int, level: str) -> list[Units]:
        value, k = ("output", "gradient"), 1 + seed % 3
        if level == "visible":
            plans = [(((0, 1, 2),), (4, 7, 6), False), (((0, 2), (1, 3)), (3, 4), True)]
        else:
            plans = [(APART, (5 + k, 4), False), (FIVE, (2, 3 + k), True)]
        return [
            Units(
                world_size=sum(map(len, groups)), groups=groups, inner=inner, unused=unused, seed=seed + i,
                properties=value if unused else (),
            )
            for i, (groups, inner, unused) in enumerate(plans)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Units) -> dict:
        with measured() as held:
            outcome = _two_steps(solution, case)
        return outcome | {"held": held}

    def judge(self, case: Units, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks, expected = range(case.world_size), []
        for rank in ranks:
            whole, own = case.modules(), {}
            for step in (0, 1):
                own |= case.alone(rank, step, whole)
                with torch.no_grad():
                    for p in (p for unit in whole for p in unit.parameters()):
                        p += MOVED
            own["the output without gradients"] = case.alone(rank, 2, whole)["the output of step 2"]
            expected.append(own)
        for name in ("output", "gradient"):
            wanted = [{key: value for key, value in own.items() if name in key} for own in expected]
            got = [{key: o["found"].get(key) for key in own} for o, own in zip(outcomes, wanted, strict=True)]
            look = "Between two steps every rank changes its own piece. Who has gathered the new ones?"
            for key in wanted[0]:
                pairs = [(one[key], other[key]) for one, other in zip(got, wanted, strict=True)]
                found = compare(name, key, [a for a, _ in pairs], [b for _, b in pairs], "layers", look)
                if not found.passed:
                    break
            yield found if not found.passed else compare_all(name, got, wanted, "layers")
        yield from expect_waits("output", ledger)
        if case.unused:
            return
        lengths = [[-(-size // len(case.peers(rank))) for rank in ranks] for size in case.sizes()]
        calls = [Calls("all_gather", 3, 2, [NUMBER * n for n in of_rank], case.groups) for of_rank in lengths]
        look = "Two steps and a forward more: each forward gathers once, each backward once."
        found = expect("traffic", ledger, *calls, look=look)
        words = "a module's parameters: once a forward, once a backward"
        yield replace(found, seen=words) if found.passed else found
        yield self._memory(case, outcomes)

    @staticmethod
    def _memory(case: Units, outcomes: list) -> Finding:
        """Nothing between uses; in forward the module's own shard; at the peak two modules beside the pieces."""
        for rank, outcome in enumerate(outcomes):
            for when, shards in outcome["kept"].items():
                if shards:
                    seen = f"{when} rank {rank} still holds the parameters of module {shards[0]}"
                    return Finding("memory", False, seen, look="Which moment tells that nobody needs them any more?")
            for i, forwards in enumerate(outcome["during"]):
                others = [k for shards in forwards for k in shards if k != i]
                if others:
                    seen = f"while module {i} runs, rank {rank} holds the parameters of module {others[0]} too"
                    return Finding("memory", False, seen)
            n = len(case.peers(rank))
            lengths = [NUMBER * -(-size // n) for size in case.sizes()]
            limit = sum(lengths) + n * sum(sorted(lengths)[-2:])
            held = outcome["held"]["parameters"]
            if held > limit:
                seen = f"at the peak rank {rank} holds {size_in_words(held)} of parameters"
                wanted = f"expected {size_in_words(limit)} at most: its pieces, and two modules that are whole"
                return Finding("memory", False, seen, wanted)
        whole = size_in_words(NUMBER * sum(case.sizes()))
        return Finding("memory", True, f"nothing is whole between uses, of {whole}")
