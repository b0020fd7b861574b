"""Checks of lesson 09: which experts a token goes to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Logits(Case):
    """Logits of T tokens for E experts, which may stand on servers.

    `ties` makes many of them equal. `far`: one expert has all the probability, and the others' rounds to 0.
    """

    tokens: int
    num_experts: int
    top_k: int
    ties: bool = False
    far: bool = False
    servers: int = 1
    most: int = 1

    def __str__(self) -> str:
        words = f"{self.tokens} tokens, {self.num_experts} experts, top {self.top_k}"
        words += f", {self.most} of {self.servers} servers" if self.servers > 1 else ""
        words += ", all but one with probability 0" if self.far else ""
        return words + (", many of them equally likely" if self.ties else "")

    def numbers(self, what: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def logits(self) -> Tensor:
        """(T, E), not contiguous."""
        numbers = self.numbers(0, self.num_experts, self.tokens).t()
        if self.far:
            numbers = numbers - 900
            numbers[:, -2] = 0
        return numbers.round() if self.ties else 2 * numbers

    def incoming(self) -> tuple[Tensor, Tensor]:
        """Gradients of probs and gates."""
        return self.numbers(1, self.tokens, self.num_experts), self.numbers(2, self.tokens, self.top_k)

    def chosen(self) -> Tensor:
        """(T, top_k) by the definition, token by token."""
        probs = self.logits().softmax(-1).tolist()
        each = self.num_experts // self.servers
        rows = []
        for own in probs:
            scores = [
                sum(sorted(own[s * each : (s + 1) * each], reverse=True)[: math.ceil(self.top_k / self.most)])
                for s in range(self.servers)
            ]
            # Sums of equal numbers in another order may differ in the last digit.
            near = [round(score, 12) for score in scores]
            open_ = sorted(range(self.servers), key=lambda s, near=near: (-near[s], s))[: self.most]
            ranked = sorted(
                (e for e in range(self.num_experts) if e // each in open_), key=lambda e, own=own: (-own[e], e)
            )
            rows.append(ranked[: self.top_k])
        return torch.tensor(rows, dtype=torch.int64).view(self.tokens, self.top_k)


def try_route(route: Any, case: Logits) -> dict:
    """What a router decides for the case's logits, and their gradient."""
    logits = case.logits().requires_grad_()
    routing = route(logits)
    found = {"probs": routing.probs.detach().clone(), "experts": routing.experts, "gates": routing.gates.detach()}
    found |= {"logits": logits.detach(), "gradient": None}
    pairs = [(one, grad) for one, grad in zip((routing.probs, routing.gates), case.incoming(), strict=True)]
    pairs = [(one * 1, grad) for one, grad in pairs if one.requires_grad and one.shape == grad.shape]
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        found["gradient"] = logits.grad
    return found


def judge_route(case: Logits, outcomes: list) -> Iterator[Finding]:
    logits, chosen = case.logits().requires_grad_(), case.chosen()
    probs = logits.softmax(-1)
    gates = torch.gather(probs, 1, chosen)
    torch.autograd.backward([probs, gates], list(case.incoming()))
    value, gradient = case.properties if len(case.properties) == 2 else case.properties * 2
    expected = {"experts": chosen, "probs": probs.detach(), "gates": gates.detach()}
    look = {"gates": "A gate is the chosen expert's probability among all experts, as it is."}
    for name, wanted in expected.items():
        tolerance = "exact" if name == "experts" else "rounding"
        yield compare(value, name, [o[name] for o in outcomes], wanted, tolerance, look.get(name, ""))
    yield compare(value, "logits afterwards", [o["logits"] for o in outcomes], case.logits(), "exact")
    yield compare(gradient, "the gradient of the logits", [o["gradient"] for o in outcomes], logits.grad)


def refusal_of(call: Any) -> str:
    """The name of the exception that a call raises, empty where it raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def judge_refusals(outcomes: list) -> Iterator[Finding]:
    for words, refused in outcomes[0]["refused"].items():
        done = f"raises {refused}" if refused else "is taken without a word"
        seen = f"{words} {done}" if refused != "ValueError" else "ValueErrors"
        yield Finding("refusal", refused == "ValueError", seen, "expected a ValueError that says so", error=0.0)


class Route(Check):
    exercise = "expert.route"
    points = {"output": 1, "gradient": 1, "ties": 1, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Logits]:
        basic = ("output", "gradient")
        sizes = [(7, 5, 2, False, basic), (6, 4, 1, False, basic), (5, 3, 3, False, basic), (9, 6, 3, True, ("ties",))]
        sizes += [(2, 4, 0, False, ("refusal",))]
        if level == "hidden":
            k = 1 + seed % 4
            sizes = [(4 + k, 6, k, False, basic), (0, 4, 2, False, basic), (12, 8, 2, True, ("ties",))]
        return [
            Logits(world_size=1, tokens=t, num_experts=e, top_k=k, ties=ties, properties=names, seed=seed + i)
            for i, (t, e, k, ties, names) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Logits) -> dict:
        if case.properties == ("refusal",):
            wrong = (0, case.num_experts + 1)
            words = f"of {case.num_experts} experts"
            return {
                "refused": {f"top_k {k} {words}": refusal_of(lambda k=k: solution(case.logits(), k)) for k in wrong}
            }
        return try_route(lambda logits: solution(logits, case.top_k), case)

    def judge(self, case: Logits, outcomes: list, ledger: Any) -> Iterator[Finding]:
        return judge_refusals(outcomes) if case.properties == ("refusal",) else judge_route(case, outcomes)


class RouteWithinServers(Check):
    exercise = "expert.route_within_servers"
    points = {"output": 1, "servers": 1, "gradient": 1, "ties": 1, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Logits]:
        basic = ("output", "gradient")
        sizes = [(12, 8, 4, 4, 2, False, basic), (40, 12, 3, 4, 2, False, basic), (8, 6, 2, 3, 1, False, basic)]
        sizes += [
            (5, 6, 2, 3, 3, False, basic),
            (12, 8, 2, 4, 2, True, ("ties",)),
            (2, 6, 2, 3, 2, False, ("refusal",)),
        ]
        if level == "hidden":
            k = 1 + seed % 3
            sizes = [(6 + k, 16, 4, 8, 2 + seed % 2, False, basic), (0, 8, 2, 2, 1, False, basic)]
            sizes += [(15, 12, 3, 6, 2, True, ("ties",))]
        names = "tokens", "num_experts", "top_k", "servers", "most", "ties", "properties"
        cases = [
            Logits(world_size=1, seed=seed + i, **dict(zip(names, size, strict=True))) for i, size in enumerate(sizes)
        ]
        each = 2 if level == "visible" else 3
        far = Logits(world_size=1, seed=seed, tokens=3, num_experts=4 * each, top_k=each, far=True, servers=4,
                     properties=basic)  # fmt: skip
        return [*cases, far]

    @staticmethod
    def program(solution: Any, case: Logits) -> dict:
        if case.properties == ("refusal",):
            wrong = {"6 experts on 4 servers": (2, 4, 2), "top 3 on 1 of 3 servers with 2 experts each": (3, 3, 1)}
            wrong |= {"4 of 3 servers": (2, 3, 4), "0 of 3 servers": (2, 3, 0), "top 0": (0, 3, 2)}
            given = case.logits()
            return {"refused": {words: refusal_of(lambda a=a: solution(given, *a)) for words, a in wrong.items()}}
        return try_route(lambda logits: solution(logits, case.top_k, case.servers, case.most), case)

    def judge(self, case: Logits, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.properties == ("refusal",):
            yield from judge_refusals(outcomes)
            return
        if "output" in case.properties:
            yield self._servers(case, outcomes[0]["experts"])
        yield from judge_route(case, outcomes)

    @staticmethod
    def _servers(case: Logits, experts: Any) -> Finding:
        """Whether any token's experts stand on more servers than are allowed."""
        fits = isinstance(experts, Tensor) and experts.shape == (case.tokens, case.top_k)
        used = [len({e * case.servers // case.num_experts for e in own}) for own in experts.tolist()] if fits else []
        many = max(used, default=0) if fits else -1
        seen = f"a token's experts stand on {many} servers, expected {case.most} at most"
        if many < 0:
            seen = f"experts is not ({case.tokens}, {case.top_k})"
        good = 0 <= many <= case.most
        return Finding("servers", good, "no token needs more servers than are open to it" if good else seen)
