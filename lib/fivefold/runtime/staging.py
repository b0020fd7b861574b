"""Operations on copies in host memory, for tensors on a GPU that several ranks share, where NCCL refuses to work.

What a rank hands over is copied to the host, gloo does the operation there, and what it wrote is copied back when the
program waits for it. That gives right numbers at the price of two copies: it is for correctness, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class Staged:
    """A work on host copies."""

    def __init__(self, work: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]):
        self.work, self.copies = work, copies  # pairs (on the device, on the host)

    def wait(self) -> None:
        self.work.wait()
        for device, host in self.copies:
            device.detach().copy_(host)
        self.copies = []

    def is_completed(self) -> bool:
        return False  # only `wait` copies the result back

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


def on_host(start: Callable[..., Any], arguments: tuple, outputs: Any) -> Staged:
    """Call `start` with host copies in the places of all tensors in `arguments`; those in `outputs` will come back.

    The others are left as they are: to write to them, even the same numbers, would tell autograd that what it saved has
    changed.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    work = start(*(_to_host(argument, copies) for argument in arguments))
    return Staged(work, [copies[id(tensor)] for tensor in _tensors(outputs)])


def device_of(value: Any) -> str:
    """The device type of the first tensor in nested lists, "" where there is none."""
    return next((tensor.device.type for tensor in _tensors(value)), "")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for item in value if isinstance(value, list | tuple) else ():
        yield from _tensors(item)


def _to_host(value: Any, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), (value, value.detach().to("cpu", copy=True)))[1]
    return [_to_host(item, copies) for item in value] if isinstance(value, list | tuple) else value
