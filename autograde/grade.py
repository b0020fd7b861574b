"""Grade notebooks: run each one, then check the solutions that it holds.

The two are kept apart. Running says whether the notebook works from top to bottom; points come only from checking the
learner's definitions on fresh ranks, with expected values that stay in this process. Nothing that a notebook prints,
patches or leaves behind can change them.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fivefold.runtime import ranks
from nbformat.notebooknode import NotebookNode

from autograde import sandbox
from autograde.definitions import bound
from autograde.exercise import ROOT
from autograde.notebook import CannotRead, grade_id, read_notebook
from autograde.progress import Silent
from autograde.run import OK, UNREADABLE, Execution, Limits, execute
from autograde.solutions import Found, Note, Task, find, tasks
from autograde.verdict import Finding, Verdict

NOT_RUN = "not run"


@dataclass
class Graded:
    """The grade of one notebook: how it ran, a verdict for each task of its lesson, and what was odd about it."""

    path: Path
    lesson: str  # "" where no lesson was recognised
    execution: Execution
    verdicts: list[Verdict] = field(default_factory=list)
    notes: dict[str, list[Note]] = field(default_factory=dict)  # by task id

    @property
    def points(self) -> float:
        return sum(verdict.points for verdict in self.verdicts)

    @property
    def max_points(self) -> float:
        return sum(verdict.max_points for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """It ran to its end, and all points are reached."""
        ran = self.execution.outcome in (OK, NOT_RUN)
        return ran and bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)


@dataclass
class Report:
    """The grades of some notebooks."""

    notebooks: list[Graded]

    @property
    def points(self) -> float:
        return sum(graded.points for graded in self.notebooks)

    @property
    def max_points(self) -> float:
        return sum(graded.max_points for graded in self.notebooks)

    @property
    def passed(self) -> bool:
        return bool(self.notebooks) and all(graded.passed for graded in self.notebooks)


def grade(
    notebooks: Iterable[str | Path],
    params: Mapping[str, Any] | None = None,
    *,
    limits: Limits | None = None,
    hidden: bool = True,
    run: bool = True,
    in_sandbox: bool = False,
    progress: Silent | None = None,
    references: Lessons | None = None,
) -> Report:
    """Grade each notebook; one that crashes, hangs or cannot be read gets its own answer and the others go on.

    `params` go to papermill, to the notebooks that have such parameters. `hidden` checks with fresh seeds, other world
    sizes and uneven sizes as well. `run=False` checks the solutions only. `in_sandbox` keeps cells and ranks under
    bubblewrap. `references` are the lessons, by default the course's own. Raises ValueError for a parameter that none
    of the notebooks has, and sandbox.NoSandbox.
    """
    progress = progress or Silent()
    references = references or Lessons()
    read = [_read(Path(path)) for path in notebooks]  # before any runs, while nothing can have changed them
    _refuse_unknown(params or {}, [notebook for _, notebook, _ in read if notebook])
    wrap = sandbox.sandboxed if in_sandbox else (lambda command, folder: command)
    graded = []
    with _sandbox_for_ranks() if in_sandbox else nullcontext():
        ranks.start()  # it loads what ranks need while the first notebook runs
        for path, notebook, problem in read:
            progress.begins(path)
            execution = Execution(path, UNREADABLE if problem else NOT_RUN, problem)
            if run and notebook:
                own = {name: value for name, value in (params or {}).items() if name in parameters(notebook)}
                execution = execute(path, own, limits, progress.cell, wrap)
            graded.append(_grade(execution, notebook, references, hidden, progress))
            progress.ends(graded[-1])
    return Report(graded)


class Lessons:
    """The lessons as their reference notebooks state them."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or ROOT / "solutions"
        self.paths = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
        self.read: dict[str, list[Task]] = {}

    def tasks(self, lesson: str) -> list[Task]:
        if lesson not in self.read:
            self.read[lesson] = tasks(read_notebook(self.paths[lesson])) if lesson in self.paths else []
        return self.read[lesson]

    def lesson_of(self, path: Path, notebook: NotebookNode | None) -> str:
        """By the file's name, also with what a browser or a person adds to it; or else by the cells it holds."""
        for lesson in self.paths:
            if re.fullmatch(rf"{re.escape(lesson)}([^A-Za-z0-9].*)?", path.stem):
                return lesson
        if notebook is None:
            return ""
        held = {grade_id(cell) for cell in notebook.cells} - {""}
        shared = {lesson: len(held & {task.grade_id for task in self.tasks(lesson)}) for lesson in self.paths}
        best = max(shared, key=shared.get, default="")
        return best if shared.get(best) else ""


def parameters(notebook: NotebookNode) -> set[str]:
    """The names that the notebook's parameters cell sets."""
    tagged = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    try:
        return set().union(*(bound(node) for source in tagged for node in ast.parse(source).body))
    except (SyntaxError, ValueError):
        return set()


def check_solutions(
    notebook: NotebookNode,
    lesson: list[Task],
    hidden: bool = True,
    progress: Silent | None = None,
    only: Collection[str] | None = None,
) -> Iterator[tuple[Found, Verdict]]:
    """For each task in turn, or those in `only`, what the notebook holds for it and the verdict on that."""
    for task in [task for task in lesson if only is None or task.id in only]:
        (progress or Silent()).checks(task.id)
        found = _find(notebook, task, lesson)
        yield found, _verdict(found, hidden)


def _read(path: Path) -> tuple[Path, NotebookNode | None, str]:
    """The notebook, or why it cannot be read."""
    try:
        return path, read_notebook(path), ""
    except CannotRead as error:
        return path, None, str(error)


def _refuse_unknown(params: Mapping[str, Any], notebooks: list[NotebookNode]) -> None:
    known = set().union(*map(parameters, notebooks))
    if unknown := sorted(set(params) - known):
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(f"no notebook has a parameter {unknown[0]}: the parameters are {there}")


def _grade(
    execution: Execution, notebook: NotebookNode | None, references: Lessons, hidden: bool, progress: Silent
) -> Graded:
    lesson = references.lesson_of(execution.path, notebook)
    graded = Graded(execution.path, lesson, execution)
    if notebook is None:
        graded.verdicts = [_ungraded(task, execution.message) for task in references.tasks(lesson)]
    elif not lesson:
        known = ", ".join(references.paths) or "none: run make build"
        name = execution.path.name
        execution.message = f"{name} belongs to no lesson (lessons: {known}): give it its lesson's name"
        execution.outcome = UNREADABLE
    else:
        for found, verdict in check_solutions(notebook, references.tasks(lesson), hidden, progress):
            graded.verdicts.append(verdict)
            graded.notes[verdict.exercise] = found.notes
    return graded


def _find(notebook: NotebookNode, task: Task, lesson: list[Task]) -> Found:
    try:
        return find(notebook, task, lesson)
    except Exception as error:
        return Found(task, problem=f"the notebook could not be searched for it: {error}")


def _verdict(found: Found, hidden: bool) -> Verdict:
    from autograde import evaluate  # the check engine loads torch

    task = found.task
    if found.problem and not found.attempted:
        return Verdict(task.id, 0, task.points, state="unsolved")
    if found.problem:
        state = "failed" if " is not Python" in found.problem else "cannot be graded"
        return Verdict(task.id, 0, task.points, [Finding("notebook", False, found.problem)], state=state)
    solution = found.answer if task.is_question else found.source
    try:
        verdict = evaluate(task.id, solution, hidden=hidden)
        if verdict.state == "timed out":  # a machine that was busy for a moment must not cost points
            verdict = evaluate(task.id, solution, hidden=hidden)
        return verdict
    except Exception as error:
        return _ungraded(task, f"{type(error).__name__}: {error}")


def _ungraded(task: Task, problem: str) -> Verdict:
    return Verdict(task.id, 0, task.points, [Finding("notebook", False, problem)], state="cannot be graded")


@contextmanager
def _sandbox_for_ranks() -> Iterator[None]:
    """Within it, ranks run under bubblewrap, and get none of this process's environment that could be a secret."""
    sandbox.require()
    environment = dict(os.environ)
    with TemporaryDirectory(prefix="fivefold-ranks-") as folder:
        try:
            for name in environment:
                if name not in sandbox.KEPT:
                    del os.environ[name]
            with ranks.launched_through(lambda command: sandbox.sandboxed(command, Path(folder))):
                yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
