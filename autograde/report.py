"""A report as a table, as JSON, as JUnit XML and as one page of HTML: the same answers four times.

*Failed*, *timed out*, *crashed* and *cannot be graded* stay apart in all of them.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat

from autograde.grade import NOT_RUN, Graded, Report
from autograde.page import render
from autograde.run import OK, RAISED
from autograde.verdict import Verdict

WIDTH, WIDEST = 76, 110  # columns of a score, and of a line that says what is wrong
MARKS = {"passed": "✓", "failed": "✗", "unsolved": "–"}  # anything else could not be judged


def table(report: Report) -> str:
    """The score table for a terminal: a line for each task, with the first thing that is wrong."""
    blocks = [_block(graded) for graded in report.notebooks]
    if len(report.notebooks) > 1:
        blocks.append(f"{len(report.notebooks)} notebooks{_score(report.points, report.max_points):>{WIDTH - 12}}")
    return "\n\n".join(blocks)


def to_dict(report: Report) -> dict[str, Any]:
    """Plain data for JSON; `format` changes when a key changes its meaning."""
    return {
        "format": 1,
        "passed": report.passed,
        "points": report.points,
        "max_points": report.max_points,
        "notebooks": [_notebook(graded) for graded in report.notebooks],
    }


def write_json(report: Report, path: Path) -> None:
    _write(path, json.dumps(to_dict(report), indent=1, ensure_ascii=False) + "\n")


def write_html(report: Report, path: Path) -> None:
    """One file that needs nothing else: no script, no font, no request."""
    _write(path, render(report, to_dict(report), score=_score, problem=first_problem, ran=ran))


def write_junit(report: Report, path: Path) -> None:
    """One suite a notebook, one case for its run and one for each task. A wrong solution is a failure; what could not
    be judged is an error whose type says why; what was not begun is skipped."""
    root = ElementTree.Element("testsuites", name="fivefold")
    for graded in report.notebooks:
        cases = [_run_case(graded), *(_case(graded, verdict) for verdict in graded.verdicts)]
        counts = {f"{tag}s" if tag != "skipped" else tag: _count(cases, tag) for tag in ("failure", "error", "skipped")}
        suite = ElementTree.SubElement(
            root, "testsuite", _attributes(name=graded.path.stem, tests=len(cases), **counts)
        )
        suite.set("time", f"{graded.execution.seconds + sum(v.seconds for v in graded.verdicts):.3f}")
        suite.extend(cases)
    ElementTree.indent(root)
    _write(path, '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n")


def write_executed(report: Report, folder: Path) -> None:
    """The notebooks as they ran, with their outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    for graded in report.notebooks:
        if graded.execution.notebook is not None:
            nbformat.write(graded.execution.notebook, folder / graded.path.name)


def ran(graded: Graded) -> str:
    """How the notebook ran, in words."""
    execution = graded.execution
    if execution.outcome == OK:
        return f"ran to its end in {execution.seconds:.0f} s"
    if execution.outcome == NOT_RUN:
        return "solutions only"
    return _one_line(f"{execution.outcome}: {execution.message.removeprefix(str(graded.path))}")


def first_problem(verdict: Verdict) -> str:
    """One line on what is wrong, or "" where nothing is."""
    if verdict.passed:
        return ""
    if verdict.state == "unsolved":
        return "not solved yet"
    wrong = next((finding for finding in verdict.findings if finding.passed is False), None)
    seen = f"{wrong.property}: {wrong.seen}" if wrong else verdict.hint or verdict.note
    return _one_line(seen if verdict.state == "failed" else f"{verdict.state}: {seen}")


def _block(graded: Graded) -> str:
    lines = [f"{graded.path}  {ran(graded)}"]
    if len(lines[0]) > WIDTH:
        lines = [str(graded.path), *_wrap(ran(graded), "  ")]
    wide = max((len(verdict.exercise) for verdict in graded.verdicts), default=0)
    for verdict in graded.verdicts:
        score = f"{verdict.points:>4g} of {verdict.max_points:g}"
        start = f"  {MARKS.get(verdict.state, '!')} {verdict.exercise.ljust(wide)} {score.ljust(11)} "
        lines += _wrap(first_problem(verdict), start) or [start]
        for note in graded.notes.get(verdict.exercise, ()):
            lines += _wrap(f"note: {_one_line(note.message)}", " " * len(start))
    lines.append(f"{_score(graded.points, graded.max_points):>{WIDTH}}")
    return "\n".join(line.rstrip() for line in lines)


def _wrap(text: str, start: str) -> list[str]:
    later = " " * len(start)
    return textwrap.wrap(
        text, WIDEST, initial_indent=start, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )


def _score(points: float, most: float) -> str:
    return f"{points:g} of {most:g} points"


def _notebook(graded: Graded) -> dict[str, Any]:
    execution = graded.execution
    return {
        "path": str(graded.path),
        "lesson": graded.lesson,
        "passed": graded.passed,
        "points": graded.points,
        "max_points": graded.max_points,
        "outcome": execution.outcome,
        "message": execution.message,
        "seconds": round(execution.seconds, 3),
        "raised": [{"cell": cell, "message": message} for cell, message in execution.raised],
        "exercises": [
            verdict.to_dict() | {"notes": [vars(note) for note in graded.notes.get(verdict.exercise, ())]}
            for verdict in graded.verdicts
        ],
    }


def _run_case(graded: Graded) -> ElementTree.Element:
    execution = graded.execution
    case = ElementTree.Element("testcase", _attributes(classname=graded.path.stem, name="runs from top to bottom"))
    case.set("time", f"{execution.seconds:.3f}")
    if execution.outcome == NOT_RUN:
        ElementTree.SubElement(case, "skipped")
    elif execution.outcome != OK:
        tag = "failure" if execution.outcome == RAISED else "error"
        ElementTree.SubElement(case, tag, _attributes(type=execution.outcome, message=execution.message))
    return case


def _case(graded: Graded, verdict: Verdict) -> ElementTree.Element:
    case = ElementTree.Element("testcase", _attributes(classname=graded.path.stem, name=verdict.exercise))
    case.set("time", f"{verdict.seconds:.3f}")
    if verdict.passed:
        return case
    tag = {"failed": "failure", "unsolved": "skipped"}.get(verdict.state, "error")
    message = f"{_score(verdict.points, verdict.max_points)}: {first_problem(verdict)}"
    item = ElementTree.SubElement(case, tag, _attributes(type=verdict.state, message=message))
    item.text = _printable(
        "\n".join([str(verdict), *(note.message for note in graded.notes.get(verdict.exercise, ()))])
    )
    return case


def _count(cases: list[ElementTree.Element], tag: str) -> int:
    return sum(case.find(tag) is not None for case in cases)


def _attributes(**values: Any) -> dict[str, str]:
    return {name: _one_line(str(value)) for name, value in values.items()}


def _printable(text: str) -> str:
    """Without what XML cannot hold, which is also what would colour a terminal or do worse to it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _one_line(text: str) -> str:
    return " ".join(_printable(text).split())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")
