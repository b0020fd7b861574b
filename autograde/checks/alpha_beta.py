"""What the seconds of a collective should be, by the α-β model, for every op and algorithm that has a formula.

Written by cases, from the papers, and not from the library's table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autograde.case import Case
from autograde.checks.messages import log_rounds
from autograde.compare import compare
from autograde.traffic import size_in_words
from autograde.verdict import Finding, in_words

PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}  # op -> how often M goes round
FIRST = {op: "pairwise" if op == "all_to_all" else "ring" for op in PASSES}
FIRST |= {"broadcast": "tree", "reduce": "tree", "send": "direct"}  # op -> the algorithm where none is named
WAYS = [*FIRST.items(), ("broadcast", "flat"), ("all_reduce", "tree")]
UNKNOWN = [("gossip",), ("broadcast", "ring"), ("all_to_all", "tree")]


@dataclass(frozen=True, kw_only=True)
class Costs(Case):
    """A link and a size, for several numbers of ranks; a case looks at one property."""

    ranks: tuple[int, ...]
    num_bytes: float
    alpha: float
    beta: float

    def __str__(self) -> str:
        size, alpha, beta = size_in_words(self.num_bytes), self.alpha * 1e6, self.beta * 1e9
        return f"{in_words(self.ranks)} ranks, {size}, α = {alpha:g} µs, β = {beta:g} ns a byte"

    @property
    def link(self) -> tuple[float, float, float]:
        return self.num_bytes, self.alpha, self.beta


def seconds(op: str, n: int, num_bytes: float, alpha: float, beta: float, algorithm: str | None = None) -> float:
    """Rounds, one after the other, of one message each."""
    algorithm = algorithm or FIRST.get(op)
    if (op, algorithm) not in WAYS:
        raise ValueError(f"{op} {algorithm}")
    if algorithm in ("ring", "pairwise"):
        return PASSES[op] * (n - 1) * (alpha + beta * num_bytes / n)
    if algorithm == "tree":
        return (2 if op == "all_reduce" else 1) * log_rounds(n) * (alpha + beta * num_bytes)
    return (n - 1 if algorithm == "flat" else 1) * (alpha + beta * num_bytes)


def calls(function: Callable, case: Costs) -> dict[str, Any]:
    """What `function(op, n, *algorithm)` gives, for the property that the case looks at.

    "seconds": each op, no algorithm named; "algorithm": each pair; "refusal": pairs that there are not.
    """
    if case.properties == ("seconds",):
        return {f"{op} over {n} ranks": function(op, n) for n in case.ranks for op in FIRST}
    if case.properties == ("algorithm",):
        return {f"{way} {op} over {n} ranks": function(op, n, way) for n in case.ranks for op, way in WAYS}
    refused = {}
    for op, *way in UNKNOWN:
        name = " ".join([*way, op])
        try:
            refused[name] = function(op, 4, *way)
        except NotImplementedError:
            raise
        except Exception as error:
            refused[name] = type(error).__name__
    return refused


def judge_seconds(property: str, got: dict[str, Any], expected: dict[str, Any]) -> Finding:
    """Calls by what they are in words: the first that gives other seconds, or another error, or how many there were."""
    for call, wanted in expected.items():
        found = compare(property, call, [got[call]], wanted)
        if found.passed:
            continue
        if isinstance(wanted, str):
            return Finding(property, False, f"{call}: {_told(got[call])}, expected a {wanted}")
        if isinstance(got[call], int | float) and not isinstance(got[call], bool):
            times = f" ({got[call] / wanted:.3g} times)" if wanted else ""
            return Finding(property, False, f"{call}: {got[call]:.6g} s, expected {wanted:.6g} s{times}")
        return Finding(property, False, f"{call}: got {type(got[call]).__name__}, expected seconds")
    return Finding(property, True, f"{len(expected)} calls")


def _told(result: Any) -> str:
    """An error's name, or what was returned in its place."""
    return f"raises {result}" if isinstance(result, str) else f"returns {result!r}"
