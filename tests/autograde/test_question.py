"""Self-check questions: right answers within the tolerance, an explanation for each foreseen mistake."""

from __future__ import annotations

import math

import pytest

from autograde.question import Question

BYTES = Question(
    id="03.bytes",
    text="How many kB does each rank send?",
    answer=6.144,
    mistakes={3.072: "That is one direction only.", 8.192: "A ring sends (n-1)/n of it, twice."},
    unit="kB",
    why="2(n-1)/n · M.",
)
WHEN = Question(
    id="03.when",
    text="When does g communicate?",
    answer="b",
    choices={"a": ("backward", "That is f."), "b": ("forward", "It sums the parts."), "c": ("never", "Then who sums?")},
)


@pytest.mark.parametrize("answer", [6.144, 6.1440001, 6.146])
def test_a_number_is_right_within_the_tolerance(answer):
    """A rounded answer is right, and the reason is told."""
    verdict = BYTES.grade(answer)
    assert verdict.passed and verdict.points == 1 and "2(n-1)/n" in verdict.findings[0].seen


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (3.07, "one direction"),
        (8.19, "(n-1)/n of it"),
        (6144, "too large"),
        (-6.144, "too small"),
        (True, "is no number"),
        ("6.144", "is no number: give one in kB"),
        (math.nan, "is no number"),
        (math.inf, "is no number"),
        ([6.144], "list is no number"),
    ],
)
def test_each_wrong_number_has_its_own_words(answer, words):
    """A foreseen mistake is explained; anything else is told apart from a number that is off."""
    verdict = BYTES.grade(answer)
    assert verdict.state == "failed" and verdict.points == 0 and words in verdict.findings[0].seen


def test_choices_are_explained_one_by_one():
    """Each letter gets its reason, in either case; what is no letter is told what to give."""
    assert WHEN.grade(" B ").passed and "sums the parts" in WHEN.grade("b").findings[0].seen
    assert WHEN.grade("a").findings[0].seen == "a: That is f."
    for odd in (2, "d", ["b"], {"b": 1}, "b" * 100):
        assert "give \"a\", \"b\" or \"c\"" in WHEN.grade(odd).findings[0].seen  # fmt: skip


@pytest.mark.parametrize("question", [BYTES, WHEN])
def test_no_answer_is_not_a_wrong_answer(question):
    """None and an ellipsis are what an untouched cell holds."""
    assert question.grade(None).state == question.grade(...).state == "unsolved"


def test_a_question_that_cannot_be_answered_is_refused():
    """A missing choice, a word for a number, and a mistake that would pass are errors where they are written."""
    for wrong in (
        {"answer": "z", "choices": {"a": ("x", "y")}},
        {"answer": "six"},
        {"answer": 6, "mistakes": {6.0001: "no"}},
    ):
        with pytest.raises(ValueError, match="03.x"):
            Question(id="03.x", text="?", **wrong)
