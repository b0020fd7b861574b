"""What exists, found from the files: checks, questions and misconceptions.

There is no registry. A lesson's checks and questions stand in `checks/NN_name.py`, its misconceptions in
`misconceptions/NN_name.py`; an exercise belongs to the lesson in whose file its check stands. Where one file would be
too long to read, a folder `NN_name/` of files takes its place.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from autograde.check import Check
    from autograde.misconception import Misconception
    from autograde.question import Question

CHECKS = Path(__file__).parent / "checks"
MISCONCEPTIONS = Path(__file__).parent / "misconceptions"


@cache
def checks() -> dict[str, type[Check]]:
    """Every check class, by exercise id, in the order of the lessons and of their files."""
    from autograde.check import Check

    return _by_id(_classes(CHECKS, Check), "exercise")


@cache
def questions() -> dict[str, Question]:
    """Every self-check question, by id."""
    from autograde.question import Question

    return _by_id(_instances(CHECKS, Question), "id")


@cache
def misconceptions(exercise: str) -> tuple[Misconception, ...]:
    """The misconceptions of an exercise, in the order in which they are written."""
    from autograde.misconception import Misconception

    return tuple(item for _, item in _instances(MISCONCEPTIONS, Misconception) if item.exercise == exercise)


@cache
def lessons() -> dict[str, str]:
    """The lesson, such as `03_tensor`, of every exercise and question."""
    from autograde.check import Check
    from autograde.question import Question

    found = {item.exercise: lesson for lesson, item in _classes(CHECKS, Check)}
    return found | {item.id: lesson for lesson, item in _instances(CHECKS, Question)}


def exercises(name: str) -> list[str]:
    """The exercises of a lesson, by its name or number ("03_tensor", "03"), or the one that `name` is.

    Raises ValueError, one line, where it is neither.
    """
    of_lesson = [exercise for exercise in checks() if name in (lessons()[exercise], lessons()[exercise][:2])]
    if not of_lesson:
        check_of(name)
    return of_lesson or [name]


def check_of(exercise: str) -> Check:
    """The check of an exercise; raises ValueError where there is none."""
    if exercise not in checks():
        raise ValueError(unknown(exercise))
    return checks()[exercise]()


def unknown(exercise: object) -> str:
    """The error line for an id that neither an exercise nor a question has."""
    near = get_close_matches(str(exercise), [*checks(), *questions()], n=1)
    return f'no exercise is called "{exercise}"' + (f': did you mean "{near[0]}"?' if near else "")


@cache
def modules(folder: Path) -> tuple[types.ModuleType, ...]:
    """The modules of a folder, in order. They travel to ranks by value: a rank reads no file of `autograde`."""
    return tuple(load(path, folder) for path in sorted([*folder.glob("[0-9]*.py"), *folder.glob("[0-9]*/*.py")]))


def lesson_of(module: types.ModuleType) -> str:
    """The lesson, such as `03_tensor`, in whose file or folder a module stands."""
    return module.__name__.split(".")[2]


def load(path: Path, folder: Path) -> types.ModuleType:
    """Import one file below `folder` under a name made of the folder's and its own, such as `checks.03_tensor`."""
    name = ".".join(("autograde", folder.name, *path.relative_to(folder).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def forget() -> None:
    """Look at the files again at the next call."""
    for found in (checks, questions, misconceptions, lessons, modules):
        found.cache_clear()


def _classes(folder: Path, kind: type) -> Iterator[tuple[str, Any]]:
    """`(lesson, class)` for every class of `kind` that names an exercise, from the module that defines it."""
    for module in modules(folder):
        for item in vars(module).values():
            own = isinstance(item, type) and issubclass(item, kind) and item.__module__ == module.__name__
            if own and item.exercise:
                yield lesson_of(module), item


def _instances(folder: Path, kind: type) -> Iterator[tuple[str, Any]]:
    """`(lesson, object)` for every object of `kind` at a module's top level, alone or in a list or tuple."""
    for module in modules(folder):
        for value in vars(module).values():
            items = value if isinstance(value, list | tuple) else [value]
            yield from ((lesson_of(module), item) for item in items if isinstance(item, kind))


def _by_id(found: Iterable[tuple[str, Any]], attribute: str) -> dict[str, Any]:
    by_id: dict[str, Any] = {}
    for lesson, item in found:
        name = getattr(item, attribute)
        if by_id.setdefault(name, item) is not item:
            raise ValueError(f"{name} is defined twice, the second time in {lesson}")
    return by_id
