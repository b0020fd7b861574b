"""Run a function on N ranks, from a notebook or a script.

    from fivefold import run

    def hello():
        return dist.get_rank()

    run(hello, 4).results        # [0, 1, 2, 3]

Ranks are fresh processes, forked from a server that has torch loaded, so a run starts in a fraction of a second.
Whatever happens to a run, none of its processes is left.
"""

from __future__ import annotations

import atexit
import contextlib
import linecache
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fivefold.runtime import errors, wire
from fivefold.runtime.frames import read_frame, write_frame
from fivefold.runtime.ledger import Ledger, RankLedger
from fivefold.runtime.pickling import dumps

RESULT_LIMIT = 1 << 34
MOST_RANKS = 256


@dataclass
class Run:
    """What came of a run."""

    results: list[Any]  # one for each rank: plain data and tensors
    ledger: Ledger
    output: list[tuple[int, str]] = field(default_factory=list)  # (rank, line) as they came
    seconds: float = 0.0


def run(
    fn: Callable,
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = 60,
    parts: dict[str, Any] | None = None,
    measure: bool = False,
    threads: int = 1,
    echo: bool | Callable[[int, str], object] = True,
) -> Run:
    """Call `fn(*args)` on `world_size` fresh ranks inside an initialised process group, and collect what they return.

    `fn` and `args` may be defined in a notebook. `device` is "cpu" or "cuda": one rank a GPU; where there are more
    ranks than GPUs, they share them. `timeout` is in seconds. `parts` maps dotted ids such as "tensor.RowLinear" to
    what stands in for the library's function on every rank, None for a stub. `measure` adds memory and computation to
    the ledger. `threads` is the number of CPU threads of a rank. `echo` prints what ranks print, by line, with the rank
    before it, or is called with the rank and the line.

    Raises a `RunError`: `RankFailed`, `RankKilled`, `Deadlock`, `Mismatch`, `RunTimeout`, `BadResult`, or `LaunchError`
    for wrong arguments. Under `torchrun` this process is one of the ranks, and every rank gets all results.
    """
    _check_arguments(fn, world_size, device, timeout)
    if "FIVEFOLD_RANK" in os.environ:
        raise errors.LaunchError("run was called on a rank: call it once, outside the function that the ranks run")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from fivefold.runtime.torchrun import run_here

        return run_here(fn, world_size, args, device, parts or {}, measure)
    request = {
        "world_size": world_size, "device": device, "timeout": timeout, "measure": measure, "threads": threads,
        "environment": dict(os.environ), "path": sys.path, "folder": os.getcwd(), "cells": _cells(),
    }  # fmt: skip
    payload = _pickle(fn, args, parts or {})
    with _server().connect() as connection:
        write_frame(connection, request, payload)
        try:
            return _follow(connection, world_size, echo)
        except BaseException:
            _end(connection)
            raise


def start() -> None:
    """Start the fork server in the background, so that the first run does not wait for torch to load."""
    threading.Thread(target=_server, daemon=True).start()


@contextlib.contextmanager
def launched_through(wrap: Callable[[list[str]], list[str]]) -> Iterator[None]:
    """Within it, ranks descend from a fork server whose command line `wrap` has changed, such as to a sandbox's.

    The process that calls `run` stays outside: it sees of the ranks what they print and plain data.
    """
    global _wrap
    close_server()
    _wrap, before = wrap, _wrap
    try:
        yield
    finally:
        close_server()
        _wrap = before


def _end(connection: socket.socket, patience: float = 5.0) -> None:
    """Tell the supervisor that nobody listens any more, and wait until it has killed the ranks and is gone itself."""
    connection.settimeout(patience)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def _follow(connection: socket.socket, world_size: int, echo: bool | Callable[[int, str], object]) -> Run:
    """Print output as it comes, until the verdict. Leaving early ends the run."""
    output: list[tuple[int, str]] = []
    while True:
        try:
            header, data = read_frame(connection, RESULT_LIMIT)
        except EOFError:
            raise errors.RunError("the run's supervisor was killed; nothing of the run is left: run it again") from None
        if "output" not in header:
            break
        output.append((header["rank"], header["output"]))
        if callable(echo):
            echo(header["rank"], header["output"])
        elif echo:
            print(f"[rank {header['rank']}] {header['output']}", flush=True)
    if header["kind"] != "ok":
        raise _error(header, world_size)
    results, at = [], 0
    for size in header["sizes"]:
        results.append(wire.decode(data[at : at + size]))
        at += size
    ledger = Ledger([RankLedger.from_dict(item) for item in header["ledgers"]])
    return Run(results, ledger, output, header["seconds"])


def _error(header: dict, world_size: int) -> errors.RunError:
    if header["kind"] == "RankFailed":
        failure, ranks = header["failure"], tuple(header["ranks"])
        texts = failure["kind"], failure["message"], failure["traceback"]
        return errors.RankFailed(header["rank"], *texts, ranks)
    if header["kind"] == "RankKilled":
        rank, how = header["rank"], header["signal"]
        why = " (the system may have run out of memory)" if how == "SIGKILL" else ""
        verb = "left with" if how.startswith("exit") else "was killed by"
        return errors.RankKilled(rank, how, f"rank {rank} of {world_size} {verb} {how}{why} before it returned")
    return getattr(errors, header["kind"])(header["text"])


class _ForkServer:
    """The server process and the socket on which new runs are announced to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, far = socket.socketpair()
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()}
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", "from fivefold.runtime.forkserver import main; main()", str(far.fileno())]
        self.process = subprocess.Popen(
            _wrap(command),
            pass_fds=[far.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=os.path.sep,
        )
        far.close()

    def connect(self) -> socket.socket:
        """A fresh connection to a supervisor of its own."""
        near, far = socket.socketpair()
        with far:
            socket.send_fds(self.control, [b"r"], [far.fileno()])
        return near

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the server and everything below it, and wait until it is gone."""
        self.control.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()


_wrap: Callable[[list[str]], list[str]] = lambda command: command  # noqa: E731
_lock = threading.Lock()
_current: list[_ForkServer] = []


def _server() -> _ForkServer:
    with _lock:
        if not _current or not _current[0].alive():
            for old in _current:
                old.close()
            _current[:] = [_ForkServer()]
        return _current[0]


@atexit.register
def close_server() -> None:
    """End the fork server, if there is one; the next run starts another."""
    with _lock:
        for server in _current:
            server.close()
        _current.clear()


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def _check_arguments(fn: Callable, world_size: int, device: str, timeout: float) -> None:
    if not callable(fn):
        raise errors.LaunchError(f"run needs a function to call on each rank, not {type(fn).__name__}: run(fn, 4)")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise errors.LaunchError(f"world_size is {world_size!r}: give a whole number from 1 to {MOST_RANKS}")
    if device not in ("cpu", "cuda"):
        raise errors.LaunchError(f"device is {device!r}: choose 'cpu' or 'cuda'")
    if device == "cuda" and not _has_gpu():
        raise errors.LaunchError("device is 'cuda', but torch sees no GPU here: use device='cpu'")
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise errors.LaunchError(f"timeout is {timeout!r}: give a positive number of seconds")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _pickle(fn: Callable, args: tuple, parts: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((dumps(parts), dumps((fn, args))))
    except Exception as error:
        name = getattr(fn, "__name__", "the function")
        raise errors.LaunchError(f"{name} or its arguments cannot be sent to the ranks: {error}") from None


def _cells() -> dict[str, tuple[str, str]]:
    """Notebook cells by the file name that IPython gave them: ("cell [12]", source)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    found = {}
    for name, number in numbers.items():
        lines = linecache.cache.get(name)
        if lines and len(lines) > 2:
            found[name] = (f"cell [{number}]", "".join(lines[2]))
    return found
