"""The text of each kind of cell in a solution notebook, from which nbgrader makes the learner's."""

from __future__ import annotations

import ast
import base64
import re
import symtable
import textwrap
from collections.abc import Iterator

from autograde import discover
from autograde.definitions import without_magics
from autograde.exercise import locate, with_markers
from autograde.exercise import source as library_source
from autograde.lesson import Cell, LessonError


def text_of(cell: Cell, defined: set[str]) -> str:
    """The text of a cell in the solution notebook; `defined` are the names that the cells before it leave behind."""
    if cell.role == "exercise":
        return _exercise(cell, defined)
    if cell.role == "question":
        return _question(cell)
    if cell.role == "check":
        return _check(cell)
    return _with_lessons(cell, _with_pictures(cell)) if cell.kind == "markdown" else cell.source


def asked(cell: Cell) -> str:
    """The text of a question and its choices, which stand in its check file only."""
    if cell.id not in discover.questions():
        raise cell.error(f"there is no question {cell.id} in autograde/checks")
    question = discover.questions()[cell.id]
    choices = [f"- **{letter}** {text}" for letter, (text, _) in question.choices.items()]
    return "\n".join([question.text, "", *choices]).rstrip()


def names_set(source: str) -> set[str]:
    """The global names that a program sets."""
    table = symtable.symtable(without_magics(source), "cell", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}


def _exercise(cell: Cell, defined: set[str]) -> str:
    module, _, name = cell.id.rpartition(".")
    if cell.source.strip() != f"from fivefold.{module} import {name}":
        raise cell.error(f"an exercise cell is its import and no more: from fivefold.{module} import {name}")
    try:
        source = library_source(cell.id, cell.root).rstrip("\n")
        if missing := sorted(_needed(source) - names_set(source) - defined):
            lines = "; ".join(_import_of(name, cell) for name in missing)
            raise cell.error(f"{cell.id} uses {', '.join(missing)}: put into an earlier cell {lines}")
        # Every edit is made, so that one whose lines are gone from the library fails the build.
        faulty = {item.name: item.apply(source).rstrip("\n") for item in discover.misconceptions(cell.id)}
        return _with_bug(cell, source, faulty) if cell.bug else with_markers(source).rstrip("\n")
    except LessonError:
        raise
    except (ValueError, LookupError) as error:
        raise cell.error(str(error)) from None


def _import_of(name: str, cell: Cell) -> str:
    """The line by which the exercise's module has `name`: its own import, or one from that module."""
    file, _ = locate(cell.id, cell.root)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    node.names = [alias]
                    return f"`{ast.unparse(node)}`"
    module = file.relative_to(cell.root / "lib").with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    return f"`from {module} import {name}`"


def _with_bug(cell: Cell, source: str, faulty: dict[str, str]) -> str:
    """A find-the-bug exercise: the faulty program is given, and the right one, in the markers, takes its place.

    nbgrader puts a `raise NotImplementedError()` where the right one was. It is caught, so that the learner can run the
    faulty program before they have mended it.
    """
    if cell.bug not in faulty:
        raise cell.error(f"{cell.id} has no misconception {cell.bug!r}: choose one of {', '.join(faulty) or 'none'}")
    if _has_long_string(source):
        raise cell.error(f"{cell.id} cannot be indented: it holds a string of several lines that is no docstring")
    right = textwrap.indent(source, "    ")
    start = "try:  # the grader's: nothing is written here, mend the program above"
    return (
        f"{faulty[cell.bug]}\n\n\n{start}\n    ### BEGIN SOLUTION\n{right}\n    ### END SOLUTION\n"
        "except NotImplementedError:\n    pass"
    )


def _has_long_string(source: str) -> bool:
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant))
    return any(node.lineno < node.end_lineno and id(node) not in docstrings for node in strings)


def _question(cell: Cell) -> str:
    """The answer's name is set to None for the learner. nbgrader takes away each line on which a marker ends, and puts
    nothing in its place, so what it leaves runs."""
    last = ast.parse(cell.source).body[-1]
    if not (isinstance(last, ast.Assign) and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name)):
        raise cell.error("a question cell ends by setting one name to the right answer")
    question = discover.questions()[cell.id]
    kind = " or ".join(f'"{letter}"' for letter in question.choices)
    kind = kind or (f"a number in {question.unit}" if question.unit else "a number")
    answer = [f"{line}  ### END SOLUTION" for line in cell.source.splitlines() if line.strip()]
    return "\n".join([f"{last.targets[0].id} = None  # your answer: {kind}", *answer])


def _check(cell: Cell) -> str:
    """The check of an exercise also runs on hidden cases, in lines that nbgrader takes out of the learner's copy."""
    call = ast.parse(cell.source).body[-1]
    text = ast.get_source_segment(cell.source, call) or ""
    if not text.startswith(f'check("{cell.id}", ') or not isinstance(getattr(call, "value", None), ast.Call):
        raise cell.error(f'a check cell ends with check("{cell.id}", NAME)')
    if cell.id in discover.questions():
        return cell.source
    hidden = text[:-1].rstrip(", \n") + ", hidden=True)"
    return f"{cell.source}\n### BEGIN HIDDEN TESTS\n{hidden}\n### END HIDDEN TESTS"


def _with_pictures(cell: Cell) -> str:
    """`![what is seen](pictures/name.svg)` with the picture itself in the place of its name, for a notebook that is
    handed on alone."""

    def embed(match: re.Match) -> str:
        file = cell.path.parent / match[1]
        if not file.is_file():
            raise cell.error(f"there is no picture {match[1]}: put it into {file.parent.name}/ beside the lesson")
        return f"](data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()})"

    return re.sub(r"\]\((pictures/[\w.-]+\.svg)\)", embed, cell.source)


def _with_lessons(cell: Cell, text: str) -> str:
    """`[Tensor parallelism](03.ipynb)` with the whole name of that lesson; the words alone where it is not written."""

    def name(match: re.Match) -> str:
        lesson = next(cell.path.parent.glob(f"{match[2]}_*.py"), None)
        return f"[{match[1]}]({lesson.stem}.ipynb)" if lesson else f"{match[1]} *(not written yet)*"

    return re.sub(r"\[([^]]+)\]\((\d\d)\.ipynb\)", name, text)


def _needed(source: str) -> set[str]:
    """The global names that a program reads, in its functions too."""
    return {name for scope in _scopes(symtable.symtable(source, "exercise", "exec")) for name in _globals(scope)}


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
