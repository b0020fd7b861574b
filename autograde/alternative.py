"""Right solutions that look different: a check must accept every one of them, with its hidden cases.

They stand in `tests/alternatives/NN_name.py` (or a folder `NN_name/` of files), as functions and classes named after
their exercise with a word for what is different: `sum_over_ranks__functional`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autograde import discover
from autograde.check import evaluate
from autograde.exercise import ROOT
from autograde.verdict import Verdict

ALTERNATIVES = ROOT / "tests" / "alternatives"


def alternatives(folder: Path = ALTERNATIVES) -> Iterator[tuple[str, str, Any]]:
    """`(exercise id, word, solution)` for each; raises ValueError for one that belongs to no exercise of its lesson."""
    for module in discover.modules(folder):
        lesson = discover.lesson_of(module)
        ids = {exercise.rpartition(".")[2]: exercise for exercise, its in discover.lessons().items() if its == lesson}
        for name, item in vars(module).items():
            exercise, different, word = name.partition("__")
            if not different or not exercise or getattr(item, "__module__", "") != module.__name__:
                continue
            if exercise not in ids:
                raise ValueError(f"{name} in {lesson}: that lesson has no exercise called {exercise}")
            yield ids[exercise], word, item


def accept(exercises: Iterable[str] | None = None, folder: Path = ALTERNATIVES) -> list[tuple[str, str, Verdict]]:
    """Check the alternatives of the exercises, or of all: `(exercise id, word, verdict)` for each."""
    wanted = None if exercises is None else set(exercises)
    found = [item for item in alternatives(folder) if wanted is None or item[0] in wanted]
    return [(exercise, word, evaluate(exercise, solution, hidden=True)) for exercise, word, solution in found]
