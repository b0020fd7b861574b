"""The guard: limits are kept, and nothing of a command is left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from autograde import guard
from autograde.guard import Limits

ESCAPE = "import subprocess, time; subprocess.Popen(['sleep', '{mark}'], start_new_session=True); {then}"


@pytest.fixture
def mark() -> str:
    """A number of seconds to sleep that no other process sleeps, to find the process by."""
    return f"{7200 + os.getpid() % 1000}.{time.monotonic_ns() % 10**6}"


def left(mark: str) -> list[int]:
    """Processes with the mark in their command line, zombies apart."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def appears(mark: str) -> None:
    """Wait until the process with the mark runs."""
    deadline = time.monotonic() + 30
    while not left(mark):
        assert time.monotonic() < deadline, "the process with the mark never came up"
        time.sleep(0.02)


def vanishes(mark: str) -> bool:
    deadline = time.monotonic() + 30
    while left(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left(mark)


def run(code: str, limits: Limits | None = None) -> guard.Ending:
    return guard.wait(guard.start([sys.executable, "-c", code], limits or Limits()))


@pytest.mark.parametrize("code", [0, 7])
def test_it_tells_the_exit_code(code: int) -> None:
    """The command's own exit code comes back."""
    assert run(f"raise SystemExit({code})") == guard.Ending("exited", code)


def test_a_process_in_a_session_of_its_own_is_ended(mark: str) -> None:
    """A child that left the process group, and whose parent is gone, does not outlive the command."""
    ending = run(ESCAPE.format(mark=mark, then=""))
    assert ending.reason == "exited"
    assert left(mark) == []


def test_time_is_limited(mark: str) -> None:
    """A command that goes on too long is ended with all it started, even if it ignores SIGTERM and SIGINT."""
    deaf = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (15, 2)]; time.sleep(7200)"
    assert run(ESCAPE.format(mark=mark, then=deaf), Limits(seconds=1)).reason == "seconds"
    assert left(mark) == []


def test_memory_is_limited() -> None:
    """Bytes are counted over all processes together: no single one of these is above the limit."""
    code = """
import subprocess, sys, time
hold = "x = bytearray(b'x') * 60_000_000; import time; time.sleep(60)"
[subprocess.Popen([sys.executable, "-c", hold]) for _ in range(3)]
time.sleep(60)
"""
    assert run(code, Limits(seconds=50, memory=150_000_000)).reason == "memory"


def test_the_number_of_processes_is_limited(mark: str) -> None:
    """A program that starts one process after the other meets its limit."""
    code = f"import subprocess, time\nwhile True: subprocess.Popen(['sleep', '{mark}']); time.sleep(0.01)"
    assert run(code, Limits(seconds=50, processes=20)).reason == "processes"
    assert left(mark) == []


def test_closing_stdin_ends_the_command(mark: str) -> None:
    """Whoever started the guard can end it at any time, by one call that cannot fail."""
    process = guard.start([sys.executable, "-c", ESCAPE.format(mark=mark, then="time.sleep(7200)")], Limits())
    appears(mark)
    process.stdin.close()
    process.wait(30)
    assert left(mark) == []


def test_nothing_is_left_when_the_starter_is_killed(mark: str) -> None:
    """kill -9 of the process that started the guard ends the command as well."""
    command = [sys.executable, "-c", ESCAPE.format(mark=mark, then="time.sleep(7200)")]
    starter = subprocess.Popen(
        [sys.executable, "-c", f"from autograde import guard; guard.wait(guard.start({command!r}, guard.Limits()))"]
    )
    appears(mark)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert vanishes(mark)


def test_a_killed_guard_is_said_to_be_lost() -> None:
    """A command that kills its own guard has no exit code to show for it, and dies with it."""
    assert run("import os, time; os.kill(os.getppid(), 9); time.sleep(7200)") == guard.Ending("lost")
