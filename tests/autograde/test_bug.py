"""Find-the-bug exercises: the program that was given is known again, however it comes back."""

from __future__ import annotations

import linecache

import pytest
from fivefold.runtime.parts import Source

from autograde import bug, discover
from autograde import exercise as exercises
from autograde.library import definition

EXERCISE, NAME = "tensor.GatedMLP", "fused_cut_in_a_row"


@pytest.fixture(autouse=True)
def starts_from_a_bug(monkeypatch):
    monkeypatch.setattr(bug, "bug_of", lambda exercise: NAME if exercise == EXERCISE else "")


def given() -> str:
    (item,) = (item for item in discover.misconceptions(EXERCISE) if item.name == NAME)
    return item.apply(definition(EXERCISE).source)


def cells(*codes: str) -> Source:
    return Source(tuple((f"cell [{number}]", code) for number, code in enumerate(codes)), "GatedMLP")


TRY = "\n\n\ntry:\n    {}\nexcept NotImplementedError:\n    pass\n"


def test_the_program_as_given_is_there_without_being_recognised():
    """As a text, also with comments and empty lines changed: no rank has to run for it."""
    untouched = given() + TRY.format("raise NotImplementedError()")
    assert bug.is_there(EXERCISE, cells("import torch", untouched), None)
    assert bug.is_there(EXERCISE, cells(untouched.replace("super()", "# how it begins\n\n        super()")), None)


def test_a_mended_program_is_not_it():
    """In the same place, in the place that the cell keeps free, and in a cell below; nor is one that is no Python."""
    right = definition(EXERCISE).source
    indented = "\n    ".join(right.splitlines())
    for text in (cells(right), cells(given() + TRY.format(indented)), cells(given(), right), cells(given() + "(")):
        assert not bug.is_there(EXERCISE, text, None)
    assert bug.is_there(EXERCISE, cells(right), NAME)  # what behaves like it counts as it


def test_a_mistake_in_a_helper_is_looked_for_in_the_helper(monkeypatch):
    """Where the function itself is as it should be, it says nothing about whether its helper was mended."""
    exercise, name = "recompute.full", exercises.bug_of("recompute.full")
    monkeypatch.setattr(bug, "bug_of", lambda exercise: name)
    (item,) = (item for item in discover.misconceptions(exercise) if item.name == name)
    faulty, right = item.apply(definition(exercise).source), definition(exercise).source
    assert bug.is_there(exercise, cells(faulty), None)
    assert not bug.is_there(exercise, cells(right), None)
    half_mended = faulty.replace("torch.enable_grad()", "torch.no_grad()", 1)  # wrong too, and in another way
    assert half_mended != faulty and not bug.is_there(exercise, cells(half_mended), None)


def test_an_object_is_known_by_the_cell_that_made_it():
    """A class of a notebook has no file; its methods say which cell they come from."""
    from fivefold.tensor import layers

    text = given()
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(keepends=True), "<cell>")
    scope = dict(vars(layers)) | {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), scope)
    assert bug.is_there(EXERCISE, scope["GatedMLP"], None)
    assert not bug.is_there(EXERCISE, layers.GatedMLP, None)
    assert not bug.is_there(EXERCISE, len, None)


def test_other_exercises_have_no_bug():
    """Where an exercise starts from nothing, whatever is recognised."""
    assert not bug.is_there("tensor.MLP", cells("class MLP: pass"), "whole_matrices")
