"""The supervisor of one run: forks its ranks, hears every operation they announce, and ends them all.

It speaks with the caller in frames: a kind, a JSON header and bytes. It never unpickles anything and never runs a
learner's code; a rank can tell it only JSON lines and a result in `wire` format.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import sysconfig
import time
from typing import Any

from fivefold.runtime import processes
from fivefold.runtime.frames import read_frame, write_frame
from fivefold.runtime.link import LIBRARY
from fivefold.runtime.matching import Call, Disagreement, Referee, Stuck, table
from fivefold.runtime.rank_process import RankProcess

OUTPUT_LIMIT = 2_000_000  # bytes of output kept of a rank; more is read and dropped
GRACE = 0.25  # seconds in which other ranks may still raise the same error
FRAME_LIMIT = 1 << 34

LATER = (  # loaded while the fork server is idle, so that ranks which use them need not
    "torch.fx.experimental.symbolic_shapes",  # every backward that is given a gradient, such as a pipeline's
    "torch.utils.flop_counter",
    "torch.utils.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)


def preload() -> None:
    """Import, before any fork, what every rank needs."""
    import cloudpickle  # noqa: F401
    import torch

    torch.set_num_threads(1)
    from fivefold.runtime import rank  # noqa: F401


def main(caller: socket.socket, folder: str) -> None:
    """Supervise one run; never returns."""
    processes.adopt_orphans()
    processes.die_with_parent()
    try:
        request, payload = read_frame(caller, FRAME_LIMIT)
        Supervisor(caller, request, payload, folder).run()
    except (OSError, EOFError):
        pass  # the caller is gone
    finally:
        processes.kill_tree(os.getpid())
        os._exit(0)


class Supervisor:
    def __init__(self, caller: socket.socket, request: dict, payload: bytes, folder: str):
        self.caller, self.request, self.payload = caller, request, payload
        self.request["store"] = os.path.join(folder, "store")
        self.referee = Referee(request["world_size"])
        self.ranks = [RankProcess(rank) for rank in range(request["world_size"])]
        self.ready = selectors.DefaultSelector()
        self.began = time.monotonic()
        self.failed_at: float | None = None
        self.made: set[tuple[str, str]] = set()

    def run(self) -> None:
        for rank in self.ranks:
            self._fork(rank)
        self.ready.register(self.caller, selectors.EVENT_READ, self._hear_caller)
        for rank in self.ranks:
            rank.close_far()
            self.ready.register(rank.channel, selectors.EVENT_READ, (self._hear_calls, rank))
            self.ready.register(rank.output, selectors.EVENT_READ, (self._hear_output, rank))
            self.ready.register(rank.result, selectors.EVENT_READ, (self._hear_result, rank))
        try:
            self._loop()
            verdict = self._verdict()
        except Disagreement as error:
            verdict = {
                "kind": "Mismatch",
                "text": f"{error}\nWithout this stop, ranks would have gone on with wrong numbers.",
            }
        except Stuck as error:
            verdict = {"kind": "Deadlock", "text": f"Deadlock after {self._seconds():.1f} s: {error}"}
        except TimeoutError as error:
            verdict = {"kind": "RunTimeout", "text": str(error)}
        for rank in self.ranks:
            self._hear_output(rank, last=True)
        self._end(verdict)

    def _fork(self, rank: RankProcess) -> None:
        parent = os.getpid()
        rank.pid = os.fork()
        if rank.pid:
            return
        processes.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        os.dup2(rank.far_output, 1)
        os.dup2(rank.far_output, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        self.caller.close()
        for other in self.ranks:
            for fd in (other.channel, other.output, other.result):
                fd.close() if isinstance(fd, socket.socket) else os.close(fd)
            if other is not rank:
                other.far_channel.close()
                os.close(other.far_output)
                os.close(other.far_result)
        from fivefold.runtime.rank import serve

        serve(self.request, self.payload, rank.rank, rank.far_channel, rank.far_result)

    def _loop(self) -> None:
        deadline = self.began + self.request["timeout"]
        while not self._settled():
            if time.monotonic() > deadline:
                raise TimeoutError(self._where_everyone_is())
            for key, _ in self.ready.select(0.05):
                if callable(key.data):
                    key.data()
                else:
                    handle, rank = key.data
                    handle(rank)
            self._collect_dead()
            if self.failed_at is None:
                self.referee.check()

    def _settled(self) -> bool:
        """All have finished; or one has failed, and the others are done, wait for it, or had their time."""
        running = [r for r in self.ranks if r.state == "running"]
        if not running:
            return True
        if self.failed_at is None:
            return False
        return all(r.rank in self.referee.waiting for r in running) or time.monotonic() - self.failed_at > GRACE

    def _hear_caller(self) -> None:
        raise EOFError  # the caller says nothing after its request: it has closed the socket, or died

    def _hear_calls(self, rank: RankProcess) -> None:
        data = _read(rank.channel.fileno())
        if not data:
            self.ready.unregister(rank.channel)
            return
        *lines, rank.lines = (rank.lines + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "wait" in message:
                self.referee.wait(rank.rank, int(message["wait"]), message.get("line", ""))
                continue
            call = _call(rank.rank, message["call"])
            for approved, index, source in self.referee.call(call):
                self._make_group(call)
                self._say(approved, {"go": index, "source": source})

    def _make_group(self, call: Call) -> None:
        """Before the first operation of a group, let all its members connect, also those that take no part in it."""
        if call.op != "new_group" and (call.group, call.device) not in self.made:
            self.made.add((call.group, call.device))
            for member in call.ranks:
                self._say(member, {"make": call.group, "device": call.device})

    def _say(self, rank: int, message: dict) -> None:
        with contextlib.suppress(OSError):
            self.ranks[rank].channel.sendall(json.dumps(message).encode() + b"\n")

    def _hear_output(self, rank: RankProcess, last: bool = False) -> None:
        data = _read(rank.output)
        if not data and not last:
            self.ready.unregister(rank.output)
        *lines, rank.text = (rank.text + data).split(b"\n")
        if last and rank.text:
            lines.append(rank.text)
        for line in lines:
            self._print(rank, line)

    def _print(self, rank: RankProcess, line: bytes) -> None:
        if rank.printed > OUTPUT_LIMIT:
            return
        rank.printed += len(line) + 1
        text = line.decode(errors="replace")
        if rank.printed > OUTPUT_LIMIT:
            text = f"… output cut after {OUTPUT_LIMIT // 1_000_000} MB"
        write_frame(self.caller, {"output": text, "rank": rank.rank})

    def _hear_result(self, rank: RankProcess) -> None:
        data = _read(rank.result)
        rank.received += data
        if data:
            return
        self.ready.unregister(rank.result)
        if len(rank.received) < 8:
            return  # it died: _collect_dead says how
        length = int.from_bytes(rank.received[:8], "big")
        rank.report = json.loads(rank.received[8 : 8 + length])
        rank.data = bytes(rank.received[8 + length :])
        rank.received.clear()
        self._done(rank, "failed" if "failed" in rank.report or "bad_result" in rank.report else "finished")

    def _done(self, rank: RankProcess, state: str) -> None:
        rank.state = state
        if state == "finished":
            self.referee.finish(rank.rank)
        elif self.failed_at is None:
            self.failed_at = time.monotonic()

    def _collect_dead(self) -> None:
        for rank in self.ranks:
            if rank.state != "running":
                continue
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if not pid:
                continue
            with contextlib.suppress(KeyError, ValueError):
                self._hear_result(rank)
            if rank.state == "running":
                rank.report = {"died": _how(status)}
                self._done(rank, "failed")

    def _verdict(self) -> dict:
        failed = [r for r in self.ranks if r.state == "failed"]
        if not failed:
            return {
                "kind": "ok",
                "ledgers": [r.report["ledger"] for r in self.ranks],
                "sizes": [len(r.data) for r in self.ranks],
            }
        return _failure(failed)

    def _end(self, verdict: dict) -> None:
        processes.kill_tree(os.getpid())
        verdict["seconds"] = self._seconds()
        data = b"".join(r.data for r in self.ranks) if verdict["kind"] == "ok" else b""
        write_frame(self.caller, verdict, data)

    def _seconds(self) -> float:
        return time.monotonic() - self.began

    def _where_everyone_is(self) -> str:
        """The report of a run that took too long: what each rank waits for, or which line it is at."""
        rows = []
        for rank in self.ranks:
            index = self.referee.waiting.get(rank.rank)
            if rank.state != "running":
                rows.append((f"rank {rank.rank}", "finished", ""))
            elif index is not None:
                call = self.referee.unmatched[rank.rank, index]
                line = self.referee.lines[rank.rank]
                rows.append((f"rank {rank.rank}", f"waits in {call.op} in {call.name}", line))
            else:
                rows.append((f"rank {rank.rank}", "runs", self._line_of(rank)))
        limit = self.request["timeout"]
        return "\n".join([f"The run took longer than {limit:g} s and was ended.", *table(rows)])

    def _line_of(self, rank: RankProcess) -> str:
        """Ask a running rank for its traceback, which `faulthandler` writes to its output even inside a C function."""
        self._hear_output(rank)
        before, rank.text = rank.text, b""
        os.kill(rank.pid, signal.SIGUSR1)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and b'File "' not in rank.text:
            time.sleep(0.02)
            rank.text += _read(rank.output)
        text, rank.text = rank.text.decode(errors="replace"), before
        for line in text.splitlines():
            if line.startswith('  File "') and not line[8:].startswith((*LIBRARY, sysconfig.get_path("stdlib"))):
                return _cell(line.strip(), self.request["cells"])
        return ""


def _read(fd: int) -> bytes:
    """What there is to read; b"" at the end, and when there is nothing."""
    try:
        return os.read(fd, 1 << 20)
    except (BlockingIOError, ConnectionError):
        return b""


def _call(rank: int, data: dict) -> Call:
    names = ("op", "group", "name", "line", "peer", "tag", "dtype", "device", "index")
    known = {name: data[name] for name in names if name in data}
    lists = {name: tuple(data.get(name, ())) for name in ("ranks", "shape", "sends", "receives")}
    agree = tuple((key, _frozen(value)) for key, value in data.get("agree", ()))
    return Call(rank=rank, agree=agree, **known, **lists)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _failure(failed: list[RankProcess]) -> dict:
    """The first real failure: what the program raised comes before what a peer's end made of it."""
    raised = [r for r in failed if "failed" in r.report and not _noise(r.report["failed"])]
    bad = [r for r in failed if "bad_result" in r.report]
    died = [r for r in failed if "died" in r.report]
    if died and not raised:
        ended = died[0]
        return {"kind": "RankKilled", "rank": ended.rank, "signal": ended.report["died"]}
    if bad and not raised:
        return {"kind": "BadResult", "text": f"On rank {bad[0].rank}: {bad[0].report['bad_result']}"}
    first = (raised or failed)[0]
    same = [r.rank for r in failed if r.report.get("failed", {}).get("kind") == first.report["failed"]["kind"]]
    return {"kind": "RankFailed", "rank": first.rank, "ranks": same, **{"failure": first.report["failed"]}}


def _noise(failure: dict) -> bool:
    return any(text in failure["message"] for text in ("Connection closed by peer", "Connection reset by peer"))


def _cell(line: str, cells: dict) -> str:
    """A traceback line with the name of the notebook cell in the place of its file."""
    for name, (label, _) in cells.items():
        line = line.replace(f'File "{name}"', label)
    return line
