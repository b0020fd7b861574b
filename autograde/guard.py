"""Run one command so that it cannot outlive its limits, nor leave anything running.

A small process of its own, started by path so that it loads nothing but the standard library and psutil: it survives
whatever happens to the command, and it ends the command when whoever started it is gone. On Linux it adopts every
process that its command loses (it is their subreaper), so that one in a session of its own is found as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import IO, Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class Limits:
    """What a command may use, all its processes together; None means no limit."""

    seconds: float | None = None
    memory: int | None = None  # bytes
    processes: int | None = None


@dataclass
class Ending:
    """How a guarded command ended: "exited", or the limit it met ("seconds", "memory", "processes"), or "lost"."""

    reason: str
    returncode: int | None = None


def start(command: list[str], limits: Limits, pass_fds: tuple[int, ...] = (), **popen: Any) -> subprocess.Popen:
    """Start `command` under a guard. Keep the guard's stdin open: closing it ends the command. See `wait`."""
    guard = [sys.executable, "-P", __file__, json.dumps({"command": command, "fds": pass_fds, **asdict(limits)})]
    return subprocess.Popen(
        guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds, start_new_session=True, **popen
    )


def wait(guard: subprocess.Popen) -> Ending:
    """Wait until the command has ended and nothing of it is left."""
    assert guard.stdout is not None and guard.stdin is not None
    line = guard.stdout.readline()
    guard.wait()
    guard.stdin.close()
    guard.stdout.close()
    try:
        return Ending(**json.loads(line))
    except (ValueError, TypeError):
        return Ending("lost")  # the guard itself was killed


def main() -> None:
    settings = json.loads(sys.argv[1])
    limits = Limits(settings["seconds"], settings["memory"], settings["processes"])
    _prctl(PR_SET_CHILD_SUBREAPER)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    ending = Ending("lost")
    try:
        # stderr is shared with the command; stdout stays the guard's own, so that nobody else can write the ending.
        child = subprocess.Popen(
            settings["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=settings["fds"],
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        for fd in settings["fds"]:
            os.close(fd)
        ending = _watch(child, limits, sys.stdin.buffer)
    finally:
        _end_descendants()
    print(json.dumps(asdict(ending)), flush=True)


def _watch(child: subprocess.Popen, limits: Limits, stdin: IO[bytes]) -> Ending:
    begin = time.monotonic()
    while child.poll() is None:
        if limits.seconds is not None and time.monotonic() - begin > limits.seconds:
            return Ending("seconds")
        if met := _met(limits):
            return Ending(met)
        readable, _, _ = select.select([stdin], [], [], 0.1)
        if readable and not os.read(stdin.fileno(), 4096):
            return Ending("lost")
    return Ending("exited", child.returncode)


def _met(limits: Limits) -> str:
    """The limit that the command's processes have met, or ""."""
    if limits.memory is None and limits.processes is None:
        return ""
    running = psutil.Process().children(recursive=True)
    if limits.processes is not None and len(running) > limits.processes:
        return "processes"
    if limits.memory is not None and sum(_memory(process) for process in running) > limits.memory:
        return "memory"
    return ""


def _memory(process: psutil.Process) -> int:
    """Bytes of its own: pages shared between forked ranks would be counted once for each of them."""
    try:
        memory = process.memory_info()
        return max(0, memory.rss - getattr(memory, "shared", 0))
    except psutil.Error:
        return 0


def _end_descendants(patience: float = 10.0) -> None:
    """Stop all first, so that none can start another while the rest are being killed."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        running = [p for p in psutil.Process().children(recursive=True) if _alive(p)]
        if not running:
            return
        for name in (signal.SIGSTOP, signal.SIGKILL):
            for process in running:
                try:
                    process.send_signal(name)
                except psutil.Error:
                    pass
        psutil.wait_procs(running, timeout=0.5)
        _reap()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _prctl(option: int, value: int = 1) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0)


if __name__ == "__main__":
    main()
