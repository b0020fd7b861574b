"""Code and arguments from the caller to its ranks: cloudpickle, with file names kept so that errors show real lines.

This goes one way only. What comes back from ranks is read by `wire`, which cannot execute code.
"""

from __future__ import annotations

import importlib
import io
import sys
import sysconfig
import types
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle


def dumps(value: Any, refer: dict[int, str] | None = None) -> bytes:
    """Value to bytes for `cloudpickle.loads`.

    Functions and classes of the caller's own files travel by value. `refer` maps the `id` of an object to a dotted name
    under `fivefold`: the object is not sent, the ranks take the library's of that name.
    """
    buffer = io.BytesIO()
    with _by_value(value):
        _Pickler(buffer, refer or {}).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({types.CodeType: lambda code: _reduce_code(code)}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, refer: dict[int, str]):
        super().__init__(file)
        self.refer = refer

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self.refer:
            return _library, (self.refer[id(obj)],)
        if (
            isinstance(obj, types.ModuleType)
            and sys.modules.get(obj.__name__) is obj
            and type(obj) is not types.ModuleType
        ):
            return importlib.import_module, (obj.__name__,)  # such as torch.ops, which cloudpickle would copy
        if isinstance(obj, types.ModuleType) and obj.__name__ not in sys.modules and _parent_has(obj):
            return _part_of, tuple(obj.__name__.rpartition(".")[::2])  # such as torch._C._functions, in C
        return super().reducer_override(obj)


def _parent_has(module: types.ModuleType) -> bool:
    """Whether a module that cannot be imported is an attribute of one that can."""
    parent, _, name = module.__name__.rpartition(".")
    return getattr(sys.modules.get(parent), name, None) is module


def _part_of(parent: str, name: str) -> Any:
    return getattr(importlib.import_module(parent), name)


def _reduce_code(code: types.CodeType) -> tuple:
    make, arguments = cloudpickle.cloudpickle._code_reduce(code)
    return _code_in_file, (make, arguments, code.co_filename)


def _code_in_file(make: Any, arguments: tuple, name: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


def _library(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(f"fivefold.{module}"), name)


@contextmanager
def _by_value(value: Any) -> Iterator[None]:
    """Let the modules that functions in `value` come from travel by value where they are the caller's own files."""
    found = {getattr(item, "__module__", None) for item in _leaves(value)}
    own = [sys.modules[name] for name in found if name in sys.modules and _is_own(sys.modules[name])]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _leaves(value: Any) -> Iterator[Any]:
    """The objects in nested tuples, lists and dicts."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else None
    if items is None:
        yield value
        return
    for item in items:
        yield from _leaves(item)


def _is_own(module: types.ModuleType) -> bool:
    """Whether a module is a file of the caller's, such as a test, that a rank need not be able to import."""
    file = getattr(module, "__file__", None)
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    package = module.__name__.partition(".")[0]
    return bool(file) and not file.startswith(installed) and package not in ("fivefold", "autograde", "__main__")
