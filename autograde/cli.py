"""The `autograde` command.

Exit codes: 0 all is well; 1 something is not right yet (points missing, a check failed, a notebook stale); 2 the
command could not do what it was asked, and one line says why.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autograde.sandbox import NoSandbox


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, NoSandbox) as error:
        # What a person can put right is one line; anything else is a fault of this program, with its traceback.
        print(f"autograde: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build(options: argparse.Namespace) -> int:
    from autograde.build import build

    stale = build(check=options.check, only=options.lessons)
    for path in stale:
        print(f"{path}: {'stale' if options.check else 'built'}")
    if options.check and stale:
        print("run autograde build, and commit what it writes")
    return int(options.check and bool(stale))


def exercises(options: argparse.Namespace) -> int:
    from autograde.exercise import exercises

    found = exercises()
    if options.json:
        print(json.dumps([exercise.to_dict() for exercise in found], indent=1))
        return 0
    wide = max((len(exercise.id) for exercise in found), default=0)
    for exercise in found:
        properties = ", ".join(f"{name} {points}" for name, points in exercise.properties.items())
        count = len(exercise.misconceptions)
        print(
            f"{exercise.lesson}  {exercise.id.ljust(wide)}  {exercise.points:>3} points  {properties}  ({count} hints)"
        )
    return 0


def check(options: argparse.Namespace) -> int:
    from fivefold.runtime.parts import Source

    from autograde import discover, evaluate
    from autograde.library import library_source

    discover.check_of(options.exercise)  # raises for an unknown one
    solution = library_source(options.exercise)
    if options.file:
        text = options.file.read_text(encoding="utf-8")
        solution = Source(((str(options.file), text),), options.exercise.rpartition(".")[2])
    verdict = evaluate(options.exercise, solution, hidden=options.hidden)
    print(json.dumps(verdict.to_dict(), indent=1) if options.json else verdict)
    return int(not verdict.passed)


def grade(options: argparse.Namespace) -> int:
    from autograde import report as reports
    from autograde.grade import Lessons, grade
    from autograde.progress import progress_for
    from autograde.run import Limits

    limits = Limits(options.cell_timeout, options.timeout, int(options.output_limit * 1e6))
    done = grade(
        options.notebooks,
        dict(options.parameters),
        limits=limits,
        run=not options.no_run,
        in_sandbox=options.sandbox,
        progress=progress_for(sys.stderr),
        references=Lessons(options.solutions) if options.solutions else None,
    )
    for path, write in (
        (options.json, reports.write_json),
        (options.junit, reports.write_junit),
        (options.html, reports.write_html),
        (options.executed, reports.write_executed),
    ):
        if path:
            write(done, path)
    print(reports.table(done))
    return int(not done.passed)


def status(options: argparse.Namespace) -> int:
    from autograde.status import status

    print(status(options.folder))
    return 0


def misconceptions(options: argparse.Namespace) -> int:
    from autograde import discover
    from autograde.misconception import prove

    proofs = prove([exercise for name in options.exercises for exercise in discover.exercises(name)] or None)
    if options.json:
        print(json.dumps([asdict(proof) | {"passed": proof.passed} for proof in proofs], indent=1))
    else:
        print("\n".join(map(_proof_line, proofs)))
    return int(not all(proof.passed for proof in proofs))


def classroom(options: argparse.Namespace) -> int:
    from autograde import classroom

    folder = options.folder
    if options.action == "init":
        lessons = classroom.init(folder)
        print(f"{folder} holds {', '.join(lessons)}. Next: cd {folder} && nbgrader generate_assignment {lessons[0]}")
    elif options.action == "grade":
        results = classroom.grade(folder, options.jobs, options.dask, options.no_sandbox, print)
        ungraded = sum(not result.graded for result in results)
        print(f"{len(results)} submissions, {ungraded} of them could not be graded. Next: autograde classroom feedback")
    elif options.action == "feedback":
        print(f"feedback for {', '.join(classroom.feedback(folder))} is in {folder / 'feedback'}")
    else:
        print(f"grades are in {classroom.export(folder)}")
    return 0


def _proof_line(proof: Any) -> str:
    if proof.passed:
        said = f"rejected and recognised, {proof.points:g} of {proof.max_points:g} points"
    elif proof.problem:
        said = proof.problem
    elif not proof.rejected:
        said = "ACCEPTED: its check gives all points"
    else:
        said = f"recognised as {proof.recognised_as}" if proof.recognised_as else "rejected, but not recognised"
    return f"{'✓' if proof.passed else '✗'} {proof.exercise}  {proof.name}  {said}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autograde", description="Build, check and grade the course.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=function)
        return sub

    sub = command("build", build, "Build notebooks/ and solutions/ from lessons/.")
    sub.add_argument("lessons", nargs="*", metavar="LESSON", help="such as 03; all, where none is named")
    sub.add_argument("--check", action="store_true", help="write nothing; exit 1 where a notebook is stale")

    sub = command("exercises", exercises, "List every exercise.")
    sub.add_argument("--json", action="store_true")

    sub = command("check", check, "Check a solution of one exercise.")
    sub.add_argument("exercise", metavar="EXERCISE", help="such as tensor.RowLinear")
    sub.add_argument("--file", type=Path, metavar="F.py", help="where the solution is; else the library's own")
    sub.add_argument("--hidden", action="store_true", help="also with fresh seeds, other world sizes, uneven sizes")
    sub.add_argument("--json", action="store_true")

    sub = command("misconceptions", misconceptions, "Prove that every named wrong solution is rejected and recognised.")
    sub.add_argument("exercises", nargs="*", metavar="EXERCISE", help="or a lesson, such as 03; none: all")
    sub.add_argument("--json", action="store_true")

    _add_grade(command("grade", grade, "Run notebooks with papermill, and grade the solutions in them."))

    sub = command("status", status, "Show how far you have come in notebooks/.")
    sub.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where your notebooks are")

    sub = command("classroom", classroom, "A nbgrader course directory: make it, grade it, give feedback.")
    sub.add_argument("action", choices=("init", "grade", "feedback", "export"))
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument("--jobs", type=_positive, default=1, metavar="N", help="submissions at a time")
    sub.add_argument("--dask", metavar="ADDRESS", help="grade on the workers of this Dask scheduler")
    sub.add_argument("--no-sandbox", action="store_true", help="grade without bubblewrap: trust every submission")
    return parser


def _add_grade(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    sub.add_argument(
        "-p", dest="parameters", nargs=2, action=_Parameter, default=[], metavar=("NAME", "VALUE"), help="for papermill"
    )
    sub.add_argument("--json", type=Path, metavar="F", help="write the report as JSON")
    sub.add_argument("--junit", type=Path, metavar="F", help="write the report as JUnit XML")
    sub.add_argument("--html", type=Path, metavar="F", help="write the report as a page")
    sub.add_argument("--executed", type=Path, metavar="DIR", help="keep the notebooks as they ran")
    sub.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds for a notebook (1800)")
    sub.add_argument("--cell-timeout", type=float, default=120, metavar="S", help="seconds for a cell (120)")
    sub.add_argument("--output-limit", type=float, default=20, metavar="MB", help="output of a notebook (20)")
    sub.add_argument(
        "--solutions", type=Path, metavar="DIR", help="the lessons' reference notebooks, if not the course's"
    )
    sub.add_argument("--no-run", action="store_true", help="check the solutions without running the notebooks")
    sub.add_argument("--sandbox", action="store_true", help="run cells and ranks under bubblewrap")


class _Parameter(argparse.Action):
    """Collects `-p NAME VALUE`; a value is a Python literal where it can be read as one, else text."""

    def __call__(self, parser: Any, options: Any, values: Any, option_string: str | None = None) -> None:
        name, text = values
        if not name.isidentifier():
            parser.error(f"-p {name}: give the name of a variable of the parameters cell")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        setattr(options, self.dest, [*getattr(options, self.dest), (name, value)])


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"give a whole number from 1, not {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
