"""Parts: functions that stand in for the library's own, on every rank, for one run.

A part replaces `fivefold.<module>.<name>` at the moment the module is imported on a rank, before anything else can take
the library's version from it. So whatever the library builds on top is built on the part.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import linecache
import sys
import types
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """A learner's program as text: cells `(label, code)`, and the name that the last of them defines.

    It is executed on the ranks only, so the process that holds it stays out of the reach of what it does.
    """

    cells: tuple[tuple[str, str], ...]
    name: str

    def load(self, replace: dict[str, Any] | None = None) -> Any:
        """Execute the cells in a module of their own and return what `name` stands for.

        `replace` names globals that are set after the cells ran, such as the library's version of earlier exercises.
        Raises NameError where the cells do not define `name`.
        """
        module = types.ModuleType("__solution__")
        sys.modules[module.__name__] = module
        _solutions.append(module)
        for label, code in self.cells:
            remember(label, code)
            exec(compile(code, label, "exec"), module.__dict__)
        if self.name not in module.__dict__:
            raise NameError(f"the solution does not define {self.name}")
        module.__dict__.update(replace or {})
        return module.__dict__[self.name]


@dataclass(frozen=True)
class Program:
    """A part that travels as text, and is executed on each rank at the moment when it takes the library's place.

    `library` names exercises that the text defines too, and that are the library's all the same.
    """

    source: Source
    library: tuple[str, ...] = ()

    def load(self) -> Any:
        others = [exercise.rpartition(".") for exercise in self.library]
        replace = {name: getattr(importlib.import_module(f"fivefold.{module}"), name) for module, _, name in others}
        return self.source.load(replace)


_solutions: list[types.ModuleType] = []  # a part that is text may use another, which takes its place later


def remember(label: str, code: str) -> None:
    """Make the lines of `code` show in tracebacks under the file name `label`."""
    linecache.cache[label] = (len(code), None, code.splitlines(keepends=True), label)


def stub(exercise: str) -> Any:
    """What stands in the place of an exercise while a solution to it is checked."""

    class Stub:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{exercise} is yours to write")

    Stub.__name__ = Stub.__qualname__ = exercise.rpartition(".")[2]
    return Stub


def install(parts: dict[str, Any]) -> None:
    """Let `fivefold.<module>` be imported with `parts` in place: dotted id to object, `Program`, or None for a stub."""
    by_module: dict[str, dict[str, Any]] = {}
    for exercise, part in parts.items():
        module, _, name = exercise.rpartition(".")
        by_module.setdefault(f"fivefold.{module}", {})[name] = stub(exercise) if part is None else part
    for module in [name for name in sys.modules if name in by_module]:
        _replace(sys.modules[module], by_module.pop(module))
    if by_module:
        sys.meta_path.insert(0, _PartFinder(by_module))


def _replace(module: types.ModuleType, parts: dict[str, Any]) -> None:
    """Set the parts in `module`, and wherever a module of the package, or another part, took the library's from."""
    for name, part in parts.items():
        original = getattr(module, name)
        if isinstance(part, Program):
            part = _with_attributes_of(original, part.load())
        for other in [m for key, m in sys.modules.items() if key.startswith("fivefold.")] + _solutions:
            if vars(other).get(name) is original:
                setattr(other, name, part)
        setattr(module, name, part)


def _with_attributes_of(original: Any, part: Any) -> Any:
    """What the library's class says of itself as plain data, such as `split`, a learner's class need not repeat."""
    if isinstance(original, type) and isinstance(part, type):
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, dict) and not hasattr(part, name):
                setattr(part, name, value)
    return part


class _PartFinder(importlib.abc.MetaPathFinder):
    """Finds a module as usual, and sets its parts when it has been executed."""

    def __init__(self, by_module: dict[str, dict[str, Any]]):
        self.by_module = by_module

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self.by_module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"there is no module {fullname}: check the name of the part")
        execute, parts = spec.loader.exec_module, self.by_module[fullname]

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _replace(module, parts)

        spec.loader.exec_module = exec_module
        return spec
