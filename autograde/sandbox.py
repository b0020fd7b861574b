"""Run a command under bubblewrap: its own processes, no network but loopback, one folder that it may write.

What is inside: the system's programs and libraries, this Python environment and the course, all read-only; empty
folders in the place of home and /tmp. Nothing else of the machine is there to be read: not the gradebook, not the
folders of other people.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/opt/conda")
SETTINGS = (
    "alternatives",
    "fonts",
    "group",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
)
DISK = 2_000_000_000  # bytes, for each folder that is kept in memory
KEPT = ("LANG", "LC_ALL", "PATH", "TERM", "TZ", "VIRTUAL_ENV")  # of the environment: nothing that could be a secret


class NoSandbox(RuntimeError):
    """bubblewrap is missing, or does not work here; the message says what to do."""


def sandboxed(command: list[str], folder: Path, readable: tuple[Path, ...] = ()) -> list[str]:
    """The command line that runs `command` in a sandbox where only `folder` can be written, and the paths `readable`
    can be read as well. Raises NoSandbox where that is not possible."""
    require()
    return [*_bubblewrap(), *_view(readable), *_writable(folder), "--", *_limited(), *command]


def require() -> None:
    """Raises NoSandbox where commands cannot be run in a sandbox."""
    if problem := _problem():
        raise NoSandbox(problem)


def status() -> str:
    """One line: the sandbox works, or what to do so that it does."""
    return _problem() or f"bubblewrap works ({shutil.which('bwrap')})"


@cache
def _problem() -> str:
    if sys.platform != "linux":
        return "no sandbox: bubblewrap needs Linux; grade on a Linux machine, or in a container without --sandbox"
    if not shutil.which("bwrap"):
        return "no sandbox: bubblewrap is not installed; install the package `bubblewrap` (apt, dnf, pacman)"
    probe = [*_bubblewrap(), *_view(()), "--", sys.executable, "-c", "pass"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no sandbox: bubblewrap does not start ({error})"
    if done.returncode == 0:
        return ""
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"no sandbox: bubblewrap may not make namespaces here ({reason}); allow unprivileged user namespaces"


def _bubblewrap() -> list[str]:
    """New namespaces for everything, no privileges, and an end when whoever started it ends.

    As root the user namespace must be asked for: without it bubblewrap keeps the real root's capabilities."""
    return [
        *(shutil.which("bwrap") or "bwrap",),
        *("--unshare-user", "--unshare-all", "--disable-userns", "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session", "--clearenv"),
        *(word for name in KEPT if name in os.environ for word in ("--setenv", name, os.environ[name])),
        *("--setenv", "HOME", "/tmp/home", "--setenv", "JUPYTER_PREFER_ENV_PATH", "1"),
        *("--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--setenv", "PYTHONPATH", os.pathsep.join(map(str, _course()))),
    ]


def _view(readable: tuple[Path, ...]) -> list[str]:
    size = ("--size", str(DISK))
    places = [*SYSTEM, *(f"/etc/{name}" for name in SETTINGS)]
    arguments = [word for place in places for word in _shown(place)]
    arguments += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm", *size, "--tmpfs", "/tmp"]
    arguments += ["--dir", "/tmp/home", "--ro-bind-try", "/sys/devices/system", "/sys/devices/system"]
    for place in dict.fromkeys([*_environment(), *readable]):
        arguments += ["--ro-bind", str(place), str(place)]
    return arguments


def _limited() -> list[str]:
    """No core dumps, no file that fills a disk, and an end to a fork bomb (the guard counts processes for root)."""
    return ["prlimit", "--core=0", f"--fsize={DISK}", "--nproc=4096"] if shutil.which("prlimit") else []


def _shown(place: str) -> list[str]:
    """Read-only as it is; where the system has a link (/lib -> usr/lib), the same link."""
    if os.path.islink(place) and not place.startswith("/etc/"):
        return ["--symlink", os.readlink(place), place]
    return ["--ro-bind-try", place, place]


def _environment() -> list[Path]:
    """Where this Python and the packages it imports live, and the course's two packages without their project."""
    prefixes = [Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parent.parent]
    packages = [course / name for course, name in zip(_course(), ("fivefold", "autograde"), strict=True)]
    course = [*packages, *(packages[1].parent / name for name in ("lessons", "solutions"))]
    return [place for place in [*prefixes, *course] if place.exists() and not _inside(place, map(Path, SYSTEM))]


def _course() -> list[Path]:
    """The folders that `fivefold` and `autograde` are imported from."""
    found = [importlib.util.find_spec(name) for name in ("fivefold", "autograde")]
    return [Path(next(iter(spec.submodule_search_locations))).resolve().parent for spec in found]


def _inside(place: Path, folders) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)


def _writable(folder: Path) -> list[str]:
    place = str(folder)
    return ["--bind", place, place, "--chdir", place, "--remount-ro", "/"]
