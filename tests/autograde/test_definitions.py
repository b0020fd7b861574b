"""Taking definitions out of cells: they do the same as in the notebook, and nothing else happens."""

import ast

import pytest

from autograde.definitions import constant, definitions, is_stub

CELL = '''\
%%time
"""A docstring."""
from __future__ import annotations
import math; wrong = print("side effect"); size = 3
!ls
%matplotlib inline
text = """
%kept
! kept
"""
modulo = (10
  % 3)
open("made", "w").write("x")
@staticmethod
def decorated(x):
    # é: two bytes
    return x + size
try:
    import does_not_exist
except ImportError:
    does_not_exist = None
for _ in range(3):
    print("loop")
if size > 2:
    def chosen(): return "big"
else:
    def chosen(): return "small"
double = lambda x: decorated(x) * 2
with open("made", "w") as file: pass
'''


def test_definitions_stay_and_everything_else_is_gone(tmp_path, monkeypatch, capsys) -> None:
    """Executing what is left defines the same names, on the same lines, and has no effect."""
    monkeypatch.chdir(tmp_path)
    left = definitions(CELL)
    names: dict = {}
    exec(compile(left, "cell", "exec"), names)
    assert (names["size"], names["modulo"], names["text"]) == (3, 1, "\n%kept\n! kept\n")
    assert (names["chosen"](), names["double"](4), names["does_not_exist"]) == ("big", 14, None)
    assert "wrong" not in names
    assert names["decorated"].__func__.__code__.co_firstlineno == CELL.split("\n").index("@staticmethod") + 1
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("cell", ["x = 1\ny = (", "def f(:\n  pass", "%%time\nreturn in ?"])
def test_what_is_not_python_is_a_syntax_error(cell: str) -> None:
    """Said by one kind of exception, for the caller to name the cell."""
    with pytest.raises(SyntaxError):
        definitions(cell)


def test_a_cell_in_another_language_is_left_out() -> None:
    """A `%%bash` cell defines nothing, and is no error."""
    assert definitions("%%bash\nrm -rf /tmp/x; def f(: 1").strip() == ""


def test_a_find_the_bug_cell_counts_as_in_the_notebook() -> None:
    """Its `try` that catches NotImplementedError leaves the program above in force until something is written in it."""
    cell = "def f(): return 'faulty'\n\ntry:\n    {}\nexcept NotImplementedError:\n    pass"
    for body, expected in (("raise NotImplementedError()", "faulty"), ("def f(): return 'right'", "right")):
        names: dict = {}
        exec(definitions(cell.format(body)), names)
        assert names["f"]() == expected


@pytest.mark.parametrize(
    ("code", "stub"),
    [
        ("def f(x):\n    '''Doc.'''\n    # YOUR CODE HERE\n    raise NotImplementedError()", True),
        ("def f(x):\n    raise NotImplementedError", True),
        ("class A:\n  def f(self):\n    raise NotImplementedError()\n  def g(self): raise NotImplementedError", True),
        ("class A:\n    def f(self):\n        return 1\n    def g(self):\n        raise NotImplementedError()", False),
        ("def f(x):\n    if x: raise NotImplementedError\n    return 1", False),
        ("def f(x):\n    raise ValueError()", False),
        ("class A: pass", False),
    ],
)  # fmt: skip
def test_a_stub_is_recognised(code: str, stub: bool) -> None:
    """Only what nobody has begun is a stub."""
    assert is_stub(ast.parse(code).body[0]) is stub


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-1.5e3", -1500.0), ("2 * 3 / 4 * 8", 12.0), ("'b'", "b"), ("n * 2 ** 10", 4096), ("7 // 2 % 2", 1)],
)
def test_plain_arithmetic_has_a_value(text: str, value: object) -> None:
    """An answer may be written as the formula that leads to it."""
    assert constant(ast.parse(text, mode="eval").body, {"n": 4}) == value


@pytest.mark.parametrize(
    "text", ["f(2)", "9 ** 9 ** 9", "'a' * 10 ** 9", "1 / 0", "x", "[1] * 9", "(2 ** 64) ** 64", "2 ** 0.5j"]
)
def test_anything_else_has_none(text: str) -> None:
    """Nothing is called, and nothing takes long or much memory."""
    with pytest.raises(ValueError):
        constant(ast.parse(text, mode="eval").body, {})
