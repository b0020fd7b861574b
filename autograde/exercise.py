"""What exercises there are, and how the source of one is divided between its learner and its author.

An exercise is found in a lesson, by its cell; its points and properties come from its check, its hints from its
misconceptions.
"""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from pathlib import Path

from autograde import discover
from autograde.lesson import LESSONS, ROOT, read_lesson


@dataclass(frozen=True)
class Exercise:
    """One function or class of the library that the learner writes; `bug` names what a find-the-bug one starts from."""

    id: str
    lesson: str
    points: int
    properties: dict[str, int]
    misconceptions: tuple[str, ...]
    bug: str = ""

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return asdict(self) | {"misconceptions": list(self.misconceptions)}


def exercises(root: Path = ROOT) -> list[Exercise]:
    """Every exercise, in the order of the course. Raises LessonError for an exercise that has no check."""
    found = []
    for path in sorted((root / "lessons").glob(LESSONS)):
        for cell in read_lesson(path):
            if cell.role == "exercise":
                if cell.id not in discover.checks():
                    raise cell.error(f"{cell.id} has no check in autograde/checks")
                properties = dict(discover.checks()[cell.id].points)
                names = tuple(item.name for item in discover.misconceptions(cell.id))
                found.append(Exercise(cell.id, path.stem, sum(properties.values()), properties, names, cell.bug))
    return found


def with_markers(text: str) -> str:
    """The same program with nbgrader's solution markers around the body of every function and method.

    Decorators, signatures, docstrings and what else stands in a class stay outside, so they stay for the learner.
    Raises ValueError for a function whose body stands on the line of its signature.
    """
    lines = text.splitlines()
    for node in reversed(_functions(ast.parse(text).body)):
        if body := _body(node):
            begin, end = _span(node, body, lines)
            margin = " " * body[0].col_offset
            lines[begin:end] = [f"{margin}### BEGIN SOLUTION", *lines[begin:end], f"{margin}### END SOLUTION"]
    return "\n".join(lines) + "\n"


def _functions(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    """The functions of a module and the methods of its classes, in the order of the text."""
    functions = []
    for node in body:
        if isinstance(node, ast.FunctionDef):
            functions.append(node)
        elif isinstance(node, ast.ClassDef):
            functions += _functions(node.body)
    return functions


def _body(node: ast.FunctionDef) -> list[ast.stmt]:
    """The statements after the docstring; none where they say nothing, such as `pass` and `...`."""
    body = node.body[ast.get_docstring(node) is not None :]
    return [] if all(isinstance(part, ast.Pass) or _is_constant(part) for part in body) else body


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _span(node: ast.FunctionDef, body: list[ast.stmt], lines: list[str]) -> tuple[int, int]:
    """Where `body` begins and ends in `lines`, with the comments above and below it."""
    begin = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))]) - 1
    if lines[begin][: body[0].col_offset].strip():
        raise ValueError(f"{node.name} has its body on the line of its signature: put it on the next one")
    margin = lines[begin][: body[0].col_offset]
    docstring_end = node.body[0].end_lineno if body[0] is not node.body[0] else node.lineno
    while begin > docstring_end and lines[begin - 1].startswith(margin + "#"):
        begin -= 1
    end = node.end_lineno
    while end < len(lines) and lines[end].startswith(margin + "#"):
        end += 1
    return begin, end
