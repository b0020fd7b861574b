"""The source of an exercise, and what of it is left to the learner."""

import ast
import inspect
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from nbgrader.preprocessors import ClearSolutions

from autograde import exercise

NBGRADER = {"nbgrader": {"solution": True, "grade": False, "locked": False, "grade_id": "x", "schema_version": 3}}


def released(text: str) -> str:
    """What nbgrader leaves a learner of a program with markers."""
    notebook = new_notebook(cells=[new_code_cell(text, metadata=NBGRADER)])
    return ClearSolutions().preprocess(notebook, {})[0].cells[0].source


def library_modules() -> list[str]:
    """Every module of the library, as the front part of an exercise's id."""
    folder = exercise.ROOT / "lib/fivefold"
    modules = [".".join(path.relative_to(folder).with_suffix("").parts) for path in sorted(folder.rglob("[a-z]*.py"))]
    return [module for module in modules if not module.startswith("runtime")]


def definitions(module: str) -> list[str]:
    """The public functions of a module, and those of its classes that have methods."""
    path = exercise.ROOT / "lib/fivefold" / Path(*module.split(".")).with_suffix(".py")
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [n.name for n in nodes if not n.name.startswith("_") and any(map(exercise._body, exercise._functions([n])))]


def interface(text: str) -> list[str]:
    """Everything of a program but the bodies of its functions, as text that does not depend on its layout."""

    class Bodies(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
            docstring = ast.get_docstring(node)
            node.body = [ast.Expr(ast.Constant(docstring))] if docstring is not None else [ast.Pass()]
            return node

    return [ast.unparse(node) for node in Bodies().visit(ast.parse(text)).body]


def test_private_helpers_come_along_where_nobody_else_uses_them(toy):
    """The source holds the helper directly before the definition, its comment and its decorator, and nothing else."""
    scope: dict = {}
    text = exercise.source("toy.middle", toy.root)
    exec("from functools import lru_cache\n" + text, scope)
    assert [line for line in text.splitlines() if line.startswith(("def", "@", "#"))] == [
        "def _half(x: float) -> float:",
        "# Between the ends.",
        "@lru_cache(maxsize=None)",
        "def middle(low: float, high: float) -> float:",
    ]
    assert scope["middle"](3, 8) == 5.5


@pytest.mark.parametrize("user", ["\n\ndef other():\n    return _half(1)\n", "\n\nclass Other:\n    half = _half\n"])
def test_a_helper_that_somebody_else_uses_stays(toy, user):
    """A helper that another function or class names is not part of the exercise."""
    toy.library.write_text(toy.library.read_text() + user)
    assert "_half(x" not in exercise.source("toy.middle", toy.root)


def test_private_constants_and_classes_are_helpers_too(toy):
    """A chain of helpers, of which only the last is named by the exercise, comes along whole."""
    toy.library.write_text(
        "OPEN = 1\n_STEP = 2\n\n\nclass _Walk:\n    step = _STEP\n\n\ndef walk(n: int) -> int:\n"
        "    return n * _Walk.step\n"
    )
    assert exercise.source("toy.walk", toy.root).startswith("_STEP = 2\n")


def test_a_package_may_pass_on_what_a_module_of_it_defines(toy):
    """An id names the package; the definition is found in the module, under the name it has there."""
    package = toy.root / "lib/fivefold/pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import walk as stroll\nfrom fivefold.toy import Counter\n")
    (package / "inner.py").write_text("def walk():\n    return 1\n")
    assert exercise.locate("pack.stroll", toy.root) == (package / "inner.py", "walk")
    assert exercise.locate("pack.Counter", toy.root) == (toy.library, "Counter")


@pytest.mark.parametrize("name", ["toy.missing", "nowhere.middle", "middle", "toy.math", "toy", ""])
def test_an_unknown_id_is_one_line(toy, name):
    """What the library does not define is refused with a line that says what an id is."""
    with pytest.raises(LookupError, match=f"there is no {name} in lib/fivefold: give") as raised:
        exercise.locate(name, toy.root)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("module", library_modules())
def test_every_definition_of_the_library_can_be_an_exercise(module):
    """nbgrader leaves signatures, decorators, docstrings and class bodies as they are, and no statement of a body."""
    for name in definitions(module):
        text = exercise.source(f"{module}.{name}")
        marked = exercise.with_markers(text)
        assert "\n".join(line for line in marked.splitlines() if " SOLUTION" not in line) == text.rstrip("\n")
        stub = released(marked)
        assert interface(stub) == interface(text)
        for node in exercise._functions(ast.parse(stub).body):
            left = [ast.unparse(part) for part in node.body if not exercise._is_constant(part)]
            assert left in (["raise NotImplementedError()"], ["pass"], [])


@pytest.mark.parametrize("text", ["class Point:\n    x: int = 0\n", "def later() -> None: ...\n"])
def test_what_leaves_nothing_to_write_is_refused(text):
    """nbgrader would replace such a cell whole."""
    with pytest.raises(ValueError, match="leaves a learner nothing to write"):
        exercise.with_markers(text)


def test_comments_of_a_body_belong_to_the_solution():
    """A comment between signature and body, or after the last statement, may say how it is done."""
    signature, rest = "def f(\n    x: int,\n):  # (b, s)\n", "\n\n# A note.\n"
    body = "    # First halve it.\n    return x / 2\n    # Then nothing.\n"
    stub = "    # YOUR CODE HERE\n    raise NotImplementedError()\n"
    assert released(exercise.with_markers(signature + body + rest)) == signature + stub + rest


def test_a_body_on_the_line_of_its_signature_is_refused():
    """There is no line to put a marker on."""
    with pytest.raises(ValueError, match="f has its body on the line of its signature: put it on the next one"):
        exercise.with_markers("def f(x): return x\n")


def test_markers_do_not_change_the_program():
    """The marked text of a class is the class: same signature, same results."""
    scope: dict = {}
    exec(exercise.with_markers(inspect.getsource(Path)), {**vars(inspect.getmodule(Path)), "__name__": "copy"}, scope)
    assert scope["Path"].__name__ == "Path"
    assert inspect.signature(scope["Path"].glob) == inspect.signature(Path.glob)


def test_exercises_are_listed_in_the_order_of_the_lesson(toy):
    """Points and properties come from the check, misconceptions and the bug from where they are named."""
    listed = exercise.exercises(toy.root)
    assert [(e.id, e.lesson, e.points, e.bug) for e in listed] == [
        ("toy.middle", "03_toy", 3, ""),
        ("toy.Counter", "03_toy", 2, ""),
        ("toy.round_up", "03_toy", 2, "rounds_down"),
    ]
    assert listed[0].properties == {"output": 1, "error": 2}
    assert listed[2].to_dict()["misconceptions"] == ["rounds_down"]


def test_the_bug_of_an_exercise_is_found_without_reading_notebooks(toy):
    """As the lesson's cell names it, whatever the order of its keys; empty where there is none."""
    assert exercise.bug_of("toy.round_up", toy.root) == "rounds_down"
    assert exercise.bug_of("toy.middle", toy.root) == exercise.bug_of("toy.round", toy.root) == ""
    text = toy.lesson.read_text()
    toy.lesson.write_text(
        text.replace('exercise="toy.round_up" bug="rounds_down"', 'bug="rounds_down" exercise="toy.round_up"')
    )
    assert exercise.bug_of("toy.round_up", toy.root) == "rounds_down"
