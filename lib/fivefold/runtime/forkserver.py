"""The fork server: a process with torch loaded, from which each run's supervisor, and from it its ranks, are forked.

It belongs to one caller and ends with it: when the caller's end of the control socket closes, however the caller
died, everything that was forked here is killed. It is the reaper of every orphan below it, so a process that a rank
started in a session of its own does not outlive the run either.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile

from fivefold.runtime import processes, supervisor

IDLE = 0.3  # seconds without a run after which the server loads one more module that runs may want


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor.preload()
    gc.collect()
    gc.freeze()
    wake, wakener = os.pipe()
    os.set_blocking(wakener, False)
    signal.set_wakeup_fd(wakener)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    folders: dict[int, str] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(wake, selectors.EVENT_READ)
        later = list(supervisor.LATER)
        while True:
            events = ready.select(IDLE if later else None)
            if not events:
                importlib.import_module(later.pop(0))
            for key, _ in events:
                if key.fileobj == wake:
                    os.read(wake, 4096)
                    _reap(folders)
                elif not _accept(control, (wake, wakener), folders):
                    _end(folders)
                    return


def _accept(control: socket.socket, inherited: tuple[int, int], folders: dict[int, str]) -> bool:
    """Fork a supervisor for the run whose socket came in; False when the caller is gone."""
    try:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
    except OSError:
        return False
    if not fds:
        return False
    folder = tempfile.mkdtemp(prefix=f"fivefold-{os.getpid()}-")
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for fd in inherited:
            os.close(fd)
        supervisor.main(socket.socket(fileno=fds[0]), folder)
    os.close(fds[0])
    folders[pid] = folder
    return True


def _reap(folders: dict[int, str]) -> None:
    """Collect ended supervisors; when none is left running, what remains below this process is an orphan: kill it."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid in folders:
            shutil.rmtree(folders.pop(pid), ignore_errors=True)
    for orphan in processes.children(os.getpid()):
        if orphan not in folders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


def _end(folders: dict[int, str]) -> None:
    processes.kill_tree(os.getpid())
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
