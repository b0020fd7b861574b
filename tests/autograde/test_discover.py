"""What exists is found from the files, a file or a folder for each lesson."""

from __future__ import annotations

import pytest

from autograde import discover
from autograde.alternative import alternatives
from autograde.question import Question

QUESTION = """
from autograde.question import Question

question = Question(id="{id}", text="?", answer=1, why="so", mistakes={{2: "no"}})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two lessons: one is a file, the other a folder of two files."""
    monkeypatch.setattr(discover, "CHECKS", tmp_path / "checks")
    (tmp_path / "checks" / "04_other").mkdir(parents=True)
    for id, path in {"03.a": "03_one.py", "04.a": "04_other/first.py", "04.b": "04_other/second.py"}.items():
        (tmp_path / "checks" / path).write_text(QUESTION.format(id=id))
    discover.forget()
    yield tmp_path
    monkeypatch.undo()
    discover.forget()


def test_a_lesson_is_a_file_or_a_folder(folder):
    """Everything below a folder belongs to the lesson that the folder is named after."""
    assert list(discover.questions()) == ["03.a", "04.a", "04.b"]
    assert all(isinstance(item, Question) for item in discover.questions().values())
    assert discover.lessons()["03.a"] == "03_one" and discover.lessons()["04.b"] == "04_other"


def test_the_same_id_twice_is_an_error(folder):
    """Said with the lesson in which it stands the second time."""
    (folder / "checks" / "04_other" / "third.py").write_text(QUESTION.format(id="03.a"))
    discover.forget()
    with pytest.raises(ValueError, match="03.a is defined twice, the second time in 04_other"):
        discover.questions()


def test_an_alternative_of_no_exercise_is_an_error(tmp_path):
    """In a folder as in a file."""
    (tmp_path / "03_tensor").mkdir()
    (tmp_path / "03_tensor" / "part.py").write_text("def no_such__word(): ...\n")
    with pytest.raises(ValueError, match="no_such__word in 03_tensor: that lesson has no exercise called no_such"):
        list(alternatives(tmp_path))


def test_exercises_are_named_by_their_lesson_too():
    """By its number or its whole name; a name that is neither is an error that proposes one."""
    assert "tensor.RowLinear" in discover.exercises("03") == discover.exercises("03_tensor")
    assert discover.exercises("tensor.RowLinear") == ["tensor.RowLinear"]
    with pytest.raises(ValueError, match='did you mean "tensor.RowLinear"'):
        discover.exercises("tensor.RowLiner")
