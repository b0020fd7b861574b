"""A rank's side of the supervision: every operation is announced, and started when the supervisor says go.

One thread listens for the word "go" and starts the operation, so that an asynchronous one makes progress while the
program computes; the program's own thread only ever blocks in a wait. Without a supervisor (under `torchrun`) an
operation starts at once.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import typing_extensions  # with which torch wraps what it will remove one day

from fivefold.runtime.ledger import Communication, Wait

RUNTIME = os.path.dirname(os.path.abspath(__file__)) + os.sep
PACKAGE = os.path.dirname(RUNTIME[:-1]) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
LIBRARY = (TORCH, typing_extensions.__file__, RUNTIME, "<frozen ")  # not the learner's lines


class Pending:
    """An announced operation: `start` is called when it may begin and returns the real work."""

    def __init__(self, start: Callable[[int | None], Any]):
        self.index = -1
        self.start: Callable[[int | None], Any] | None = start
        self.work: Any = None
        self.error: BaseException | None = None
        self.source: int | None = None
        self.approved = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def go(self, source: int | None) -> None:
        self.source = source
        try:
            self.work = self.start(source)
        except BaseException as error:
            self.error = error
        self.start = None  # frees the tensors it holds
        with self._lock:
            self.approved.set()
        for callback in self._callbacks:
            callback()

    def when_started(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the operation has started, at once where it has."""
        with self._lock:
            if not self.approved.is_set():
                self._callbacks.append(callback)
                return
        callback()


class Recorder:
    """Writes one rank's ledger and speaks with the supervisor, if there is one."""

    def __init__(self, channel: socket.socket | None, began: float):
        self.entries: list = []
        self.phase = ""
        self.before: Callable[[], None] | None = None
        self.device = "cpu"
        self.alone = channel is None
        self._began = began
        self._channel = channel
        self._pending: dict[int, Pending] = {}
        self._under_way: set[Pending] = set()  # gloo drops a message whose handle is dropped, and the peer would hang
        self._announced = 0
        self._groups: dict[str, Any] = {}
        self._registered = threading.Condition()
        if channel is not None:
            threading.Thread(target=self._listen, name="fivefold-link", daemon=True).start()

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def line(self) -> str:
        """The innermost line outside torch and the runtime, such as "cell [12] line 4: dist.send(x, dst=right)"."""
        return describe_frame(learner_frame(sys._getframe(1)))

    def announce(self, call: dict, entry: Communication | None, start: Callable[[int | None], Any]) -> Pending:
        """Announce an operation; `entry` is what the ledger keeps of it."""
        if self.before is not None and entry is not None:
            self.before()
        pending = Pending(start)
        index = len(self.entries)
        if entry is not None:
            entry.index, entry.phase, entry.begin = index, self.phase, self.clock()
            self.entries.append(entry)
        if self._channel is None:
            pending.go(call.get("peer"))
            return pending
        call["index"] = pending.index = self._announced
        self._announced += 1
        self._pending[pending.index] = pending
        self._tell({"call": call})
        return pending

    def wait(self, pending: Pending) -> None:
        """Block until the operation has started; raises what its start raised."""
        if not pending.approved.is_set():
            self._tell({"wait": pending.index, "line": self.line()})
            pending.approved.wait()
        if pending.error is not None:
            raise pending.error

    def ended(self, pending: Pending) -> None:
        """The program has waited for the operation: nobody needs its handle any more."""
        self._under_way.discard(pending)

    def waited(self, entry: Communication, began: float, inside_call: bool) -> None:
        """Note in the ledger that the program waited for `entry` since `began`."""
        entry.end = self.clock()
        if inside_call and entry.index == len(self.entries) - 1:
            entry.asynchronous = False
            return
        if self.before is not None:
            self.before()
        self.entries.append(Wait(len(self.entries), entry.index, began, entry.end))

    def register(self, name: str, group: Any) -> None:
        """Make a group known to the listening thread."""
        with self._registered:
            self._groups[name] = group
            self._registered.notify_all()

    def close_groups(self) -> None:
        """End what the real groups have running; nobody uses them any more."""
        for group in self._groups.values():
            group.close()

    def _group(self, name: str) -> Any:
        """The group of that name; the program's thread may still be about to register it."""
        with self._registered:
            self._registered.wait_for(lambda: name in self._groups)
            return self._groups[name]

    def _tell(self, message: dict) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _start(self, index: int, source: int | None) -> None:
        """Start an operation; a function of its own, so that the listening thread holds no handle, and no tensor."""
        pending = self._pending.pop(index)
        self._under_way.add(pending)
        pending.go(source)

    def _listen(self) -> None:
        with self._channel.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "go" in message:
                    self._start(message["go"], message["source"])
                else:
                    self._group(message["make"]).make(message["device"])
        os._exit(0)  # the supervisor is gone: nobody waits for this rank any more


def learner_frame(frame: Any) -> Any:
    """The innermost frame of the learner's own code; where none is, the innermost of this package above `runtime`."""
    ours = None
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_back is None and name == "<string>":  # the command from which ranks are forked
            return ours
        if not name.startswith(LIBRARY):
            if not name.startswith(PACKAGE):
                return frame
            ours = ours or frame
        frame = frame.f_back
    return ours


def describe_frame(frame: Any) -> str:
    return "" if frame is None else _described(frame.f_code.co_filename, frame.f_lineno)


@cache
def _described(name: str, number: int) -> str:
    """A program makes most of its calls from the same few lines."""
    text = linecache.getline(name, number).strip()
    short = name
    if os.sep in name and not name.startswith("<"):
        short = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
    return f"{CELLS.get(name, short)} line {number}: {text}".rstrip(": ")


CELLS: dict[str, str] = {}  # file names of notebook cells, as the kernel knows them -> "cell [12]"
