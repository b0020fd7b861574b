"""The library's own version of an exercise, as text: what misconceptions edit, and what a check keeps out of reach."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.runtime.parts import Source

from autograde import exercise as exercises

COPIES = ("autograde", "build", "lessons", "solutions", "tests", ".git")  # folders in which answers also lie


@dataclass(frozen=True)
class Definition:
    """An exercise in the library: `source` is its definition with the helpers that it alone uses, `text` the module."""

    exercise: str
    path: Path
    name: str
    source: str
    text: str

    @property
    def helpers(self) -> tuple[str, ...]:
        """Names of the private functions and classes that belong to the definition."""
        nodes = [node for node in ast.parse(self.source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        return tuple(node.name for node in nodes if node.name != self.name)

    def module_with(self, source: str) -> Source:
        """The module with another definition in the place of the library's, ready to be checked."""
        before, found, after = self.text.partition(self.source)
        if not found:
            raise ValueError(f"{self.path.name} does not hold the definition of {self.exercise} in one piece")
        return Source(((self.path.name, before + source.rstrip("\n") + "\n" + after),), self.name)


@cache
def definition(exercise: str) -> Definition:
    """Find an exercise in the library; raises LookupError where it is not there."""
    path, name = exercises.locate(exercise)
    return Definition(exercise, path, name, exercises.source(exercise), path.read_text(encoding="utf-8"))


def library_source(exercise: str) -> Source:
    """The library's own version, ready to be checked like a learner's."""
    found = definition(exercise)
    return found.module_with(found.source)


def library_object(exercise: str) -> Any:
    """The library's own version as an object; raises LookupError where it is not there."""
    module, _, name = exercise.rpartition(".")
    try:
        return getattr(importlib.import_module(f"fivefold.{module}"), name)
    except (ImportError, AttributeError):
        raise LookupError(f"the library has no {exercise}: check the id") from None


def copies() -> tuple[str, ...]:
    """Folders that a rank must not read while a solution is checked."""
    return tuple(str(exercises.ROOT / folder) for folder in COPIES)
