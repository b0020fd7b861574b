"""Take out of a cell what defines something, and leave out what does something, without executing either."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterable
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def definitions(code: str, names: Collection[str] | None = None) -> str:
    """The imports, functions, classes and plain assignments of a cell, each on the line where it stands.

    Every other statement becomes a `0`, and so do definitions of other than `names`, where these are given. Raises
    SyntaxError where the cell is not Python; lines of IPython's own (`%timeit`, `!ls`) are blank.
    """
    code = without_magics(code)
    lines = code.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = bytearray(b"".join(lines))
    for node in ast.parse(code).body:
        if not _defines(node) or not _wanted(node, names):
            begin, end = _span(node, starts)
            text[begin:end] = re.sub(rb"[^\n]", b" ", bytes(text[begin:end]))
            text[begin : begin + 1] = b"0"
    return text.decode()


def needed(name: str, statements: Iterable[ast.stmt]) -> set[str]:
    """The names that `name` is made of: those in its definitions, those in theirs, and so on."""
    parts: dict[str, set[str]] = {}
    for node in filter(_defines, statements):
        used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        for each in bound(node):
            parts.setdefault(each, set()).update(used)
    found, new = set(), {name}
    while new:
        found |= new
        new = set().union(*(parts.get(each, set()) for each in new)) - found
    return found


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement imports, defines or assigns to at the top of its cell."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, IMPORTS):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for inner in _inner(node) for name in bound(inner)}


def without_magics(code: str) -> str:
    """The cell with its IPython lines blank, so that what is left is Python on the lines where it stands."""
    if re.match(r"%%(?!time|timeit|capture|prun)", code.lstrip()):
        return "\n" * code.count("\n")  # the rest of the cell is another language
    kept = []
    for line in code.split("\n"):
        magic = re.match(r"\s*[%!?]", line) and not _python([*kept, line])
        kept.append("" if magic else line)
    return "\n".join(kept)


def is_stub(node: ast.stmt) -> bool:
    """True for a function or class in which every body is still docstring and `raise NotImplementedError`."""
    functions = [inner for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
    return bool(functions) and all(_unwritten(function) for function in functions)


def constant(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal, of arithmetic on numbers, or of a name in `names`; ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = constant(node.left, names), constant(node.right, names)
        return _calculate(node.op, left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _calculate(ast.Sub(), 0, constant(node.operand, names))
    return ast.literal_eval(node)


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _calculate(kind: ast.operator, left: Any, right: Any) -> Any:
    if not (_is_number(left) and _is_number(right)) or isinstance(kind, ast.Pow) and abs(right) > 64:
        raise ValueError("not arithmetic on numbers of ordinary size")
    try:
        result = _ARITHMETIC[type(kind)](left, right)
    except ArithmeticError as error:
        raise ValueError(str(error)) from None
    if not _is_number(result):
        raise ValueError("not a number of ordinary size")
    return result


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, (*DEFINITIONS, *IMPORTS, ast.Pass)):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring may stand before `from __future__`
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return _plain(node.value)
    if isinstance(node, ast.If):
        return _plain(node.test) and all(map(_defines, _inner(node)))
    # What a find-the-bug cell raises, it catches.
    return isinstance(node, ast.Try) and all(isinstance(s, ast.Raise) or _defines(s) for s in _inner(node))


def _wanted(node: ast.stmt, names: Collection[str] | None) -> bool:
    everything = isinstance(node, ast.Expr | ast.Pass) or getattr(node, "module", "") == "__future__"
    return names is None or everything or not bound(node).isdisjoint({*names, "*"})


def _plain(node: ast.AST | None) -> bool:
    """No call, no comprehension, nothing else that takes time or has an effect."""
    busy = (ast.Call, ast.Await, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Pow)
    if node is None or isinstance(node, busy):
        return False
    return isinstance(node, ast.Lambda) or all(map(_plain, ast.iter_child_nodes(node)))


def _inner(node: ast.stmt) -> list[ast.stmt]:
    bodies = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    bodies += [handler.body for handler in getattr(node, "handlers", [])]
    return [statement for body in bodies for statement in body]


def _span(node: ast.stmt, starts: list[int]) -> tuple[int, int]:
    """Where the statement begins and ends, in bytes, with its decorators."""
    if decorators := getattr(node, "decorator_list", []):
        begin = starts[decorators[0].lineno - 1]
    else:
        begin = starts[node.lineno - 1] + node.col_offset
    return begin, starts[node.end_lineno - 1] + node.end_col_offset


def _unwritten(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return False
    raised = body[0].exc.func if isinstance(body[0].exc, ast.Call) else body[0].exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def _python(lines: list[str]) -> bool:
    """Whether the last of these lines can be Python: inside a string or brackets, a line may begin with % or !."""
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as error:
        return error.lineno != len(lines) or "was never closed" in str(error) or "unterminated" in str(error)
    return True
