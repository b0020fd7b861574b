"""Processes and their descendants: who they are, and how none of them is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of every orphan among one's descendants (Linux; elsewhere init gets them)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Be killed when the parent dies, however it dies (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def children(pid: int) -> list[int]:
    """Process ids of the direct children that still run."""
    try:
        found = psutil.Process(pid).children()
    except psutil.Error:
        return []
    return [child.pid for child in found if _runs(child)]


def kill_tree(root: int) -> None:
    """Kill and collect every descendant of `root` (this process itself), also those that come up meanwhile."""
    for _ in range(100):
        try:
            found = psutil.Process(root).children(recursive=True)
        except psutil.Error:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0 if found else os.WNOHANG)[0]:
                pass
        if not found:
            return


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
