"""Find-the-bug exercises: whether the mistake that one starts from is still in a solution. Then it earns nothing, so
that a notebook handed in as it was given scores zero, whatever else about the faulty program is right."""

from __future__ import annotations

import ast
import linecache
from typing import Any

from fivefold.runtime.parts import Source

from autograde import discover
from autograde.exercise import bug_of
from autograde.library import definition

NOTE = "The mistake that this exercise starts from is still in it. Nothing is earned until it is found."


def is_there(exercise: str, solution: Any, recognised: str | None) -> bool:
    """Whether a solution behaves like the faulty program, or is that very program, to the letter of its syntax."""
    bug = bug_of(exercise)
    if not bug or recognised == bug:
        return bool(bug)
    where = definition(exercise)
    (item,) = (item for item in discover.misconceptions(exercise) if item.name == bug)
    right, faulty = _definitions(where.source), _definitions(item.apply(where.source))
    mistaken = {name: dump for name, dump in faulty.items() if dump != right.get(name)}
    given = _definitions(_text(solution))
    return bool(mistaken) and all(given.get(name) == dump for name, dump in mistaken.items())


def _text(solution: Any) -> str:
    """The cells of a solution that is a text; of an object, the cell or file that defines it."""
    if isinstance(solution, Source):
        return "\n".join(code for _, code in solution.cells)
    parts = [solution, *vars(solution).values()] if isinstance(solution, type) else [solution]
    codes = [part.__code__ for part in parts if hasattr(part, "__code__")]
    return "".join(linecache.getlines(codes[0].co_filename)) if codes else ""


def _definitions(text: str) -> dict[str, str]:
    """By name, the last function or class of that name, without what the syntax does not see: comments, line breaks.

    A faulty program differs from the right one in some of them only, such as a helper that does the work.
    """
    try:
        waiting: list[ast.AST] = [ast.parse(text)]
        found = []
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(node)
            else:
                waiting += ast.iter_child_nodes(node)  # into the `try` of the cell, not into a class
        return {node.name: ast.dump(node) for node in sorted(found, key=lambda node: node.lineno)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
