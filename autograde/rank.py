"""What a check does on a rank: put the answer out of reach, then run the program on the solution, case by case.

This is the only part of a check that meets a learner's code. What it returns is plain data, which the grader judges.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fivefold.runtime import link
from fivefold.runtime.marks import now
from fivefold.runtime.parts import Program, Source

OURS = tuple(os.path.dirname(path.rstrip(os.sep)) + os.sep for path in (link.RUNTIME, os.path.abspath(__file__)))


@dataclass(frozen=True)
class Sent:
    """A solution on its way to the ranks: pickled, or as text with the exercises that the library stands in for."""

    body: bytes | Source
    replace: tuple[str, ...] = ()

    def load(self) -> Any:
        if isinstance(self.body, bytes):
            return pickle.loads(self.body)
        return Program(self.body, self.replace).load()


@dataclass(frozen=True)
class Answer:
    """Where the library's answer to an exercise lies: its helpers, its file, and the folders with copies of it."""

    exercise: str
    helpers: tuple[str, ...]
    file: str
    folders: tuple[str, ...]


def work(answer: Answer, plan: bytes, solutions: list[Sent]) -> list[dict]:
    """Do each job of the plan on this rank: `program(solution, case)`.

    `plan` is a pickled `(program, jobs)`, a job `(index of the solution, case)`. Returns, for each job, what the
    program returned and which entries of the ledger are its own.
    """
    gc.disable()
    program, jobs = pickle.loads(plan)
    shut_away(answer)
    gc.enable()
    entries = now.recorder.entries
    loaded: dict[int, Any] = {}
    done = []
    for index, case in jobs:
        if len(jobs) > 1:
            dist.barrier()  # a call that one job leaves unmatched must not meet a call of the next
        torch.manual_seed(getattr(case, "seed", 0))
        if index not in loaded:
            loaded[index] = solutions[index].load()
        first = len(entries)
        outcome = program(loaded[index], case)
        done.append({"outcome": outcome, "first": first, "end": len(entries)})
    return done


def shut_away(answer: Answer) -> None:
    """Take the answer out of this process: from the modules that are loaded, from the disk, from other programs."""
    importlib.import_module(f"fivefold.{answer.exercise.rpartition('.')[0]}")
    link.LIBRARY += OURS  # so that ledgers and tracebacks have the learner's lines alone
    for module in [module for name, module in sys.modules.items() if name.startswith("fivefold.")]:
        if getattr(module, "__file__", None) == answer.file:
            for helper in answer.helpers:
                vars(module).pop(helper, None)
    gc.collect(0)  # a class goes only with its cycles, until then it is found among its base's subclasses
    sys.modules["autograde"] = _silent()
    sys.addaudithook(_Guard(answer))


class _Guard:
    """Refuses to read the answer, to move it, to start other programs and to search the memory for it."""

    MOVES = ("os.link", "os.symlink", "os.rename", "os.remove", "os.truncate")
    PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
    SEARCHES = ("gc.get_objects", "gc.get_referrers")

    def __init__(self, answer: Answer):
        folder, name = os.path.split(os.path.realpath(answer.file))
        compiled = os.path.join(folder, "__pycache__", name.removesuffix("py"))
        folders = (os.path.realpath(folder) + os.sep for folder in answer.folders)
        self.hidden = (os.path.join(folder, name), compiled, *folders)
        self.line = f"{answer.exercise} is yours to write: while it is checked, a rank cannot"

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open" or event in self.MOVES:
            for path in arguments[: 1 if event == "open" else 2]:
                if self._hides(path):
                    raise PermissionError(f"{self.line} open {os.path.basename(os.fsdecode(path))}")
        elif event in self.PROGRAMS:
            raise PermissionError(f"{self.line} start another program")
        elif event in self.SEARCHES:
            raise PermissionError(f"{self.line} search its memory")

    def _hides(self, path: Any) -> bool:
        named = isinstance(path, str | bytes | os.PathLike)
        return named and os.path.realpath(os.fsdecode(path)).startswith(self.hidden)


def _silent() -> types.ModuleType:
    """What a learner's cell imports from `autograde` on a rank, where nothing is checked."""
    module = types.ModuleType("autograde")
    module.check = lambda *arguments, **options: None
    module.mine = lambda exercise, solution: solution
    module.own_parts = lambda *arguments, **options: None
    return module
