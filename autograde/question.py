"""Self-check questions: a number, or one of many. Each wrong answer that was foreseen has its own explanation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autograde.verdict import Finding, Verdict


@dataclass(frozen=True)
class Question:
    """A question with a number (`answer` within `tolerance`, relative) or, where it has choices, one of their letters.

    `choices` maps a letter to `(text, why)`: why it is wrong, or for the right one why it is right. `mistakes` maps
    wrong numbers that people arrive at to the explanation of each. `unit` is that of the number.
    """

    id: str
    text: str
    answer: float | str
    choices: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    mistakes: Mapping[float, str] = field(default_factory=dict)
    tolerance: float = 1e-3
    unit: str = ""
    why: str = ""
    points: float = 1

    def __post_init__(self) -> None:
        if self.choices and self.answer not in self.choices:
            raise ValueError(f"{self.id}: the answer {self.answer!r} is none of the choices {', '.join(self.choices)}")
        if not self.choices and not _is_number(self.answer):
            raise ValueError(f"{self.id}: the answer {self.answer!r} is no number: give choices or a number")
        if any(self.near(value, float(self.answer)) for value in self.mistakes):
            raise ValueError(f"{self.id}: a mistake is within the tolerance of the answer: make the tolerance smaller")

    def grade(self, answer: Any) -> Verdict:
        """The verdict on an answer; None and `...` are no answer yet."""
        if answer is None or answer is Ellipsis:
            return Verdict(self.id, 0, self.points, state="unsolved")
        right, seen = self._choice(answer) if self.choices else self._number(answer)
        state, points = ("passed", self.points) if right else ("failed", 0)
        return Verdict(self.id, points, self.points, [Finding("answer", right, seen)], state)

    def near(self, value: float, wanted: float) -> bool:
        """Whether two numbers are the same within the tolerance."""
        return math.isclose(value, wanted, rel_tol=self.tolerance, abs_tol=self.tolerance if wanted == 0 else 0)

    def _choice(self, answer: Any) -> tuple[bool, str]:
        letter = answer.strip().lower() if isinstance(answer, str) else answer
        if not isinstance(letter, str) or letter not in self.choices:
            *most, last = (f'"{name}"' for name in self.choices)
            return False, f"{_brief(answer)} is none of the choices: give {', '.join(most)} or {last}"
        text, why = self.choices[letter]
        right = letter == self.answer
        return right, f"{letter}: {why or text}"

    def _number(self, answer: Any) -> tuple[bool, str]:
        if not _is_number(answer):
            return False, f"{_brief(answer)} is no number: give one{f' in {self.unit}' if self.unit else ''}"
        given = f"{answer:g}{f' {self.unit}' if self.unit else ''}"
        if self.near(float(answer), float(self.answer)):
            return True, f"{given}{f': {self.why}' if self.why else ''}"
        for value, why in self.mistakes.items():
            if self.near(float(answer), float(value)):
                return False, f"{given}: {why}"
        return False, f"{given} is too {'large' if answer > self.answer else 'small'}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _brief(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
