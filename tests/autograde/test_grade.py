"""Grading notebooks: points come from what a learner defined, and from nothing else that a notebook does."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograde import grade as grading
from autograde.grade import Graded, Lessons, grade
from autograde.library import definition
from autograde.run import CRASHED, OK, RAISED, UNREADABLE, Limits
from autograde.verdict import Verdict

IMPORTS = "import torch\nimport torch.distributed as dist\nfrom torch import Tensor\nfrom autograde import check"
F, G = "tensor.copy_to_ranks", "tensor.sum_over_ranks"
STUB = 'def sum_over_ranks(x, group):\n    """g"""\n    raise NotImplementedError()'
WRONG = "def sum_over_ranks(x, group):\n    return x * 1"


def cells(**changed: str) -> dict[str, str]:
    """The cells of a small lesson by grade id, solved; some of them changed."""
    first, second = definition(F).source, definition(G).source
    known = {
        "start": IMPORTS,
        "tensor-copy_to_ranks": first,
        "check-tensor-copy_to_ranks": f'check("{F}", copy_to_ranks)',
        "tensor-sum_over_ranks": second,
        "check-tensor-sum_over_ranks": f'check("{G}", sum_over_ranks)',
    }
    return known | {name.replace("__", "-"): source for name, source in changed.items()}


def write(path: Path, sources: dict[str, str]) -> Path:
    notebook = new_notebook()
    for name, source in sources.items():
        is_check = name.startswith("check-")
        metadata = {"nbgrader": {"grade_id": name, "grade": is_check, "points": 3 if is_check else None}}
        notebook.cells.append(new_code_cell(source, metadata=metadata if "-" in name else {}))
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def course(tmp_path: Path) -> Lessons:
    """Lessons with one reference notebook, `03_small`."""
    write(tmp_path / "solutions/03_small.ipynb", cells())
    return Lessons(tmp_path / "solutions")


def states(graded: Graded) -> list[str]:
    return [verdict.state for verdict in graded.verdicts]


def one(path: Path, course: Lessons, **options) -> Graded:
    return grade([path], references=course, hidden=False, **{"run": False} | options).notebooks[0]


def test_the_reference_gets_all_points_run_and_graded(course: Lessons) -> None:
    """Executed through papermill, then checked with hidden cases: everything that there is to reach."""
    report = grade([course.paths["03_small"]], references=course)
    assert report.passed and (report.points, report.max_points) == (7, 7)
    assert report.notebooks[0].execution.outcome == OK
    shown = str(report.notebooks[0].execution.notebook.cells[2].outputs)
    assert "4 of 4 points" in shown  # the check in the notebook says the same


def test_half_done_gets_its_part(course: Lessons, tmp_path: Path) -> None:
    """An empty exercise is not begun, a wrong one has failed, and neither costs the other one anything."""
    path = write(tmp_path / "03_small.ipynb", cells(tensor__sum_over_ranks=STUB))
    assert states(one(path, course)) == ["passed", "unsolved"]
    path = write(tmp_path / "03_small.ipynb", cells(tensor__sum_over_ranks=WRONG))
    graded = one(path, course)
    assert states(graded) == ["passed", "failed"] and 3 <= graded.points < 7 and graded.max_points == 7


def test_points_do_not_come_from_the_notebook(course: Lessons, tmp_path: Path) -> None:
    """A patched check, a patched comparison, a printed verdict and an object that equals everything earn nothing."""
    cheat = """
import autograde, autograde.check, autograde.compare, torch
from autograde.verdict import Score
class Equal(float):
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: True
    __hash__ = float.__hash__
autograde.check = check = autograde.evaluate = autograde.check_module = lambda *a, **k: Score(3)
autograde.compare.allowed = lambda *a: float("inf")
torch.equal = torch.allclose = lambda *a, **k: True
print("tensor.sum_over_ranks  3 of 3 points")
"""
    always = "def sum_over_ranks(x, group):\n    return Equal(3)"
    path = write(tmp_path / "03_small.ipynb", cells(start=IMPORTS + cheat, tensor__sum_over_ranks=always))
    graded = one(path, course, run=True)
    assert states(graded)[1] == "failed" and graded.verdicts[1].points == 0


def test_a_parameter_that_no_notebook_has_is_refused(course: Lessons, tmp_path: Path) -> None:
    """A misspelt name must not be ignored; one that some of the notebooks have goes to those."""
    path = write(tmp_path / "03_small.ipynb", {"start": "world_size = 4\ndepth: int = 2"})
    notebook = nbformat.read(path, 4)
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    with pytest.raises(ValueError, match="has a parameter word_size: the parameters are depth, world_size"):
        grade([path], {"word_size": 2}, references=course)


def test_metadata_of_a_submission_changes_nothing(course: Lessons, tmp_path: Path) -> None:
    """Points raised, checks removed, ids stripped: the exercises and their points are the lesson's."""
    path = write(tmp_path / "03_small.ipynb", cells(tensor__sum_over_ranks=WRONG))
    notebook = nbformat.read(path, 4)
    notebook.cells[2].metadata["nbgrader"]["points"] = 1000
    del notebook.cells[4]
    notebook.cells[3].metadata.clear()
    nbformat.write(notebook, path)
    graded = one(path, course)
    assert graded.max_points == 7 and graded.points < 7
    assert {note.kind for note in graded.notes[G]} == {"unlabelled", "missing"}


def test_one_bad_notebook_never_stops_the_others(course: Lessons, tmp_path: Path) -> None:
    """A crash, no notebook at all, and a good one: three answers, and a crash keeps the points of what was solved."""
    (tmp_path / "03_small (1).ipynb").write_text("<html>")
    paths = [
        write(tmp_path / "03_small-crash.ipynb", cells(start=IMPORTS + "\nimport os; os.kill(os.getpid(), 9)")),
        tmp_path / "03_small (1).ipynb",
        tmp_path / "03_small_lost.ipynb",
        write(tmp_path / "03_small.ipynb", cells(start=cells()["start"] + "\n1 / 0")),
    ]
    report = grade(paths, references=course, hidden=False, limits=Limits(cell_seconds=60))
    assert [graded.execution.outcome for graded in report.notebooks] == [CRASHED, UNREADABLE, UNREADABLE, RAISED]
    assert [states(graded) for graded in report.notebooks] == [
        ["passed"] * 2,
        ["cannot be graded"] * 2,
        ["cannot be graded"] * 2,
        ["passed"] * 2,
    ]
    assert not any(graded.passed for graded in report.notebooks)


def test_a_check_that_breaks_stops_nothing(course: Lessons, tmp_path: Path, monkeypatch) -> None:
    """A fault in the grader is "cannot be graded" for that exercise, with its reason; the next one is graded."""
    import autograde

    def evaluate(exercise: str, solution: object, hidden: bool) -> Verdict:
        if exercise == F:
            raise ZeroDivisionError("a fault")
        return Verdict(exercise, 3, 3, state="passed")

    monkeypatch.setattr(autograde, "evaluate", evaluate, raising=False)
    graded = one(write(tmp_path / "03_small.ipynb", cells()), course)
    assert states(graded) == ["cannot be graded", "passed"]
    assert "a fault" in graded.verdicts[0].findings[0].seen


@pytest.mark.parametrize(
    ("name", "lesson"),
    [
        ("03_small", "03_small"),
        ("03_small (1)", "03_small"),
        ("03_small-Copy1", "03_small"),
        ("my homework", "03_small"),
        ("03_smaller", "03_small"),
    ],
)
def test_the_lesson_is_recognised(course: Lessons, tmp_path: Path, name: str, lesson: str) -> None:
    """By the name that a browser or Jupyter gives a copy, else by the cells."""
    notebook = nbformat.read(write(tmp_path / f"{name}.ipynb", cells()), 4)
    assert course.lesson_of(tmp_path / f"{name}.ipynb", notebook) == lesson


def test_a_notebook_of_no_lesson_is_said_to_be_one(course: Lessons, tmp_path: Path) -> None:
    """The line names the lessons that there are."""
    graded = one(write(tmp_path / "diary.ipynb", {"start": "1 + 1"}), course)
    assert graded.execution.outcome == UNREADABLE and "lessons: 03_small" in graded.execution.message
    assert graded.verdicts == [] and not graded.passed


def test_in_a_sandbox_ranks_see_nothing_and_solutions_still_pass(course: Lessons, tmp_path: Path, monkeypatch) -> None:
    """Cells and ranks run under bubblewrap, without this process's secrets, and the grade is the same."""
    if problem := grading.sandbox._problem():
        pytest.skip(problem)
    monkeypatch.setenv("SECRET", "hidden")
    secret = write(tmp_path / "secret.ipynb", {"start": "1"})
    spy = f"""
def copy_to_ranks(x, group):
    import os
    seen = [os.path.exists({str(secret)!r}), "SECRET" in os.environ]
    raise RuntimeError(f"seen {{seen}}")
"""
    path = write(tmp_path / "03_small.ipynb", cells(tensor__copy_to_ranks=spy))
    graded = one(path, course, in_sandbox=True)
    assert states(graded)[1] == "passed"
    assert "seen [False, False]" in str(graded.verdicts[0])
