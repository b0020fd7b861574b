"""Checks of lesson 09: the layer, its gradients over ranks, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fivefold import mesh

from autograde.case import Case
from autograde.check import Check
from autograde.checks.experts import NUMBER, expect_exchanges
from autograde.checks.moe import Copies, Exchange, Mixture, averaged, in_one_process, try_average, try_mixture
from autograde.compare import compare, compare_all
from autograde.traffic import sent_in_words, size_in_words
from autograde.verdict import Finding, numbered

SPARE = 64  # bytes that a layer may keep beside its weights: the last balance loss
WHOLE = "Is the whole kept, or a view of it, which keeps it as well? A copy of this rank's part is all that is needed."


class MoE(Check):
    exercise = "expert.MoE"
    points = {"output": 2, "gradient": 3, "traffic": 1, "memory": 1, "capacity": 1, "balance": 1, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Mixture]:
        plans = [
            {"layout": "dp2,cp2,tp2,ep4", "num_experts": 4, "top_k": 2, "sizes": ((1, 3), (2, 2), (1, 1), (0, 4)),
             "idle": (2,), "properties": ("output", "gradient", "traffic", "memory")},
            {"layout": "dp4,ep2", "num_experts": 6, "top_k": 1, "sizes": ((1, 7), (1, 2), (3, 1), (1, 4)),
             "properties": ("output", "gradient", "traffic")},
            {"layout": "dp4", "num_experts": 4, "top_k": 2, "sizes": ((2, 3), (1, 2), (0, 1), (1, 4)),
             "properties": ("output", "gradient")},
            {"layout": "dp4,ep2", "num_experts": 4, "top_k": 2, "sizes": ((2, 4), (1, 2), (3, 2), (1, 5)),
             "factor": 0.75, "steps": 1, "properties": ("capacity",)},
            {"layout": "dp4,ep4", "num_experts": 4, "top_k": 1, "sizes": ((1, 5), (2, 2), (1, 1), (2, 4)),
             "balance": 0.3, "properties": ("balance",)},
            {"layout": "dp2,tp2,ep2", "num_experts": 4, "top_k": 2, "sizes": ((2, 4), (1, 6)), "factor": 0.75,
             "balance": 0.2, "split": True, "steps": 1, "properties": ("arguments",)},
        ]  # fmt: skip
        if level == "hidden":
            k = 1 + seed % 3
            plans = [
                {"layout": "dp2,tp3,ep2", "num_experts": 6, "top_k": 1 + k % 2, "sizes": ((k, 3), (1, 5)),
                 "idle": (1,), "properties": ("output", "gradient", "traffic", "memory")},
                {"layout": "dp3,ep3", "num_experts": 6, "top_k": 2, "sizes": ((2, 5), (1, 9), (0, k)), "factor": 0.5,
                 "balance": 0.1 * k, "properties": ("capacity",)},
            ]  # fmt: skip
        return [
            Mixture(world_size=mesh.Layout.parse(plan["layout"]).world_size, seed=seed + i, **plan)
            for i, plan in enumerate(plans)
        ]

    @staticmethod
    def program(solution: Any, case: Mixture) -> dict:
        return try_mixture(solution, case)

    def judge(self, case: Mixture, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected, routed = in_one_process(case)
        asked = case.properties
        value, gradient = ("output", "gradient") if "gradient" in asked else asked * 2
        for property, words in ((value, ("output",)), (gradient, ("x.grad", "router.grad", "w_in.grad", "w_out.grad"))):
            names = [f"{word} of step {step}" for step in range(case.steps) for word in words]
            yield compare_all(property, *_named(outcomes, expected, names), "layers")
        if case.balance:
            names = [f"balance of step {step}" for step in range(case.steps)]
            yield compare_all(value, *_named(outcomes, expected, names), "layers")
            if any(outcome.get("attached") for outcome in outcomes):
                seen = "self.balance has a gradient function, and with it the whole step stays in memory"
                yield Finding(value, False, seen, "expected a number alone")
        if "traffic" in asked or "capacity" in asked:  # what is dropped does not travel
            yield self._traffic("traffic" if "traffic" in asked else "capacity", case, routed, ledger)
        if "memory" in asked:
            yield self._memory(case, outcomes)

    def _traffic(self, property: str, case: Mixture, routed: list, ledger: Any) -> Finding:
        found = None
        for step, taken in enumerate(routed):
            words = ["counts", "out", "back"], ["out", "back"]
            exchange = Exchange(case, taken)
            found = expect_exchanges(property, exchange, ledger, *words, phase=f"step {step}", others=True)
            if not found.passed:
                return found
            for rank in range(case.world_size):
                if problem := self._reduced(case, ledger, rank, step):
                    return Finding(property, False, problem)
        error = None if property == "traffic" else 0.0
        return Finding(property, True, f"{found.seen}, to each as routed", sent_in_words(ledger), error=error)

    @staticmethod
    def _reduced(case: Mixture, ledger: Any, rank: int, step: int) -> str:
        """What is wrong with the all-reduces: of the output forward, of tokens and gates backward, over tp.

        Those of a balance loss are of two numbers an expert, over DP x CP.
        """
        b, s = case.sizes[case.place(rank)]
        ranks = next(ranks for ranks in mesh.groups(case.degrees, "tp") if rank in ranks)
        wanted = {False: NUMBER * b * s * case.h, True: NUMBER * b * s * (case.h + case.top_k)}
        calls = [c for c in ledger[rank].communications if c.op == "all_reduce" and c.phase == f"step {step}"]
        balance = next(own for own in mesh.groups(case.degrees, ("dp", "cp")) if rank in own) if case.balance else []
        for call in calls:
            small = list(call.ranks) == balance and call.bytes <= NUMBER * 2 * case.num_experts
            if list(call.ranks) != ranks and not small:
                return f"all-reduce in ranks {list(call.ranks)} on rank {rank}, expected none"
        for backward, size in wanted.items():
            total = sum(call.bytes for call in calls if call.backward == backward and list(call.ranks) == ranks)
            if len(ranks) > 1 and total != size:
                way = "backward" if backward else "forward"
                seen = f"{size_in_words(total)} all-reduced over {ranks} {way} on rank {rank}"
                return f"{seen}, expected {size_in_words(size)}"
        return ""

    @staticmethod
    def _memory(case: Mixture, outcomes: list) -> Finding:
        whole = case.weights()
        for rank, outcome in enumerate(outcomes):
            wanted = NUMBER * sum(case.piece(rank, name, tensor).numel() for name, tensor in whole.items())
            kept = outcome["kept"]
            if not 0 <= kept - wanted <= SPARE:
                seen = f"rank {rank} keeps {size_in_words(kept)} of weights, expected {size_in_words(wanted)}"
                return Finding("memory", False, f"{seen} ({kept / wanted:.3g} times)", look=WHOLE * (kept > wanted))
            if outcome["shared"]:
                seen = f"rank {rank} keeps the very {outcome['shared'][0]} that it was given"
                return Finding("memory", False, seen, look="Whoever gave it may still need it as it was: keep a copy.")
        every = NUMBER * sum(tensor.numel() for tensor in whole.values())
        return Finding("memory", True, f"{size_in_words(outcomes[0]['kept'])} of {size_in_words(every)} a rank")


def _named(outcomes: list, expected: list, names: list[str]) -> tuple[list[dict], list[dict]]:
    """Of what the ranks returned, and of what was expected, these names."""
    return [{n: o.get(n) for n in names} for o in outcomes], [{n: e[n] for n in names} for e in expected]


class AverageGradients(Check):
    exercise = "expert.average_gradients"
    points = {"router": 1, "experts": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Copies]:
        layouts = ("dp4,ep4", "dp4,ep1", "dp2,cp2,ep2") if level == "visible" else ("dp2,cp2,tp2,ep2", "dp6,ep3")
        return [
            Copies(world_size=mesh.Layout.parse(layout).world_size, layout=layout, seed=seed + i)
            for i, layout in enumerate(layouts)
        ]

    @staticmethod
    def program(solution: Any, case: Copies) -> dict:
        return try_average(solution, case)

    def judge(self, case: Copies, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected = list(averaged(case))
        look = "Others may hold the tensors that .grad was. Where does a mean have to go?"
        for property, names in (("router", ["router"]), ("experts", ["w_in", "w_out"])):
            yield compare_all(property, *_named([o["after"] for o in outcomes], expected, names))
            wanted = [{f"the tensor that was the gradient of {n}": own[n] for n in names} for own in expected]
            got = [{name: o["kept"][name] for name in wanted[0]} for o in outcomes]
            yield compare_all(property, got, wanted, look=look)
            for i, shape in enumerate(case.shapes):
                if (i == 0) == (property == "router"):
                    ones = torch.ones(shape, dtype=torch.float64)
                    yield compare(property, "the weights", [o["weights"][i] for o in outcomes], ones, "exact")
        everyone, copies = case.groups()
        sizes = [NUMBER * torch.Size(shape).numel() for shape in case.shapes]
        yield self._traffic(case, ledger, (everyone, sizes[0]), (copies, sizes[1] + sizes[2]))

    @staticmethod
    def _traffic(case: Copies, ledger: Any, router: tuple, experts: tuple) -> Finding:
        """As many bytes all-reduced over each group as the gradients have, in one call or several."""
        for rank in range(case.world_size):
            wanted: dict[tuple[int, ...], int] = {}
            for groups, size in (router, experts):
                ranks = tuple(next(ranks for ranks in groups if rank in ranks))
                wanted[ranks] = wanted.get(ranks, 0) + size * (len(ranks) > 1)
            calls = ledger[rank].communications
            for call in calls:
                if call.op != "all_reduce" or call.ranks not in wanted:
                    seen = f"{call.op.replace('_', '-')} in ranks {list(call.ranks)} on rank {rank}"
                    return Finding("traffic", False, f"{seen} should not be there", call.line)
            for ranks, size in wanted.items():
                total = sum(call.bytes for call in calls if call.ranks == ranks)
                if total != size:
                    seen = f"{size_in_words(total)} all-reduced in ranks {list(ranks)} on rank {rank}"
                    return Finding("traffic", False, f"{seen}, expected {size_in_words(size)}")
        return Finding("traffic", True, "each gradient all-reduced once", sent_in_words(ledger))


@dataclass(frozen=True, kw_only=True)
class Sizes(Case):
    """Arguments of `expert_traffic`: tokens, h, top_k, ep."""

    sizes: tuple[tuple[int, int, int, int], ...]

    def __str__(self) -> str:
        return numbered(len(self.sizes), "size")


class ExpertTraffic(Check):
    exercise = "cost.expert_traffic"
    points = {"elements": 1, "alone": 1}

    def cases(self, seed: int, level: str) -> list[Sizes]:
        k = 1 + seed % 50
        sizes = ((4096, 7168, 8, 64), (32, 8, 2, 4), (100, 12, 1, 2), (7, 3, 3, 5))
        sizes = sizes if level == "visible" else ((k, 64, 2, 8), (10 * k, 96, 4, 3), (0, 8, 2, 4))
        alone = ((64, 8, 2, 1),)
        return [
            Sizes(world_size=1, sizes=own, properties=(name,)) for own, name in ((sizes, "elements"), (alone, "alone"))
        ]

    @staticmethod
    def program(solution: Any, case: Sizes) -> list:
        return [float(solution(*sizes)) for sizes in case.sizes]

    def judge(self, case: Sizes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        for got, (tokens, h, top_k, ep) in zip(outcomes[0], case.sizes, strict=True):
            away = tokens * top_k * (ep - 1) / ep  # rows that leave the rank, where the load is even
            wanted = 2 * 2 * away * h
            good = abs(got - wanted) <= 1e-9 * max(wanted, 1)
            words = f"{tokens} tokens, h {h}, top {top_k}, ep {ep}"
            times = f" ({got / wanted:.3g} times)" if wanted else ""
            seen = numbered(len(case.sizes), "size") if good else f"{got:,.0f} elements, expected {wanted:,.0f}{times}"
            yield Finding(name, good, seen, "" if good else words)
