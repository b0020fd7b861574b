"""Checks of lesson 03: tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autograde.case import Case, ranks_in_words
from autograde.check import Check
from autograde.compare import compare
from autograde.layers import LayerCheck
from autograde.question import Question
from autograde.traffic import Calls, expect
from autograde.training import Kind, Layer, try_layer


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
            look="The gradient of the sum is the same on every rank already. Does it need to travel?",
        )  # fmt: skip
        yield expect("traffic", ledger, Calls("all_reduce", forward=1, bytes=size, groups=case.groups()))


def _tripled(x: Tensor, group: Any) -> Tensor:
    return 3 * x


def _weighed(x: Tensor, group: Any) -> Tensor:
    return (2 + group.rank()) * x


def _linear(case: Layer, out: int, width: int) -> dict[str, Tensor]:
    return {"weight": case.random(0, out, width), "bias": case.random(1, out)}


def _mlp(case: Layer) -> dict[str, Tensor]:
    column, row = _linear(case, case.inner, case.h), {"weight": case.random(2, case.h, case.inner)}
    row["bias"] = case.random(3, case.h)
    return {f"column.{name}": t for name, t in column.items()} | {f"row.{name}": t for name, t in row.items()}


def _gated(case: Layer) -> dict[str, Tensor]:
    return {"w_in": case.random(0, 2 * case.inner, case.h), "row.weight": case.random(1, case.h, case.inner)}


COLUMN = Kind(
    lambda case: _linear(case, case.inner, case.h), {"weight": 0, "bias": 0, "output": -1}, {"enter": _tripled}
)
ROW = Kind(lambda case: _linear(case, case.h, case.inner), {"weight": 1, "x": -1}, {"leave": _weighed})
PAIR = Kind(_mlp, {"column.weight": 0, "column.bias": 0, "row.weight": 1}, {"enter": _tripled, "leave": _weighed})
GATED = Kind(_gated, {"w_in": 1, "row.weight": 1}, {})


class ColumnLinear(LayerCheck):
    exercise = "tensor.ColumnLinear"
    kind, exchanges = COLUMN, ("backward",)

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, COLUMN)

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        return F.linear(enter(x), p["weight"], p["bias"])


class RowLinear(LayerCheck):
    exercise = "tensor.RowLinear"
    points = {"output": 3, "gradient": 2, "traffic": 1, "memory": 1, "arguments": 1}
    kind, exchanges = ROW, ("forward",)

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, ROW)

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        product = leave(F.linear(x, p["weight"]))
        return product if p["bias"] is None else product + p["bias"]


class MLP(LayerCheck):
    exercise = "tensor.MLP"
    points = {"output": 1, "gradient": 1, "traffic": 1, "memory": 1, "arguments": 1}
    kind, exchanges = PAIR, ("forward", "backward")

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, PAIR)

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        hidden = F.gelu(F.linear(enter(x), p["column.weight"], p["column.bias"]))
        product = leave(F.linear(hidden, p["row.weight"]))
        return product if p["row.bias"] is None else product + p["row.bias"]


class GatedMLP(LayerCheck):
    exercise = "tensor.GatedMLP"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1}
    kind, exchanges = GATED, ("forward", "backward")

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, GATED)

    @staticmethod
    def parameters(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return whole | {"w_in": whole["w_in"].unflatten(0, (2, -1))}

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        gate, up = p["w_in"]
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), p["row.weight"])


questions = [
    Question(
        id="03.bytes",
        text="An MLP with h = 4,096 is split over **8 ranks**. 2,048 tokens go through at once, numbers are bf16 (2 "
        "bytes). How many **MB**, of 10⁶ bytes, does each rank send for this MLP in a step, forward and backward?",
        answer=58.72,
        unit="MB",
        tolerance=0.01,
        why="2,048 · 4,096 · 2 bytes are 16.8 MB; an all-reduce over 8 ranks sends 2 · 7/8 of that, and there are two",
        mistakes={
            29.36: "that is one all-reduce; there is one forward and one backward. Or it is two, but with each rank "
            "sending (t−1)/t of the tensor: an all-reduce goes round the ring twice",
            33.55: "that is the tensor once each way; an all-reduce makes each rank send 2(t−1)/t of it",
            56: "that is in MiB, of 2²⁰ bytes; 1 MB is 10⁶ bytes",
            67.11: "that is 2 · M each way; a rank does not send the piece that it ends up with: 2(t−1)/t · M",
            117.44: "that is with 4 bytes a number; bf16 has 2",
            14.68: "that is one pass round the ring, one way; an all-reduce makes two passes, and there are two of it",
            7.34: "that is what 1/8 of the ranks would have to send; the tensor that travels is not split",
        },
    ),
    Question(
        id="03.order",
        text="Why is the first matrix of the pair cut by columns, and the second by rows?",
        answer="b",
        choices={
            "a": (
                "Because a column of A is shorter than a row of it, so that a rank has fewer numbers to keep.",
                "both cuts leave 1/t of the matrix on a rank; memory does not tell them apart",
            ),
            "b": (
                "Because a column of A gives a finished number to the GELU, a row a part of a sum.",
                "yes: and what the columns give is what the rows take, so nothing travels in between",
            ),
            "c": (
                "Because PyTorch stores a weight as (out, in).",
                "that decides which dimension of the tensor you cut, not which cut lets the GELU work on its own",
            ),
            "d": (
                "It does not matter: rows first would send as many bytes.",
                "rows first needs a sum before the GELU, of 4h numbers a token, and leaves the output in pieces",
            ),
        },
    ),
    Question(
        id="03.without_f",
        text="You forget *f*: the input goes straight into the `ColumnLinear`. Before the MLP there is an embedding, "
        "of which every rank has a copy. What happens on 4 ranks?",
        answer="c",
        choices={
            "a": (
                "The loss of the first step is wrong, and on every rank it is another one.",
                "forward, *f* does nothing, so the first loss is right to the last digit: that is what makes it hard",
            ),
            "b": (
                "The run hangs in backward, in the all-reduce of the embedding's gradient.",
                "a rank hangs when others wait for it in an all-reduce; here nobody calls one",
            ),
            "c": (
                "The embedding's copies get unlike gradients, and drift apart.",
                "yes, and the first loss is right: each rank knows what its own columns want of the input. Only a "
                "check of gradients sees it",
            ),
            "d": (
                "Nothing: autograd adds up the gradients of all the copies of x.",
                "autograd sees one process. That the same x is used on three other ranks is known to you alone",
            ),
        },
    ),
    Question(
        id="03.stays",
        text="Which of these does tensor parallelism *not* make smaller on a rank?",
        answer="d",
        choices={
            "a": ("The weights of the two matrices.", "a rank has 1/t of each"),
            "b": ("Their optimizer state.", "it follows the weights: 1/t"),
            "c": (
                "The inner activations, X·A and its GELU, kept for backward.",
                "a rank has its own columns of them: 1/t",
            ),
            "d": (
                "The input X of the pair, kept for backward.",
                "yes: every rank keeps every token of it. Lesson 04 cuts that as well",
            ),
        },
    ),
    Question(
        id="03.server",
        text="Four ranks share a layer with large matrices. In one server they have NVLink, a link between its GPUs "
        "of 450 GB/s each way. Placed in four servers they have one 400 Gb/s network card each. By bandwidth alone, "
        "without latency, how many **times as long** does the all-reduce take there?",
        answer=9,
        tolerance=0.02,
        why="400 Gb/s are 50 GB/s, and 450/50 is 9; the bytes that each rank sends are the same. The replay above has "
        "a little less: before every message stands a latency, which does not grow as much",
        mistakes={
            8.15: "that is what the replay shows, latencies included; by bandwidth alone it is a little more",
            1.125: "b is not B: 400 Gb/s are gigabits; in bytes that is an eighth",
            18: "900 GB/s is NVLink in both directions together, and the card's 50 GB/s are one direction",
            36: "each rank has a card of its own; they do not share one",
            72: "you divided the card's speed by 8 twice",
        },
    ),
]
