"""Bytes saved for backward: what autograd keeps between forward and backward, and the line that made it keep it.

Every tensor that autograd saves passes through a pair of hooks. They put it into a `Kept`, which autograd holds in the
tensor's place: as long as a `Kept` lives, its storage counts. A storage counts once, whole, however many views of it
are saved; parameters do not count, they are there anyway.

Not seen: tensors that an autograd function hides on its context (`ctx.x = x` instead of `ctx.save_for_backward`), and
what selective checkpoint policies keep in a cache of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fivefold.runtime.ledger import Saved


class Kept:
    """Stands for one tensor saved for backward; its end of life ends the counting."""

    __slots__ = ("count", "line", "storages", "tensor", "version")

    def __init__(self, count: SavedBytes, tensor: torch.Tensor, line: str):
        # Detached: an output that is saved by its own graph node would otherwise hold itself alive for ever.
        self.count, self.tensor, self.line, self.version = count, tensor.detach(), line, tensor._version
        self.storages = count.add(tensor, line)

    def release(self) -> None:
        """Let go of the tensor; backward must not ask for it again."""
        self.tensor = None
        while self.storages:
            self.count.remove(self.storages.pop())

    __del__ = release


class SavedBytes:
    """How many bytes are saved now, and at the peak, by line.

    `line()` names the learner's current line, `is_parameter(storage)` says what is not to count, `changed()` is called
    after each change of `current`.
    """

    def __init__(self, line: Callable[[], str], is_parameter: Callable[[Any], bool], changed: Callable[[], None]):
        self.current = self.peak = 0
        self._line, self._is_parameter, self._changed = line, is_parameter, changed
        self._storages: dict[int, list] = {}  # address -> [number of Kept, bytes, line, weak reference]
        self._at_peak: dict[str, list[int]] | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self._join_other_hooks(), saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: torch.Tensor) -> Kept:
        return Kept(self, tensor, self._line())

    def unpack(self, kept: Kept) -> torch.Tensor:
        if kept.tensor._version != kept.version:  # autograd leaves this check out where there are hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(kept.tensor.shape)} that backward needs was changed in place after it was "
                f"saved ({kept.line}): change a copy"
            )
        return kept.tensor

    def add(self, tensor: torch.Tensor, line: str) -> list[int]:
        """Count the storages of a saved tensor; answers with their addresses."""
        storages = [s for s in storages_of(tensor) if not self._is_parameter(s)]
        for storage in storages:
            self._enter(storage, line)[0] += 1
        return [storage._cdata for storage in storages]

    def remove(self, address: int) -> None:
        entry = self._storages[address]
        entry[0] -= 1
        if not entry[0] and entry[3] is None:
            self._leave(address)

    def at_peak(self) -> list[Saved]:
        """What was saved at the peak, by line, the largest first."""
        lines = self._at_peak if self._at_peak is not None else self._by_line()
        found = [Saved(line, size, count) for line, (size, count) in lines.items()]
        return sorted(found, key=lambda saved: -saved.bytes)

    def _enter(self, storage: Any, line: str) -> list:
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = [0, storage.nbytes(), line, None]
            self.current += entry[1]
            if self.current > self.peak:
                self.peak, self._at_peak = self.current, None
            self._changed()
        return entry

    def _leave(self, address: int) -> None:
        if self._at_peak is None and self.current == self.peak:
            self._at_peak = self._by_line()
        self.current -= self._storages.pop(address)[1]
        self._changed()

    def _by_line(self) -> dict[str, list[int]]:
        lines: dict[str, list[int]] = {}
        for _, size, line, _ in self._storages.values():
            total = lines.setdefault(line, [0, 0])
            total[0] += size
            total[1] += 1
        return lines

    @contextmanager
    def _join_other_hooks(self) -> Iterator[None]:
        """Only the innermost pair of hooks is called: a pair that the program installs is given ours inside."""
        original = saved_tensors_hooks.__init__

        def init(hooks: saved_tensors_hooks, pack: Callable, unpack: Callable) -> None:
            if type(hooks).__module__ == "torch.utils.checkpoint":
                pack = self._seen_by_checkpoint(pack) if type(hooks).__name__ == "_recomputation_hook" else pack
            elif pack != self.pack:
                pack, unpack = self._joined(pack, unpack)
            original(hooks, pack, unpack)

        saved_tensors_hooks.__init__ = init
        try:
            yield
        finally:
            saved_tensors_hooks.__init__ = original

    def _joined(self, pack: Callable, unpack: Callable) -> tuple[Callable, Callable]:
        def join_pack(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            return self.pack(packed) if isinstance(packed, torch.Tensor) else packed

        def join_unpack(packed: Any) -> torch.Tensor:
            return unpack(self.unpack(packed) if isinstance(packed, Kept) else packed)

        return join_pack, join_unpack

    def _seen_by_checkpoint(self, pack: Callable) -> Callable:
        """Checkpoint puts what it recomputes into a table, until backward has used it: it counts until it is freed."""

        def seen(tensor: torch.Tensor) -> Any:
            for storage in storages_of(tensor):
                address = storage._cdata
                if address not in self._storages and not self._is_parameter(storage):
                    entry = self._enter(storage, self._line())
                    entry[3] = weakref.ref(storage, lambda _, address=address: self._freed(address))
            return pack(tensor)

        return seen

    def _freed(self, address: int) -> None:
        self._storages[address][3] = None
        if not self._storages[address][0]:
            self._leave(address)


def storages_of(tensor: torch.Tensor) -> list[Any]:
    """The storages under a tensor: one, or those of its parts where it is a wrapper such as a DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor's mesh is one too
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in storages_of(part)]
    if tensor.layout is not torch.strided:
        return []
    return [tensor.untyped_storage()]
