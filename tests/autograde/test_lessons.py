"""What every lesson has, and what its first lines promise."""

from __future__ import annotations

import re

import pytest

from autograde import discover
from autograde.exercise import ROOT
from autograde.lesson import LESSONS, Cell, read_lesson

LESSON_FILES = sorted((ROOT / "lessons").glob(LESSONS))
PARTS = (
    "What is split, what travels, when", "A worked example", "Exercises", "See it", "Find the bug", "The real tool",
    "Self-check", "Where this stands",
)  # fmt: skip


def points_of(cell: Cell) -> float:
    if cell.role == "exercise":
        return sum(discover.checks()[cell.id].points.values())
    return discover.questions()[cell.id].points


@pytest.mark.parametrize("path", LESSON_FILES, ids=lambda path: path.stem)
def test_the_first_screen_counts_right(path):
    """Exercises, questions and points in the line under the title are those of the cells."""
    cells = read_lesson(path)
    found = {role: [cell for cell in cells if cell.role == role] for role in ("exercise", "question")}
    points = sum(points_of(cell) for role in found for cell in found[role])
    counts = f"{len(found['exercise'])} exercises and {len(found['question'])} questions, {points:g} points"
    wanted = rf"# {int(path.stem[:2])} · .+\n\n\*\d+ minutes · {counts} · "
    assert re.match(wanted, cells[0].source), (counts, cells[0].source[:200])


@pytest.mark.parametrize("path", LESSON_FILES, ids=lambda path: path.stem)
def test_no_line_of_prose_becomes_a_heading(path):
    """A line that begins with the number of an issue, "#123", is one to some readers of Markdown."""
    lines = [line for cell in read_lesson(path) if cell.kind == "markdown" for line in cell.source.splitlines()]
    assert [line for line in lines if re.match(r"#+[^# ]", line)] == []


@pytest.mark.parametrize("path", LESSON_FILES, ids=lambda path: path.stem)
def test_a_lesson_has_its_parts_in_order(path):
    """Those of the course, as headings; a bug to find; three to five questions, of which every wrong answer is told."""
    cells = read_lesson(path)
    lines = [line for cell in cells if cell.kind == "markdown" for line in cell.source.splitlines()]
    headings = [line[3:] for line in lines if line[:3] == "## "]
    # The bug may be the first exercise, as in lesson 00, where a knot has to be untied before anything else is written.
    among_exercises = any(line.startswith("### Find the bug") for line in lines)
    wanted = [part for part in PARTS if part != "Find the bug" or not among_exercises]
    assert [heading for heading in headings if heading in PARTS] == wanted
    assert any(cell.bug for cell in cells)
    questions = [discover.questions()[cell.id] for cell in cells if cell.role == "question"]
    assert 3 <= len(questions) <= 5
    for question in questions:
        assert question.mistakes or all(why for _, why in question.choices.values())
