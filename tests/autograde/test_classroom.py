"""A class: what nbgrader does with the course directory, and what hostile submissions cannot do to it."""

import csv
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from nbgrader.api import Gradebook

from autograde import classroom, sandbox
from autograde.discover import check_of
from autograde.exercise import with_markers
from autograde.library import definition

IMPORTS = "import torch\nimport torch.distributed as dist\nfrom torch import Tensor\nfrom autograde import check"
F, G = "copy_to_ranks", "sum_over_ranks"
LESSON = "03_small"

POINTS = {name: sum(check_of(f"tensor.{name}").points.values()) for name in (F, G)}
FULL = sum(POINTS.values())


def graded(source: str, name: str, points: int | None = None) -> NotebookNode:
    metadata = {"grade": points is not None, "grade_id": name, "locked": points is not None}
    metadata |= {"schema_version": 3, "solution": points is None, "task": False}
    metadata |= {} if points is None else {"points": points}
    return new_code_cell(source, metadata={"nbgrader": metadata}, id=name)


def solutions(folder: Path) -> Path:
    """A lesson of two exercises of the library, as the build writes it."""
    cells = [new_code_cell(IMPORTS, id="start")]
    for name in (F, G):
        cells.append(graded(with_markers(definition(f"tensor.{name}").source), f"tensor-{name}"))
        check = f'check("tensor.{name}", {name})'
        hidden = check[:-1] + ", hidden=True)"
        text = f"{check}\n### BEGIN HIDDEN TESTS\n{hidden}\n### END HIDDEN TESTS"
        cells.append(graded(text, f"check-tensor-{name}", POINTS[name]))
    notebook = new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    folder.mkdir()
    nbformat.write(notebook, folder / f"{LESSON}.ipynb")
    return folder


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course directory whose release has been made by nbgrader itself."""
    folder = tmp_path / "course"
    assert classroom.init(folder, solutions(tmp_path / "solutions")) == [LESSON]
    nbgrader(folder, "generate_assignment", LESSON)
    return folder


def nbgrader(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "nbgrader", *arguments]
    environment = {**os.environ, "PATH": classroom.PATH}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def hand_in(course: Path, student: str, *changes) -> Path:
    """The released notebook, changed, where nbgrader's collect would put it."""
    notebook = nbformat.read(course / "release" / LESSON / f"{LESSON}.ipynb", 4)
    for change in changes:
        change(notebook.cells)
    path = course / "submitted" / student / LESSON / f"{LESSON}.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(notebook, path)
    return path


def solve(*names: str):
    def change(cells: list) -> None:
        for cell in cells:
            for name in names:
                if cell.metadata.get("nbgrader", {}).get("grade_id") == f"tensor-{name}":
                    cell.source = definition(f"tensor.{name}").source

    return change


def first(source: str):
    return lambda cells: cells.insert(0, new_code_cell(source))


def scores(course: Path) -> dict[str, float]:
    with Gradebook(f"sqlite:///{course}/gradebook.db") as gradebook:
        return {item.student.id: item.score for item in gradebook.assignment_submissions(LESSON)}


def exported(course: Path) -> dict[str, float]:
    with open(course / "grades.csv") as file:
        return {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}


@pytest.mark.slow
def test_nbgraders_own_commands_work(course: Path) -> None:
    """Generate, autograde, feedback and export, as they come: full marks, none, and the right part."""
    hand_in(course, "full", solve(F, G))
    hand_in(course, "none")
    hand_in(course, "half", solve(G))
    nbgrader(course, "autograde", LESSON)
    assert scores(course) == {"full": FULL, "none": 0, "half": POINTS[G]}
    nbgrader(course, "generate_feedback", LESSON)
    assert "3 of 3 points" in (course / "feedback/full" / LESSON / f"{LESSON}.html").read_text()
    nbgrader(course, "export", "--to", "grades.csv")
    assert exported(course) == {"full": FULL, "none": 0, "half": POINTS[G]}


@pytest.mark.slow
def test_a_class_is_graded_whatever_is_handed_in(course: Path) -> None:
    """In the sandbox, two at a time. A submission that writes where it should not reaches nothing, a broken one and a
    link have their answers, and everybody else has their points, their feedback and their line in the export."""
    if problem := sandbox._problem():
        pytest.skip(problem)
    other = hand_in(course, "full", solve(F, G))
    hand_in(course, "half", solve(G), lambda cells: cells.append(cells[2]))
    attack = f"""
import os, subprocess
for place in ({str(course / "gradebook.db")!r}, {str(other)!r}, {str(Path(classroom.__file__).parent / "check.py")!r}):
    try:
        print("reached", place, open(place, "r+b").write(b"x"))
    except OSError as error:
        print(type(error).__name__)
subprocess.Popen(["sleep", "7200"], start_new_session=True)
"""
    hand_in(course, "hostile", solve(F), first("os.kill(os.getpid(), 9)"), first(attack))
    broken = hand_in(course, "broken")
    broken.write_text(broken.read_text()[:300])
    link = hand_in(course, "link")
    link.unlink()
    os.symlink(other, link)
    before = digest(other), digest(Path(classroom.__file__).parent / "check.py")

    said: list[str] = []
    environment = dict(os.environ)
    results = {result.job.student: result for result in classroom.grade(course, jobs=2, say=said.append)}
    assert dict(os.environ) == environment

    assert {student: result.points for student, result in results.items()} == {
        "full": FULL,
        "half": POINTS[G],
        "hostile": POINTS[F],
        "broken": 0,
        "link": 0,
    }
    assert scores(course) == {student: result.points for student, result in results.items()}
    assert results["hostile"].said == "crashed: the kernel died in code cell 2"
    assert "is not a notebook" in results["broken"].said and "is a link" in results["link"].said
    assert before == (digest(other), digest(Path(classroom.__file__).parent / "check.py"))
    assert len(said) == 5
    attacked = nbformat.read(course / "autograded/hostile" / LESSON / f"{LESSON}.ipynb", 4).cells[1].outputs
    assert attacked[0].text.split() == ["FileNotFoundError", "FileNotFoundError", "OSError"]

    assert classroom.feedback(course) == [LESSON]
    page = (course / "feedback/hostile" / LESSON / f"{LESSON}.html").read_text()
    assert "the kernel died in code cell 2" in page and f"{POINTS[F]} of {POINTS[F]} points" in page
    assert (course / "feedback/broken" / LESSON / f"{LESSON}.html").exists()
    assert exported(classroom.export(course).parent) == scores(course)


@pytest.mark.slow
def test_workers_of_a_dask_cluster_give_the_same_grades(course: Path) -> None:
    """A class that outgrows one machine: submissions travel to workers, and only this process writes grades."""
    distributed = pytest.importorskip("distributed")
    hand_in(course, "full", solve(F, G))
    hand_in(course, "none")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        results = classroom.grade(course, dask=cluster.scheduler_address, trusted=bool(sandbox._problem()))
    assert {result.job.student: result.points for result in results} == {"full": FULL, "none": 0} == scores(course)


def test_a_scheduler_that_is_not_there_is_said_to_be_absent(course: Path) -> None:
    """With or without Dask, one line says what is missing."""
    hand_in(course, "none")
    with pytest.raises(classroom.ClassroomError, match="Dask"):
        classroom.grade(course, dask="tcp://127.0.0.1:9")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_that_is_no_course_is_said_to_be_none(tmp_path: Path) -> None:
    """One line, with the command that makes one."""
    for action in (classroom.grade, classroom.feedback, classroom.export):
        with pytest.raises(classroom.ClassroomError, match="run autograde classroom init"):
            action(tmp_path)


def test_nothing_handed_in_is_said(tmp_path: Path) -> None:
    """One line, with the place where submissions belong."""
    classroom.init(tmp_path / "course", solutions(tmp_path / "solutions"))
    with pytest.raises(classroom.ClassroomError, match="submitted/STUDENT/LESSON"):
        classroom.grade(tmp_path / "course", trusted=True)


def test_a_teachers_settings_are_kept(tmp_path: Path) -> None:
    """Making the directory again brings new lessons and leaves nbgrader_config.py alone."""
    folder = tmp_path / "course"
    classroom.init(folder, solutions(tmp_path / "solutions"))
    (folder / "nbgrader_config.py").write_text("# mine")
    classroom.init(folder, tmp_path / "solutions")
    assert (folder / "nbgrader_config.py").read_text() == "# mine"


def test_without_a_sandbox_nothing_is_graded(course: Path, monkeypatch) -> None:
    """Unless the teacher says that every submission is trusted."""
    hand_in(course, "full")
    monkeypatch.setenv("PATH", "")
    sandbox._problem.cache_clear()
    try:
        with pytest.raises(sandbox.NoSandbox, match="bubblewrap"):
            classroom.grade(course)
    finally:
        monkeypatch.undo()
        sandbox._problem.cache_clear()
