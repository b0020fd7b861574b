"""Executing notebooks that crash, hang, flood or leave something behind: each has its own answer, and does no harm."""

import os
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograde import run
from autograde.run import Limits, execute

SWAP = """
import os, threading, time

def swap():
    while True:
        try:
            os.remove("output.ipynb")
            os.symlink("{secret}", "output.ipynb")
        except OSError:
            pass

threading.Thread(target=swap, daemon=True).start()
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""
QUICK = Limits(cell_seconds=60, seconds=120, output_bytes=200_000)


def write(path: Path, *cells: str, tags: tuple[str, ...] = ()) -> Path:
    """A notebook with these code cells; `tags` go to the first."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    notebook.cells[0].metadata["tags"] = list(tags)
    nbformat.write(notebook, path)
    return path


def printed(execution: run.Execution) -> list[str]:
    cells = execution.notebook.cells
    return ["".join(o.text for o in cell.outputs if o.output_type == "stream") for cell in cells]


def test_a_notebook_runs_past_an_error_with_its_parameters(tmp_path: Path) -> None:
    """papermill's parameters arrive; a cell that raises has its outcome, and the cells after it run."""
    path = write(tmp_path / "n.ipynb", "n = 1", "raise KeyError('nothing here')", "print(n + 1)", tags=("parameters",))
    seen = []
    execution = execute(path, {"n": 41}, QUICK, progress=lambda number, total: seen.append((number, total)))
    assert execution.outcome == run.RAISED
    assert execution.raised == [(3, "KeyError: 'nothing here'")]
    assert printed(execution)[-1] == "42\n"
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    nbformat.validate(execution.notebook)


def test_a_killed_kernel_is_a_crash(tmp_path: Path) -> None:
    """The death of the kernel is told at once, with the cell; what ran before it is kept."""
    path = write(tmp_path / "n.ipynb", "print('before')", "import os; os.kill(os.getpid(), 9)", "print('after')")
    execution = execute(path, limits=QUICK)
    assert (execution.outcome, execution.message) == (run.CRASHED, "the kernel died in code cell 2")
    assert printed(execution) == ["before\n", "", ""]
    assert execution.seconds < QUICK.cell_seconds


def test_an_endless_cell_is_interrupted_and_the_rest_runs(tmp_path: Path) -> None:
    """A time limit of its own for each cell."""
    path = write(tmp_path / "n.ipynb", "while True: pass", "print('after')")
    execution = execute(path, limits=Limits(cell_seconds=1, seconds=120))
    assert execution.outcome == run.TIMED_OUT and "code cell 1; the rest ran" in execution.message
    assert execution.raised == []
    assert printed(execution)[-1] == "after\n"


def test_a_cell_that_ignores_the_interrupt_is_ended(tmp_path: Path) -> None:
    """Catching KeyboardInterrupt does not win time."""
    deaf = "while True:\n    try:\n        import time; time.sleep(1)\n    except BaseException: pass"
    execution = execute(write(tmp_path / "n.ipynb", deaf), limits=Limits(cell_seconds=1, grace_seconds=1, seconds=120))
    assert execution.outcome == run.TIMED_OUT and "ignored the interrupt" in execution.message


def test_the_whole_notebook_has_a_limit_and_leaves_nothing(tmp_path: Path) -> None:
    """Cells each within their limit, and a process in a session of its own: all ends with the notebook's time."""
    mark = f"{7200 + os.getpid() % 1000}.{time.monotonic_ns() % 10**6}"
    escape = f"import subprocess; subprocess.Popen(['setsid', 'sleep', '{mark}'], start_new_session=True)"
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    execution = execute(write(tmp_path / "n.ipynb", escape, stop), limits=Limits(cell_seconds=600, seconds=8))
    assert execution.outcome == run.TIMED_OUT and "stopped after 8 s" in execution.message
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]


@pytest.mark.parametrize(
    "cell", ["while True: print('x' * 1000)", "from IPython.display import HTML; HTML('x' * 10**7)"]
)
def test_a_flood_of_output_is_stopped(tmp_path: Path, cell: str) -> None:
    """Many small outputs and one huge output are the same to the limit, and neither is kept."""
    execution = execute(write(tmp_path / "n.ipynb", cell, "print('after')"), limits=QUICK)
    assert execution.outcome == run.FLOODED and "more than 0.2 MB, in code cell 1" in execution.message
    assert len(nbformat.writes(execution.notebook)) < 1_000_000


def test_a_file_that_is_no_notebook_is_unreadable(tmp_path: Path) -> None:
    """Told without starting anything."""
    path = tmp_path / "n.ipynb"
    path.write_text("<html>")
    execution = execute(path)
    assert execution.outcome == run.UNREADABLE and "download it again" in execution.message


def test_a_link_in_the_place_of_the_output_is_not_followed(tmp_path: Path) -> None:
    """A notebook that replaces its own output by a link to another file does not get to see that file."""
    secret = write(tmp_path / "secret.ipynb", "print('secret')")
    link = SWAP.format(secret=str(secret))
    execution = execute(write(tmp_path / "n.ipynb", link), limits=QUICK)
    assert execution.outcome == run.CRASHED
    assert execution.notebook is None or "secret" not in str([c.outputs for c in execution.notebook.cells])
    assert "secret" in secret.read_text()
