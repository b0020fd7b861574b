"""The process group of a supervised rank: gloo (or NCCL) inside, every operation announced and recorded.

`torch.distributed` reaches a group through the methods below, whether the program calls `dist.all_reduce`, a functional
collective, DTensor or DDP. So this is the one place that sees them all. Each method describes its operation, hands the
description to the recorder, and starts the real operation when the recorder lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
)

from fivefold.runtime.describe import (
    check_same_sizes,
    check_total,
    dtype_of,
    num_bytes,
    options_like,
    reduction,
    shape_of,
    split_sizes,
)
from fivefold.runtime.handle import WatchedWork
from fivefold.runtime.ledger import Communication
from fivefold.runtime.link import Pending, Recorder
from fivefold.runtime.staging import device_of, on_host


class WatchedGroup(dist.ProcessGroup):
    """A process group whose operations are announced to `recorder` before they run.

    They run on `make_inner(device_type)`, which is made when a first tensor of that device comes; it answers with the
    real group and whether tensors must be staged through host memory for it.
    """

    def __init__(self, recorder: Recorder, rank: int, ranks: list[int], make_inner: Callable[[str], tuple[Any, bool]]):
        super().__init__(rank, len(ranks))
        self._recorder, self._ranks = recorder, tuple(ranks)
        self._make_inner: Callable[[str], tuple[Any, bool]] = make_inner
        self._inner: dict[str, tuple[Any, bool]] = {}
        self._called, self._described, self._known_as = "", "", ""
        self._sequence = 0
        self._message_counts: dict[tuple, int] = {}
        self._batch: list[Pending] | None = None

    def getBackendName(self) -> str:
        return "fivefold"  # "gloo" would make DDP's C++ side look for a C++ gloo group in here

    def _set_group_name(self, name: str) -> None:
        self._called = name
        self._recorder.register(name, self)
        if self._recorder.alone:  # no supervisor will say when: all members are here now
            self.make(self._recorder.device)

    def _set_group_desc(self, description: str) -> None:
        self._described = description

    @property
    def group_name(self) -> str:
        return self._called

    @property
    def group_desc(self) -> str:
        return self._described

    def getGroupName(self) -> str:
        return self._called

    def getGroupDesc(self) -> str:
        return self._described

    def _title(self) -> str:
        if not self._known_as:
            described = self._described if self._described not in ("", "undefined", "default_pg") else ""
            whole = len(self._ranks) == dist.get_world_size()
            self._known_as = described or ("world" if whole else f"group {self._called}")
        return self._known_as

    # What each method hands over: the operation's name, its tensors in, its tensors out, and the real call.

    def allreduce(self, tensors: Any, opts: Any = None) -> WatchedWork:
        opts = opts or AllreduceOptions()
        return self._collective("all_reduce", tensors, tensors, "allreduce", (tensors, opts), reduce=reduction(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> WatchedWork:
        return self._each(
            [self.allreduce([tensor], options_like(AllreduceOptions, opts)) for tensor in tensors], tensors
        )

    def broadcast(self, tensors: Any, opts: Any) -> WatchedWork:
        return self._collective("broadcast", tensors, tensors, "broadcast", (tensors, opts), root=opts.rootRank)

    def reduce(self, tensors: Any, opts: Any) -> WatchedWork:
        options = {"root": opts.rootRank, "reduce": reduction(opts)}
        return self._collective("reduce", tensors, tensors, "reduce", (tensors, opts), **options)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> WatchedWork:
        arguments = (outputs, inputs, opts or AllgatherOptions())
        check_same_sizes("all_gather", inputs[0], outputs[0])
        return self._collective("all_gather", inputs, outputs[0], "allgather", arguments)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> WatchedWork:
        lists = zip(*outputs, strict=True)
        return self._each([self.allgather([list(o)], [i]) for o, i in zip(lists, inputs, strict=True)], outputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> WatchedWork:
        check_total(output, input.numel() * self.size(), "all_gather", "output", "n times the input's")
        arguments = (output, input, opts or AllgatherOptions())
        return self._collective("all_gather", [input], [output], "_allgather_base", arguments)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> WatchedWork:
        return self._each([self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)], outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> WatchedWork:
        opts = opts or ReduceScatterOptions()
        check_total(outputs[0], inputs[0][self.rank()].numel(), "reduce_scatter", "output", "that of this rank's piece")
        return self._collective(
            "reduce_scatter", inputs[0], outputs, "reduce_scatter", (outputs, inputs, opts), reduce=reduction(opts)
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> WatchedWork:
        opts = opts or ReduceScatterOptions()
        check_total(input, output.numel() * self.size(), "reduce_scatter", "input", "n times the output's")
        arguments = (output, input, opts)
        return self._collective(
            "reduce_scatter", [input], [output], "_reduce_scatter_base", arguments, reduce=reduction(opts)
        )

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> WatchedWork:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._each(works, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> WatchedWork:
        return self._collective("gather", inputs, outputs, "gather", (outputs, inputs, opts), root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> WatchedWork:
        arguments = (outputs, inputs, opts)
        size = sum(num_bytes(t) for some in inputs for t in some)
        return self._collective("scatter", outputs, outputs, "scatter", arguments, size=size, root=opts.rootRank)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> WatchedWork:
        splits = [t.numel() for t in inputs], [t.numel() for t in outputs]
        arguments = (outputs, inputs, opts or AllToAllOptions())
        return self._collective("all_to_all", inputs, outputs, "alltoall", arguments, splits=splits)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> WatchedWork:
        splits = split_sizes(input, input_splits, self.size()), split_sizes(output, output_splits, self.size())
        arguments = (output, input, list(output_splits or []), list(input_splits or []), opts or AllToAllOptions())
        return self._collective("all_to_all", [input], [output], "alltoall_base", arguments, splits=splits)

    def barrier(self, opts: Any = None) -> WatchedWork:
        return self._collective("barrier", [], [], "barrier", (BarrierOptions(),))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> WatchedWork:
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> WatchedWork:
        return self._message("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> WatchedWork:
        return self._message("recv", tensors, None, tag)

    # Names that torch renamed in 2.13, under which older releases call the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _collective(
        self, op: str, inputs: Any, outputs: Any, method: str, arguments: tuple, *, size: int | None = None,
        splits: tuple[list[int], list[int]] = ((), ()), reduce: str | None = None, root: int | None = None,
    ) -> WatchedWork:  # fmt: skip
        first = inputs[0] if inputs else None
        rooted = None if root is None else self._ranks[root]
        shapes = tuple(tuple(t.shape) for t in inputs[1:]) if op == "reduce_scatter" else ()
        own = splits[0][self.rank()] * first.element_size() if splits[0] else 0
        entry = Communication(
            index=0, op=op, group=self._title(), ranks=self._ranks, sequence=self._sequence,
            bytes=sum(map(num_bytes, inputs)) if size is None else size, dtype=dtype_of(first), shape=shape_of(first),
            peer=rooted, splits=tuple(n * first.element_size() for n in splits[0]), own=own,
        )  # fmt: skip
        self._sequence += 1
        agree = (("reduction", reduce), ("root", rooted), ("pieces", shapes or None))
        extent = shape_of(first) if op != "all_to_all" else ()
        call = {"op": op, "agree": agree, "shape": extent, "sends": splits[0], "receives": splits[1]}
        return self._start(entry, call, method, arguments, outputs)

    def _message(self, op: str, tensors: Any, peer: int | None, tag: int) -> WatchedWork:
        other = None if peer is None else self._ranks[peer]
        if peer == self.rank():
            raise ValueError(f"rank {other} is both ends of this message: copy the tensor instead")
        key = (op, peer, tag)
        entry = Communication(
            index=0, op=op, group=self._title(), ranks=self._ranks, sequence=self._message_counts.get(key, 0),
            bytes=num_bytes(tensors[0]) if op == "send" else 0, dtype=dtype_of(tensors[0]), shape=shape_of(tensors[0]),
            peer=other, tag=tag,
        )  # fmt: skip
        self._message_counts[key] = entry.sequence + 1
        call = {"op": op, "peer": other, "tag": tag, "shape": entry.shape}
        return self._start(entry, call, op, (tensors, peer, tag), tensors)

    def _start(self, entry: Communication, call: dict, method: str, arguments: tuple, result: Any) -> WatchedWork:
        entry.asynchronous, entry.backward = True, torch._C._current_graph_task_id() != -1
        entry.line = self._recorder.line()
        call |= {
            "group": self.group_name, "name": f"{entry.group} {list(self._ranks)}", "ranks": self._ranks,
            "line": entry.line, "dtype": entry.dtype, "device": device_of(arguments) or self._recorder.device,
        }  # fmt: skip

        def start(source: int | None) -> Any:
            if method == "recv" and arguments[1] is None:
                entry.peer = source
                return self._run(method, (arguments[0], self._ranks.index(source), arguments[2]), result)
            return self._run(method, arguments, () if method == "send" else result)

        if self.size() == 1:  # a group of one sends nothing: there is nobody to agree with, and no traffic to record
            pending = Pending(start)
            pending.go(None)
            return WatchedWork(self._recorder, pending, None, result)
        pending = self._recorder.announce(call, entry, start)
        if self._batch is not None:
            self._batch.append(pending)
        return WatchedWork(self._recorder, pending, entry, result)

    def _run(self, method: str, arguments: tuple, outputs: Any) -> Any:
        """Start the real operation, on copies in host memory where the tensors live on a GPU that ranks share."""
        inner, stage = self.make(device_of(arguments) or self._recorder.device)
        start = getattr(inner, method)
        return on_host(start, arguments, outputs) if stage else start(*arguments)

    @contextmanager
    def batch(self, device: str) -> Iterator[None]:
        """Start the messages inside at one time where the real group does one thing after the other, as NCCL does.

        Two ranks that send to each other first would wait for ever there. Under a supervisor they cannot: it starts a
        message when both ends are there, and messages in one order on all ranks.
        """
        inner, stage = self.make(device) if self._recorder.alone else (None, True)
        if stage or not inner.supports_coalescing:
            yield
            return
        self._batch = []
        inner._start_coalescing()
        try:
            yield
        finally:
            batch, self._batch = self._batch, None
            together = inner._end_coalescing()
        for pending in batch:
            pending.work = together

    def close(self) -> None:
        """End what the real groups have running, and wait for gloo's threads.

        A thread that still lets go of a tensor when the interpreter ends takes the whole process down with it.
        """
        while self._inner:
            device, (inner, stage) = self._inner.popitem()
            if device == "cuda" and not stage:
                inner.shutdown()

    def make(self, device: str) -> tuple[Any, bool]:
        """The real group for tensors of a device. To make it takes all members at once, also for a message of two."""
        if device not in self._inner:
            self._inner[device] = self._make_inner(device)
        return self._inner[device]

    def _each(self, works: list[WatchedWork], result: Any) -> WatchedWork:
        """One handle for several operations: waits for all."""
        for work in works[:-1]:
            work.wait()
        works[-1]._result = result
        return works[-1]
