"""Fivefold: data, tensor, context, pipeline and expert parallelism, written to be read.

`from fivefold import run` gives the launcher: `run(fn, world_size, *args)`. Importing the package loads no torch.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["run"]

_EXPORTS = {"run": "fivefold.runtime.ranks"}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first asked for (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
