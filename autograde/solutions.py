"""A learner's solutions, taken out of their saved notebook without executing any of it.

What is looked for comes from the reference notebook, never from the submission: a learner may have lost, copied or
edited cells and their metadata. Whatever is odd is a note with a name; it is never a silent zero, and never an
exception that would stop a batch.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fivefold.runtime.parts import Source
from nbformat.notebooknode import NotebookNode

from autograde.definitions import bound, constant, definitions, is_stub, needed, without_magics
from autograde.notebook import cell_label, grade_id

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Task:
    """One graded thing of a lesson, as its reference notebook states it."""

    id: str  # "tensor.RowLinear", or "03.bytes" for a question
    name: str  # what the check cell is given: "RowLinear", "bytes_answer"
    points: float
    check: str  # source of the check cell, as the learner gets it

    @property
    def is_question(self) -> bool:
        return self.id[:1].isdigit()

    @property
    def grade_id(self) -> str:
        return self.id.replace(".", "-")

    @property
    def check_id(self) -> str:
        return f"check-{self.grade_id}"


@dataclass(frozen=True)
class Note:
    """Something odd about a submission: its kind, and a line that says what was done about it."""

    kind: str  # missing, duplicated, altered, unlabelled, unreadable
    message: str


@dataclass
class Found:
    """What a notebook holds for one task."""

    task: Task
    source: Source | None = None  # for an exercise; None where nothing can be graded
    answer: Any = None  # for a question
    problem: str = ""  # why there is nothing to grade
    attempted: bool = True
    notes: list[Note] = field(default_factory=list)


def tasks(reference: NotebookNode) -> list[Task]:
    """The graded things of a lesson, in the order of its reference notebook."""
    found = []
    for cell in reference.cells:
        if grade_id(cell).startswith("check-") and (call := _check_call(cell.source)):
            released = re.sub(r"(?ms)^[^\n]*BEGIN HIDDEN TESTS.*?END HIDDEN TESTS[^\n]*\n?", "", cell.source)
            found.append(Task(*call, float(cell.metadata["nbgrader"].get("points") or 0), released.strip()))
    return found


def find(notebook: NotebookNode, task: Task, lesson: Iterable[Task] = ()) -> Found:
    """What `notebook` holds for `task`. Where it has lost an earlier exercise of the `lesson`, the library's version is
    imported in its place: a mistake costs once."""
    found = Found(task)
    end = _end(notebook, task, found.notes)
    cells = [
        (cell_label(notebook, index), cell.source)
        for index, cell in enumerate(notebook.cells[:end])
        if cell.cell_type == "code"
    ]
    if task.is_question:
        _answer(cells, found)
    else:
        _source(cells, found, [other for other in _before(task, lesson) if not other.is_question])
    return found


def _before(task: Task, lesson: Iterable[Task]) -> list[Task]:
    return list(itertools.takewhile(lambda other: other.id != task.id, lesson))


def _end(notebook: NotebookNode, task: Task, notes: list[Note]) -> int:
    """How far the notebook counts for a task: to its check cell, or else to the last cell that bears its grade id, or
    else to its end. Cells between an exercise and its check count, as they do when the notebook is run."""
    ids = [grade_id(cell) for cell in notebook.cells]
    checks = [index for index, name in enumerate(ids) if name == task.check_id]
    own = [index for index, name in enumerate(ids) if name == task.grade_id]
    calls = [index for index, cell in enumerate(notebook.cells) if _checks(cell, task)]
    if len(own) > 1:
        notes.append(Note("duplicated", f"{len(own)} cells are labelled {task.grade_id}: the last definition counts"))
    if len(checks) > 1:
        notes.append(Note("duplicated", f"{len(checks)} cells are labelled {task.check_id}: the last one counts"))
    if not own and not task.is_question:  # an answer's cell need not be labelled: nbgrader knows its check only
        notes.append(Note("unlabelled", f"no cell is labelled {task.grade_id}: {task.name} was looked for by its name"))
    if checks and notebook.cells[checks[-1]].source.split("### BEGIN HIDDEN TESTS")[0].strip() != task.check:
        notes.append(Note("altered", f"the check cell {task.check_id} was edited: the course's own check was used"))
    if not checks:
        notes.append(Note("missing", f"the check cell {task.check_id} is gone: the course's own check was used"))
    ends = checks or calls
    # A check that was moved above its exercise, or copied there, must not hide the exercise.
    return max([ends[-1]] + [index + 1 for index in own]) if ends else len(notebook.cells)


def _source(cells: list[tuple[str, str]], found: Found, others: list[Task]) -> None:
    name, definition, broken = found.task.name, None, ""
    programs: list[tuple[str, str, list[ast.stmt]]] = []
    for label, code in cells:
        try:
            programs.append((label, code, ast.parse(without_magics(code)).body))
        except UNPARSABLE as error:
            if name in code:
                broken = f"{label} is not Python: {_line(error)}"
            continue
        for statement in programs[-1][2]:
            if name in bound(statement):
                definition, broken = statement, ""
    if broken:
        found.problem = broken
    elif definition is None:
        found.notes.append(Note("missing", f"the notebook does not define {name}"))
        found.problem = f"the notebook does not define {name}: its cell was deleted, or the name was changed"
    elif is_stub(definition):
        found.attempted, found.problem = False, "not begun"
    else:
        found.source = Source(_needed_cells(name, programs, others), name)


def _needed_cells(
    name: str, programs: list[tuple[str, str, list[ast.stmt]]], others: list[Task]
) -> tuple[tuple[str, str], ...]:
    """Of each cell what the solution is made of: what else a learner keeps in a notebook costs no time on the ranks."""
    statements = [statement for _, _, body in programs for statement in body]
    names = needed(name, statements)
    there = set().union(*map(bound, statements))
    lost = [_import(other.id) for other in others if other.name in names - there]
    cells = [(label, definitions(code, names)) for label, code, _ in programs]
    kept = [(label, text) for label, text in cells if text.strip("0 \n")]
    return (*([("the library", "\n".join(lost))] if lost else []), *kept)


def _import(exercise: str) -> str:
    module, _, name = exercise.rpartition(".")
    return f"from fivefold.{module} import {name}"


def _answer(cells: list[tuple[str, str]], found: Found) -> None:
    """The last value assigned to the question's name, where it is written out and not computed by a program."""
    known: dict[str, Any] = {}
    value, problem = None, f"the notebook does not set {found.task.name}: its cell was deleted, or the name was changed"
    for label, code in cells:
        try:
            statements = ast.parse(without_magics(code)).body
        except UNPARSABLE as error:
            if found.task.name in code:
                value, problem = None, f"{label} is not Python: {_line(error)}"
            continue
        for statement in statements:
            for name in bound(statement):
                known.pop(name, None)
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                continue
            if len(bound(statement)) != 1:
                continue
            (name,) = bound(statement)
            try:
                known[name] = constant(statement.value, known)
                problem_here = ""
            except UNPARSABLE:
                problem_here = f"{name} in {label} is not written out: give a number, a word or plain arithmetic"
            if name == found.task.name:
                value, problem = known.get(name), problem_here
    found.answer, found.problem = value, problem
    if not problem and (value is None or value is Ellipsis):
        found.attempted, found.problem = False, "not begun"


def _check_call(source: str) -> tuple[str, str] | None:
    """("tensor.RowLinear", "RowLinear") of `check("tensor.RowLinear", RowLinear)`."""
    try:
        nodes = list(ast.walk(ast.parse(without_magics(source))))
    except UNPARSABLE:
        return None
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check":
            if len(node.args) > 1 and isinstance(node.args[0], ast.Constant) and isinstance(node.args[1], ast.Name):
                return str(node.args[0].value), node.args[1].id
    return None


def _checks(cell: NotebookNode, task: Task) -> bool:
    return cell.cell_type == "code" and (_check_call(cell.source) or ("",))[0] == task.id


def _line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    return str(error) or type(error).__name__
