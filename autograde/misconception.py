"""Misconceptions: named wrong solutions of an exercise, most of them a small edit of the library's own.

Misconception(
    exercise="tensor.RowLinear",
    name="bias_on_every_rank",
    hint="This looks like: the bias is added on every rank before the sum. The all-reduce then adds it up n times. "
    "Who should add it, and when?",
    old="y = sum_over_ranks(x @ self.weight.T, self.group)",
    new="y = sum_over_ranks(x @ self.weight.T + self.bias, self.group)",
)
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.runtime.parts import Source

from autograde import discover
from autograde.library import definition


class StaleEdit(ValueError):
    """The lines that a misconception replaces are not in the library's function, or stand there more than once."""


@dataclass(frozen=True)
class Misconception:
    """A wrong solution with the hint it deserves: a sentence and a question, never the fix.

    `old` and `new` are whole lines of the exercise's source, whatever their common indentation; `also` are more such
    pairs. A wrong solution of another shape is written out as `source`.
    """

    exercise: str
    name: str
    hint: str
    old: str = ""
    new: str = ""
    also: tuple[tuple[str, str], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if bool(self.old) == bool(self.source):
            raise ValueError(f"{self.name}: give either old and new lines or a source")

    def apply(self, text: str) -> str:
        """The library's source of the exercise with this mistake made in it; raises StaleEdit."""
        if self.source:
            return textwrap.dedent(self.source).strip("\n") + "\n"
        for old, new in ((self.old, self.new), *self.also):
            text = self._edit(text, old, new)
        return text

    def program(self) -> Source:
        """The wrong solution, ready to be checked: the library's module with this definition in it."""
        where = definition(self.exercise)
        return where.module_with(self.apply(where.source))

    def _edit(self, text: str, old: str, new: str) -> str:
        lines, wanted = text.splitlines(), _lines(old)
        places = [i for i in range(len(lines)) if _lines("\n".join(lines[i : i + len(wanted)])) == wanted]
        if len(places) != 1:
            found = "are not in" if not places else f"stand {len(places)} times in"
            raise StaleEdit(
                f"{self.exercise}, {self.name}: its old lines {found} the library's source: {wanted[0].strip()}"
            )
        (at,) = places
        margin = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        changed = [margin + line if line else "" for line in _lines(new)]
        return "\n".join([*lines[:at], *changed, *lines[at + len(wanted) :]]) + "\n"


@dataclass(frozen=True)
class Proof:
    """How one misconception fared: it must be rejected, and be recognised as itself."""

    exercise: str
    name: str
    rejected: bool
    recognised_as: str | None
    points: float
    max_points: float
    seconds: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.rejected and self.recognised_as == self.name


def prove(exercises: Iterable[str] | None = None) -> list[Proof]:
    """Check every misconception of the exercises (all of them where none are given) like a learner's solution."""
    ids = list(exercises) if exercises is not None else list(discover.checks())
    return [_proof(item) for exercise in ids for item in discover.misconceptions(exercise)]


def first_is_rejected(exercise: str) -> bool:
    """Whether the check of an exercise rejects its first misconception; quicker than `prove`, which also recognises."""
    from autograde.check import examine
    from autograde.rank import Sent

    verdict, _ = examine(discover.check_of(exercise), Sent(discover.misconceptions(exercise)[0].program()))
    return not verdict.passed


def _proof(item: Misconception) -> Proof:
    from autograde.check import evaluate_alone

    try:
        verdict = evaluate_alone(item.exercise, item.program())
    except (StaleEdit, LookupError, SyntaxError) as error:
        return Proof(item.exercise, item.name, False, None, 0, 0, 0.0, str(error))
    tried = verdict.passed, verdict.misconception, verdict.points, verdict.max_points, verdict.seconds
    passed, recognised_as, points, most, seconds = tried
    return Proof(item.exercise, item.name, not passed, recognised_as, points, most, seconds)


def _lines(text: str) -> list[str]:
    """Lines without their common indentation."""
    return [line.rstrip() for line in textwrap.dedent(text.strip("\n")).splitlines()]
