"""Checks of lesson 09: tokens on their way to experts and back."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fivefold.expert import Plan, combine
from fivefold.runtime.ledger import phase
from torch import Tensor

from autograde.check import Check
from autograde.checks.among import APART, FIVE, FOUR, UNEQUAL, Exchange, planned
from autograde.checks.experts import NUMBER, Routed, expect_exchanges, my_group
from autograde.compare import compare
from autograde.traffic import Calls, expect
from autograde.verdict import Finding

WAY_BACK = "the way back"
BASIC = ("output", "gradient", "traffic")


class AllToAll(Check):
    exercise = "expert.all_to_all"
    points = {"output": 1, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Exchange]:
        plans = [
            (FOUR, lambda i, j: (3 * i + 2 * j + 1) % 4),
            (UNEQUAL, lambda i, j: 1 + (i == j)),
            (FOUR, lambda i, j: 2 * (j == 1 and i != 2)),  # one rank receives, and one sends nothing
        ]
        if level == "hidden":
            k = 1 + seed % 3
            plans = [(APART, lambda i, j: (2 * i + j * k) % 3), (FIVE, lambda i, j: (i + k) * (j != 2) % 4)]
            plans += [(FIVE, lambda i, j: 0)]
        tables = [
            tuple(tuple(tuple(rows(i, j) for j in range(len(g))) for i in range(len(g))) for g in groups)
            for groups, rows in plans
        ]
        return planned(
            Exchange, seed, [{"groups": g, "tables": t, "row": (3,)} for (g, _), t in zip(plans, tables, strict=True)]
        )

    @staticmethod
    def program(solution: Any, case: Exchange) -> dict:
        group, rank = my_group(case), dist.get_rank()
        x = _turned(case.x(rank)).requires_grad_()
        sends, receives = case.rows(rank)
        result = solution(x, sends, receives, group)
        found = {"result": result.detach().clone(), "x": x.detach(), "x.grad": None, "rows": [sends, receives]}
        incoming = AllToAll.incoming(case, rank)
        if result.requires_grad and result.shape == incoming.shape:
            torch.autograd.backward([result * 1], [_turned(incoming)])
            found["x.grad"] = x.grad
        return found

    @staticmethod
    def incoming(case: Exchange, rank: int) -> Tensor:
        return case.numbers(50 + rank, sum(case.rows(rank)[1]), case.width)

    def judge(self, case: Exchange, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks = range(case.world_size)
        result, gradient = [], []
        for rank in ranks:
            _, number = case.place(rank)
            result.append(torch.cat([case.x(r).split(case.rows(r)[0])[number] for r in case.peers(rank)]))
            back = [self.incoming(case, r).split(case.rows(r)[1])[number] for r in case.peers(rank)]
            gradient.append(torch.cat(back))
        yield compare("output", "the result", [o["result"] for o in outcomes], result, "exact")
        yield compare("output", "x afterwards", [o["x"] for o in outcomes], [case.x(r) for r in ranks], "exact")
        rows = [[list(part) for part in case.rows(r)] for r in ranks]
        yield compare("output", "the numbers of rows afterwards", [o["rows"] for o in outcomes], rows)
        yield compare("gradient", "x.grad", [o["x.grad"] for o in outcomes], gradient, "exact")
        calls = [int(len(case.peers(rank)) > 1) for rank in ranks]
        there, back = ([NUMBER * case.width * sum(case.rows(rank)[way]) for rank in ranks] for way in (0, 1))
        forward = Calls("all_to_all", calls, 0, there, case.groups)
        found = expect("traffic", ledger, forward, Calls("all_to_all", 0, calls, back, case.groups))
        words = "1 all-to-all forward, 1 backward"
        yield Finding("traffic", True, words, found.detail) if found.passed else found


class Dispatch(Check):
    exercise = "expert.dispatch"
    points = {"output": 2, "gradient": 1, "traffic": 1, "dropped": 1, "uneven": 1, "way back": 1, "refusal": 1}

    def cases(self, seed: int, level: str) -> list[Routed]:
        plans = [
            {"groups": FOUR, "num_experts": 8, "top_k": 2, "tokens": (3, 5, 4, 2), "properties": BASIC},
            {"groups": UNEQUAL, "num_experts": 6, "top_k": 1, "tokens": (4, 2, 3, 5), "properties": BASIC},
            {"groups": FOUR, "num_experts": 8, "top_k": 3, "tokens": (4, 3, 2, 5), "dropped": 0.4,
             "properties": ("dropped",)},
            {"groups": FOUR, "num_experts": 4, "top_k": 2, "tokens": (4, 0, 3, 5), "never": (2,),
             "properties": ("uneven",)},
            {"groups": UNEQUAL, "num_experts": 6, "top_k": 2, "tokens": (4, 2, 5, 3), "dropped": 0.3,
             "properties": ("way back",)},
            {"groups": FOUR, "num_experts": 6, "top_k": 1, "tokens": (2, 2, 2, 2), "properties": ("refusal",)},
        ]  # fmt: skip
        if level == "hidden":
            k = 1 + seed % 4
            plans = [
                {"groups": APART, "num_experts": 6 * (1 + k % 2), "top_k": 2, "tokens": (3, k, 4, 0, 2),
                 "properties": BASIC},
                {"groups": FIVE, "num_experts": 5, "top_k": 3, "tokens": (k, 2, 0, 4, 3), "dropped": 0.5,
                 "properties": ("dropped",)},
                {"groups": APART, "num_experts": 12, "top_k": 1, "tokens": (k, 1, 0, 3, 2), "never": (4, 5, 6, 7),
                 "properties": ("uneven",)},
                {"groups": FIVE, "num_experts": 10, "top_k": 2, "tokens": (0, 3, k, 2, 4), "dropped": 0.2,
                 "properties": ("way back",)},
            ]  # fmt: skip
        return planned(Routed, seed, plans)

    @staticmethod
    def program(solution: Any, case: Routed) -> dict:
        group, rank = my_group(case), dist.get_rank()
        x, experts, keep = case.x(rank).requires_grad_(), case.experts(rank), case.keep(rank)
        options = {} if keep is None else {"keep": keep}
        if case.properties == ("refusal",):
            return {"refused": _refusal(lambda: solution(x, experts, case.num_experts, group))}
        rows, counts, plan = solution(x, experts, case.num_experts, group, **options)
        found = {"rows": rows.detach().clone(), "counts": counts, "x": x.detach(), "experts": experts, "x.grad": None}
        if case.properties == ("way back",):
            numbers = torch.tensor([1.0 + row.expert for row in case.received(rank)], dtype=torch.float64)
            with phase(WAY_BACK):
                found["came back"] = combine(rows.detach() * numbers[:, None], case.gates(rank), plan, group)
            return found
        incoming = Dispatch.incoming(case, rank)
        if rows.requires_grad and rows.shape == incoming.shape:
            torch.autograd.backward([rows * 1], [incoming])
            found["x.grad"] = x.grad
        return found

    @staticmethod
    def incoming(case: Routed, rank: int) -> Tensor:
        """A gradient for each row that a rank received."""
        made = {other: case.made(other) for other in case.peers(rank)}
        return case.stack(case.received(rank), lambda row: made[row.rank][row.token, row.expert])

    def judge(self, case: Routed, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if case.properties == ("refusal",):
            refused = outcomes[0]["refused"]
            done = f"raise {refused}" if refused else "are spread without a word"
            late = bool(ledger[0].communications)
            done += " after ranks have talked" * (late and refused == "ValueError")
            seen = f"{case.num_experts} experts over {case.world_size} ranks {done}"
            good = refused == "ValueError" and not late
            yield Finding(
                "refusal", good, seen, "expected a ValueError that says so, before anything travels", error=0.0
            )
            return
        ranks = range(case.world_size)
        output, gradient, traffic = case.properties if case.properties == BASIC else case.properties * 3
        rows, counts = [], []
        for rank in ranks:
            arrived = case.received(rank)
            rows.append(case.stack(arrived, lambda row: case.x(row.rank)[row.token]))
            counts.append(torch.tensor([sum(row.expert == expert for row in arrived) for expert in case.own(rank)]))
        given = [case.x(rank) for rank in ranks]
        chosen = [case.experts(rank) for rank in ranks]
        for name, wanted in (("rows", rows), ("counts", counts), ("x", given), ("experts", chosen)):
            title = {"rows": "rows", "counts": "counts"}.get(name, f"{name} afterwards")
            yield compare(output, title, [o[name] for o in outcomes], wanted, "exact")
        if case.properties == ("way back",):
            expected = [
                _summed(case, rank, lambda row: (1 + row.expert) * case.x(row.rank)[row.token]) for rank in ranks
            ]
            look = "The plan tells `combine` which choice each sent row was, and where each received row went."
            name = "what `combine` makes of the rows"
            yield compare(output, name, [o["came back"] for o in outcomes], expected, look=look)
        else:
            wanted = [
                _summed(case, rank, lambda row: case.made(row.rank)[row.token, row.expert], True) for rank in ranks
            ]
            yield compare(gradient, "x.grad", [o["x.grad"] for o in outcomes], wanted)
        backward = [] if case.properties == ("way back",) else ["back"]
        yield expect_exchanges(traffic, case, ledger, ["counts", "out"], backward)


class Combine(Check):
    exercise = "expert.combine"
    points = {"output": 2, "gradient": 2, "traffic": 1, "dropped": 1, "uneven": 1}

    def cases(self, seed: int, level: str) -> list[Routed]:
        plans = [
            {"groups": FOUR, "num_experts": 8, "top_k": 2, "tokens": (3, 5, 4, 2), "properties": BASIC},
            {"groups": UNEQUAL, "num_experts": 6, "top_k": 3, "tokens": (4, 2, 3, 5), "by_token": True,
             "properties": BASIC},
            {"groups": FOUR, "num_experts": 8, "top_k": 3, "tokens": (4, 3, 2, 5), "dropped": 0.4,
             "properties": ("dropped",)},
            {"groups": FOUR, "num_experts": 4, "top_k": 2, "tokens": (4, 0, 3, 5), "never": (2,),
             "properties": ("uneven",)},
        ]  # fmt: skip
        if level == "hidden":
            k = 1 + seed % 4
            plans = [
                {"groups": APART, "num_experts": 6, "top_k": 1 + k % 3, "tokens": (3, k, 4, 1, 2), "by_token": True,
                 "properties": BASIC},
                {"groups": FIVE, "num_experts": 5, "top_k": 3, "tokens": (k, 2, 0, 4, 3), "dropped": 0.6,
                 "properties": ("dropped",)},
                {"groups": APART, "num_experts": 12, "top_k": 1, "tokens": (k, 1, 0, 3, 2), "never": (4, 5, 6, 7),
                 "properties": ("uneven",)},
            ]  # fmt: skip
        return planned(Routed, seed, plans)

    @staticmethod
    def program(solution: Any, case: Routed) -> dict:
        group, rank = my_group(case), dist.get_rank()
        rows, arrived = case.rows(rank), case.received(rank)
        places = {(row.rank, row.token, row.expert): place for place, row in enumerate(case.arriving(rank))}
        regrouped = torch.tensor([places[row.rank, row.token, row.expert] for row in arrived], dtype=torch.int64)
        sent = torch.tensor([row.token * case.top_k + row.choice for row in rows], dtype=torch.int64)
        plan = Plan(sent, regrouped, case.sends(rank), case.receives(rank))
        made = {other: case.made(other) for other in case.peers(rank)}
        y = case.stack(arrived, lambda row: made[row.rank][row.token, row.expert]).requires_grad_()
        gates = case.gates(rank).requires_grad_()
        out = solution(y, gates, plan, group)
        found = {"output": out.detach().clone(), "y": y.detach(), "gates": gates.detach()}
        found |= {"plan": [sent, regrouped], "y.grad": None, "gates.grad": None}
        incoming = case.numbers(400 + rank, case.tokens[rank], case.h)
        if out.requires_grad and out.shape == incoming.shape:
            torch.autograd.backward([out * 1], [incoming])
            found |= {"y.grad": y.grad, "gates.grad": gates.grad}
        return found

    def judge(self, case: Routed, outcomes: list, ledger: Any) -> Iterator[Finding]:
        ranks = range(case.world_size)
        value, gradient, traffic = case.properties if case.properties == BASIC else case.properties * 3
        expected = [_summed(case, rank, lambda row: case.made(row.rank)[row.token, row.expert]) for rank in ranks]
        yield compare(value, "the output", [o["output"] for o in outcomes], expected)
        incoming = [case.numbers(400 + rank, case.tokens[rank], case.h) for rank in ranks]
        y_grad, gates_grad = [], []
        for rank in ranks:
            y_grad.append(
                case.stack(
                    case.received(rank),
                    lambda row: case.gates(row.rank)[row.token, row.choice] * incoming[row.rank][row.token],
                )
            )
            own = torch.zeros(case.tokens[rank], case.top_k, dtype=torch.float64)
            for row in case.rows(rank):
                own[row.token, row.choice] = case.made(rank)[row.token, row.expert] @ incoming[rank][row.token]
            gates_grad.append(own)
        for name, wanted in (("y.grad", y_grad), ("gates.grad", gates_grad)):
            yield compare(gradient, name, [o[name] for o in outcomes], wanted)
        made = [
            case.stack(case.received(rank), lambda row: case.made(row.rank)[row.token, row.expert]) for rank in ranks
        ]
        yield compare(value, "y afterwards", [o["y"] for o in outcomes], made, "exact")
        yield compare(
            value, "gates afterwards", [o["gates"] for o in outcomes], [case.gates(r) for r in ranks], "exact"
        )
        yield expect_exchanges(traffic, case, ledger, ["back"], ["out"])


def _turned(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return x.t().contiguous().t()


def _summed(case: Routed, rank: int, of: Any, plain: bool = False) -> Tensor:
    """(T, h): for each token of a rank the sum over its rows, by gate or `plain`."""
    total = torch.zeros(case.tokens[rank], case.h, dtype=torch.float64)
    for row in case.rows(rank):
        total[row.token] += of(row) * (1 if plain else case.gates(rank)[row.token, row.choice])
    return total


def _refusal(call: Any) -> str:
    """The name of the exception that a call raises, and whether a collective did; empty where none is raised."""
    try:
        call()
    except Exception as error:
        raised = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__", "")
        return type(error).__name__ + " from inside a collective" * raised.startswith(("torch.", "fivefold.runtime"))
    return ""
