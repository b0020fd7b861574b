"""What a program says about itself: the phase it is in, the micro-batch it works on, the tensors it keeps.

    with phase("forward"):
        with work("F", microbatch=3):
            ...

In a run, what is said reaches the ledger and from there the timeline. Elsewhere all of it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("F", "B", "I", "W")
HELD = ("parameters", "gradients", "optimizer")


class Now:
    """What holds at this moment on this rank."""

    recorder: Any = None  # writes this rank's ledger, None outside a run
    meter: Any = None  # measures it, None where the run is not measured
    phase: str = ""
    kind: str = ""
    label: str = ""
    block: int = 0
    blocks: int = 0  # how many blocks of work there have been


now = Now()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Give the work and the communication inside a name; memory gets a peak of its own for each phase."""
    with _said(phase=name):
        yield


@contextmanager
def work(kind: str = "", *, microbatch: int | None = None, chunk: int | None = None, label: str = "") -> Iterator[None]:
    """Say what the computation inside is, so that a timeline can write it and `replay` can give it a unit cost.

    `kind` is F (forward), B (full backward), I (input gradient), W (weight gradient) or "" for anything else. The label
    is the micro-batch number, with the chunk after a dot where a rank holds several: "3.1". Raises ValueError for
    another kind.
    """
    if kind not in (*KINDS, ""):
        raise ValueError(f"no kind of work called {kind!r}: choose F, B, I or W")
    if microbatch is not None:
        label = f"{microbatch}" if not chunk else f"{microbatch}.{chunk}"
    now.blocks += 1
    with _said(kind=kind, label=label, block=now.blocks):
        yield


def keep(what: str, *tensors: Any) -> None:
    """Count tensors as "parameters", "gradients" or "optimizer" state for as long as they live.

    For programs that keep them elsewhere than in an nn.Parameter, its `.grad` or a torch.optim.Optimizer: the shards of
    a ZeRO optimizer, for instance. Raises ValueError for another word.
    """
    if what not in HELD:
        raise ValueError(f"nothing called {what!r} is counted: choose parameters, gradients or optimizer")
    if now.meter is not None:
        now.meter.keep(what, tensors)


def forget() -> None:
    """Empty this rank's ledger, which a long training would fill its memory with; what comes after is recorded."""
    if now.recorder is not None:
        now.recorder.entries.clear()


@contextmanager
def _said(**changes: Any) -> Iterator[None]:
    before = {name: getattr(now, name) for name in changes}
    _turn(changes)
    try:
        yield
    finally:
        _turn(before)


def _turn(changes: dict[str, Any]) -> None:
    """Work done so far belongs to what held until now: it is written down first."""
    if now.meter is not None:
        now.meter.turn()
    for name, value in changes.items():
        setattr(now, name, value)
    if now.recorder is not None:
        now.recorder.phase = now.phase
    if now.meter is not None:
        now.meter.turned()
