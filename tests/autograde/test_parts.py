"""A learner's own parts: what passes takes the library's place on every rank, what does not stays the library's."""

from __future__ import annotations

import nbformat
import pytest
from fivefold import run
from fivefold.layout import Layout
from fivefold.train import Job, train

from autograde.exercise import ROOT
from autograde.library import library_source
from autograde.parts import own_parts

LESSON = "03_tensor"
COLUMN = """
class ColumnLinear(nn.Module):
    def __init__(self, weight, bias, group, enter=None):
        super().__init__()
        print("a ColumnLinear of mine")
        self.group, self.enter = group, enter or copy_to_ranks
        self.weight = nn.Parameter(shard(weight, group))
        self.bias = None if bias is None else nn.Parameter(shard(bias, group))

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)
"""
WRONG_ROW = """
class RowLinear(nn.Module):
    def __init__(self, weight, bias, group, leave=None):
        super().__init__()
        self.group, self.leave = group, leave or sum_over_ranks
        self.weight = nn.Parameter(shard(weight, group, dim=1))
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x):
        return self.leave(F.linear(x, self.weight, self.bias), self.group)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A course of mixed solutions: f and the MLP right, a ColumnLinear of its own kind, a RowLinear that is wrong, the
    rest not begun; every other lesson is missing, and one cannot be read."""
    place = tmp_path_factory.mktemp("notebooks")
    notebook = nbformat.read(ROOT / "notebooks" / f"{LESSON}.ipynb", as_version=4)
    written = {"tensor-ColumnLinear": COLUMN, "tensor-RowLinear": WRONG_ROW}
    for name in ("copy_to_ranks", "MLP"):
        written[f"tensor-{name}"] = "\n".join(code for _, code in library_source(f"tensor.{name}").cells)
    for cell in notebook.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = written.get(grade_id, cell.source)
    nbformat.write(notebook, place / f"{LESSON}.ipynb")
    (place / "00_ranks.ipynb").write_text("<html>")
    return place


@pytest.fixture(scope="module")
def found(folder):
    return own_parts(folder, say=lambda line: None)


def test_what_passes_is_taken_and_the_rest_says_why(found):
    """Right, wrong, not begun, missing and unreadable, each with its own words."""
    assert set(found.taken) == {"tensor.copy_to_ranks", "tensor.ColumnLinear", "tensor.MLP"}
    assert found.left["tensor.RowLinear"].startswith(("output", "gradient"))
    assert found.left["tensor.sum_over_ranks"] == "not written yet"
    assert "is not a notebook" in found.left["collectives.ring_all_reduce"]
    assert "04_sequence" in found.left["sequence.Block"]
    shown = str(found)
    assert "3 of " in shown and "✓ yours  tensor.MLP" in shown and "– the library’s  tensor.RowLinear: " in shown
    assert "tensor.MLP" in found._repr_html_()


def losses(job):
    return [report.loss for report in train(job, 2)]


def test_a_training_runs_on_them_and_on_the_librarys_for_the_rest(found):
    """The learner's ColumnLinear is in every layer of every rank, and the MLP, which is built on a RowLinear that is
    wrong, is built on the library's here: the losses are those of one process."""
    job = Job(Layout.parse("tp2"), sequence_parallel=True)
    done = run(losses, 2, job, parts=found.taken, echo=False)
    assert {rank for rank, line in done.output if line == "a ColumnLinear of mine"} == {0, 1}
    assert done.results[0] == pytest.approx(run(losses, 1, Job()).results[0], rel=1e-5)


def test_one_can_be_left_out(folder, found):
    """By name, to see what difference a part makes."""
    assert set(found.without("tensor.MLP")) == {"tensor.copy_to_ranks", "tensor.ColumnLinear"}
    found = own_parts(folder, say=lambda line: None, but=["tensor.ColumnLinear"])
    assert found.left["tensor.ColumnLinear"] == "left out, as asked"


def test_a_folder_that_is_not_there_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*none: give the one that holds your notebooks"):
        own_parts(tmp_path / "none")


def test_some_parts_alone_are_looked_at(folder):
    """What a lesson needs of an earlier one, without the time that all the checks take."""
    heard = []
    found = own_parts(folder, say=heard.append, only=["tensor.ColumnLinear", "sequence.Block"])
    assert set(found.taken) == {"tensor.ColumnLinear"} and set(found.left) == {"sequence.Block"}
    assert heard == ["checking your 03_tensor"]
    with pytest.raises(ValueError, match='no exercise is called "tensor.ColumnLine": did you mean'):
        own_parts(folder, only=["tensor.ColumnLine"])
