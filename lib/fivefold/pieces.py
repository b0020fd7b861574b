"""Which part of the whole model each rank holds, piece by piece: what a checkpoint saves and where it belongs.

A rank holds a part of a parameter, its share of the rows or columns and of the experts; and of AdamW's state for that
part a contiguous piece, which ZeRO has cut from a bucket without regard to rows. In the whole matrix, such a piece is a
few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fivefold.model import Role
from fivefold.train import Trainer

KINDS = {"parameter": "master", "momentum": "momentum", "variance": "variance"}  # the name in a checkpoint, in a Shard


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor that this rank holds; `tensor` is a view of the state, so what is written to it stays."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


def pieces(trainer: Trainer) -> Iterator[tuple[Piece, bool]]:
    """All pieces of the state that this rank holds, and whether no rank before it holds the same."""
    mesh = trainer.mesh
    for shard in trainer.shards:
        start = 0  # of the parameter in the bucket
        for parameter in shard.parameters:
            role = trainer.roles[parameter]
            first = mesh.pp.rank() == min(trainer.holders(parameter, role))
            first = first and (role.split is not None or mesh.tp.rank() == 0)
            origin, whole = _place(trainer, parameter, role)
            own = range(max(start, shard.own.start) - start, min(start + parameter.numel(), shard.own.stop) - start)
            at = start + own.start - shard.own.start  # in the piece
            for offset, size in boxes(parameter.shape, own.start, own.stop):
                offset = tuple(o + i for o, i in zip(origin, offset, strict=True))
                kept = (min(size[0], whole[0] - offset[0]), *size[1:])  # rows that only fill up a vocabulary are not
                for kind, name in KINDS.items() if kept[0] > 0 else ():
                    values = getattr(shard, name)[at : at + math.prod(kept)].view(kept)
                    yield Piece(f"{kind}/{role.name}", whole, offset, values), first
                at += math.prod(size)
            start += parameter.numel()


def _place(trainer: Trainer, parameter: nn.Parameter, role: Role) -> tuple[list[int], tuple[int, ...]]:
    """Where in the whole tensor this rank's part begins, and the shape of the whole."""
    origin, whole = [0] * parameter.dim(), list(parameter.shape)
    cuts = [(role.split, trainer.mesh.tp)] if role.split is not None else []
    for dim, group in [*cuts, (0, trainer.mesh.ep)] if role.expert else cuts:
        origin[dim], whole[dim] = group.rank() * parameter.shape[dim], group.size() * parameter.shape[dim]
    if role.name in ("embedding.weight", "head.weight"):
        whole[0] = trainer.job.model.vocabulary
    return origin, tuple(whole)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements `start` to `stop` - 1 of a tensor, counted row by row, into boxes: pairs (offset, size).

    A box is a part of the tensor with sides of its own; here each is contiguous, and they come in order. Elements 2 to
    9 of a (3, 4) are the end of row 0, the whole of row 1 and the start of row 2: three boxes at most of a matrix, and
    two more for each further dimension.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if start % row == 0 and (whole := stop // row - first):
        yield (first, *(0 for _ in shape[1:])), (whole, *shape[1:])
        yield from boxes(shape, (first + whole) * row, stop)
    else:
        end = stop if first == last else (first + 1) * row
        for offset, size in boxes(shape[1:], start - first * row, end - first * row):
            yield (first, *offset), (1, *size)
        yield from boxes(shape, end, stop)
