"""The degrees of the five axes, and whether they fit a model: checked in one line before any rank starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

AXES = ("dp", "cp", "pp", "tp", "ep")


class LayoutError(ValueError):
    """A layout that cannot be: one line that names the number to change."""


@dataclass(frozen=True)
class Layout:
    """The degree of each axis. The world has dp·cp·pp·tp ranks; ep needs no ranks of its own, it must divide dp·cp.

    Raises LayoutError for a degree below 1 and for an ep that does not divide dp·cp.
    """

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or degree < 1:
                raise LayoutError(f"{axis} is {degree!r}: a degree is a whole number, 1 or more")
        if (self.dp * self.cp) % self.ep:
            choices = _divisors(self.dp * self.cp)
            raise LayoutError(f"ep{self.ep} cannot be folded over dp{self.dp} x cp{self.cp}: choose {choices}")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout written "dp2,cp2,pp2,tp2,ep2": any order, an axis left out has degree 1."""
        degrees: dict[str, int] = {}
        for word in text.replace(" ", "").split(","):
            match = re.fullmatch(r"(dp|cp|pp|tp|ep)([0-9]+)", word)
            if match is None or match[1] in degrees:
                fault = f"{match[1]} stands twice" if match else f"{word!r} is not an axis and its degree"
                raise LayoutError(f"layout {text!r}: {fault}: write it like dp2,cp2,pp2,tp2,ep2")
            degrees[match[1]] = int(match[2])
        return cls(**degrees)

    def __str__(self) -> str:
        degrees = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join(degrees) or "dp1"

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.pp * self.tp


def check_sizes(
    layout: Layout,
    *,
    ranks: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    experts: int | None = None,
    layers: int | None = None,
    num_chunks: int = 1,
    sequence: int | None = None,
    sequence_parallel: bool = False,
    batch: int | None = None,
    num_microbatches: int = 1,
) -> None:
    """Raise LayoutError, one line that names the number to change, where a layout does not fit a model or a batch.

    Sizes left out are not checked. `ranks`: processes there are. `heads`, `kv_heads`, `ffn` (inner width) are split
    over TP, `experts` over EP. `layers` must give each of pp·num_chunks stages one at least. `sequence`: tokens,
    split over CP in 2·cp zig-zag chunks, and with `sequence_parallel` each rank's part over TP. `batch`: sequences a
    step, split over DP and then into `num_microbatches` equal ones.
    """
    if ranks is not None and ranks != layout.world_size:
        needs = f"layout {layout} needs {layout.world_size} ranks, {ranks} were given"
        raise LayoutError(f"{needs}: make the product of the degrees {ranks}")
    for what, size in (("heads", heads), ("kv heads", kv_heads), ("inner columns of the MLP", ffn)):
        _check_split(size, what, f"tp{layout.tp}", layout.tp)
    if experts is not None and experts % layout.ep:
        choices = _divisors(math.gcd(experts, layout.dp * layout.cp))
        raise LayoutError(f"{experts} experts cannot be split over ep{layout.ep}: choose {choices}")
    stages = layout.pp * num_chunks
    if layers is not None and layers < stages:
        fills = f"pp{layout.pp}" if num_chunks == 1 else f"pp{layout.pp} with {num_chunks} chunks a rank"
        raise LayoutError(f"{layers} layers cannot fill the {stages} stages of {fills}: take {stages} layers or more")
    if sequence is not None:
        _check_sequence(layout, sequence, sequence_parallel)
    if batch is not None:
        _check_split(batch, "sequences a step", f"dp{layout.dp}", layout.dp)
        _check_split(batch // layout.dp, "sequences a rank", f"{num_microbatches} micro-batches", num_microbatches)


def _check_split(size: int | None, what: str, over: str, degree: int) -> None:
    if size is not None and (size < 1 or size % degree):
        raise LayoutError(f"{size} {what} cannot be split over {over}: choose {_divisors(size)}")


def _check_sequence(layout: Layout, sequence: int, sequence_parallel: bool) -> None:
    zigzag = 2 * layout.cp if layout.cp > 1 else 1
    step = math.lcm(zigzag, layout.cp * layout.tp) if sequence_parallel else zigzag
    if sequence < 1 or sequence % step:
        over = f"cp{layout.cp} and tp{layout.tp}" if sequence_parallel else f"cp{layout.cp}"
        below, above = sequence // step * step, (sequence // step + 1) * step
        near = f"{below} or {above}" if below > 0 else f"{above}"
        raise LayoutError(f"a sequence of {sequence} tokens cannot be split over {over}: choose {near}")


def _divisors(n: int) -> str:
    """What divides n, in words: 1, 2, 3 or 6."""
    if n < 1:
        return "a size of 1 or more"
    *most, last = (str(d) for d in range(1, n + 1) if n % d == 0)
    return f"{', '.join(most)} or {last}" if most else last
