"""The check of lesson 07 for parameters that two ranks hold: an embedding tied to the output layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fivefold import pipeline
from fivefold.pipeline import Schedule
from torch import nn

from autograde.case import Case, ranks_in_words
from autograde.check import Check
from autograde.checks import staged
from autograde.checks.messages import expect_messages
from autograde.checks.training import group_of
from autograde.compare import compare_all
from autograde.verdict import Finding

NUMBER = 8  # bytes of a float64
WHOLE = "What does each of the two have: the whole gradient, or that of its own use of the weight?"


@dataclass(frozen=True, kw_only=True)
class Tied(Case):
    """Ranks of one schedule or two, with a weight that the first and the last stage share, or with none."""

    kind: str
    m: int
    v: int = 0
    groups: tuple[tuple[int, ...], ...]
    tied: bool = True
    unused: bool = False  # the last stage's use of the tied weight has no gradient here

    def __str__(self) -> str:
        tied = "a tied weight" if self.tied else "none tied"
        return f"{self.kind} on {ranks_in_words(self.groups)}, {tied}{', one of them without a gradient' * self.unused}"

    def schedule(self, ranks: int) -> Schedule:
        return getattr(pipeline, self.kind)(*((ranks, self.m, self.v) if self.v else (ranks, self.m)))


class SumCopies(Check):
    exercise = "pipeline.sum_copies"
    points = {"gradient": 2, "copies": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Tied]:
        four, two, uneven, three = ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0, 2, 4), (1, 3))
        tied, copies = ("gradient", "traffic"), ("copies", "traffic")
        plans = [
            ("one_f_one_b", 4, 0, four, True, False, tied),
            ("interleaved", 4, 2, two, True, False, tied),
            ("gpipe", 2, 0, uneven, True, False, tied),
            ("dualpipe", 8, 0, four, False, False, copies),
            ("one_f_one_b", 4, 0, four, False, False, copies),
        ]
        if level == "hidden":
            plans = [
                ("one_f_one_b", 3, 0, three, True, False, tied),
                ("zb_v", 7, 0, four, True, False, tied),
                ("gpipe", 2, 0, ((0, 1), (2, 3)), True, True, tied),
                ("dualpipe", 4, 0, two, True, False, copies),
            ]
        return [
            Tied(
                world_size=max(map(max, groups)) + 1, seed=seed + number, kind=kind, m=m, v=v, groups=groups, tied=tied,
                unused=unused, properties=properties,
            )
            for number, (kind, m, v, groups, tied, unused, properties) in enumerate(plans)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Tied) -> dict:
        group, place = group_of(case.groups)
        schedule = case.schedule(group.size())
        stages, tied = build(case, schedule, place, group.rank())
        solution(schedule, stages, group, tied)
        dist.barrier()
        return {
            f"stage {number} {name}.grad": p.grad
            for number, stage in stages.items()
            for name, p in stage.named_parameters()
            if p.grad is not None
        }

    def judge(self, case: Tied, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected: list[dict] = [{} for _ in outcomes]
        messages, sent = [0] * case.world_size, [0] * case.world_size
        for place, ranks in enumerate(case.groups):
            schedule = case.schedule(len(ranks))
            held = [build(case, schedule, place, number) for number in range(len(ranks))]
            for number, rank in enumerate(ranks):
                expected[rank] = _whole(schedule, held, number)
                for peer in range(len(ranks)):
                    shared = _shared(schedule, held, number, peer)
                    if shared:
                        messages[rank] += 1
                        sent[rank] += NUMBER * shared
        yield compare_all(case.properties[0], outcomes, expected, look=WHOLE)
        look = "Who holds a copy of what? All that two ranks share goes in one message each way."
        yield expect_messages("traffic", ledger, case.groups, messages, sent, look=look)


class _Holder(nn.Module):
    """A stage with a weight of its own and, where it is the first or the last, the tied one."""

    def __init__(self, own: torch.Tensor, shared: nn.Parameter | None):
        super().__init__()
        self.own, self.bias = nn.Parameter(own), nn.Parameter(own[0].clone())
        if shared is not None:
            self.shared = shared


def build(case: Tied, schedule: Schedule, place: int, rank: int) -> tuple[dict[int, nn.Module], nn.Parameter | None]:
    """The stages that one rank holds, with the gradients that it has of each, and the tied weight if it has it."""
    last = schedule.num_stages - 1
    mine = schedule.stages_of(rank)
    tied = nn.Parameter(staged.random(7, 4, 3)) if case.tied and {0, last} & set(mine) else None
    stages = {n: _Holder(staged.random(n + 10, 2 + n % 3, 3), tied if n in (0, last) else None) for n in mine}
    for n, stage in stages.items():
        for k, parameter in enumerate((stage.own, stage.bias)):
            parameter.grad = staged.random(
                10_000 * case.seed + 1000 * place + 100 * rank + 10 * n + k, *parameter.shape
            )
    if tied is not None and not (case.unused and rank > 0):
        tied.grad = staged.random(10_000 * case.seed + 1000 * place + 100 * rank + 9, 4, 3)
    return stages, tied


def _whole(schedule: Schedule, held: list, number: int) -> dict[str, torch.Tensor]:
    """What one rank is to have: of each stage the sum over the ranks that hold it, of the tied weight over all."""
    stages, tied = held[number]
    found = {}
    for n, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if parameter is tied:
                parts = [other.grad for _, other in held if other is not None]
            else:
                parts = [getattr(held[rank][0][n], name).grad for rank in schedule.ranks_of(n)]
            found[f"stage {n} {name}.grad"] = sum(part for part in parts if part is not None)
    return found


def _shared(schedule: Schedule, held: list, number: int, peer: int) -> int:
    """How many numbers of parameters both ranks hold."""
    if number == peer:
        return 0
    (mine, tied), (others, their_tied) = held[number], held[peer]
    own = sum(p.numel() for n in mine.keys() & others.keys() for p in (mine[n].own, mine[n].bias))
    return own + (tied.numel() if tied is not None and their_tied is not None else 0)
