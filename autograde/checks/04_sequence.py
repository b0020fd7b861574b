"""Checks of lesson 04: sequence parallelism and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autograde.blocks import Column, Layers, try_block, try_column, try_dropout
from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare, compare_all
from autograde.question import Question
from autograde.recomputed import Passes, Residual, core, flops, try_full, try_selective
from autograde.sequence import (
    judge_block,
    judge_dropout,
    judge_exchange,
    judge_kept,
    judge_pass,
    judge_regions,
    one_pass,
    sent,
)
from autograde.tokens import (
    APART,
    PAIRS,
    UNLIKE,
    Exchange,
    Replicated,
    Tokens,
    exchange_cases,
    group_of,
    try_exchange,
    try_regions,
    try_sync,
)
from autograde.traffic import Calls
from autograde.verdict import Finding


class GatherTokens(Check):
    exercise = "sequence.gather_tokens"
    points = {"output": 1, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        return exchange_cases(seed, level)

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        return try_exchange(solution, case, Exchange(gathers=True))

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        look = "All ranks of the group used this rank's tokens. Whose gradients do these get?"
        return judge_exchange(case, outcomes, ledger, Exchange(gathers=True), look)


class ScatterTokens(Check):
    exercise = "sequence.scatter_tokens"
    points = {"output": 1, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        uneven = Tokens(world_size=4, groups=UNLIKE, s=7, properties=("output",))
        return exchange_cases(seed, level) + ([uneven] if level == "visible" else [])

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        if not case.properties:
            return try_exchange(solution, case, Exchange(gathers=False))
        group = group_of(case)
        try:
            solution(torch.ones(case.b, case.s, case.h), group)
        except Exception as error:
            return {"refused": type(error).__name__}
        return {"refused": ""}

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if not case.properties:
            look = "What this rank handed in is in the sums of all tokens. Who knows the gradient of each sum?"
            yield from judge_exchange(case, outcomes, ledger, Exchange(gathers=False), look)
            return
        refused = outcomes[0]["refused"]
        done = f"raise {refused}" if refused else "are cut without a word"
        seen = f"{case.s} tokens for {len(case.groups[0])} ranks {done}"
        yield Finding("output", refused == "ValueError", seen, "expected a ValueError that says so", error=0.0)


class RegionRng(Check):
    exercise = "sequence.region_rng"
    points = {"split": 1, "replicated": 1, "passes": 1, "restored": 1, "outside": 1}

    def cases(self, seed: int, level: str) -> list[Tokens]:
        sizes = [(4, UNLIKE), (4, PAIRS)] if level == "visible" else [(5, APART), (3, ((0, 1, 2),))]
        return [Tokens(world_size=world, groups=groups, seed=seed + i) for i, (world, groups) in enumerate(sizes)]

    @staticmethod
    def program(solution: Any, case: Tokens) -> dict:
        return try_regions(solution, case)

    def judge(self, case: Tokens, outcomes: list, ledger: Any) -> Iterator[Finding]:
        return judge_regions(case, outcomes, ledger)


class Block(Check):
    exercise = "sequence.Block"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1, "arguments": 2}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Layers]:
        """One of training, and one of dropout in both regions."""
        if level == "visible":
            sizes = [(4, UNLIKE, 2, 6, 5, 3, 6), (2, ((0, 1),), 2, 24, 64, 2, 2)]
        else:
            sizes = [(5, APART, 1, 6 * (1 + seed % 3), 4, 6, 12), (3, ((0, 1, 2),), 2, 24, 96, 3, 3)]
        asked = tuple(name for name in self.points if name != "arguments"), ("arguments",)
        return [
            Layers(
                world_size=world, groups=groups, b=b, s=s, h=h, heads=heads, size=2, inner=inner, seed=seed + i,
                properties=asked[i],
            )
            for i, (world, groups, b, s, h, heads, inner) in enumerate(sizes)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Layers) -> dict:
        return (try_dropout if "arguments" in case.properties else try_block)(solution, case)

    def judge(self, case: Layers, outcomes: list, ledger: Any) -> Iterator[Finding]:
        if "arguments" in case.properties:
            yield judge_dropout(outcomes)
        else:
            yield from judge_block(case, outcomes, ledger)


class SyncReplicatedGradients(Check):
    exercise = "sequence.sync_replicated_gradients"
    points = {"gradient": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Replicated]:
        sizes = [(4, UNLIKE), (4, PAIRS)] if level == "visible" else [(5, APART), (2, ((0, 1),))]
        shapes = ((1, 5), (2, 3), (1, 1), (4, 1 + seed % 5))
        return [
            Replicated(world_size=world, groups=groups, shapes=shapes, without=1 + i, seed=seed + i)
            for i, (world, groups) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Replicated) -> dict:
        return try_sync(solution, case)

    def judge(self, case: Replicated, outcomes: list, ledger: Any) -> Iterator[Finding]:
        sums = [case.summed(rank) for rank in range(case.world_size)]
        look = "Others may hold the tensors that .grad was. Where does a sum have to go?"
        places = {"after": "gradient", "kept": "the tensor that was gradient", "views": "a view of what was gradient"}
        for key, name in places.items():
            expected = [{f"{name} {i}": total for i, total in enumerate(own)} for own in sums]
            yield compare_all("gradient", [o[key] for o in outcomes], expected, look="" if key == "after" else look)
        ones = [torch.ones(shape, dtype=torch.float64) for shape in case.shapes]
        for i, one in enumerate(ones):
            yield compare("gradient", f"parameter {i}", [o["parameters"][i] for o in outcomes], one, "exact")
        size = 8 * sum(one.numel() for i, one in enumerate(ones) if i != case.without)
        look = "The second call had parameters without any gradient."
        one = Calls("all_reduce", case.calls(1), 0, size, case.groups)
        yield sent("traffic", ledger, "1 all-reduce", one, look=look)


class RegatheringColumnLinear(Check):
    exercise = "sequence.RegatheringColumnLinear"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Column]:
        if level == "visible":
            return [Column(world_size=4, groups=UNLIKE, b=2, s=6, h=5, out=12, seed=seed)]
        return [Column(world_size=5, groups=APART, b=1, s=12, h=3 + seed % 4, out=18, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Column) -> dict:
        return try_column(solution, case)

    def judge(self, case: Column, outcomes: list, ledger: Any) -> Iterator[Finding]:
        output, without, grads = [], [], []
        for rank in range(case.world_size):
            _, ranks, number = case.place(rank)
            x, incoming, weight, bias = case.tensors(rank)
            tensors = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]

            def piece(y: Tensor, t: int = len(ranks), r: int = number) -> Tensor:
                return y.chunk(t, -1)[r].detach()

            y = F.linear(*tensors)
            y.backward(incoming)
            output.append(piece(y))
            without.append(piece(y - bias))
            own = {"x.grad": case.own(rank, x.grad), "weight.grad": piece(weight.grad.mT).mT}
            grads.append(own | {"bias.grad": piece(bias.grad)})
        yield compare("output", "the output", [o["output"] for o in outcomes], output)
        yield compare("output", "the output without a bias", [o["without a bias"] for o in outcomes], without)
        yield compare_all("gradient", [o["gradient"] for o in outcomes], grads)
        whole, own = case.bytes()
        gather = Calls("all_gather", case.calls(2), case.calls(1), own, case.groups)
        scatter = Calls("reduce_scatter", 0, case.calls(1), whole, case.groups)
        words = "1 all-gather each way, 1 reduce-scatter backward"
        look = "Forward ran twice, with a bias and without one; backward ran once."
        yield sent("traffic", ledger, words, gather, scatter, look=look)
        yield judge_kept(ledger, own, "Which tokens does this rank need to keep, and which can it ask for again?")


class Selective(Check):
    exercise = "recompute.selective"
    points = {"output": 1, "gradient": 1, "random": 1, "memory": 1, "computation": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Passes]:
        if level == "visible":
            sizes = [(2, 6, 3, 4, ()), (1, 4, 2, 2, (1,))]
        else:
            sizes = [(1, 5 + seed % 4, 4, 2, (seed % 3,))]
        return [
            Passes(world_size=1, groups=((0,),), b=b, s=s, h=h, heads=heads, frozen=frozen, seed=seed + i)
            for i, (b, s, h, heads, frozen) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Passes) -> dict:
        return try_selective(solution, case)

    def judge(self, case: Passes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        inputs = dict(zip("qkv", case.qkv(), strict=True))
        output, gradient, drawn = one_pass(case, core, inputs, ())
        elsewhere = {name: grad if grad is None else grad + 1 for name, grad in gradient.items()}
        yield from judge_pass(outcomes, (output, elsewhere, drawn))
        size = 8 * (3 + sum(x.numel() for x in inputs.values()))  # three numbers are the check's own
        kept = judge_kept(ledger, [size], "q, k and v may stay. What of the core's own is still there?")
        yield replace(kept, seen="q, k and v, nothing of the core's") if kept.passed else kept
        if outcomes[0]["alive"]:
            yield Finding("memory", False, "after forward, what the core computed on the way is still in memory")
        if outcomes[0]["output alive"]:
            seen = "nobody uses the core's output any more, and it is still in memory"
            yield Finding("memory", False, seen, look="Who holds it, and does backward need it?")
        once = flops(ledger[0], "forward")
        again = flops(ledger[0], "backward") / once - 2
        seen = f"backward computes the core {again:.3g} times, expected once at most"
        yield Finding("computation", again <= 1, seen if again > 1 else f"{again:.0%} of the core computed again")


class Full(Check):
    exercise = "recompute.full"
    points = {"output": 1, "gradient": 2, "random": 1, "memory": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Passes]:
        if level == "visible":
            return [Passes(world_size=2, groups=((0, 1),), b=2, s=3, h=4, seed=seed)]
        return [Passes(world_size=3, groups=((0, 1, 2),), b=1, s=4 + seed % 3, h=6, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Passes) -> dict:
        return try_full(solution, case)

    def judge(self, case: Passes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        x = case.random(0, case.b, case.s, case.h).requires_grad_()
        names = ("mlp.column.weight", "mlp.column.bias", "mlp.row.weight", "mlp.row.bias")
        w = {name: tensor.requires_grad_() for name, tensor in zip(names, case.weights(), strict=True)}

        def mlp(x: Tensor) -> Tensor:
            w_in, b_in, w_out, b_out = w.values()
            return F.linear(F.gelu(F.linear(x, w_in, b_in)), w_out, b_out)

        output, gradient, drawn = one_pass(case, Residual(mlp), {"x": x} | w, (0.5,), inputs=1)
        pieces = []
        for rank in range(case.world_size):
            cut = {f"{name}.grad": dim for name, dim in zip(names[:3], (0, 0, 1), strict=True)}
            pieces.append({n: g.chunk(case.world_size, cut[n])[rank] if n in cut else g for n, g in gradient.items()})
        yield from judge_pass(outcomes, (output, pieces, drawn))
        size = 8 * x.numel()
        yield judge_kept(ledger, [size] * case.world_size, "The block's input may stay. What else does?")


@dataclass(frozen=True, kw_only=True)
class Sizes(Case):
    """Arguments of `activation_bytes`: b, s, h, a, and t."""

    layers: tuple[tuple[int, int, int, int, int], ...]

    def __str__(self) -> str:
        return f"one layer in {len(self.layers)} sizes"


class ActivationBytes(Check):
    exercise = "cost.activation_bytes"
    points = {"none": 2, "selective": 1, "full": 1}

    def cases(self, seed: int, level: str) -> list[Sizes]:
        k = 1 + seed % 7
        known = (
            (1, 2048, 12288, 96, 8),
            (1, 2048, 20480, 128, 8),
            (4, 512, 1024, 16, 1),
            (3, 128, 96, 12, 4),
            (2, 96, 80, 10, 5),
        )
        fresh = ((k, 64 * k, 256, 4, 2), (2, 100, 48 * k, 6, 3))
        return [Sizes(world_size=1, layers=known if level == "visible" else fresh, seed=seed)]

    @staticmethod
    def program(solution: Any, case: Sizes) -> dict:
        values = {
            f"{recompute} {split} {i}": solution(*sizes, sequence_parallel=split, recompute=recompute)
            for recompute, split in product(("none", "selective", "full"), (False, True))
            for i, sizes in enumerate(case.layers)
        }
        default = solution(*case.layers[0][:4])
        refused = {}
        for split in (False, True):
            try:
                solution(*case.layers[0], sequence_parallel=split, recompute="some")
                refused[split] = ""
            except Exception as error:
                refused[split] = type(error).__name__
        return {"values": values, "default": default, "refused": refused}

    def judge(self, case: Sizes, outcomes: list, ledger: Any) -> Iterator[Finding]:
        got, table = outcomes[0], {}
        for i, (b, s, h, a, t) in enumerate(case.layers):
            sbh, core = s * b * h, 5 * a * s / h
            table |= {
                f"none False {i}": sbh * (10 + (24 + core) / t), f"none True {i}": sbh * (34 + core) / t,
                f"selective False {i}": sbh * (10 + 24 / t), f"selective True {i}": 34 * sbh / t,
                f"full False {i}": 2 * sbh, f"full True {i}": 2 * sbh,
            }  # fmt: skip
        for key, wanted in table.items():
            recompute, split, i = key.split()
            b, s, h, a, t = case.layers[int(i)]
            words = f"b {b}, s {s}, h {h}, a {a}, t {t}, sequence_parallel={split}, recompute={recompute!r}"
            yield _bytes(recompute, got["values"][key], wanted, words)
        b, s, h, a, _ = case.layers[0]
        words = "without t, sequence_parallel and recompute"
        yield _bytes("none", got["default"], s * b * h * 34 + 5 * a * s * s * b, words)
        for split, refused in got["refused"].items():
            seen = f"recompute='some' with sequence_parallel={split} raises {refused or 'nothing'}"
            yield Finding("full", refused == "ValueError", seen, "expected a ValueError", error=0.0)


def _bytes(property: str, got: float, wanted: float, words: str) -> Finding:
    seen = f"{got:,.0f} bytes, expected {wanted:,.0f} ({got / wanted:.4g} times)"
    return Finding(property, abs(got / wanted - 1) < 1e-9, seen, words, error=abs(got / wanted - 1))


questions = [
    Question(
        id="04.kept",
        text="A layer of GPT-3 has h = 12,288 and 96 heads. One sequence of **4,096** tokens goes through it, split "
        "over **4 ranks**, tokens too; the attention core is computed again, and the gathered tokens are gathered "
        "again. How many **MB** does each rank keep of this layer for backward (16-bit numbers)?",
        answer=427.8,
        unit="MB",
        tolerance=0.01,
        why="34 · s·b·h / 4, with s·b·h = 50.3 million",
        mistakes={
            2441: "that is with the scores and probabilities kept: (34 + 160)/4; the core is computed again",
            805.3: "that is without sequence parallelism: its 10 bytes are split here as well",
            1711: "that is what all 4 ranks keep together",
            100.7: "that is the layer's input alone, 2 bytes a number, as full recomputation keeps it",
            25.17: "that is a rank's tokens of the input alone, as full recomputation with split tokens keeps it",
            578.8: "that is with the inputs of the two pairs kept whole: a layer that gathers again keeps 1/4 of them",
            213.9: "that is for half of the tokens, or for twice as many ranks",
            106.95: "that is for 2,048 tokens on 8 ranks",
            4.278e8: "that is in bytes; the answer is in MB",
            408.0: "that is in MiB, of 2²⁰ bytes; the answer is in MB, of 10⁶",
        },
    ),
    Question(
        id="04.bytes",
        text="All tokens are split, and the first layer of each pair gathers its input a second time in backward. "
        "How many **times** as many bytes does a rank send in a step as with tensor parallelism alone (t = 8)?",
        answer=1.25,
        tolerance=0.01,
        why="a layer had 4 all-reduces, which are 8 passes round the ring; now there are 10",
        mistakes={
            1: "so it is as long as every rank keeps what it has gathered: here it gathers twice more in a step",
            1.5: "an all-gather goes round the ring once, an all-reduce twice",
            1.125: "a layer has two pairs, and each gathers again",
            2: "only the gathered input travels again, and that in backward only",
            0.5: "an all-reduce became two exchanges, of half its bytes each",
        },
    ),
    Question(
        id="04.norms",
        text="Somebody leaves `sync_replicated_gradients` out. Tokens are split over 4 ranks; there is no data "
        "parallelism. What happens?",
        answer="b",
        choices={
            "a": (
                "The run hangs in the second step.",
                "a rank hangs when others wait for it; nobody calls anything here that the others do not",
            ),
            "b": (
                "The first loss is right. Each rank's norms learn from its own tokens, and the copies drift apart.",
                "yes: every token of a sequence belongs to one rank, and so does its part of the gradient",
            ),
            "c": (
                "The norms learn four times too slowly, and all alike.",
                "that would be the mean in the place of the sum; without any exchange the four gradients differ",
            ),
            "d": (
                "Nothing: the reduce-scatter in backward has summed their gradients.",
                "it sums the gradients of *activations*; those of the norms' weights are made after it, on each rank",
            ),
        },
    ),
    Question(
        id="04.masks",
        text="A dropout stands inside the attention core, on probabilities (b, a/t, s, s), in a model with **tensor "
        "parallelism alone**. Should the masks of the ranks be equal?",
        answer="c",
        choices={
            "a": (
                "Equal: without sequence parallelism, every rank has all tokens.",
                "all tokens, and of each its own heads: these numbers are on no other rank",
            ),
            "b": (
                "It does not matter: a mask is random either way.",
                "with equal masks head 0 and head a/t lose the same pairs of tokens in every step, for all of training",
            ),
            "c": (
                "Different: each rank has other heads there.",
                "yes: what decides is whether ranks hold pieces or copies, and not what they are pieces of",
            ),
            "d": (
                "Equal, or the sum over ranks after the projection would be wrong.",
                "that sum adds up what different heads give; it asks nothing of their masks",
            ),
        },
    ),
    Question(
        id="04.flops",
        text="Selective recomputation computes the attention core once more: 4·b·s²·h operations. A layer's whole step "
        "takes 72·b·s·h² and 12·b·s²·h. By how many **percent** does the step grow for s = 8,192 and h = 12,288?",
        answer=3.333,
        unit="percent",
        tolerance=0.04,
        why="s/(18h) is 3.70%, and 3.33% with the core itself in what it is compared with",
        mistakes={
            10: "that is the core's share of *one forward*, as the paper states it; a step is three forwards long",
            11.1: "that is s/(6h), the core beside the rest of *one forward*; a step is three forwards long",
            3.704: "that is s/(18h): the step that it is compared with has the core in it as well",
            33.3: "that is full recomputation: the whole forward once more",
            0.0333: "that is the ratio; times 100 it is percent",
            4.76: "that is this lesson's small model, where s is as large as h",
            0.90: "that is for 2,048 tokens, a sixth of h",
            70: "that is what it saves in memory",
        },
    ),
]
