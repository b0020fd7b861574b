"""Read a lesson, the py:percent text that a notebook is built from, and refuse in one line what cannot be built."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import jupytext
from nbformat.notebooknode import NotebookNode

LESSONS = "[0-9][0-9]_*.py"
HOME = "index.py"  # the course's first page: text and cells, no exercises, so no solutions
ROLES = ("exercise", "question", "check")
KEPT = ("tags", "jupyter")  # metadata that readers of notebooks know, and that says nothing of the solution
JUPYTEXT = ("lines_to_next_cell", "lines_to_end_of_cell_marker", "cell_marker")
NBGRADER = re.compile(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS|MARK SCHEME)|AUTOTEST")


class LessonError(ValueError):
    """A lesson that cannot be built; the message is one line that names the file and the line in it."""


@dataclass(frozen=True)
class Cell:
    """A cell of a lesson: its role is one of ROLES, with the id of the exercise or question, or ""."""

    path: Path
    line: int
    kind: str  # code, markdown or raw
    source: str
    metadata: dict
    role: str = ""
    id: str = ""
    bug: str = ""

    @property
    def root(self) -> Path:
        """The project that the lesson belongs to."""
        return self.path.parent.parent

    def error(self, message: str) -> LessonError:
        return LessonError(f"{self.path.parent.name}/{self.path.name}:{self.line}: {message}")


def read_lesson(path: Path) -> list[Cell]:
    """The cells of a lesson, each with its line and role. Raises LessonError for what no notebook can be built from."""
    text = path.read_text(encoding="utf-8")
    nodes = jupytext.reads(text, fmt="py:percent").cells
    lines = _header_lines(path, text)
    if len(lines) < len(nodes):
        lines.insert(0, 1)  # the first cell may stand without a header
    cells = [_cell(path, line, node) for line, node in zip(lines, nodes, strict=True)]
    _refuse_loose_checks(cells)
    _refuse_computed_parameters(cells)
    return cells


def slug(cell_id: str) -> str:
    """An id as nbgrader and nbformat can hold it: `tensor.RowLinear` is `tensor-RowLinear`."""
    return cell_id.replace(".", "-")


def _header_lines(path: Path, text: str) -> list[int]:
    """The lines of the cells' headers. Tokens tell them from a line of text in a string that looks like one."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise LessonError(f"{path.parent.name}/{path.name}:{error.lineno}: this is not Python: {error.msg}") from None
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    headers = (t for t in tokens if t.type == tokenize.COMMENT and t.start[1] == 0 and t.string.startswith("# %%"))
    return [token.start[0] for token in headers]


def _cell(path: Path, line: int, node: NotebookNode) -> Cell:
    metadata = {key: value for key, value in node.metadata.items() if key not in JUPYTEXT}
    roles = [role for role in ROLES if role in metadata]
    cell = Cell(
        path,
        line,
        node.cell_type,
        node.source,
        {key: metadata[key] for key in KEPT if key in metadata},
        role=roles[0] if roles else "",
        id=str(metadata[roles[0]]) if roles else "",
        bug=str(metadata.get("bug", "")),
    )
    if len(roles) > 1:
        raise cell.error(f"a cell is one of {', '.join(ROLES)}, not two: split it")
    if cell.bug and cell.role != "exercise":
        raise cell.error("only an exercise can start from a bug")
    if unknown := sorted(set(metadata) - {*KEPT, *ROLES, "bug"}):
        raise cell.error(f"metadata {unknown[0]!r} is not known: keep to {', '.join([*ROLES, 'bug', *KEPT])}")
    if cell.role and node.cell_type != "code":
        raise cell.error(f"a cell with {cell.role}= holds code")
    if cell.role and not re.fullmatch(r"[A-Za-z0-9_.]+", cell.id):
        raise cell.error(f"{cell.role}={cell.id!r} is not an id such as tensor.RowLinear or 03.bytes")
    if marker := NBGRADER.search(node.source):
        raise cell.error(f"{marker[0]!r} is for nbgrader: the build writes it, take it out")
    return cell


def _refuse_loose_checks(cells: list[Cell]) -> None:
    """Each exercise and question is followed by its check, before the next one begins."""
    waiting: Cell | None = None
    for cell in cells:
        if cell.role == "check":
            if waiting is None or waiting.id != cell.id:
                raise cell.error(
                    f"this check does not follow the exercise or question {cell.id}: put it after its cell"
                )
            waiting = None
        elif cell.role:
            if waiting:
                break
            waiting = cell
    if waiting:
        raise waiting.error(f'{waiting.id} has no check cell: add `# %% check="{waiting.id}"` after it')


def _refuse_computed_parameters(cells: list[Cell]) -> None:
    """papermill sets parameters in a cell *after* this one, so a value computed from another would be out of date."""
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    if len(tagged) > 1:
        raise tagged[1].error("a second cell is tagged parameters: papermill reads one")
    for cell in tagged:
        for node in ast.parse(cell.source).body:
            if not (isinstance(node, ast.Assign | ast.AnnAssign) and _is_literal(node.value)):
                raise cell.error(f"parameters are names set to literals, not {ast.unparse(node)!r}")


def _is_literal(node: ast.expr | None) -> bool:
    try:
        ast.literal_eval(node or "")
    except (ValueError, SyntaxError):
        return False
    return True
