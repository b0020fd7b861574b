"""Checks of lesson 03: the conjugate pair f and g."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autograde.case import Case, ranks_in_words
from autograde.check import Check
from autograde.compare import compare
from autograde.traffic import Calls, expect


@dataclass(frozen=True, kw_only=True)
class Conjugate(Case):
    """The pair f and g. Ranks are in groups of `group_size`: with fewer than all of them, the wrong group shows."""

    shape: tuple[int, ...]
    group_size: int
    use: str = "f(x)"  # or another expression, in which a mistake shows that is none in this one

    def __str__(self) -> str:
        use = "" if self.use == "f(x)" else f", in {self.use}"
        return f"{ranks_in_words(self.groups())}, x of shape {self.shape}{use}"

    def groups(self) -> list[list[int]]:
        return [list(range(i, i + self.group_size)) for i in range(0, self.world_size, self.group_size)]


def _cases(seed: int, level: str) -> list[Conjugate]:
    sizes = (
        [(4, 2, (3, 5)), (3, 3, (7,))] if level == "visible" else [(2, 2, (1, 3, 2)), (6, 3, (4, 5)), (4, 4, (2, 9))]
    )
    return [
        Conjugate(world_size=world, group_size=group, shape=shape, seed=seed + i)
        for i, (world, group, shape) in enumerate(sizes)
    ]


def _numbers(case: Conjugate, what: int) -> torch.Tensor:
    """Random numbers for every rank: row r is rank r's."""
    generator = torch.Generator().manual_seed(1000 * case.seed + what)
    return torch.randn(case.world_size, *case.shape, generator=generator, dtype=torch.float64)


def _run(solution: Any, case: Conjugate) -> dict:
    """The solution's output for this rank's x, and the gradient of x for this rank's gradient of the output."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in case.groups()]
    x = _numbers(case, 0)[rank].requires_grad_()
    given = x.detach().clone()
    weight = _numbers(case, 1)[rank]
    incoming = weight.clone()
    group = groups[rank // case.group_size]
    if case.use == "x + f(x)":
        output = x + solution(x, group)
    elif case.use == "f(f(x, group), world)":
        output = solution(solution(x, group), dist.group.WORLD)
    else:
        output = solution(x, group)
    before = output.detach().clone()
    if output.requires_grad:
        torch.autograd.backward([output * 1], [incoming])
    return {"output": before, "x.grad": x.grad, "x": x.detach(), "given": given, "incoming": incoming}


def _sums(case: Conjugate, rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows[group].sum(0) for group in case.groups() for _ in group]


SHARED = "The gradient that comes in here also goes to the other x. Is it overwritten, or is more summed than f's part?"
TWICE = "Each call has a group of its own. Where does backward find that of its call?"


class CopyToRanks(Check):
    exercise = "tensor.copy_to_ranks"
    points = {"output": 1, "gradient": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Conjugate]:
        """Also x in two places, whose gradients meet, and two groups in one graph."""
        uses = [
            Conjugate(world_size=4, group_size=2, shape=(3, 2), seed=seed + 10, use=use, properties=("gradient",))
            for use in ("x + f(x)", "f(f(x, group), world)")
        ]
        return _cases(seed, level) + uses

    program = staticmethod(_run)

    def judge(self, case: Conjugate, outcomes: list, ledger: Any) -> list:
        x, weight = _numbers(case, 0), _numbers(case, 1)
        size = 8 * x[0].numel()
        wanted, look = _sums(case, weight), "Every rank used its own copy of x. Whose gradients does x get?"
        if case.use == "x + f(x)":
            wanted, look = [one + total for one, total in zip(weight, wanted, strict=True)], SHARED
        elif case.use != "f(x)":
            wanted, look = [case.group_size * weight.sum(0)] * case.world_size, TWICE
        yield compare("gradient", "x.grad", [o["x.grad"] for o in outcomes], wanted, look=look)
        if case.use != "f(x)":
            return
        yield compare("output", "the output", [o["output"] for o in outcomes], list(x), "exact")
        yield compare("gradient", "the incoming gradient", [o["incoming"] for o in outcomes], list(weight), "exact")
        yield expect("traffic", ledger, Calls("all_reduce", backward=1, bytes=size, groups=case.groups()))


class SumOverRanks(Check):
    exercise = "tensor.sum_over_ranks"
    points = {"output": 1, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Conjugate]:
        return _cases(seed, level)

    program = staticmethod(_run)

    def judge(self, case: Conjugate, outcomes: list, ledger: Any) -> list:
        x, weight = _numbers(case, 0), _numbers(case, 1)
        size = 8 * x[0].numel()
        yield compare("output", "the output", [o["output"] for o in outcomes], _sums(case, x))
        yield compare("output", "x afterwards", [o["x"] for o in outcomes], list(x), "exact")
        yield compare(
            "gradient", "x.grad", [o["x.grad"] for o in outcomes], list(weight), "exact",
            look="Every rank has the gradient of the sum already. Is that of its part another one?",
        )  # fmt: skip
        yield expect("traffic", ledger, Calls("all_reduce", forward=1, bytes=size, groups=case.groups()))
