"""Build the instructor's and the learner's notebooks from the lessons.

    lessons/03_tensor.py  →  solutions/03_tensor.ipynb  →  notebooks/03_tensor.ipynb

A solution notebook is in nbgrader's source format; the learner's is what `nbgrader generate_assignment` makes of it, by
the same preprocessors. Every byte follows from the lesson, the library, the checks and the misconceptions.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

from autograde import discover
from autograde.definitions import without_magics
from autograde.exercise import ROOT, with_markers
from autograde.exercise import source as library_source
from autograde.lesson import LESSONS, Cell, LessonError, read_lesson, slug

NOTEBOOKS = "[0-9][0-9]_*.ipynb"
NEW_CELL = {"code": new_code_cell, "markdown": new_markdown_cell, "raw": new_raw_cell}
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


def build(root: Path = ROOT, check: bool = False) -> list[Path]:
    """Write `solutions/` and `notebooks/`, and return the files that were not up to date; with `check`, write nothing.

    A notebook that has no lesson is such a file too, and is left where it is. Raises LessonError, with one line, for a
    lesson that cannot be built, and for a notebook that somebody has worked in and that the build would overwrite.
    """
    root = Path(root)
    stale = []
    for path, text in _built(root).items():
        if path.exists() and path.read_bytes() == text.encode():
            continue
        stale.append(path)
        if not check:
            _refuse_to_overwrite_work(path, root)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text.encode())
    return stale + _without_lesson(root)


def solution_notebook(lesson: Path) -> NotebookNode:
    """The instructor's notebook of a lesson, in nbgrader's source format."""
    cells, names, defined = [], _Names(lesson.stem), set(dir(builtins))
    for cell in read_lesson(lesson):
        source = _source(cell, defined)
        node = NEW_CELL[cell.kind](source, id=names(cell), metadata=_metadata(cell))
        cells.append(node)
        if cell.kind == "code":
            defined |= _bound(source)
    return new_notebook(cells=cells, metadata=METADATA, nbformat_minor=5)


def learner_notebook(solution: NotebookNode) -> NotebookNode:
    """What `nbgrader generate_assignment` releases of a solution notebook."""
    from nbgrader import preprocessors as nbgrader

    notebook, resources = nbformat.from_dict(solution), {}
    # The order of nbgrader's GenerateAssignment. A second checksum is taken of what is left without hidden tests.
    for step in (
        nbgrader.LockCells,
        nbgrader.ClearSolutions,
        nbgrader.ClearOutput,
        nbgrader.CheckCellMetadata,
        nbgrader.ComputeChecksums,
        nbgrader.ClearHiddenTests,
        nbgrader.ClearMarkScheme,
        nbgrader.ComputeChecksums,
        nbgrader.CheckCellMetadata,
    ):
        notebook, resources = step().preprocess(notebook, resources)
    return notebook


def _built(root: Path) -> dict[Path, str]:
    """The text of every notebook, by its path."""
    built: dict[Path, str] = {}
    seen: dict[str, Cell] = {}
    for lesson in sorted((root / "lessons").glob(LESSONS)):
        for cell in read_lesson(lesson):
            _refuse_second(cell, seen)
        solution = solution_notebook(lesson)
        for folder, notebook in (("solutions", solution), ("notebooks", learner_notebook(solution))):
            nbformat.validate(notebook)
            built[root / folder / f"{lesson.stem}.ipynb"] = nbformat.writes(notebook) + "\n"
    return built


def _refuse_second(cell: Cell, seen: dict[str, Cell]) -> None:
    if cell.role in ("exercise", "question"):
        first = seen.setdefault(slug(cell.id), cell)
        if first is not cell:
            raise cell.error(f"{cell.id} has a cell already, in {first.path.name} line {first.line}")


def _refuse_to_overwrite_work(path: Path, root: Path) -> None:
    """A learner who ran cells in notebooks/ must not lose them to a build."""
    if not path.exists():
        return
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:
        return  # what is no notebook holds no work
    if any(cell.get("outputs") or cell.get("execution_count") for cell in cells):
        name = path.relative_to(root)
        raise LessonError(f"{name} has been worked in and would be overwritten: move it elsewhere, then build again")


def _without_lesson(root: Path) -> list[Path]:
    lessons = {path.stem for path in (root / "lessons").glob(LESSONS)}
    built = [
        path for folder in ("notebooks", "solutions") for path in sorted((root / folder).glob("[0-9][0-9]_*.ipynb"))
    ]
    return [path for path in built if path.stem not in lessons]


class _Names:
    """Cell ids that stay when cells elsewhere are added: a graded cell's own, or a number after the last such cell."""

    def __init__(self, lesson: str) -> None:
        self.last, self.number = lesson, 0

    def __call__(self, cell: Cell) -> str:
        if cell.role:
            self.last, self.number = _grade_id(cell), 0
            return self.last
        self.number += 1
        return f"{self.last}-{self.number}"


def _grade_id(cell: Cell) -> str:
    return f"check-{slug(cell.id)}" if cell.role == "check" else slug(cell.id)


def _metadata(cell: Cell) -> dict:
    metadata = dict(cell.metadata)
    if cell.role:
        metadata["nbgrader"] = {
            "grade": cell.role == "check",
            "grade_id": _grade_id(cell),
            "locked": cell.role == "check",
            "schema_version": 3,
            "solution": cell.role == "exercise",
            "task": False,
        }
    if cell.role == "check":
        metadata["nbgrader"]["points"] = _points(cell)
    return metadata


def _points(cell: Cell) -> int | float:
    if cell.id in discover.checks():
        return sum(discover.checks()[cell.id].points.values())
    if cell.id in discover.questions():
        return discover.questions()[cell.id].points
    raise cell.error(f"{cell.id} is neither an exercise nor a question of autograde/checks")


def _source(cell: Cell, defined: set[str]) -> str:
    """The text of a cell in the solution notebook; `defined` are the names that the cells before it leave behind."""
    if cell.role == "exercise":
        return _exercise(cell, defined)
    if cell.role == "question":
        return _question(cell)
    return _check(cell) if cell.role == "check" else cell.source


def _exercise(cell: Cell, defined: set[str]) -> str:
    module, _, name = cell.id.rpartition(".")
    if cell.source.strip() != f"from fivefold.{module} import {name}":
        raise cell.error(f"an exercise cell is its import and no more: from fivefold.{module} import {name}")
    try:
        source = library_source(cell.id, cell.root).rstrip("\n")
        if missing := sorted(_needed(source) - _bound(source) - defined):
            raise cell.error(f"{cell.id} uses {', '.join(missing)}: import or define that in an earlier cell")
        return _with_bug(cell, source) if cell.bug else with_markers(source).rstrip("\n")
    except LessonError:
        raise
    except (ValueError, LookupError) as error:
        raise cell.error(str(error)) from None


def _with_bug(cell: Cell, source: str) -> str:
    """A find-the-bug exercise: the faulty program is given, and the right one, in the markers, takes its place.

    nbgrader puts a `raise NotImplementedError()` where the right one was. It is caught, so that the learner can run the
    faulty program before they have mended it.
    """
    known = {item.name: item for item in discover.misconceptions(cell.id)}
    if cell.bug not in known:
        raise cell.error(f"{cell.id} has no misconception {cell.bug!r}: choose one of {', '.join(known) or 'none'}")
    faulty = known[cell.bug].edited(source).rstrip("\n")
    right = textwrap.indent(source, "    ")
    if ast.dump(ast.parse(textwrap.dedent(right))) != ast.dump(ast.parse(source)):
        raise cell.error(f"{cell.id} cannot be indented: it holds a string of several lines")
    return (
        f"{faulty}\n\n\ntry:\n    ### BEGIN SOLUTION\n{right}\n    ### END SOLUTION\n"
        "except NotImplementedError:\n    pass  # nothing is written here: the program above counts, so mend it there"
    )


def _question(cell: Cell) -> str:
    """The answer's name is set to None for the learner. nbgrader takes away each line on which a marker ends, and puts
    nothing in its place, so what it leaves runs."""
    last = ast.parse(cell.source).body[-1]
    if not (isinstance(last, ast.Assign) and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name)):
        raise cell.error("a question cell ends by setting one name to the right answer")
    answer = [f"{line}  ### END SOLUTION" for line in cell.source.splitlines() if line.strip()]
    return "\n".join([f"{last.targets[0].id} = None  # your answer", *answer])


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


def _bound(source: str) -> set[str]:
    """The global names that a program sets."""
    table = symtable.symtable(without_magics(source), "cell", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
