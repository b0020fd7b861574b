"""Execute one notebook with papermill, in a process of its own, and tell each step as a line of JSON.

Started by `autograde.run`, which survives whatever happens here. A cell that raises does not end the notebook; one that
takes too long is interrupted, and only a kernel that ignores the interrupt is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from typing import Any

import papermill
from nbclient.exceptions import DeadKernelError
from nbformat.notebooknode import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers
from papermill.iorw import load_notebook_node, write_ipynb


def main() -> None:
    job = json.loads(sys.argv[1])
    tell = Teller(job["fd"])
    logging.disable(logging.CRITICAL)  # whatever happens is told as an event
    papermill_engines.register("fivefold", _engine(tell, job))
    try:
        papermill.execute_notebook(
            job["notebook"],
            job["output"],
            parameters=job["parameters"],
            engine_name="fivefold",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=job["folder"],
            allow_errors=True,
            store_widget_state=False,
            coalesce_streams=True,
            iopub_timeout=30,
            shutdown_kernel="immediate",
        )
    except PapermillExecutionError:
        write_ipynb(remove_error_markers(load_notebook_node(job["output"])), job["output"])
    except DeadKernelError:
        tell(event="died")
    except Exception as error:
        tell(event="broke", message=f"{type(error).__name__}: {error}"[:500])
    tell(event="end")


class Teller:
    """Writes events to the grader's pipe, which nothing else in this process tree inherits."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.pipe = os.fdopen(fd, "w")

    def __call__(self, **event: Any) -> None:
        print(json.dumps(event), file=self.pipe, flush=True)


class WatchedClient(PapermillNotebookClient):
    """papermill's client, with a limit on each cell's time and on what the notebook prints."""

    def __init__(self, nb_man: Any, tell: Teller, job: dict, **options: Any) -> None:
        super().__init__(nb_man, on_cell_execute=self.began, on_cell_executed=self.ended, **options)
        self.tell, self.job, self.output_left = tell, job, job["output_bytes"]
        self.timers: list[asyncio.TimerHandle] = []

    def execute(self, **kwargs: Any) -> NotebookNode:
        return super().execute(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **kwargs)

    def began(self, cell: NotebookNode, cell_index: int) -> None:
        number, total = self.code_cells_executed + 1, sum(c.cell_type == "code" for c in self.nb.cells)
        self.tell(event="cell", number=number, total=total)
        loop = asyncio.get_running_loop()
        limit, grace = self.job["cell_seconds"], self.job["grace_seconds"]
        self.timers = [
            loop.call_later(limit, self.overdue, signal.SIGINT, number),
            loop.call_later(limit + grace, self.overdue, signal.SIGKILL, number),
        ]

    def overdue(self, name: signal.Signals, number: int) -> None:
        self.tell(event="slow", number=number, killed=name == signal.SIGKILL)
        self.send(name)

    def ended(self, cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        for timer in self.timers:
            timer.cancel()
        content = execute_reply["content"]
        if content["status"] == "error":
            message = f"{content.get('ename')}: {content.get('evalue')}"
            self.tell(event="raised", number=self.code_cells_executed, message=_plain(message)[:500])

    def process_message(self, msg: dict, *args: Any, **kwargs: Any) -> Any:
        self.output_left -= len(repr(msg["content"])) + sum(len(buffer) for buffer in msg.get("buffers", ()))
        if self.output_left < 0:
            self.tell(event="flooded", number=self.code_cells_executed)
            self.send(signal.SIGKILL)
            raise DeadKernelError("more output than allowed")
        return super().process_message(msg, *args, **kwargs)

    def send(self, name: signal.Signals) -> None:
        """To the kernel's process group, as Jupyter does: what it started in the group is interrupted with it."""
        process = getattr(self.km.provisioner, "process", None) if self.km else None
        if process is not None and process.poll() is None:
            try:
                os.killpg(os.getpgid(process.pid), name)
            except ProcessLookupError:
                pass


def _engine(tell: Teller, job: dict) -> type[NBClientEngine]:
    class Engine(NBClientEngine):
        """papermill's own engine with the client above."""

        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            for unused in ("input_path", "log_output", "stdout_file", "stderr_file", "execution_timeout"):
                options.pop(unused, None)
            startup = options.pop("start_timeout", 60)
            client = WatchedClient(nb_man, tell, job, kernel_name=kernel_name, startup_timeout=startup, **options)
            return client.execute()

    return Engine


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


if __name__ == "__main__":
    main()
