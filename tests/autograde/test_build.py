"""Lessons become notebooks: the same bytes each time, the same as nbgrader's own; what is wrong is told in one line."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook

from autograde.build import build
from autograde.exercise import ROOT
from autograde.lesson import LessonError

COURSE = "toy"


def nbgrader(course: Path, *arguments: str) -> None:
    """Stock nbgrader in a course directory, with no configuration but the folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic by its name
    environment = os.environ | {"HOME": str(course), "PATH": path, "JUPYTER_PREFER_ENV_PATH": "1"}
    command = [sys.executable, "-m", "nbgrader", *arguments, f"--CourseDirectory.root={course}"]
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def submit(course: Path, student: str, notebook: Path) -> None:
    folder = course / "submitted" / student / COURSE
    folder.mkdir(parents=True)
    shutil.copy(notebook, folder / "03_toy.ipynb")


def change(path: Path, old: str, new: str) -> int:
    """Replace `old`, which must stand there once; returns the number of its line."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def cells(path: Path) -> dict[str, str]:
    return {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}


def half_done(released: Path, path: Path) -> Path:
    """A notebook with one exercise solved, the faulty program mended in place, and one question answered."""
    notebook = nbformat.read(released, as_version=4)
    by_id = {cell.id: cell for cell in notebook.cells}
    by_id["toy-middle"].source = "def middle(low, high):\n    return (low + high) / 2"
    by_id["toy-round_up"].source = by_id["toy-round_up"].source.replace("math.floor", "math.ceil")
    by_id["03-which"].source = 'which_answer = "a"'
    nbformat.write(notebook, path)
    return path


@pytest.mark.slow
def test_stock_nbgrader_releases_the_same_bytes_and_grades_them(toy):
    """generate_assignment on solutions/ yields notebooks/; autograde gives the reference all points, an untouched
    notebook none, and a half-done one what it earned."""
    build(toy.root)
    course, released = toy.root / "course", toy.root / "notebooks/03_toy.ipynb"
    (course / "source" / COURSE).mkdir(parents=True)
    shutil.copy(toy.root / "solutions/03_toy.ipynb", course / "source" / COURSE)
    nbgrader(course, "generate_assignment", COURSE)
    assert (course / "release" / COURSE / "03_toy.ipynb").read_bytes() == released.read_bytes()

    submit(course, "reference", toy.root / "solutions/03_toy.ipynb")
    submit(course, "untouched", released)
    submit(course, "half", half_done(released, toy.root / "half.ipynb"))
    nbgrader(course, "autograde", COURSE)
    with Gradebook(f"sqlite:///{course}/gradebook.db") as gradebook:
        scores = {s.student.id: (s.score, s.max_score) for s in gradebook.assignment_submissions(COURSE)}
    assert scores == {"reference": (9, 9), "untouched": (0, 9), "half": (5, 9)}


def test_a_released_notebook_runs_to_its_end_under_papermill(toy):
    """Stock papermill, with a parameter, on the notebook as a learner gets it: no cell raises."""
    build(toy.root)
    out = toy.root / "out.ipynb"
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "-p", "world_size", "2"]
    done = subprocess.run([*command, toy.root / "notebooks/03_toy.ipynb", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "world_size = 2" in [cell.source.splitlines()[-1] for cell in nbformat.read(out, 4).cells if cell.source]


def test_a_solution_notebook_is_the_library(toy):
    """Its cells, executed in order, define what the library defines, also where a faulty program was given."""
    build(toy.root)
    scope: dict = {}
    for cell in nbformat.read(toy.root / "solutions/03_toy.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(cell.source, scope)
    library: dict = {}
    exec(toy.library.read_text(), library)
    for x in (-1.5, 0, 2, 2.01):
        assert scope["round_up"](x) == library["round_up"](x)
    assert scope["middle"](1, 4) == library["middle"](1, 4)
    assert scope["Counter"](5).advance() == library["Counter"](5).advance()
    assert (scope["double_answer"], scope["which_answer"]) == (12, "b")


def test_the_faulty_program_is_the_learners_to_run_and_mend(toy):
    """A find-the-bug cell runs as it stands, with the fault; mended in place, or written anew below, it is right."""
    build(toy.root)
    source = cells(toy.root / "notebooks/03_toy.ipynb")["toy-round_up"]
    anew = "def round_up(x):\n        return -(-x // 1)"
    mended = [source.replace("floor", "ceil"), source.replace("raise NotImplementedError()", anew)]
    results = []
    for program in (source, *mended):
        scope: dict = {}
        exec("import math\n" + program, scope)
        results.append(scope["round_up"](2.5))
    assert results == [2, 3, 3]


def test_notebooks_are_valid_and_hold_known_metadata(toy):
    """Format 4.5, unique ids, no outputs, and no key that a reader of notebooks does not know."""
    build(toy.root)
    for folder in ("solutions", "notebooks"):
        notebook = json.loads((toy.root / folder / "03_toy.ipynb").read_text())
        nbformat.validate(notebook, relax_add_props=False)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
        for cell in notebook["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None
            assert set(cell["metadata"]) <= {"tags", "nbgrader", "deletable", "editable"}


def test_a_picture_is_put_into_the_notebook(toy):
    """The file's bytes, under the text that says what is seen; one that is missing is named with the lesson's line."""
    change(toy.lesson, "# Made for tests.", "# ![A square.](pictures/square.svg)")
    with pytest.raises(LessonError, match=r"lessons/03_toy.py:1: there is no picture pictures/square.svg: put it into"):
        build(toy.root)
    picture = toy.root / "lessons/pictures/square.svg"
    picture.parent.mkdir()
    picture.write_bytes(b"<svg/>")
    build(toy.root)
    first = next(iter(cells(toy.root / "notebooks/03_toy.ipynb").values()))
    alt, data = re.fullmatch(r"# 3 · Toy\n!\[(.*)\]\(data:image/svg\+xml;base64,(.*)\)", first).groups()
    assert alt == "A square." and base64.b64decode(data) == picture.read_bytes()


def test_ids_of_cells_do_not_depend_on_cells_elsewhere(toy):
    """A new cell near the top leaves the ids of all cells after the next graded one."""
    build(toy.root)
    before = list(cells(toy.root / "notebooks/03_toy.ipynb"))
    change(toy.lesson, "# Made for tests.\n", "# Made for tests.\n\n# %%\n1 + 1\n")
    build(toy.root)
    after = list(cells(toy.root / "notebooks/03_toy.ipynb"))
    assert after[after.index("toy-middle") :] == before[before.index("toy-middle") :]
    assert len(after) == len(before) + 1


def test_check_names_what_is_stale_and_writes_nothing(toy):
    """By bytes: after a build nothing is stale; a change of the library or of the points is; the files stay."""
    names = [toy.root / "solutions/03_toy.ipynb", toy.root / "notebooks/03_toy.ipynb"]
    assert build(toy.root, check=True) == names and not names[0].exists()
    assert build(toy.root) == names
    assert build(toy.root) == build(toy.root, check=True) == []
    change(toy.library, "return x / 2", "return x * 0.5")
    kept = names[0].read_bytes()
    assert build(toy.root, check=True) == names[:1]
    assert names[0].read_bytes() == kept
    build(toy.root)
    toy.checks["toy.middle"].points["output"] = 7
    assert build(toy.root, check=True) == names


def test_one_lesson_is_built_alone(toy):
    """The others are not looked at, whatever state they are in; a name that no lesson has is an error."""
    (toy.root / "lessons" / "98_broken.py").write_text('# %% exercise="toy.gone"\nx = 1\n')
    assert build(toy.root, only=["03"]) == [toy.root / "solutions/03_toy.ipynb", toy.root / "notebooks/03_toy.ipynb"]
    with pytest.raises(LessonError):
        build(toy.root)
    with pytest.raises(LessonError, match="no lesson begins with 97: there are 03_toy, 98_broken"):
        build(toy.root, only=["97"])


def test_the_home_page_is_a_notebook_without_solutions(toy):
    """Its links find lessons by their number, and where there is no such lesson the page says so."""
    text = "# %% [markdown]\n# # Home\n# [Toys](03.ipynb), [games](04.ipynb)\n\n# %%\n1 + 1\n"
    (toy.root / "lessons/index.py").write_text(text)
    home = toy.root / "notebooks/index.ipynb"
    assert home in build(toy.root) and not (toy.root / "solutions/index.ipynb").exists()
    nbformat.validate(json.loads(home.read_text()), relax_add_props=False)
    first, second = cells(home).values()
    assert first == "# Home\n[Toys](03_toy.ipynb), games *(not written yet)*" and second == "1 + 1"
    (toy.root / "lessons/04_games.py").write_text("# %% [markdown]\n# # 4 · Games\n")
    assert home in build(toy.root, check=True)
    build(toy.root)
    assert "[games](04_games.ipynb)" in home.read_text()


def test_a_notebook_without_a_lesson_is_named_and_kept(toy):
    """It is stale, but it may be somebody's work. Files with other names are nobody's business."""
    build(toy.root)
    for name in ("04_gone.ipynb", "Untitled.ipynb"):
        (toy.root / "notebooks" / name).write_text("{}")
    assert build(toy.root) == [toy.root / "notebooks/04_gone.ipynb"]
    assert (toy.root / "notebooks/04_gone.ipynb").exists()


def test_a_learners_work_is_not_overwritten(toy):
    """A notebook in which cells were run is left alone, with a line that says what to do."""
    build(toy.root)
    path = toy.root / "notebooks/03_toy.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].execution_count = 1
    nbformat.write(notebook, path)
    kept = path.read_bytes()
    with pytest.raises(LessonError, match="notebooks/03_toy.ipynb has been worked in .* move it elsewhere"):
        build(toy.root)
    assert path.read_bytes() == kept
    assert build(toy.root, check=True) == [path]


BROKEN = [
    ("toy.middle", "toy.midle", "from fivefold.toy import midle"),
    ("from fivefold.toy import middle\n", "from fivefold.toy import middle as m\n", "is its import and no more"),
    ('# %% check="toy.Counter"', "# %%", "toy.Counter has no check cell"),
    ('# %% check="toy.middle"', '# %% check="toy.Counter"', "does not follow the exercise or question toy.Counter"),
    ("03.which", "03.double", "03.double has a cell already, in 03_toy.py line"),
    ('# %% check="03.which"', "# %%", "03.which has no check cell"),
    ("03.which", "03.who", "there is no question 03.who in autograde/checks"),
    ('bug="rounds_down"', 'bug="rounds"', "has no misconception 'rounds': choose one of rounds_down"),
    ('exercise="toy.middle"', 'exercise="toy.middle" colour="red"', "metadata 'colour' is not known"),
    ('exercise="toy.middle"', 'exercise="toy.middle" question="03.x"', "a cell is one of exercise, question, check"),
    ('# %% [markdown]\n# Now a class.', '# %% [markdown] bug="x"\n# Now.', "only an exercise can start from a bug"),
    ('# %% [markdown]\n# Now a class.', '# %% [markdown] check="x.y"\n# Now.', "holds code"),
    ("# Now a class.", "# ### BEGIN SOLUTION", "'BEGIN SOLUTION' is for nbgrader"),
    ("world_size = 4", "world_size = 2 * 2", "set to literals, not 'world_size = 2 * 2'"),
    ("# %%\ncounter = Counter", '# %% tags=["parameters"]\nn = 1', "a second cell is tagged parameters"),
    ("import math\n", "import cmath\n", "toy.round_up uses math: put into an earlier cell `import math`"),
    ("import lru_cache", "import cache", "uses lru_cache: put into an earlier cell `from functools import lru_cache`"),
    ('check("toy.middle", middle)', 'score = check("toy.middle", middle)', 'a check cell ends with check("toy.middle"'),
    ('which_answer = "b"', 'print("b")', "ends by setting one name to the right answer"),
    ("counter = Counter", "counter = (Counter", "this is not Python"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_a_lesson_that_cannot_be_built_is_one_line_with_its_place(toy, old, new, message):
    """The message names the lesson and the line of the cell; nothing is written."""
    assert old in toy.lesson.read_text()
    toy.lesson.write_text(toy.lesson.read_text().replace(old, new))
    with pytest.raises(LessonError) as raised:
        build(toy.root)
    text = str(raised.value)
    assert message in text and "\n" not in text
    name, line, _ = text.split(":", 2)
    assert name == "lessons/03_toy.py" and 1 <= int(line) <= len(toy.lesson.read_text().splitlines())
    assert not (toy.root / "solutions").exists()


def test_a_name_that_the_library_defines_is_to_be_imported_from_it(toy):
    """A function that several exercises share is no part of any of them."""
    change(toy.library, "return math.ceil(x)", "return _shared(math.ceil(x) - 1)")
    toy.edits.clear()
    with pytest.raises(LessonError, match="uses _shared: put .* `from fivefold.toy import _shared`"):
        build(toy.root)


def test_the_line_of_an_error_is_that_of_its_cell(toy):
    """Also after a string that holds what looks like a cell."""
    change(toy.lesson, "# %%\ncounter", '# %%\ntext = """\n# %% no cell\n"""\ncounter')
    line = change(toy.lesson, '# %% exercise="toy.round_up"', '# %% odd="x" exercise="toy.round_up"')
    with pytest.raises(LessonError, match=f"lessons/03_toy.py:{line}: metadata 'odd'"):
        build(toy.root)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda toy: toy.checks.pop("toy.Counter"), "toy.Counter is neither an exercise nor a question"),
        (lambda toy: change(toy.library, "class Counter", "class Clock"), "there is no toy.Counter in lib/fivefold"),
        (lambda toy: change(toy.library, "math.ceil(x)", "-math.floor(-x)"), "rounds_down: its old lines are not in"),
        (
            lambda toy: change(toy.library, "return math.ceil(x)", 'f"""\n{x}"""\n    return math.ceil(x)'),
            "be indented",
        ),
    ],
)
def test_what_is_gone_from_elsewhere_fails_the_build(toy, break_it, message):
    """A check, a function, or the lines that a misconception replaces."""
    break_it(toy)
    with pytest.raises(LessonError, match=f"lessons/03_toy.py:\\d+: .*{message}"):
        build(toy.root)


def test_the_notebooks_of_this_course_are_up_to_date():
    """What is committed is what the lessons build. Where this fails, run `make build`."""
    assert [str(path.relative_to(ROOT)) for path in build(check=True)] == []
