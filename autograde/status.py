"""How far a learner has come: each lesson's tasks, checked as they stand in the saved notebooks, which are not run."""

from __future__ import annotations

from pathlib import Path

from autograde.exercise import ROOT
from autograde.grade import Lessons, check_solutions
from autograde.notebook import CannotRead, read_notebook
from autograde.report import MARKS, first_problem
from autograde.solutions import Task
from autograde.verdict import Verdict

BAR = 20


def status(folder: Path | None = None) -> str:
    """A block for each lesson, with a bar, what is done, and what comes next."""
    folder, lessons = folder or ROOT / "notebooks", Lessons()
    if not lessons.paths:
        raise ValueError(f"{ROOT / 'solutions'} holds no notebooks: run make build first")
    blocks = [_block(folder / f"{lesson}.ipynb", lesson, lessons.tasks(lesson)) for lesson in lessons.paths]
    return "\n\n".join(blocks)


def _block(path: Path, lesson: str, tasks: list[Task]) -> str:
    most = sum(task.points for task in tasks)
    try:
        notebook = read_notebook(path)
    except CannotRead as error:
        return f"{_head(lesson, 0, most)}\n  {error}"
    verdicts = [verdict for _, verdict in check_solutions(notebook, tasks, hidden=False)]
    lines = [_head(lesson, sum(verdict.points for verdict in verdicts), most)]
    begun = [verdict for verdict in verdicts if verdict.state != "unsolved"]
    lines += [_line(verdict) for verdict in begun]
    waiting = [verdict.exercise for verdict in verdicts if verdict.state == "unsolved"]
    if waiting:
        lines.append(f"  – {len(waiting)} not solved yet; next: {waiting[0]}")
    return "\n".join(lines)


def _head(lesson: str, points: float, most: float) -> str:
    done = round(BAR * points / most) if most else 0
    return f"{lesson}  [{'█' * done}{'·' * (BAR - done)}]  {points:g} of {most:g} points"


def _line(verdict: Verdict) -> str:
    line = f"  {MARKS.get(verdict.state, '!')} {verdict.exercise}  {verdict.points:g} of {verdict.max_points:g}"
    problem = first_problem(verdict)
    return f"{line}  {problem}" if problem else line
