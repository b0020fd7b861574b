"""The same run under `torchrun`: this process is one of the ranks, and there is no supervisor.

Calls are recorded but not matched, and a failure ends as torchrun ends it. Every rank gets the results of all.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fivefold.runtime import errors, wire
from fivefold.runtime.ledger import Ledger, RankLedger
from fivefold.runtime.link import Recorder
from fivefold.runtime.parts import install
from fivefold.runtime.rank import join, measured


def run_here(fn: Callable, world_size: int, args: tuple, device: str, parts: dict, measure: bool) -> Any:
    """Call `fn(*args)` as this rank of torchrun's world and exchange results; raises LaunchError for another size."""
    from fivefold.runtime.ranks import Run

    given = int(os.environ["WORLD_SIZE"])
    if world_size != given:
        raise errors.LaunchError(f"run asks for {world_size} ranks, torchrun started {given}: make the two equal")
    recorder = _recorder(device)
    recorder.entries.clear()
    install(parts)
    began = time.monotonic()
    with _on_a_rank():
        value, ledger = measured(fn, args, recorder, dist.get_rank(), measure)
    try:
        data = wire.encode(value)
    except TypeError as error:
        raise errors.BadResult(f"On rank {dist.get_rank()}: {error}") from None
    results = [wire.decode(item) for item in _exchange(data)]
    ledgers = [RankLedger.from_dict(json.loads(item)) for item in _exchange(json.dumps(ledger.to_dict()).encode())]
    return Run(results, Ledger(ledgers), [], time.monotonic() - began)


_recorders: list[Recorder] = []


def _recorder(device: str) -> Recorder:
    """This process's recorder; the first call joins torchrun's world, which then stays for further runs."""
    if not _recorders:
        recorder = Recorder(None, time.monotonic())
        recorder.device = device
        join(recorder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, device)
        atexit.register(_leave, recorder)
        _recorders.append(recorder)
    return _recorders[0]


def _leave(recorder: Recorder) -> None:
    """Leave together: a rank that closes its sockets while a peer still uses them makes the peer abort."""
    if not hasattr(sys, "last_value"):  # nor after an error outside the function that the ranks run
        dist.barrier()
        recorder.close_groups()
        dist.destroy_process_group()


@contextlib.contextmanager
def _on_a_rank() -> Iterator[None]:
    os.environ["FIVEFOLD_RANK"] = os.environ["RANK"]
    try:
        yield
    except BaseException:
        atexit.unregister(_leave)  # whoever handles it, the others may be gone: to wait for them could take for ever
        raise
    finally:
        del os.environ["FIVEFOLD_RANK"]


def _exchange(data: bytes) -> list[bytes]:
    """The bytes of every rank, in rank order. Tensors, not objects: what arrives cannot execute code."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [bytes(item[: int(size)].tolist()) for item, size in zip(gathered, sizes, strict=True)]
