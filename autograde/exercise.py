"""What exercises there are, the library source that each is about, and what of it is the learner's to write.

An exercise is found in a lesson, by its cell; its points and properties come from its check, its hints from its
misconceptions. The library's source is read as text: finding it imports nothing.
"""

from __future__ import annotations

import ast
import re
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
    from autograde import discover
    from autograde.lesson import LESSONS, read_lesson  # loads jupytext, which most that need a source do not

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


def bug_of(exercise: str, root: Path = ROOT) -> str:
    """The misconception that a find-the-bug exercise starts from; empty for any other exercise."""
    header = re.compile(rf"""^# %%(?=.*\bexercise="{re.escape(exercise)}").*\bbug="(\w+)\"""", re.MULTILINE)
    found = (header.search(path.read_text(encoding="utf-8")) for path in sorted((root / "lessons").glob("*.py")))
    return next((match[1] for match in found if match), "")


def locate(exercise: str, root: Path = ROOT) -> tuple[Path, str]:
    """The file of the library that defines an exercise, and the name it has there.

    A package may take the name from one of its modules. Raises LookupError where the library has no such definition.
    """
    module, _, name = exercise.rpartition(".")
    if module and (file := _module_file(f"fivefold.{module}", root)):
        if where := _definition(file, f"fivefold.{module}", name, root):
            return where
    raise LookupError(f"there is no {exercise} in lib/fivefold: give the dotted path of a function or class")


def source(exercise: str, root: Path = ROOT) -> str:
    """The text of an exercise in the library: the definition, after the private helpers that it alone uses.

    Those are the private definitions that stand directly before it and that nothing else in the module names.
    """
    file, name = locate(exercise, root)
    text = file.read_text(encoding="utf-8")
    body = ast.parse(text).body
    last = next(i for i, node in enumerate(body) if name in _names(node))
    first = last
    while first and _is_private(body[first - 1]) and _only_used_within(body, first - 1, last):
        first -= 1
    lines = text.splitlines()
    return "\n".join(lines[_first_line(body[first], lines) : body[last].end_lineno]) + "\n"


def with_markers(text: str) -> str:
    """The same program with nbgrader's solution markers around the body of every function and method.

    Decorators, signatures, docstrings and what else stands in a class stay outside, so they stay for the learner.
    Raises ValueError where there is no body to take out, or one that stands on the line of its signature.
    """
    lines = text.splitlines()
    bodies = [(node, body) for node in _functions(ast.parse(text).body) if (body := _body(node))]
    if not bodies:
        raise ValueError("this leaves a learner nothing to write: an exercise has a function or a method")
    for node, body in reversed(bodies):
        begin, end = _span(node, body, lines)
        margin = " " * body[0].col_offset
        lines[begin:end] = [f"{margin}### BEGIN SOLUTION", *lines[begin:end], f"{margin}### END SOLUTION"]
    return "\n".join(lines) + "\n"


def _module_file(module: str, root: Path) -> Path | None:
    path = root / "lib" / Path(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _definition(file: Path, module: str, name: str, root: Path) -> tuple[Path, str] | None:
    """Where `name` of `module` is defined: in `file`, or in the module of the library that it is imported from."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    late = [inner for node in body if isinstance(node, ast.If) for inner in node.body]  # `if TYPE_CHECKING:`
    for node in body + late:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return file, name
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    origin = _absolute(node, module, file)
                    other = _module_file(origin, root)
                    return _definition(other, origin, alias.name, root) if other else None
    return None


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str:
    """The module that an import names, with the dots of a relative one resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (file.name == "__init__.py")]
    return ".".join([*parts, node.module] if node.module else parts)


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_private(node: ast.stmt) -> bool:
    names = _names(node)
    return bool(names) and all(name.startswith("_") and not name.endswith("__") for name in names)


def _only_used_within(body: list[ast.stmt], helper: int, last: int) -> bool:
    """Whether the definitions after `helper`, up to `last`, use it, and the rest of the module does not."""
    names = _names(body[helper])
    inside = any(_uses(node, names) for node in body[helper + 1 : last + 1])
    return inside and not any(_uses(node, names) for node in body[:helper] + body[last + 1 :])


def _uses(node: ast.stmt, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    """Index of the line a definition begins on, with its decorators and the comment directly on top of it."""
    line = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1
    while line and lines[line - 1].startswith("#"):
        line -= 1
    return line


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
    begin = min([body[0].lineno, *(decorator.lineno for decorator in getattr(body[0], "decorator_list", ()))]) - 1
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
