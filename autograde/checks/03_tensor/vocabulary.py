"""Checks of lesson 03: the embedding and the loss, with the vocabulary split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from autograde.check import Check
from autograde.checks.vocabulary import (
    LOSS,
    Embedded,
    Targets,
    expected_embedding,
    expected_loss,
    try_embedding,
    try_loss,
)
from autograde.compare import compare
from autograde.traffic import Calls, expect, sent_in_words, size_in_words
from autograde.verdict import Finding

EVERY = "Which all-reduces does a rank take part in? All that its group makes, whatever its own numbers are."

OTHERS = "Every word of the vocabulary is in the sum of exponentials: on which ranks does that give a gradient?"


def _left_out(pairs: list[tuple[Any, Tensor]]) -> bool:
    """Whether logits that are to have a gradient have none, or zero."""
    return any(
        got is None or (got.shape == wanted.shape and bool(((got == 0) & (wanted.abs() > 1e-6)).any()))
        for got, wanted in pairs
    )


class VocabEmbedding(Check):
    exercise = "tensor.VocabEmbedding"
    points = {"output": 2, "gradient": 1, "traffic": 1, "memory": 1, "arguments": 1}

    def cases(self, seed: int, level: str) -> list[Embedded]:
        """Sizes that do not divide, a rank that has padding only, and tokens of which some ranks have none."""
        k = 1 + seed % 3
        if level == "visible":
            sizes = [(4, ((0, 1, 2, 3),), 10, (2, 3), 3, 2), (4, ((0, 1, 2), (3,)), 4, (5,), 2, 2)]
            sizes += [(4, ((0, 1), (2, 3)), 7, (2, 2), 3, 0)]  # also words that rank 1 and 3 have none of
        else:
            sizes = [(5, ((0, 2), (1, 3, 4)), 6 + k, (2, k), 3, 2), (2, ((0, 1),), 9, (1, 2, 3), 1 + k, 2)]
            sizes += [(3, ((0, 1, 2),), 8 + k, (3,), 2, 0)]
        training = tuple(name for name in self.points if name != "arguments")
        return [
            Embedded(
                world_size=world, groups=groups, size=size, tokens=tokens, h=h, steps=steps, seed=seed + number,
                properties=training if steps else ("arguments",),
            )
            for number, (world, groups, size, tokens, h, steps) in enumerate(sizes)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Embedded) -> dict:
        return try_embedding(solution, case)

    def judge(self, case: Embedded, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected = [expected_embedding(case, rank) for rank in range(case.world_size)]
        if not case.steps:
            for name, words in (
                ("own", "the output with leave= of the check's own"),
                ("own, few", "the output with leave= of the check's own, where some ranks have no word,"),
                ("calls", "the number of calls of leave, in two forwards,"),
            ):
                yield compare("arguments", words, [o[name] for o in outcomes], [e[name] for e in expected])
            return
        apart = [rank for rank, outcome in enumerate(outcomes) if outcome.get("apart")]
        if apart:
            ranks = f"rank{'s' * (len(apart) > 1)} {', '.join(map(str, apart))}"
            seen = f"on {ranks} the output does not depend on the weight, so it has no gradient"
            yield Finding("gradient", False, seen, look="Does every rank take the same path?")
        for property, name, words in (
            ("output", "output", "the output"),
            ("output", "tokens", "the tensor of tokens afterwards"),
            ("gradient", "weight.grad", "weight.grad"),
            ("gradient", "weight after 2 steps", "weight after 2 steps"),
        ):
            tolerance = "rounding" if property == "gradient" else "exact"
            yield compare(property, words, [o.get(name) for o in outcomes], [e[name] for e in expected], tolerance)
        number = 8 * case.h * math.prod(case.tokens)
        traffic = expect("traffic", ledger, Calls("all_reduce", case.calls(2), 0, number, case.groups), look=EVERY)
        yield replace(traffic, detail=f"{traffic.detail}, in 2 steps") if traffic.passed else traffic
        yield self._memory(case, outcomes)

    @staticmethod
    def _memory(case: Embedded, outcomes: list) -> Finding:
        for rank, outcome in enumerate(outcomes):
            kept, wanted = outcome["kept"], 8 * case.rows(rank) * case.h
            if kept != wanted:
                seen = f"rank {rank} keeps {size_in_words(kept)} of weights, expected {size_in_words(wanted)}"
                return Finding("memory", False, f"{seen} ({kept / wanted:.3g} times)")
            if outcome["shared"]:
                return Finding("memory", False, f"rank {rank} keeps the very weight that it was given",
                               look="Whoever gave it may still need it as it was: keep a copy.")  # fmt: skip
        whole = size_in_words(8 * case.size * case.h)
        return Finding("memory", True, f"{size_in_words(outcomes[0]['kept'])} of {whole} a rank")


class VocabCrossEntropy(Check):
    exercise = "tensor.vocab_cross_entropy"
    points = {"output": 2, "gradient": 2, "traffic": 1, "memory": 1}
    timeout, measure = 20.0, True

    def cases(self, seed: int, level: str) -> list[Targets]:
        """Logits that overflow, padding, a word of the vocabulary that is ignored, and half precision."""
        k = 1 + seed % 3
        if level == "visible":
            sizes = [(4, ((0, 1, 2, 3),), 198, (2, 3), 0.0, None, "float64")]
            sizes += [(4, ((0, 1, 2), (3,)), 4, (7,), 2e3, 2, "float64")]
            sizes += [(2, ((0, 1),), 9, (2, 4), 0.0, None, "bfloat16")]
        else:
            sizes = [(5, ((0, 2), (1, 3, 4)), 6 + k, (2, 1 + k), 5e3, None, "float64")]
            sizes += [(2, ((0, 1),), 8 + k, (1, 2, 2), 0.0, k, "float64")]
        return [
            Targets(
                world_size=world, groups=groups, size=size, tokens=tokens, shift=shift, ignored=ignored, dtype=dtype,
                seed=seed + number,
            )
            for number, (world, groups, size, tokens, shift, ignored, dtype) in enumerate(sizes)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Targets) -> dict:
        return try_loss(solution, case)

    def judge(self, case: Targets, outcomes: list, ledger: Any) -> Iterator[Finding]:
        expected = [expected_loss(case, rank) for rank in range(case.world_size)]

        def same(property: str, name: str, words: str, tolerance: str, look: str = "") -> Finding:
            return compare(property, words, [o[name] for o in outcomes], [e[name] for e in expected], tolerance, look)

        yield same("output", "loss", "the loss", "layers")
        yield same("output", "logits", "the tensor of logits afterwards", "exact")
        yield same("output", "targets", "the tensor of targets afterwards", "exact")
        pairs = [(o["logits.grad"], e["logits.grad"]) for o, e in zip(outcomes, expected, strict=True)]
        yield same("gradient", "logits.grad", "logits.grad", "layers", OTHERS if _left_out(pairs) else "")
        yield self._traffic(case, ledger)
        yield self._memory(case, ledger)

    @staticmethod
    def _traffic(case: Targets, ledger: Any) -> Finding:
        """All-reduces of three numbers a token at most, however they are packed, and none backward."""
        number = math.prod(case.tokens) * (8 if case.dtype == "float64" else 4)
        for rank in range(case.world_size):
            ranks = sorted(case.groups[case.place(rank)[0]])
            calls, limit = ledger[rank].communications, 3 * number * (len(ranks) > 1)
            for call in calls:
                if call.op != "all_reduce" or sorted(call.ranks) != ranks or call.backward:
                    way = "backward" if call.backward else "forward"
                    seen = f"{call.op.replace('_', '-')} in ranks {list(call.ranks)}, {way} on rank {rank}"
                    detail = f"{size_in_words(call.bytes)}, called at {call.line}" if call.line else ""
                    return Finding("traffic", False, f"{seen}: expected all-reduces in {ranks} forward alone", detail)
            given = sum(call.bytes for call in calls)
            if given > limit or len(calls) > 3:
                seen = f"{len(calls)} all-reduces of {size_in_words(given)} together on rank {rank}, expected 3 at most"
                look = "What must every rank know of a token? Not its logits."
                return Finding("traffic", False, f"{seen}, of {size_in_words(limit)} together", "", look)
        most = max(len(ledger[rank].communications) for rank in range(case.world_size))
        return Finding("traffic", True, f"{most} all-reduces forward, 0 backward", sent_in_words(ledger))

    @staticmethod
    def _memory(case: Targets, ledger: Any) -> Finding:
        """For backward: three tensors as large as this rank's logits, and sixteen numbers a token."""
        tokens, width = math.prod(case.tokens), 8 if case.dtype == "float64" else 4
        for rank in range(case.world_size):
            own = tokens * case.rows(rank) * width
            kept, limit = ledger[rank].memory.phases.get(LOSS, 0), 3 * own + 16 * 8 * tokens
            if kept > limit and case.dtype == "float64":
                seen = f"rank {rank} keeps {size_in_words(kept)} for backward, its logits are {size_in_words(own)}"
                return Finding("memory", False, seen, look="Whose logits does this rank need in backward?")
        own = tokens * case.rows(0) * width
        return Finding("memory", True, f"{size_in_words(ledger[0].memory.phases.get(LOSS, 0))} kept for backward",
                       f"{size_in_words(own)} of logits a rank")  # fmt: skip
