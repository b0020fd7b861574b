"""Nothing of a solution reaches a learner's notebook. The oracle is the library's text, not nbgrader's markers."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode

from autograde import discover, exercise
from autograde.build import build
from autograde.lesson import LESSONS, Cell, read_lesson, slug

CELL_METADATA = {"tags", "jupyter", "nbgrader", "deletable", "editable"}
NBGRADER = {"schema_version", "grade", "locked", "solution", "task", "grade_id", "points", "checksum", "cell_type"}
LESSON_FILES = sorted((exercise.ROOT / "lessons").glob(LESSONS))


def body_lines(source: str) -> set[str]:
    """The lines that a learner is to write: of every function, what comes after its signature and docstring."""
    lines = source.splitlines()
    inside = {number for node in ast.walk(ast.parse(source)) for number in body_numbers(node, lines)}
    given = {line.strip() for number, line in enumerate(lines) if number not in inside}
    return {lines[number].strip() for number in inside} - given - {"", "pass", "...", ")", "]", "}", "else:", "try:"}


def body_numbers(node: ast.AST, lines: list[str]) -> range:
    """The indices of a function's lines below its docstring, with the comments above and below its statements."""
    if not isinstance(node, ast.FunctionDef):
        return range(0)
    begin, end = node.body[0].lineno - 1, node.end_lineno
    if ast.get_docstring(node) is not None:
        begin = node.body[0].end_lineno
    while lines[begin - 1].lstrip().startswith("#"):
        begin -= 1
    while end < len(lines) and lines[end].startswith(" " * (node.col_offset + 1)) and "#" in lines[end]:
        end += 1
    return range(begin, end)


def leaks(notebook: NotebookNode, lesson: Path) -> list[str]:
    """Everything in a learner's notebook that should not be there, a line each."""
    found = [f"{cell.id}: {problem}" for cell in notebook.cells for problem in foreign_parts(cell)]
    if extra := set(notebook.metadata) - {"kernelspec", "language_info"}:
        found.append(f"metadata of the notebook: {extra}")
    texts = {cell.id: cell.source for cell in notebook.cells}
    for cell in read_lesson(lesson):
        found += [f"{slug(cell.id)}: {line}" for line in leaked_lines(cell, texts)]
    return found


def foreign_parts(cell: NotebookNode) -> list[str]:
    """Outputs, attachments, unknown metadata, hidden tests and markers of one cell."""
    problems = [key for key in ("outputs", "execution_count", "attachments") if cell.get(key)]
    problems += sorted(set(cell.metadata) - CELL_METADATA)
    problems += sorted(set(cell.metadata.get("nbgrader", {})) - NBGRADER)
    return problems + [text for text in ("hidden=True", "SOLUTION", "HIDDEN", "MARK SCHEME") if text in cell.source]


def leaked_lines(cell: Cell, texts: dict[str, str]) -> list[str]:
    """The lines of a solution, or of an answer, that its cell in the learner's notebook still has."""
    lines = {line.strip() for line in texts.get(slug(cell.id), "").splitlines()}
    if cell.role == "question":
        return [line for line in sorted(lines) if " = None  # your answer: " not in line]
    if cell.role != "exercise":
        return []
    source = exercise.source(cell.id, cell.root)
    secret = body_lines(source)
    if cell.bug:
        (bug,) = (item for item in discover.misconceptions(cell.id) if item.name == cell.bug)
        secret -= {line.strip() for line in bug.apply(source).splitlines()}
    whole = [name for name, text in texts.items() if len(secret) > 1 and all(line in text for line in secret)]
    return sorted(lines & secret) + [f"all of it stands in {name}" for name in whole]


def test_a_small_lesson_leaks_nothing(toy):
    """Functions, methods, helpers, a faulty program and questions."""
    build(toy.root)
    assert leaks(nbformat.read(toy.root / "notebooks/03_toy.ipynb", as_version=4), toy.lesson) == []


@pytest.mark.parametrize("lesson", LESSON_FILES, ids=lambda path: path.stem)
def test_no_lesson_of_the_course_leaks(lesson):
    """What is committed in notebooks/."""
    notebook = nbformat.read(exercise.ROOT / "notebooks" / f"{lesson.stem}.ipynb", as_version=4)
    assert leaks(notebook, lesson) == []


def set_source(name: str, old: str, new: str):
    def plant(cells: dict[str, NotebookNode]) -> None:
        assert old in cells[name].source
        cells[name].source = cells[name].source.replace(old, new)

    return plant


PLANTED = [
    ("a line of a body", set_source("toy-middle", "raise", "return low + _half(high - low)\n    raise")),
    ("a comment", set_source("toy-middle", "# YOUR", "# Whoever gets this wrong returns half the width.\n    # YOUR")),
    ("a line of a helper", set_source("toy-middle", "raise", "return x / 2\n    raise")),
    ("a line of a method", set_source("toy-Counter", "raise", "self.now = start\n        raise")),
    ("the mended line", set_source("toy-round_up", "return math.floor(x)", "return math.ceil(x)")),
    ("an answer", set_source("03-which", "None", '"b"  #\nwhich_answer = "b"')),
    ("a hidden test", set_source("check-toy-middle", "middle)", "middle, hidden=True)")),
    ("a marker", set_source("toy-middle", "# YOUR", "### BEGIN SOLUTION\n    # YOUR")),
    ("a solution elsewhere", set_source("check-toy-middle-1", "Now", "self.now = start def after(now: int) -> int: "
     "return now + self.step self.now = after(self.now) return self.now")),
    ("an output", lambda cells: cells["toy-middle"].outputs.append(nbformat.v4.new_output("stream", text="5"))),
    ("unknown metadata", lambda cells: cells["toy-middle"].metadata.update(answer="return low")),
    ("an unknown key of nbgrader", lambda cells: cells["toy-middle"].metadata.nbgrader.update(answer=1)),
    ("an attachment", lambda cells: cells["check-toy-middle-1"].update(attachments={"a.txt": {"text/plain": "x"}})),
]  # fmt: skip


@pytest.mark.parametrize(("what", "plant"), PLANTED, ids=[what for what, _ in PLANTED])
def test_a_planted_leak_is_seen(toy, what, plant):
    """Each kind of leak, put into a clean notebook, is found: so the tests above can fail."""
    build(toy.root)
    notebook = nbformat.read(toy.root / "notebooks/03_toy.ipynb", as_version=4)
    plant({cell.id: cell for cell in notebook.cells})
    assert leaks(notebook, toy.lesson)
