"""Tensors and options of an operation in plain words and numbers, and the sizes that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def split_sizes(tensor: torch.Tensor, rows: Sequence[int] | None, n: int) -> list[int]:
    """Elements for each of n ranks, from the split sizes of an all-to-all in rows; equal ones where none are given."""
    if not rows:
        if tensor.shape[0] % n:
            raise ValueError(
                f"all_to_all without split sizes needs a first dimension that {n} ranks divide, "
                f"it is {tensor.shape[0]}: give the split sizes"
            )
        rows = [tensor.shape[0] // n] * n
    if len(rows) != n or sum(rows) != tensor.shape[0]:
        raise ValueError(f"all_to_all split sizes {list(rows)} must be {n} numbers with the sum {tensor.shape[0]}")
    size = tensor[0].numel() if tensor.shape[0] else 0
    return [row * size for row in rows]


def options_like(kind: type, opts: Any) -> Any:
    """Options of `kind` with the same reduction as `opts`."""
    options = kind()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options


def reduction(opts: Any) -> str:
    return str(opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp).rpartition(".")[2].lower()


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def dtype_of(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)


def check_total(tensor: torch.Tensor, expected: int, op: str, which: str, what: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(f"{op}: the {which} has {tensor.numel()} elements, it must have {expected}: {what}")


def check_same_sizes(op: str, input: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    sizes = [output.numel() for output in outputs]
    if any(size != input.numel() for size in sizes):
        raise ValueError(f"{op}: every output must have the input's {input.numel()} elements, they have {sizes}")
