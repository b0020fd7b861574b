"""Reading notebooks that anybody may have written."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from autograde.notebook import CannotRead, cell_label, grade_id, read_notebook

GOOD = json.loads(nbformat.writes(new_notebook(cells=[new_code_cell("x = 1")])))


def cells(*found: object) -> bytes:
    return json.dumps(GOOD | {"cells": list(found)}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<!doctype html><html>Sign in</html>", "is not a notebook (line 1: '<')"),
        (json.dumps(GOOD).encode()[:60], "is not a notebook"),
        (b"", "it is empty"),
        (b"   \n", "it is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "not text in UTF-8"),
        (b"[1, 2]", "has no list of cells"),
        (b'{"cells": {}}', "has no list of cells"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [3]}', "is not a valid notebook"),
        (b'{"nbformat": 99, "nbformat_minor": 5, "metadata": {}, "cells": []}', "is not a valid notebook"),
        (cells({"cell_type": "code"}), "is not a valid notebook"),
        (cells({"cell_type": "code", "source": 5, "metadata": {}, "outputs": []}), "is not a valid notebook"),
        (cells({"cell_type": "spell", "source": "", "metadata": {}}), "is not a valid notebook"),
        (b"[" * 200_000, "is not a notebook"),
        (b'{"cells": [], "x": ' + b"9" * 10_000 + b"}", "is not a notebook"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {"x": "\\ud800"}, "cells": []}', "is not a notebook"),
    ],
)
def test_what_is_no_notebook_is_said_in_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    """Whatever is in the file, there is one line that names it and says what to do, and no other exception."""
    path = tmp_path / "03_tensor.ipynb"
    path.write_bytes(data)
    with pytest.raises(CannotRead) as caught:
        read_notebook(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "download it again" in str(caught.value)


def test_what_is_no_file_is_said_in_one_line(tmp_path: Path) -> None:
    """A folder, a missing file and a pipe, which would keep its reader waiting for ever."""
    os.mkfifo(tmp_path / "pipe")
    for name, said in ((".", "is a folder"), ("nowhere.ipynb", "does not exist"), ("pipe", "is not a file")):
        with pytest.raises(CannotRead, match=said):
            read_notebook(tmp_path / name)


def test_damaged_outputs_do_not_cost_the_notebook(tmp_path: Path) -> None:
    """Outputs that no tool should have written are left out, and the source is still read."""
    cell = new_code_cell("y = 2") | {"outputs": [{"output_type": "stream", "name": 3}], "execution_count": "many"}
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps(GOOD | {"cells": [cell]}))
    assert [(c.source, c.outputs) for c in read_notebook(path).cells] == [("y = 2", [])]


def test_outputs_are_kept_where_they_are_wanted(tmp_path: Path) -> None:
    """A notebook that was executed is read with what it showed."""
    notebook = new_notebook(cells=[new_code_cell("print(1)", outputs=[new_output("stream", text="1\n")])])
    nbformat.write(notebook, tmp_path / "n.ipynb")
    assert read_notebook(tmp_path / "n.ipynb", keep_outputs=True).cells[0].outputs[0].text == "1\n"


@pytest.mark.parametrize("minor", [0, 2, 4])
def test_older_formats_are_brought_up_to_date(tmp_path: Path, minor: int) -> None:
    """What an older Jupyter or Colab wrote comes out as format 4.5, valid, with cell ids."""
    cell = {"cell_type": "code", "source": ["a = 1\n", "b = 2"], "metadata": {}, "outputs": [], "execution_count": 3}
    old = {"nbformat": 4, "nbformat_minor": minor, "metadata": {"colab": {"x": 1}}, "cells": [cell]}
    (tmp_path / "n.ipynb").write_text(json.dumps(old))
    notebook = read_notebook(tmp_path / "n.ipynb")
    nbformat.validate(notebook)
    assert (notebook.nbformat_minor, notebook.cells[0].source) == (5, "a = 1\nb = 2")
    assert cell_label(notebook, 0) == "cell [3]"


def test_a_cell_that_never_ran_is_named_by_its_place() -> None:
    """Text cells do not count."""
    notebook = new_notebook(cells=[nbformat.v4.new_markdown_cell("x"), new_code_cell("1"), new_code_cell("2")])
    assert cell_label(notebook, 2) == "code cell 2"


@pytest.mark.parametrize("metadata", [{}, {"nbgrader": None}, {"nbgrader": []}, {"nbgrader": {"grade_id": 5}}])
def test_metadata_of_any_shape_is_no_grade_id(metadata: dict) -> None:
    """A learner's metadata is never trusted to have a shape."""
    assert grade_id(new_code_cell("", metadata=metadata)) == ""
