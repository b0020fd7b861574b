"""A learner's own parts: what the library's functions can be replaced with, taken from their saved notebooks.

    mine = own_parts()                        # checks every solution in the notebooks; `only` checks some
    run(train, 16, job, 10, parts=mine.taken)

What is missing, or does not pass its check, stays the library's; `mine`, shown, says which is which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from fivefold.runtime.parts import Program

from autograde.discover import check_of, lessons
from autograde.exercise import ROOT
from autograde.grade import Lessons, check_solutions
from autograde.notebook import CannotRead, read_notebook
from autograde.report import first_problem
from autograde.trial import other_exercises


@dataclass(repr=False)
class Parts:
    """Of each exercise, whether the learner's own solution is taken, or why it is not."""

    taken: dict[str, Program] = field(default_factory=dict)  # by exercise id, for `run(..., parts=...)`
    left: dict[str, str] = field(default_factory=dict)  # exercise id -> why it stays the library's

    def without(self, *exercises: str) -> dict[str, Program]:
        """`taken`, but for some exercises."""
        return {exercise: part for exercise, part in self.taken.items() if exercise not in exercises}

    def __str__(self) -> str:
        lines = [self._headline()]
        for lesson, rows in self._by_lesson().items():
            if common := _same_reason(rows):
                lines.append(f"{lesson}\n  – the library’s{common}")
                continue
            lines.append(f"{lesson}")
            lines += [f"  {'✓ yours' if own else '– the library’s'}  {name}{why}" for name, own, why in rows]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = []
        for lesson, rows in self._by_lesson().items():
            yours = ", ".join(f"<code>{escape(name)}</code>" for name, own, _ in rows if own) or "–"
            others = "<br>".join(f"<code>{escape(name)}</code>{escape(why)}" for name, own, why in rows if not own)
            if common := _same_reason(rows):
                others = f"all of it{escape(common)}"
            cells.append(
                f"<tr><td>{escape(lesson)}</td><td style='text-align: left'>{yours}</td>"
                f"<td style='text-align: left'>{others or '–'}</td></tr>"
            )
        head = (
            "<tr><th>lesson</th><th style='text-align: left'>yours</th><th style='text-align: left'>the library’s</th>"
        )
        return f"<p>{escape(self._headline())}</p><table>{head}</tr>{''.join(cells)}</table>"

    def _headline(self) -> str:
        return f"{len(self.taken)} of {len(self.taken) + len(self.left)} parts are yours."

    def _by_lesson(self) -> dict[str, list[tuple[str, bool, str]]]:
        of, found = lessons(), {}
        for exercise in sorted([*self.taken, *self.left], key=list(of).index):
            why = f": {self.left[exercise]}" if exercise in self.left else ""
            found.setdefault(of[exercise], []).append((exercise, exercise in self.taken, why))
        return found


def own_parts(
    folder: str | Path = "",
    say: Callable[[str], object] = print,
    but: Iterable[str] = (),
    only: Iterable[str] | None = None,
) -> Parts:
    """Check the solutions in the notebooks of `folder`, as they are saved, and take those that pass.

    folder: by default the one that the kernel runs in, where it holds lessons; otherwise the course's `notebooks`.
    `say` is told each lesson before its checks begin. `but` names exercises that are left to the library, `only` the
    ones to look at, where not all. Raises ValueError where there is no such folder, and for a name in `only` that no
    exercise has.
    """
    place, found, known = _folder(folder), Parts(), Lessons()
    wanted = None if only is None else {check_of(exercise).exercise for exercise in only}
    for lesson in known.paths:
        tasks = [task for task in known.tasks(lesson) if not task.is_question]
        ids = {task.id for task in tasks} if wanted is None else {task.id for task in tasks if task.id in wanted}
        if not ids:
            continue
        try:
            notebook = read_notebook(place / f"{lesson}.ipynb")
        except CannotRead as error:
            found.left |= dict.fromkeys(ids, str(error))
            continue
        say(f"checking your {lesson}")
        for solution, verdict in check_solutions(notebook, tasks, hidden=False, only=ids):
            exercise = verdict.exercise
            if exercise in but:
                found.left[exercise] = "left out, as asked"
            elif verdict.passed:
                found.taken[exercise] = Program(solution.source)
            elif verdict.state == "unsolved":
                found.left[exercise] = "not written yet"
            else:
                found.left[exercise] = first_problem(verdict)
    found.taken = {exercise: _with_librarys(exercise, part, found) for exercise, part in found.taken.items()}
    return found


def _same_reason(rows: list[tuple[str, bool, str]]) -> str:
    """Why none of a lesson's parts is taken, where it is one reason for several: there is no such notebook."""
    reasons = {why for _, _, why in rows}
    return reasons.pop() if len(rows) > 1 and len(reasons) == 1 else ""


def _folder(folder: str | Path) -> Path:
    place = Path(folder or os.getcwd())
    if not place.is_dir():
        raise ValueError(f"there is no folder {place}: give the one that holds your notebooks")
    return place if folder or any(place.glob("[0-9][0-9]_*.ipynb")) else ROOT / "notebooks"


def _with_librarys(exercise: str, part: Program, found: Parts) -> Program:
    """A mistake costs once: of the exercises that a solution is built on, those that failed are the library's."""
    used = other_exercises(exercise, part.source)
    return Program(part.source, tuple(other for other in used if other not in found.taken))
