"""What happens inside one rank: join the group, call the learner's function, hand back its result and ledger."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fivefold.runtime import group as groups
from fivefold.runtime import link, marks, wire
from fivefold.runtime.ledger import Memory, RankLedger
from fivefold.runtime.link import Recorder
from fivefold.runtime.parts import install, remember

NEVER = timedelta(days=1)  # the supervisor ends a run; the group's own time limit must not come first
DEFAULT_LIMIT = timedelta(minutes=10)  # without a supervisor, as under torchrun


def serve(request: dict, payload: bytes, rank: int, channel: socket.socket, result: int) -> None:
    """Be rank `rank`: never returns. What is written to `result` is JSON and `wire` bytes, nothing that needs trust."""
    began = time.monotonic()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # how a timeout report finds out where a rank is
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch renames some collectives; a learner may use either name, and need not read about it n times a run.
    warnings.filterwarnings("ignore", message=r".*deprecated. Please use .*_single", category=FutureWarning)
    try:
        report = _report(request, payload, rank, channel, began)
    except BaseException as error:
        report = {"failed": _failure(error)}, b""
    sys.stdout.flush()
    sys.stderr.flush()
    header = json.dumps(report[0]).encode()
    with open(result, "wb") as out:
        out.write(len(header).to_bytes(8, "big") + header + report[1])
    while True:
        signal.pause()  # peers may still be reading from this rank's sockets: the supervisor ends all at once


def _report(request: dict, payload: bytes, rank: int, channel: socket.socket, began: float) -> tuple[dict, bytes]:
    _enter(request, rank)
    recorder = Recorder(channel, began)
    recorder.device = request["device"]
    join(recorder, rank, request["world_size"], request["store"], request["device"])
    fn, args = _load(payload)
    value, ledger = measured(fn, args, recorder, rank, request["measure"])
    try:
        data = wire.encode(value)
    except TypeError as error:
        return {"bad_result": str(error)}, b""
    return {"ledger": ledger.to_dict()}, data


def measured(fn: Any, args: tuple, recorder: Recorder, rank: int, measure: bool) -> tuple[Any, RankLedger]:
    """Call the function; return its value and this rank's ledger, with memory and computation where asked for."""
    marks.now.recorder = recorder
    if not measure:
        return fn(*args), RankLedger(rank, list(recorder.entries), Memory())
    from fivefold.runtime.meter import Meter

    with Meter(recorder) as meter:
        value = fn(*args)
    return value, RankLedger(rank, list(recorder.entries), meter.memory)


def join(recorder: Recorder, rank: int, world_size: int, store: str | None, device: str) -> None:
    """Initialise the default process group with watched groups in the place of gloo and NCCL.

    `store` is a file that all ranks share, None for the meeting point that torchrun has set in the environment.
    """
    if device == "cuda":
        torch.cuda.set_device(_own_gpu())
        batch_messages()
    watch_groups(recorder, device)
    where = {"init_method": "env://"} if store is None else {"store": dist.FileStore(store, world_size)}
    limit = DEFAULT_LIMIT if recorder.alone else NEVER
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=limit, **where)


def watch_groups(recorder: Recorder, device: str) -> None:
    """Let every group that this process makes, whatever backend it asks for, be a `WatchedGroup`."""

    def create(options: Any, _: Any) -> groups.WatchedGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        local = int(os.environ["LOCAL_WORLD_SIZE"])

        def make_inner(kind: str) -> tuple[Any, bool]:
            shared = kind == "cuda" and local > torch.cuda.device_count()
            store = dist.PrefixStore(kind, options.store)
            if kind == "cuda" and not shared:
                return _nccl(store, options.group_rank, options.group_size), False
            limit = DEFAULT_LIMIT if recorder.alone else NEVER
            return dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=limit), kind == "cuda"

        return groups.WatchedGroup(recorder, options.group_rank, ranks, make_inner)

    dist.Backend.register_backend("fivefold", create, extended_api=True, devices=["cpu", "cuda"])
    c10d.BackendConfig.get_device_backend_map = lambda self: dict.fromkeys(("cpu", "cuda"), "fivefold")
    if not recorder.alone:  # the announcement of a new group keeps the ranks together
        c10d._store_based_barrier = lambda *args, **kwargs: None
    make = c10d._new_process_group_helper

    def announce(
        size: int, rank: Any, ranks: list[int], backend: Any, store: Any, name: Any, *args: Any, **kwargs: Any
    ):
        if dist.is_initialized():  # not the default group itself
            _announce_group(recorder, ranks, str(name), kwargs.get("group_desc"))
        return make(size, rank, ranks, backend, store, name, *args, **kwargs)

    c10d._new_process_group_helper = announce


def _own_gpu() -> torch.device:
    """One GPU a rank; where there are more ranks than GPUs on a node, they share them in turn."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    """A real NCCL group, connected now: all members are here, while at its first message only two of them would be."""
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")  # `batch` sees to that
    group = dist.ProcessGroupNCCL(store, rank, size)
    group.eager_connect_single_device(_own_gpu())
    return group


def batch_messages() -> None:
    """Let `batch_isend_irecv` tell a `WatchedGroup` which messages belong together."""
    original = dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        with p2p_op_list[0].group.batch(p2p_op_list[0].tensor.device.type):
            return original(p2p_op_list)

    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv


def _announce_group(recorder: Recorder, ranks: list[int], name: str, described: str | None) -> None:
    """Making a group takes all ranks of the world, in the same order, members or not."""
    world = tuple(range(dist.get_world_size())) if name.isdigit() else tuple(ranks)
    call = {
        "op": "new_group", "group": f"new_group {'' if name.isdigit() else name}", "name": "world", "ranks": world,
        "line": recorder.line(), "agree": (("ranks", tuple(ranks)),),
    }  # fmt: skip
    recorder.wait(recorder.announce(call, None, lambda source: None))


def _enter(request: dict, rank: int) -> None:
    """The caller's folder, environment and import path, and the names that torchrun would set."""
    os.environ.clear()
    os.environ.update(request["environment"])
    size = str(request["world_size"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"FIVEFOLD_RANK": str(rank)}
    sys.path[:] = request["path"]
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
    torch.set_num_threads(request["threads"])
    for name, (label, code) in request["cells"].items():
        remember(name, code)
        link.CELLS[name] = label


def _load(payload: bytes) -> tuple[Any, tuple]:
    """The function and its arguments, with the parts put in place before anything can refer to the library's."""
    parts, call = pickle.loads(payload)
    install(pickle.loads(parts))
    return pickle.loads(call)


def _failure(error: BaseException) -> dict:
    """The exception as text, with the learner's lines; frames of the launcher and of the handle are left out."""
    frames = traceback.TracebackException.from_exception(error)
    item: traceback.TracebackException | None = frames
    while item is not None:
        kept = [f for f in item.stack if not f.filename.startswith(link.LIBRARY[1:])]
        for frame in kept:
            frame.filename = link.CELLS.get(frame.filename, frame.filename)
        item.stack = traceback.StackSummary.from_list(kept)
        item = item.__cause__ or item.__context__
    return {"kind": type(error).__name__, "message": str(error), "traceback": "".join(frames.format())}
