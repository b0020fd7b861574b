"""Build the course's notebooks, check solutions, grade notebooks and classes.

In a notebook: `from autograde import check`. In Python: `autograde.evaluate(exercise_id, solution)`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["check", "evaluate", "mine"]


def __getattr__(name: str) -> Any:
    """Import the check engine when it is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    engine = import_module("autograde.check")
    globals().update({export: getattr(engine, export) for export in __all__})  # the submodule is `check` too: undo that
    return globals()[name]
