"""Build the course's notebooks, check solutions, grade notebooks and classes.

In a notebook: `from autograde import check`. In Python: `autograde.evaluate(exercise_id, solution)`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["check", "evaluate", "mine", "own_parts"]


def __getattr__(name: str) -> Any:
    """Load the check engine, and torch with it, when it is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "autograde.parts" if name == "own_parts" else "autograde.check"
    return getattr(import_module(module), name)


class _Package(ModuleType):
    """Loading a submodule sets it as an attribute; for `check` that is to be the function, whoever loads it first."""

    def __setattr__(self, name: str, value: Any) -> None:
        submodule = name in __all__ and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if submodule else value)


sys.modules[__name__].__class__ = _Package
