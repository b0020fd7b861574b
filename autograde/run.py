"""Execute notebooks with papermill, each in a process of its own that can crash, hang or flood without harm.

What a run says is how the notebook *ran*, never how good it is: points come from `autograde.grade`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode

from autograde import guard
from autograde.notebook import CannotRead, read_notebook

OK, RAISED, TIMED_OUT, CRASHED, FLOODED, UNREADABLE = OUTCOMES = (
    "ok",
    "cell raised",
    "timed out",
    "crashed",
    "flooded",
    "cannot be read",
)
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Limits:
    """What a notebook may use."""

    cell_seconds: float = 120.0  # then the cell is interrupted
    grace_seconds: float = 5.0  # and after these its kernel is killed
    seconds: float = 1800.0
    output_bytes: int = 20_000_000
    memory: int | None = None  # bytes, all its processes together
    processes: int | None = None


@dataclass
class Execution:
    """How one notebook ran: one of OUTCOMES, a line that says more, and the notebook with its outputs."""

    path: Path
    outcome: str
    message: str = ""
    seconds: float = 0.0
    cells: int = 0  # code cells that were started
    raised: list[tuple[int, str]] = field(default_factory=list)  # (number of the code cell, error)
    notebook: NotebookNode | None = None

    @property
    def ok(self) -> bool:
        return self.outcome == OK


Progress = Callable[[int, int], None]  # number of the code cell that begins, of how many
Wrap = Callable[[list[str], Path], list[str]]  # (command, the one folder it may write) -> command in a sandbox


def execute(
    path: str | Path,
    parameters: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    progress: Progress = lambda number, total: None,
    wrap: Wrap = lambda command, folder: command,
    folder: str | Path | None = None,
) -> Execution:
    """Run the notebook at `path` from top to bottom, past cells that raise, and say how it ended. Never raises for
    what the notebook is or does. `folder` is where its cells run, by default a copy's own empty folder."""
    path, limits = Path(path), limits or Limits()
    begin = time.monotonic()
    try:
        notebook = read_notebook(path)
    except CannotRead as error:
        return Execution(path, UNREADABLE, str(error))
    with tempfile.TemporaryDirectory(prefix="fivefold-run-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        nbformat.write(notebook, place / "input.ipynb")
        job = {
            "notebook": str(place / "input.ipynb"),
            "output": str(place / "output.ipynb"),
            "folder": str(folder or place),
            "parameters": dict(parameters or {}),
            "cell_seconds": limits.cell_seconds,
            "grace_seconds": limits.grace_seconds,
            "output_bytes": limits.output_bytes,
        }
        events, errors, ending = _supervise(job, limits, progress, wrap, place)
        execution = _judge(path, events, errors, ending, limits)
        execution.seconds = time.monotonic() - begin
        execution.notebook = _executed(place / "output.ipynb")
    return execution


def _supervise(
    job: dict, limits: Limits, progress: Progress, wrap: Wrap, place: Path
) -> tuple[list[dict], str, guard.Ending]:
    """Run the worker to its end, whichever that is; its events, the end of its stderr, and how it ended."""
    read, write = os.pipe()
    command = wrap([sys.executable, "-P", str(WORKER), json.dumps({**job, "fd": write})], place)
    whole = guard.Limits(limits.seconds, limits.memory, limits.processes)
    # A kernel spec that somebody once installed for their user must not win over this environment's own.
    environment = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    process = guard.start(command, whole, pass_fds=(write,), stderr=subprocess.PIPE, env=environment)
    os.close(write)
    events: list[dict] = []
    tail = bytearray()
    readers = [
        threading.Thread(target=_read_events, args=(read, events, progress)),
        threading.Thread(target=_read_tail, args=(process.stderr, tail)),
    ]
    for reader in readers:
        reader.start()
    try:
        ending = guard.wait(process)
    finally:
        if process.poll() is None:
            process.stdin.close()  # an interrupt came here: let the guard end what it started
            process.wait()
        for reader in readers:
            reader.join()
        process.stderr.close()
    return events, tail.decode(errors="replace"), ending


def _read_events(fd: int, events: list[dict], progress: Progress, most: int = 100_000) -> None:
    with os.fdopen(fd, errors="replace") as pipe:
        for line in iter(lambda: pipe.readline(10_000), ""):
            try:
                event = json.loads(line)
                if event["event"] == "cell":
                    progress(int(event["number"]), int(event["total"]))
            except (ValueError, TypeError, KeyError):
                continue
            if len(events) < most:
                events.append(event)


def _read_tail(pipe: Any, tail: bytearray, size: int = 4000) -> None:
    for chunk in iter(lambda: pipe.read1(65536), b""):
        tail += chunk
        del tail[:-size]


def _judge(path: Path, events: list[dict], errors: str, ending: guard.Ending, limits: Limits) -> Execution:
    """The worst thing that happened is the outcome."""
    said = {event["event"]: event for event in events}
    number = said.get("cell", {}).get("number", 0)
    where = f"in code cell {number}" if number else "before the first cell"
    raised = [(event["number"], event["message"]) for event in events if event["event"] == "raised"]
    slow = [event for event in events if event["event"] == "slow"]
    interrupted = {event["number"] for event in slow}
    raised = [(cell, message) for cell, message in raised if cell not in interrupted]

    def execution(outcome: str, message: str = "") -> Execution:
        return Execution(path, outcome, message, cells=number, raised=raised)

    if ending.reason == "seconds":
        return execution(TIMED_OUT, f"stopped after {limits.seconds:g} s, {where}")
    if ending.reason == "memory":
        return execution(CRASHED, f"used more than {limits.memory / 1e9:.1f} GB of memory, {where}")
    if ending.reason == "processes":
        return execution(CRASHED, f"started more than {limits.processes} processes, {where}")
    if "flooded" in said:
        return execution(FLOODED, f"printed more than {limits.output_bytes / 1e6:g} MB, {where}")
    if any(event["killed"] for event in slow):
        return execution(TIMED_OUT, f"no end after {limits.cell_seconds:g} s {where}, and it ignored the interrupt")
    if "died" in said:
        return execution(CRASHED, f"the kernel died {where}")
    if "broke" in said:
        return execution(CRASHED, f"{where}: {said['broke']['message']}")
    if "end" not in said or ending.reason != "exited" or ending.returncode:
        last = errors.strip().splitlines()[-1:] or [f"the process that ran it ended ({ending.reason})"]
        return execution(CRASHED, f"{where}: {last[0][:300]}")
    if slow:
        cells = ", ".join(str(event["number"]) for event in slow)
        return execution(TIMED_OUT, f"no end after {limits.cell_seconds:g} s in code cell {cells}; the rest ran")
    if raised:
        cell, message = raised[0]
        more = f"; {len(raised) - 1} more cells raised" if len(raised) > 1 else ""
        return execution(RAISED, f"code cell {cell}: {message}{more}")
    return execution(OK)


def _executed(path: Path) -> NotebookNode | None:
    """The executed notebook. What ran could have put anything in its place, so it is read like any other file, and
    never through a link, which could lead out of a sandbox."""
    try:
        return None if path.is_symlink() else read_notebook(path, keep_outputs=True)
    except CannotRead:
        return None
