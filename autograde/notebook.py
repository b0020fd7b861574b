"""Read a notebook that anybody may have written, or say in one line why it cannot be read."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat.notebooknode import NotebookNode

MAX_BYTES = 100_000_000


class CannotRead(ValueError):
    """The file is not a notebook that can be graded."""


def read_notebook(path: str | Path, keep_outputs: bool = False) -> NotebookNode:
    """The notebook at `path`, in format 4.5 and valid. Raises CannotRead, with one line, for whatever is wrong."""
    return parse_notebook(_bytes(Path(path)), str(path), keep_outputs)


def parse_notebook(data: bytes, name: str, keep_outputs: bool = False) -> NotebookNode:
    """The notebook that a file called `name` holds, without outputs unless they are wanted.

    Outputs are left out first: they are the part that other tools write, and a damaged one must not cost the learner
    the whole notebook. Raises CannotRead, with one line that begins with `name`.
    """
    try:
        notebook = _parse(name, data)
        if not keep_outputs:
            _clear_outputs(notebook)
        with _quiet():
            _, notebook = nbformat.validator.normalize(notebook, version=4, version_minor=notebook.nbformat_minor)
            notebook = nbformat.v4.upgrade(notebook)
            nbformat.validate(notebook)
    except CannotRead:
        raise
    except nbformat.ValidationError as error:
        raise CannotRead(f"{name} is not a valid notebook ({_first_line(error.message)}): download it again") from None
    except Exception as error:
        # Hostile input fails in places that nobody lists: an object where a list belongs, a key that is missing.
        raise CannotRead(f"{name} is not a valid notebook ({_first_line(error)}): download it again") from None
    return notebook


def grade_id(cell: NotebookNode) -> str:
    """The cell's nbgrader grade id, or "" where it has none."""
    metadata = cell.metadata.get("nbgrader")
    name = metadata.get("grade_id") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def cell_label(notebook: NotebookNode, index: int) -> str:
    """How a message names a cell: "cell [12]" as Jupyter shows it, or its position where it has never run."""
    count = notebook.cells[index].get("execution_count")
    if isinstance(count, int):
        return f"cell [{count}]"
    return f"code cell {sum(cell.cell_type == 'code' for cell in notebook.cells[: index + 1])}"


def _bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise CannotRead(f"{path} is a folder: name the notebooks in it")
        if path.exists() and not path.is_file():
            raise CannotRead(f"{path} is not a file")  # a pipe would keep its reader waiting for ever
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CannotRead(f"{path} has {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB: clear its outputs")
        return path.read_bytes()
    except FileNotFoundError:
        raise CannotRead(f"{path} does not exist") from None
    except OSError as error:
        raise CannotRead(f"{path} cannot be opened: {error.strerror}") from None


def _parse(name: str, data: bytes) -> NotebookNode:
    try:
        text = data.decode("utf-8-sig")
        content = json.loads(text)
        # A lone half of a surrogate pair is legal JSON and cannot be written to a file or a socket again.
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        wrong = text[error.pos : error.pos + 1]
        where = f"line {error.lineno}: {wrong!r}" if wrong else "it is cut short" if text.strip() else "it is empty"
        raise CannotRead(f"{name} is not a notebook ({where}): download it again") from None
    except UnicodeDecodeError:
        raise CannotRead(f"{name} is not a notebook (it is not text in UTF-8): download it again") from None
    except (ValueError, RecursionError) as error:
        raise CannotRead(f"{name} is not a notebook ({_first_line(error)}): download it again") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells", content.get("worksheets")), list):
        raise CannotRead(f"{name} is not a notebook (it has no list of cells): download it again")
    with _quiet():
        return nbformat.convert(nbformat.reader.reads(json.dumps(content)), 4)


def _clear_outputs(notebook: NotebookNode) -> None:
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            count = cell.get("execution_count")
            cell.execution_count = count if isinstance(count, int) else None


@contextmanager
def _quiet():
    """nbformat reports each repair on stderr; what matters here is whether the result is valid."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _first_line(error: object) -> str:
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= 120 else line[:117] + "..."
