"""The command line: names, exit codes, and one line for what went wrong."""

import io
import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograde import cli
from autograde.library import definition

EXERCISE = "tensor.sum_over_ranks"


@pytest.fixture
def solution(tmp_path: Path) -> Path:
    """The library's function in a file of its own, with its imports."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"import torch\nimport torch.distributed as dist\nfrom torch import Tensor\n{definition(EXERCISE).source}"
    )
    return path


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """A folder of references with one lesson that asks for one exercise."""
    cells = [
        new_code_cell("import torch\nimport torch.distributed as dist\nfrom torch import Tensor"),
        new_code_cell(definition(EXERCISE).source, metadata={"nbgrader": {"grade_id": "tensor-sum_over_ranks"}}),
        new_code_cell(
            f'check("{EXERCISE}", sum_over_ranks)',
            metadata={"nbgrader": {"grade_id": "check-tensor-sum_over_ranks", "points": 3}},
        ),
    ]
    (tmp_path / "solutions").mkdir()
    nbformat.write(new_notebook(cells=cells), tmp_path / "solutions/03_small.ipynb")
    return tmp_path / "solutions"


def test_check_takes_the_librarys_own_or_a_file(capsys, solution: Path) -> None:
    """Exit 0 where it is right, 1 where it is wrong; the verdict as text or as JSON."""
    assert cli.main(["check", EXERCISE]) == 0
    assert "3 of 3 points" in capsys.readouterr().out
    assert cli.main(["check", EXERCISE, "--file", str(solution), "--hidden", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] and data["points"] == 3
    solution.write_text("def sum_over_ranks(x, group):\n    return 2 * x")
    assert cli.main(["check", EXERCISE, "--file", str(solution)]) == 1


def test_grade_writes_its_reports_and_says_whether_all_is_reached(capsys, lesson: Path, tmp_path: Path) -> None:
    """All points give exit 0; a missing one exit 1, with the same reports."""
    files = [tmp_path / "out" / name for name in ("report.json", "junit.xml", "index.html")]
    wanted = [
        word for name, path in zip(("--json", "--junit", "--html"), files, strict=True) for word in (name, str(path))
    ]
    command = ["grade", "--no-run", "--solutions", str(lesson), *wanted]
    assert cli.main([*command, str(lesson / "03_small.ipynb")]) == 0
    assert "3 of 3 points" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["passed"] and all(path.stat().st_size > 200 for path in files)
    empty = tmp_path / "03_small.ipynb"
    empty.write_text("")
    assert cli.main([*command, str(empty), str(lesson / "03_small.ipynb")]) == 1
    out, err = capsys.readouterr()
    assert "(it is empty): download it again" in " ".join(out.split()) and "3 of 6 points" in out
    assert f"{empty}: running" in err and "\r" not in err  # plain lines where nobody watches


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "tensor.sum_over_rank"], 'did you mean "tensor.sum_over_ranks"?'),
        (["check", EXERCISE, "--file", "nowhere.py"], "nowhere.py"),
        (["misconceptions", "tensor.Nothing"], "tensor.Nothing"),
        (["classroom", "grade", "nowhere"], "run autograde classroom init nowhere"),
        (["classroom", "export", "nowhere"], "run autograde classroom init nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, arguments: list[str], said: str) -> None:
    """Exit code 2, nothing on stdout, no traceback."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and err.startswith("autograde: ")


@pytest.mark.parametrize(
    "arguments",
    [[], ["grade"], ["grade", "n.ipynb", "-p", "2x", "1"], ["classroom", "grade", "d", "--jobs", "0"], ["nothing"]],
)
def test_wrong_usage_is_exit_2(capsys, arguments: list[str]) -> None:
    """As argparse has it."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("1e-3", 1e-3), ("True", True), ("gelu", "gelu"), ("[1, 2]", [1, 2]), ("None", None)]
)
def test_parameters_are_values_where_they_can_be_read_as_such(text: str, value: object) -> None:
    """What papermill gets is what a cell would have."""
    options = cli._parser().parse_args(["grade", "n.ipynb", "-p", "a", text, "-p", "b", "x y"])
    assert options.parameters == [("a", value), ("b", "x y")]


def test_status_says_what_is_done_and_what_comes_next(capsys, lesson: Path, tmp_path: Path, monkeypatch) -> None:
    """Solved, not begun and unreadable notebooks, none of which is run."""
    monkeypatch.setattr("autograde.grade.ROOT", tmp_path)
    monkeypatch.setattr("autograde.status.ROOT", tmp_path)
    place = tmp_path / "notebooks"
    place.mkdir()
    assert cli.main(["status"]) == 0
    assert "0 of 3 points" in (said := capsys.readouterr().out) and "03_small.ipynb does not exist" in said
    notebook = nbformat.read(lesson / "03_small.ipynb", 4)
    notebook.cells.insert(0, new_code_cell("import os; os._exit(1)"))
    nbformat.write(notebook, place / "03_small.ipynb")
    assert cli.main(["status"]) == 0
    assert "✓ tensor.sum_over_ranks  3 of 3" in capsys.readouterr().out
    notebook.cells[2].source = "def sum_over_ranks(x, group):\n    raise NotImplementedError()"
    nbformat.write(notebook, place / "03_small.ipynb")
    assert cli.main(["status", str(place)]) == 0
    assert "1 not solved yet; next: tensor.sum_over_ranks" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_is_wiped() -> None:
    """What stays on the screen is nothing; elsewhere there are no control characters at all."""
    from autograde.grade import Graded
    from autograde.progress import progress_for
    from autograde.run import OK, Execution

    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = progress_for(stream)
        progress.begins(Path("03_small.ipynb"))
        progress.cell(3, 12)
        progress.checks(EXERCISE)
        progress.ends(Graded(Path("03_small.ipynb"), "", Execution(Path("x"), OK)))
    shown = terminal.getvalue()
    assert "cell 3 of 12" in shown and f"checking {EXERCISE}" in shown
    assert "\n" not in shown and shown.endswith("\r\x1b[2K")
    assert "running" in log.getvalue() and "\x1b" not in log.getvalue() and "\r" not in log.getvalue()


def test_the_command_starts_without_torch() -> None:
    """Help and errors come at once: the engine is loaded only where something is checked."""
    import subprocess

    code = "import sys, autograde.cli, fivefold.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
