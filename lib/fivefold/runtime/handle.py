"""The handle of an operation, which `torch.distributed` and its C++ side wait for."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from fivefold.runtime.ledger import Communication
from fivefold.runtime.link import Pending, Recorder


class WatchedWork(Work):
    """The handle of an announced operation."""

    def __init__(self, recorder: Recorder, pending: Pending, entry: Communication | None, result: Any):
        super().__init__()
        self._recorder, self._pending, self._entry, self._result = recorder, pending, entry, result
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done:
            return True
        began = self._recorder.clock()
        self._recorder.wait(self._pending)
        self._pending.work.wait()
        self._recorder.ended(self._pending)
        self._done = True
        if self._entry is not None:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self._recorder.waited(self._entry, began, caller == "torch.distributed.distributed_c10d")
        return True

    def is_completed(self) -> bool:
        return self._done or (self._pending.approved.is_set() and self._pending.work.is_completed())

    def is_success(self) -> bool:
        return self.is_completed() and self._pending.error is None

    def exception(self) -> BaseException | None:
        return self._pending.error

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """A future that is done when the operation is; DDP asks for it at once and must not be held up."""
        future: torch.futures.Future = torch.futures.Future()

        def started() -> None:
            if self._pending.error is not None:
                future.set_exception(self._pending.error)
                return
            self._pending.work.get_future().add_done_callback(lambda _: future.set_result(self._result))

        self._pending.when_started(started)
        return future

    def _source_rank(self) -> int:
        return self._pending.source if self._pending.source is not None else -1
