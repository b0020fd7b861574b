"""Build the instructor's and the learner's notebooks from the lessons.

    lessons/03_tensor.py  →  solutions/03_tensor.ipynb  →  notebooks/03_tensor.ipynb

A solution notebook is in nbgrader's source format; the learner's is what `nbgrader generate_assignment` makes of it, by
the same preprocessors. Every byte follows from the lesson, the library, the checks and the misconceptions. The home
page, `lessons/index.py`, has nothing to solve, and becomes `notebooks/index.ipynb` alone.
"""

from __future__ import annotations

import builtins
from collections.abc import Collection
from pathlib import Path

import nbformat
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

from autograde import discover
from autograde.cells import asked, names_set, text_of
from autograde.exercise import ROOT
from autograde.lesson import HOME, LESSONS, Cell, LessonError, read_lesson, slug

NOTEBOOKS = "[0-9][0-9]_*.ipynb"
NEW_CELL = {"code": new_code_cell, "markdown": new_markdown_cell, "raw": new_raw_cell}
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


def build(root: Path = ROOT, check: bool = False, only: Collection[str] = ()) -> list[Path]:
    """Write `solutions/` and `notebooks/`, and return the files that were not up to date; with `check`, write nothing.

    `only` names lessons by the start of their file's name, such as `03` or `index`; the others are not looked at.
    A notebook that has no lesson is such a file too, and is left where it is. Raises LessonError, with one line, for a
    lesson that cannot be built, and for a notebook that somebody has worked in and that the build would overwrite.
    """
    root = Path(root)
    stale = []
    for path, text in _built(root, only).items():
        if path.exists() and path.read_bytes() == text.encode():
            continue
        stale.append(path)
        if not check:
            _refuse_to_overwrite_work(path, root)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text.encode())
    return stale if only else [*stale, *_without_lesson(root)]


def solution_notebook(lesson: Path) -> NotebookNode:
    """The instructor's notebook of a lesson, in nbgrader's source format."""
    cells, names, defined = [], _Names(lesson.stem), set(dir(builtins))
    for cell in read_lesson(lesson):
        if cell.role == "question":
            cells.append(new_markdown_cell(asked(cell), id=f"question-{slug(cell.id)}"))
        source = text_of(cell, defined)
        cells.append(NEW_CELL[cell.kind](source, id=names(cell), metadata=_metadata(cell)))
        if cell.kind == "code":
            defined |= names_set(source)
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


def _built(root: Path, only: Collection[str]) -> dict[Path, str]:
    """The text of every notebook, by its path."""
    built: dict[Path, str] = {}
    seen: dict[str, Cell] = {}
    lessons = sorted((root / "lessons").glob(LESSONS))
    home = root / "lessons" / HOME
    for name in only:
        if not any(lesson.stem.startswith(name) for lesson in [*lessons, home]):
            raise LessonError(f"no lesson begins with {name}: there are {', '.join(lesson.stem for lesson in lessons)}")
    for lesson in lessons:
        if only and not lesson.stem.startswith(tuple(only)):
            continue
        for cell in read_lesson(lesson):
            _refuse_second(cell, seen)
        solution = solution_notebook(lesson)
        for folder, notebook in (("solutions", solution), ("notebooks", learner_notebook(solution))):
            built[root / folder / f"{lesson.stem}.ipynb"] = _text(notebook)
    if home.exists() and (not only or home.stem.startswith(tuple(only))):
        built[root / "notebooks" / f"{home.stem}.ipynb"] = _text(learner_notebook(solution_notebook(home)))
    return built


def _text(notebook: NotebookNode) -> str:
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


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
