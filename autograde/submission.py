"""Grade one submission, wherever there is a machine for it, and hand back plain data.

The grading itself is `autograde grade --sandbox` in a process of its own under a guard, so that even a grader that is
brought down takes nothing with it but this one answer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autograde import guard

LIMITS = guard.Limits(seconds=3600, memory=8_000_000_000, processes=500)


@dataclass(frozen=True)
class Job:
    """One submission: the notebook as bytes, the lesson's reference, or why there is nothing to grade."""

    student: str
    lesson: str
    data: bytes
    reference: bytes = b""
    trusted: bool = False
    problem: str = ""


@dataclass
class Result:
    """The grade of one submission, as the JSON report of its notebook, and the notebook after it ran."""

    job: Job
    graded: dict[str, Any] = field(default_factory=dict)
    executed: bytes = b""
    problem: str = ""  # why it could not be graded

    @property
    def points(self) -> float:
        return self.graded.get("points", 0.0)

    @property
    def max_points(self) -> float:
        return self.graded.get("max_points", 0.0)

    @property
    def scores(self) -> dict[str, float]:
        """Points by the grade id of the check cell that they belong to."""
        exercises = self.graded.get("exercises", ())
        return {check_id(item["exercise"]): item["points"] for item in exercises}

    @property
    def said(self) -> str:
        """How it went, in a few words."""
        if self.problem:
            return self.problem
        outcome, message = self.graded["outcome"], self.graded["message"]
        return f"{outcome}: {message}" if message else outcome


def check_id(exercise: str) -> str:
    """Grade id of the check cell of an exercise."""
    return f"check-{exercise.replace('.', '-')}"


def grade_submission(job: Job, limits: guard.Limits = LIMITS) -> Result:
    """Never raises for what a submission is or does."""
    if job.problem:
        return Result(job, problem=f"cannot be graded: {job.problem}")
    with TemporaryDirectory(prefix="fivefold-submission-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        name = f"{job.lesson}.ipynb"
        (place / name).write_bytes(job.data)
        (place / "solutions").mkdir()
        (place / "solutions" / name).write_bytes(job.reference)
        command = [sys.executable, "-m", "autograde.cli", "grade", name, "--solutions", "solutions"]
        command += ["--json", "report.json", "--executed", "executed", *([] if job.trusted else ["--sandbox"])]
        ending, said = _run(command, place, limits)
        try:
            report = json.loads((place / "report.json").read_text())
        except (OSError, ValueError):
            return Result(job, problem=_problem(ending, said, limits))
        executed = place / "executed" / name
        return Result(job, report["notebooks"][0], executed.read_bytes() if executed.is_file() else b"")


def _run(command: list[str], place: Path, limits: guard.Limits) -> tuple[guard.Ending, str]:
    """Run the grader in `place`; how it ended, and the last line it said."""
    with open(place / "said", "w+b") as said:
        process = guard.start(command, limits, stderr=said, cwd=place)
        try:
            ending = guard.wait(process)
        except BaseException:
            process.stdin.close()
            process.wait()
            raise
        said.seek(max(0, said.tell() - 2000))
        lines = said.read().decode(errors="replace").strip().splitlines()
    return ending, lines[-1] if lines else ""


def _problem(ending: guard.Ending, said: str, limits: guard.Limits) -> str:
    if ending.reason == "seconds":
        return f"timed out: its grading took longer than {limits.seconds:g} s"
    if ending.reason in ("memory", "processes"):
        return f"crashed: it used more {ending.reason} than allowed"
    return f"cannot be graded: {said or f'its grader ended ({ending.reason})'}"
