"""Measure one rank: floating-point operations between communications, and the bytes it keeps.

A dispatch mode sees every operator that runs, forward and backward, and counts its work; what has been counted becomes
a `Computation` when a communication begins, a phase changes, or backward begins or ends. FLOPs are those of matrix
products, convolutions and attention, as `torch.utils.flop_counter` counts them: 2mnk for a product, causal attention
in full. Bytes are the operators' inputs and outputs as they run here, one by one, nothing fused.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from fivefold.runtime.ledger import Computation, Memory
from fivefold.runtime.marks import HELD, now
from fivefold.runtime.saved import SavedBytes, storages_of

aten = torch.ops.aten
COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
NO_WORK = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.detach}


class Meter:
    """Measures what runs inside `with Meter(recorder) as meter`; afterwards `meter.memory` is the rank's `Memory`.

    `recorder` has `entries`, `clock()`, `line()`, `phase`, and calls its `before` ahead of each communication.
    Gradients, parameters and optimizer state are looked at when a computation is written down and around
    `optimizer.step`: their peak is that of these moments. Parameters are the `nn.Parameter`s that an operator or an
    optimizer has touched; optimizer state is that of `torch.optim` without its scalars. `marks.keep` adds what is kept
    elsewhere.
    """

    def __init__(self, recorder: Any):
        self.recorder, self.memory = recorder, Memory()
        self._saved = SavedBytes(recorder.line, self._is_parameter, self._memory_changed)
        self._parameters: dict[int, weakref.ref] = {}  # id -> nn.Parameter
        self._parameter_storages: dict[int, weakref.ref] = {}  # address -> storage
        self._optimizers: weakref.WeakSet = weakref.WeakSet()
        self._kept: dict[str, dict[int, weakref.ref]] = {what: {} for what in HELD}
        self._stack = ExitStack()
        self._owed = False
        self._start_again()

    def __enter__(self) -> Meter:
        now.recorder, now.meter, now.phase = self.recorder, self, self.recorder.phase
        self._memory_changed()
        self.recorder.before = self.flush
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._stack.callback(register(self._optimizer_steps).remove)
        self._stack.enter_context(self._saved.counting())
        self._stack.enter_context(_Count(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self.flush()
        self.recorder.before = now.recorder = now.meter = None
        self.memory.peak_saved, self.memory.saved_at_peak = self._saved.peak, self._saved.at_peak()

    def flush(self) -> None:
        """Write down what has been computed since the last entry."""
        self._look()
        if self._flops or self._bytes:
            self._write()
        self._start_again()

    def turn(self) -> None:
        """`marks` is about to change what is said of the work."""
        self.flush()
        if self._owed:
            self._write()

    def turned(self) -> None:
        self._owed = bool(now.kind)  # work that was named gets an entry even where nothing in it is counted
        if now.phase:
            self._note_phase()

    def keep(self, what: str, tensors: Any) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._kept[what][storage._cdata] = weakref.ref(storage)
        self._look()

    def count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Add one operator that has run."""
        backward = torch._C._current_graph_task_id() != -1
        if backward != self._backward:
            self.flush()
            self._backward = backward
        packet = func._overloadpacket
        formula = FORMULAS.get(packet)
        if formula is not None:
            self._flops += formula(*args, **kwargs, out_val=out)
        if not func.is_view and packet not in NO_WORK:
            self._bytes += _size(args) + _size(out if isinstance(out, tuple | list) else (out,))
        self._last = self.recorder.clock()

    def touch(self, parameter: torch.nn.Parameter) -> None:
        """Remember a parameter, and the storage it has now: what is saved of that is not an activation."""
        self._parameters.setdefault(id(parameter), weakref.ref(parameter))
        for storage in storages_of(parameter):
            known = self._parameter_storages.get(storage._cdata)
            if known is None or known() is None:
                self._parameter_storages[storage._cdata] = weakref.ref(storage)

    def _write(self) -> None:
        entries = self.recorder.entries
        self._owed = False
        entries.append(
            Computation(
                index=len(entries),
                flops=self._flops,
                bytes=self._bytes,
                seconds=self._last - self._began,
                phase=now.phase,
                backward=self._backward,
                label=now.label,
                kind=now.kind,
                block=now.block,
            )
        )

    def _start_again(self) -> None:
        self._flops = self._bytes = 0
        self._backward = torch._C._current_graph_task_id() != -1
        self._began = self._last = self.recorder.clock()

    def _is_parameter(self, storage: Any) -> bool:
        known = self._parameter_storages.get(storage._cdata)
        return known is not None and known() is not None

    def _memory_changed(self) -> None:
        """Keep the turning points of the curve; on the way between two of them nothing is to be seen."""
        points, point = self.memory.timeline, (len(self.recorder.entries), self._saved.current)
        on_the_way = len(points) > 1 and points[-2][0] == points[-1][0] == point[0]
        if on_the_way and (points[-1][1] - points[-2][1]) * (point[1] - points[-1][1]) >= 0:
            points[-1] = point
        else:
            points.append(point)
        if now.phase:
            self._note_phase()

    def _note_phase(self) -> None:
        phases = self.memory.phases
        phases[now.phase] = max(phases.get(now.phase, 0), self._saved.current)

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.touch(parameter)
        self._look()

    def _look(self) -> None:
        """Compare what is held now with the most that has been held."""
        parameters = [p for p in (ref() for ref in self._parameters.values()) if p is not None]
        states = [state.values() for optimizer in self._optimizers for state in optimizer.state.values()]
        held = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [t for state in states for t in state if isinstance(t, torch.Tensor) and t.dim()],
        }
        for what, tensors in held.items():
            storages = {s._cdata: s for tensor in tensors for s in storages_of(tensor)}
            storages |= {s._cdata: s for s in (ref() for ref in self._kept[what].values()) if s is not None}
            size = sum(storage.nbytes() for storage in storages.values())
            setattr(self.memory, what, max(getattr(self.memory, what), size))


class _Count(TorchDispatchMode):
    """Shows the meter every operator."""

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator loads the compiler, which takes a second and is not used

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors(args):
            if isinstance(tensor, torch.nn.Parameter):
                self.meter.touch(tensor)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor turns it into operators on its parts, which come here next
        if torch.is_inference_mode_enabled() and func._overloadpacket not in FORMULAS:
            with self:
                out = func.decompose(*args, **kwargs)  # inference leaves F.linear and its like in one piece
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        pretends = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if func.namespace not in COMMUNICATION and not pretends:  # DTensor asks for shapes on tensors without data
            self.meter.count(func, args, kwargs, out)
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _size(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(values))


def _twice_first(first: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * first.numel()


def _twice_second(_: Any, second: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * second.numel()


FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten.mv: _twice_first,
    aten.dot: _twice_first,
    aten.addmv: _twice_second,
    **flop_registry,
}
