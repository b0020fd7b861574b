"""What is checked of the memory and of the seconds of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fivefold import plan
from fivefold.layout import Layout

from autograde.check import Check
from autograde.checks.planning import (
    DENSE,
    GPT,
    MIXED,
    UNEVEN,
    Planned,
    counted,
    data_by_hand,
    fields,
    memory_by_hand,
    numbers,
    seconds_by_hand,
    work_for,
)
from autograde.verdict import Finding

MEMORY = ("parameters", "gradients", "optimizer", "activations", "limit")
FIRST = plan.Plan(Layout(dp=8, tp=2), 1, "one_f_one_b", 1, 2)
A100, LLAMA3 = plan.cluster("a100"), plan.cluster("llama3")


def plans_of(model: plan.Model, seed: int) -> tuple[plan.Plan, ...]:
    """Plans that differ in all that can be chosen, the pipelines uneven where the model's layers are."""
    pp, v = (4, 4) if model is UNEVEN else (2, 2)
    found = (
        plan.Plan(Layout(4, 2, pp, 2), 1, "interleaved", v, 1, "full"),
        plan.Plan(Layout(8, 1, pp, 1), 0, "one_f_one_b", 1, 2),
        plan.Plan(Layout(2, 4, pp, 4), 2, "gpipe", 1, 1 + seed % 2, "selective"),
        plan.Plan(Layout(4, 1, pp, 2), 0, "zb_h1", 1, 1),
    )
    if model.experts:
        found += (plan.Plan(Layout(4, 2, pp, 2, 4), 1, "one_f_one_b", 1, 1), plan.Plan(Layout(8, ep=8), 3))
    return found


class Fits(Check):
    exercise = "plan.fits"
    points = {"states": 2, "stage 3": 1, "experts": 1, "activations": 2, "limit": 1}

    def cases(self, seed: int, level: str) -> list[Planned]:
        def case(kind: str, model: plan.Model, *some: plan.Plan, **more: Any) -> Planned:
            work = work_for(model, 64, 2048 if level == "visible" else 1024 * (2 + seed % 3))
            return Planned(
                world_size=1, model=model, work=work, plans=some, cluster=A100, properties=(kind,), seed=seed, **more
            )

        states = (
            FIRST,
            replace(FIRST, zero=0),
            replace(FIRST, zero=2),
            plan.Plan(Layout(64), 2),
            plan.Plan(Layout(32, 2), 2),
        )
        states += (plan.Plan(Layout(4, 4, 2, 2), 1),)
        third = (
            plan.Plan(Layout(8, 2), 3, micro_batch=2),
            plan.Plan(Layout(1, 1, 2), 3),
            plan.Plan(Layout(4, pp=2), 3),
        )
        two = plan.Software(gradient_bytes=2, element_bytes=4, optimizer_bytes=8)
        spread = [plan.Plan(Layout(8, 2, 1, 2, ep), zero) for ep in (1, 4, 8) for zero in (0, 1, 3)]
        model = DENSE if level == "visible" else UNEVEN
        return [
            case("states", model, *states), case("states", GPT, *states, software=two),
            case("stage 3", model, *third), case("experts", MIXED, *spread),
            case("activations", model, FIRST, *plans_of(model, seed)),
            case("activations", GPT, *plans_of(GPT, seed), software=plan.MEGATRON_2021),
            case("activations", UNEVEN, plan.Plan(Layout(4, pp=4), 1)), case("activations", GPT, FIRST, software=two),
            case("limit", model, FIRST), replace(case("limit", model, FIRST), cluster=plan.cluster("h200")),
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Planned) -> list:
        answers = [solution(case.model, one, case.work, case.cluster, case.software) for one in case.plans]
        return [fields(answer, (*MEMORY, "fits")) for answer in answers]

    def judge(self, case: Planned, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (kind,) = case.properties
        names = {"activations": ("activations",), "limit": ("limit",)}.get(kind, MEMORY[:3])
        for one, got in zip(case.plans, outcomes[0], strict=True):
            wanted = memory_by_hand(case, one)
            for name in names:
                yield numbers(kind, f"{name} of {one}, {case.model.name}{case.programs},", got[name], wanted[name])
            if kind == "limit":
                fit = sum(wanted[name] for name in MEMORY[:4]) <= wanted["limit"]
                yield Finding("limit", got["fits"] == fit, f"it says fits={got['fits']}, expected {fit}")


class StepSeconds(Check):
    exercise = "plan.step_seconds"
    points = {"compute": 1, "exchanges": 1, "pipeline": 2, "data": 1}

    PARTS = {"compute": ("compute",), "exchanges": ("tp", "cp", "ep"), "pipeline": ("pp", "bubble"), "data": ("dp",)}

    def cases(self, seed: int, level: str) -> list[Planned]:
        found = []
        for model, cluster in ((DENSE, A100), (UNEVEN, LLAMA3), (MIXED, LLAMA3)):
            if level == "visible" or model is not DENSE:
                work = work_for(model, 64, 2048 if level == "visible" else 512 * (2 + seed % 5))
                some = (FIRST, *plans_of(model, seed))
                found.append(Planned(world_size=1, model=model, work=work, plans=some, cluster=cluster, seed=seed))
        apart = plan.cluster("a100", gpus_per_server=2)
        some = (FIRST, *plans_of(GPT, seed))
        work, software = work_for(GPT, 64, 1024), plan.COURSE
        return [*found, Planned(
            world_size=1, model=GPT, work=work, plans=some, cluster=apart, software=software, seed=seed
        )]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Planned) -> list:
        answers = [solution(case.model, one, case.work, case.cluster, case.software) for one in case.plans]
        return [fields(answer, ("compute", "tp", "cp", "ep", "pp", "dp", "bubble")) for answer in answers]

    def judge(self, case: Planned, outcomes: list, ledger: Any) -> Iterator[Finding]:
        for one, got in zip(case.plans, outcomes[0], strict=True):
            wanted = seconds_by_hand(case, one)
            for kind, names in self.PARTS.items():
                for name in names:
                    m = one.num_microbatches(case.work)
                    words = f"{name} of {one}, {counted(m, 'micro-batch', 'es')}, {case.model.name}{case.programs},"
                    yield numbers(kind, words, got[name], wanted[name])


class DataSeconds(Check):
    exercise = "plan.data_seconds"
    points = {"hidden": 2, "exposed": 1, "stage 3": 1}

    def cases(self, seed: int, level: str) -> list[Planned]:
        def case(kind: str, model: plan.Model, some: tuple, software: plan.Software = plan.MODERN) -> Planned:
            work = work_for(model, 128, 1024 if level == "visible" else 512 * (1 + seed % 4))
            return Planned(
                world_size=1, model=model, work=work, plans=some, cluster=A100, software=software,
                properties=(kind,), seed=seed,
            )  # fmt: skip

        some = tuple(one for one in plans_of(DENSE, seed) if one.zero < 3)
        some += (plan.Plan(Layout(64), 1), plan.Plan(Layout(1, 1, 2, 2), 1), plan.Plan(Layout(4, 1, 4, 8), 0))
        third = (plan.Plan(Layout(32), 3), plan.Plan(Layout(16, tp=2), 3, recompute="full"), plan.Plan(Layout(1), 3))
        third += (plan.Plan(Layout(2, pp=4), 3),)
        gathers = replace(plan.MODERN, overlap="gathers", rails=False)
        return [
            case("hidden", DENSE, some), case("hidden", GPT, some), case("hidden", MIXED, plans_of(MIXED, seed)[:5]),
            case("hidden", DENSE, some, gathers), case("exposed", DENSE, some, plan.MEGATRON_2021),
            case("stage 3", DENSE, third), case("stage 3", GPT, third, gathers),
            case("stage 3", GPT, third, plan.COURSE),
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Planned) -> list:
        return [solution(case.model, one, case.work, case.cluster, case.software) for one in case.plans]

    def judge(self, case: Planned, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (kind,) = case.properties
        for one, got in zip(case.plans, outcomes[0], strict=True):
            m = counted(one.num_microbatches(case.work), "micro-batch", "es")
            words = f"{one}, {m}, overlap {case.software.overlap!r}:"
            yield numbers(kind, f"seconds of {words} it", got, data_by_hand(case, one))
