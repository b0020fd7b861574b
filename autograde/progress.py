"""Say how far grading has come: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from autograde.grade import Graded


class Silent:
    """Says nothing; the others say the same things in their own way."""

    def begins(self, path: Path) -> None: ...

    def cell(self, number: int, total: int) -> None: ...

    def checks(self, task: str) -> None: ...

    def ends(self, graded: Graded) -> None: ...


class Lines(Silent):
    """For logs: a line when a notebook begins, one when it has run, one when it is graded."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.checking = stream, False

    def begins(self, path: Path) -> None:
        self.checking = False
        self._say(f"{path}: running")

    def checks(self, task: str) -> None:
        if not self.checking:
            self._say("  checking its solutions")
        self.checking = True

    def ends(self, graded: Graded) -> None:
        self._say(f"{graded.path}: {graded.points:g} of {graded.max_points:g} points")

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Line(Silent):
    """For a terminal: the cell that runs or the exercise that is checked, in one line that leaves nothing behind."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.name = stream, ""

    def begins(self, path: Path) -> None:
        self.name = path.name
        self._show(f"{self.name}  starting its kernel")

    def cell(self, number: int, total: int) -> None:
        done = round(20 * (number - 1) / max(total, 1))
        self._show(f"{self.name}  [{'█' * done}{'·' * (20 - done)}]  cell {number} of {total}")

    def checks(self, task: str) -> None:
        self._show(f"{self.name}  checking {task}")

    def ends(self, graded: Graded) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[2K{text[:width]}", end="", file=self.stream, flush=True)


def progress_for(stream: TextIO = sys.stderr) -> Silent:
    """The progress that suits a stream."""
    return Line(stream) if stream.isatty() else Lines(stream)
