"""Misconceptions read as diffs; every one in the course is rejected and recognised, every right solution accepted."""

from __future__ import annotations

import ast

import pytest

from autograde import discover
from autograde.alternative import accept, alternatives
from autograde.check import evaluate_alone
from autograde.library import definition, library_source
from autograde.misconception import Misconception, StaleEdit, first_is_rejected, prove

TEXT = """\
def f(x):
    if x:
        y = x + 1
        return y

    y = x - 1
    return y
"""


def edit(old, new, **more):
    return Misconception(
        exercise="tensor.sum_over_ranks", name="m", hint="This looks like: m. Why?", old=old, new=new, **more
    )


def test_an_edit_keeps_the_place_and_the_indentation():
    """Old lines are found whatever their common indentation, and new ones stand where they stood."""
    assert edit("y = x - 1", "y = x\ny -= 2").apply(TEXT) == TEXT.replace("    y = x - 1", "    y = x\n    y -= 2")
    block = """
            if x:
                y = x + 1
                return y
    """
    assert edit(block, "").apply(TEXT) == "def f(x):\n\n    y = x - 1\n    return y\n"
    twice = edit("y = x - 1", "y = x", also=(("y = x + 1", "y = 3"),))
    assert twice.apply(TEXT) == TEXT.replace("x - 1", "x").replace("x + 1", "3")


STALE = {"y = x * 2": "are not in", "return y": "stand 2 times in", "y = x": "are not in"}


@pytest.mark.parametrize(("old", "words"), STALE.items())
def test_a_stale_edit_is_an_error(old, words):
    """Lines that are gone, ambiguous or only a part of a line make no silent other program."""
    with pytest.raises(StaleEdit, match=words):
        edit(old, "pass").apply(TEXT)


def test_a_misconception_is_an_edit_or_a_source():
    """Neither and both are refused where it is written."""
    with pytest.raises(ValueError, match="either"):
        edit("", "x")
    with pytest.raises(ValueError, match="either"):
        edit("x", "y", source="def f(): ...")


def test_a_stale_edit_is_told_by_the_proof(monkeypatch):
    """`autograde misconceptions` names the misconception whose lines are gone, and goes on."""
    exercise = next(iter(discover.checks()))
    stale = Misconception(exercise=exercise, name="gone", hint="This looks like: x. Why?", old="no such line", new="")
    monkeypatch.setattr(discover, "misconceptions", lambda exercise: (stale,))
    (proof,) = prove([exercise])
    assert not proof.passed and "no such line" in proof.problem


@pytest.mark.parametrize("exercise", discover.checks())
def test_the_librarys_version_passes_its_own_check(exercise):
    """The reference solution earns every point, on hidden cases with fresh seeds as well."""
    verdict = evaluate_alone(exercise, library_source(exercise), hidden=True)
    assert verdict.passed and verdict.points == verdict.max_points, str(verdict)


IN_EVERY_RUN = ("00_ranks", "03_tensor")  # the other lessons take minutes: `autograde misconceptions` proves all
ALL = [
    pytest.param(exercise, marks=() if discover.lessons()[exercise] in IN_EVERY_RUN else pytest.mark.every_lesson)
    for exercise in discover.checks()
]


@pytest.mark.parametrize("exercise", discover.checks())
def test_a_wrong_solution_is_rejected(exercise):
    """At least three misconceptions an exercise, and the first of them does not pass."""
    assert len(discover.misconceptions(exercise)) >= 3
    assert first_is_rejected(exercise)


@pytest.mark.parametrize("exercise", ALL)
def test_every_misconception_is_rejected_and_recognised(exercise):
    """Each is told apart from the right solution and from the others."""
    proofs = prove([exercise])
    assert [proof for proof in proofs if not proof.passed] == []


@pytest.mark.parametrize("exercise", discover.checks())
def test_right_solutions_of_another_shape_are_accepted(exercise):
    """At least two an exercise, written differently from the library's, earn every point."""
    verdicts = accept([exercise])
    assert len(verdicts) >= 2
    assert [(word, str(verdict)) for _, word, verdict in verdicts if not verdict.passed] == []


@pytest.mark.parametrize("exercise", discover.checks())
def test_a_hint_asks_and_does_not_tell(exercise):
    """A hint ends with a question and holds no line of the right solution; names are unique in an exercise."""
    items = discover.misconceptions(exercise)
    assert len({item.name for item in items}) == len(items)
    lines = {line.strip() for line in definition(exercise).source.splitlines() if len(line.strip()) > 12}
    for item in items:
        assert item.hint.startswith("This looks like: ") and item.hint.endswith("?")
        assert not any(line in item.hint for line in lines)
        ast.parse(item.program().cells[0][1])


def test_alternatives_belong_to_exercises():
    """Each is named after an exercise of its lesson, so none is left out by a slip of the pen."""
    assert {exercise for exercise, _, _ in alternatives()} <= set(discover.checks())
