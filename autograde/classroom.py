"""A nbgrader course directory: make it, grade what is handed in, and pass on feedback and grades.

The directory is an ordinary one, on which nbgrader's own commands work too. What `grade` adds: each submission is
graded in a sandbox that shows it nothing of the course directory, several at a time, and the grades are written by this
process alone. A submission that crashes, hangs or cannot be read gets its own answer, and the others go on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbgrader.api import Gradebook
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config, PyFileConfigLoader

from autograde import sandbox
from autograde.exercise import ROOT
from autograde.feedback import graded_notebook
from autograde.notebook import read_notebook
from autograde.submission import Job, Result, grade_submission

# nbgrader starts the program `alembic` by its name, which lies beside this Python also where no environment is active.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
CONFIG = '''\
"""A course made by `autograde classroom init`. nbgrader's own commands and `autograde classroom` both work here."""

c = get_config()  # noqa: F821

c.CourseDirectory.course_id = "fivefold"

# nbgrader's limit is 30 s a cell; a cell that starts ranks on a busy machine needs more.
c.Execute.timeout = 300
c.Execute.iopub_timeout = 60
'''


class ClassroomError(ValueError):
    """Something about the course directory; the message says what to do."""


def init(folder: Path, solutions: Path = ROOT / "solutions") -> list[str]:
    """Make a course directory with every lesson in `source/`; returns the lessons. Keeps a config that is there."""
    references = sorted(solutions.glob("*.ipynb"))
    if not references:
        raise ClassroomError(f"{solutions} holds no notebooks: run make build first")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "nbgrader_config.py").exists():
        (folder / "nbgrader_config.py").write_text(CONFIG)
    for reference in references:
        place = folder / "source" / reference.stem
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(reference, place / reference.name)
    return [reference.stem for reference in references]


def grade(
    folder: Path,
    jobs: int = 1,
    dask: str | None = None,
    trusted: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Grade everything in `submitted/`, write the grades to the gradebook and the graded notebooks to `autograded/`.

    `jobs` submissions at a time here, or as many as there are workers at a Dask scheduler's address `dask`. `trusted`
    leaves out the sandbox. Raises ClassroomError, and sandbox.NoSandbox where that is missing here.
    """
    course = _course(folder)
    if not trusted and not dask:
        sandbox.require()
    waiting = [_job(course, path, trusted) for path in _submissions(course)]
    if not waiting:
        raise ClassroomError(
            f"{folder}/submitted holds no submissions: put them in submitted/STUDENT/LESSON/LESSON.ipynb"
        )
    for lesson in sorted({job.lesson for job in waiting}):
        _ensure_assignment(course, lesson)
    results = []
    with _executor(jobs, dask) as executor:
        for future in as_completed([executor.submit(grade_submission, job) for job in waiting]):
            result = future.result()
            _record(course, result)
            say(f"{result.job.student}  {result.job.lesson}  {result.points:g} of {result.max_points:g}  {result.said}")
            results.append(result)
    return sorted(results, key=lambda result: (result.job.lesson, result.job.student))


def feedback(folder: Path) -> list[str]:
    """Write `feedback/STUDENT/LESSON/` for all graded submissions; returns the lessons."""
    course = _course(folder)
    lessons = sorted(
        {path.parent.name for path in Path(course.root).glob(f"{course.autograded_directory}/*/*/*.ipynb")}
    )
    if not lessons:
        raise ClassroomError(
            f"{folder}/{course.autograded_directory} holds nothing: run autograde classroom grade first"
        )
    for lesson in lessons:
        _nbgrader(folder, "generate_feedback", lesson, "--force")
    return lessons


def export(folder: Path) -> Path:
    """Write all grades to `grades.csv` in the course directory; returns its path."""
    _course(folder)
    _nbgrader(folder, "export", "--to", "grades.csv")
    return folder / "grades.csv"


def _course(folder: Path) -> CourseDirectory:
    """The directory as nbgrader sees it, with the settings of its nbgrader_config.py."""
    if not (folder / "nbgrader_config.py").is_file():
        raise ClassroomError(f"{folder} is not a course directory: run autograde classroom init {folder}")
    config = Config(PyFileConfigLoader("nbgrader_config.py", path=str(folder.resolve())).load_config())
    config.CourseDirectory.root = str(folder.resolve())
    return CourseDirectory(config=config)


def _submissions(course: CourseDirectory) -> list[Path]:
    """`submitted/STUDENT/LESSON/LESSON.ipynb` for every lesson that a student has handed something in for."""
    sources = {path.stem for path in Path(course.root).glob(f"{course.source_directory}/*/*.ipynb")}
    folders = sorted(path for path in Path(course.root).glob(f"{course.submitted_directory}/*/*") if path.is_dir())
    return [folder / f"{folder.name}.ipynb" for folder in folders if folder.name in sources]


def _job(course: CourseDirectory, path: Path, trusted: bool) -> Job:
    """What is sent to where it is graded: text, never a path, which could lead somewhere else there."""
    student, lesson = path.parts[-3], path.parts[-2]
    problem, data = "", b""
    if path.is_symlink() or path.parent.is_symlink() or path.parent.parent.is_symlink():
        problem = "the submission is a link, not a file: ask for the notebook itself"
    elif not path.is_file():
        problem = f"{path.name} was not handed in"
    else:
        data = path.read_bytes()
    return Job(student, lesson, data, _source(course, lesson).read_bytes(), trusted, problem)


def _source(course: CourseDirectory, lesson: str) -> Path:
    return Path(course.root) / course.source_directory / lesson / f"{lesson}.ipynb"


def _ensure_assignment(course: CourseDirectory, lesson: str) -> None:
    """nbgrader writes a lesson's cells to the gradebook when it makes the release."""
    with _gradebook(course) as gradebook:
        known = {assignment.name for assignment in gradebook.assignments}
    if lesson not in known:
        _nbgrader(Path(course.root), "generate_assignment", lesson, "--force")


def _record(course: CourseDirectory, result: Result) -> None:
    """Write one submission's points and its graded notebook. Nothing that a submission ran is alive by now."""
    job = result.job
    scores = result.scores
    with warnings.catch_warnings(), _gradebook(course) as gradebook:
        warnings.simplefilter("ignore")  # nbgrader's own, about how it uses SQLAlchemy
        gradebook.update_or_create_student(job.student)
        timestamp = course.get_existing_timestamp(
            course.format_path(course.submitted_directory, job.student, job.lesson)
        )
        gradebook.update_or_create_submission(
            job.lesson, job.student, **({"timestamp": timestamp} if timestamp else {})
        )
        for cell in gradebook.find_notebook(job.lesson, job.lesson).grade_cells:
            entry = gradebook.find_grade(cell.name, job.lesson, job.lesson, job.student)
            entry.auto_score = min(scores.get(cell.name, 0.0), cell.max_score)
            entry.needs_manual_grade = entry.manual_score is not None
        gradebook.db.commit()
    reference = read_notebook(_source(course, job.lesson))
    place = Path(course.format_path(course.autograded_directory, job.student, job.lesson))
    place.mkdir(parents=True, exist_ok=True)
    nbformat.write(graded_notebook(reference, result), place / f"{job.lesson}.ipynb")


@contextmanager
def _executor(jobs: int, dask: str | None) -> Iterator[Executor]:
    if dask is None:
        with ThreadPoolExecutor(jobs) as executor:
            yield executor
        return
    try:
        from distributed import Client
    except ImportError:
        raise ClassroomError("Dask is not installed: pip install 'fivefold[dask]', or leave out --dask") from None
    try:
        client = Client(dask, timeout=10)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClassroomError(f"no Dask scheduler answers at {dask}: {error}") from None
    with client, client.get_executor(pure=False) as executor:
        yield executor


def _gradebook(course: CourseDirectory) -> Gradebook:
    with patch.dict(os.environ, PATH=PATH):  # nbgrader calls alembic by its name
        return Gradebook(course.db_url, course.course_id)


def _nbgrader(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "nbgrader", *arguments]
    environment = {**os.environ, "PATH": PATH}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
        raise ClassroomError(f"nbgrader {arguments[0]} failed in {folder}: {' '.join(lines)[:400]}")
