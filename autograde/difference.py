"""How tensors differ, in numbers and in words: what ranks hold against what they should hold.

`got` and `expected` are lists with one tensor for each rank; `wrong` are the ranks whose tensors differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def differs(got: torch.Tensor, expected: torch.Tensor, limit: float) -> torch.Tensor:
    """True where the numbers differ by more than `limit`; what is not finite must be the same."""
    if got.dtype == expected.dtype and not (got.is_floating_point() or got.is_complex()):
        return got != expected
    got, expected = _wide(got), _wide(expected)
    finite = got.isfinite() & expected.isfinite()
    return ~_equal(got, expected) & ~(finite & ((got - expected).abs() <= limit))


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference; infinite where one of the two is not finite and the other is."""
    if not got.numel():
        return 0.0
    got, expected = _wide(got), _wide(expected)
    return float((got - expected).abs().nan_to_num(math.inf, math.inf).masked_fill(_equal(got, expected), 0.0).max())


def scale_of(tensors: Sequence[torch.Tensor]) -> float:
    """The largest finite number in the tensors, or 1 where there is none but zero."""
    largest = [float(_wide(t).abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in tensors if t.numel()]
    return max(largest, default=0.0) or 1.0


def close(got: torch.Tensor, expected: torch.Tensor, relative: float, scale: float | None = None) -> bool:
    """Whether two tensors have one shape and differ nowhere by more than `relative` times `scale`."""
    if got.shape != expected.shape:
        return False
    return not bool(differs(got, expected, relative * (scale or scale_of([expected]))).any())


def pattern(got: list[torch.Tensor], expected: list[torch.Tensor], wrong: list[int], limit: float) -> str:
    """In what way the wrong ranks' numbers are wrong, as the end of a sentence; `limit` is relative."""
    where = which_ranks(wrong, len(got))
    for words in (_not_finite, _zero, _multiple, _one_part, _another_ranks, _reordered):
        found = words(got, expected, wrong, limit, where)
        if found:
            return found
    if len(wrong) == len(got):
        return "differs from the expected one on every rank"
    right = [rank for rank in range(len(got)) if rank not in wrong]
    return f"is wrong on {where} and right on {which_ranks(right, len(got))}"


def which_ranks(ranks: Sequence[int], world_size: int) -> str:
    """`every rank`, `rank 2`, `ranks 0, 2`."""
    if len(ranks) == world_size:
        return "every rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _not_finite(got: list, expected: list, wrong: list[int], limit: float, where: str) -> str:
    for what, test in (("NaN", torch.isnan), ("infinite numbers", torch.isinf)):
        if any(bool((test(got[r]) & ~test(expected[r])).any()) for r in wrong):
            return f"has {what} on {where}"
    return ""


def _zero(got: list, expected: list, wrong: list[int], limit: float, where: str) -> str:
    return f"is zero on {where}" if not any(bool(got[r].any()) for r in wrong) else ""


def _multiple(got: list, expected: list, wrong: list[int], limit: float, where: str) -> str:
    mine, other = (torch.cat([_wide(t[r]).flatten() for r in wrong]) for t in (got, expected))
    if mine.numel() < 2 or not bool(other.any()):
        return ""
    ratio = (mine * other.conj()).sum().real / (other.abs() ** 2).sum()
    if not bool(ratio.isfinite()) or not close(mine, ratio * other, 64 * limit, scale_of([mine])):
        return ""
    return (
        f"has the wrong sign on {where}"
        if abs(ratio + 1) < 1e-3
        else f"is {_unlike_one(float(ratio))} times the expected one on {where}"
    )


def _unlike_one(ratio: float) -> str:
    """With as many digits as it takes to see that it is not 1."""
    shown = (f"{ratio:.{digits}f}" for digits in range(2, 16))
    return next((text for text in shown if float(text) != 1), f"{ratio}")


def _one_part(got: list, expected: list, wrong: list[int], limit: float, where: str) -> str:
    alike = all(g.shape == got[0].shape for g in got) and all(close(e, expected[0], limit) for e in expected)
    if len(got) < 2 or not alike or not close(sum(map(_wide, got)), expected[0], 64 * limit):
        return ""
    return "is one rank's part: the sum over the ranks is the expected one"


def _another_ranks(got: list, expected: list, wrong: list[int], limit: float, where: str) -> str:
    rank = wrong[0]
    for other, tensor in enumerate(expected):
        if other != rank and close(got[rank], tensor, limit):
            return f"on rank {rank} is what rank {other} should have"
    return ""


def _reordered(got: list, expected: list, wrong: list[int], limit: float, where: str) -> str:
    for rank in wrong:
        if got[rank].is_complex():
            return ""
        mine, other = (_wide(t[rank]).flatten().sort().values for t in (got, expected))
        if not close(mine, other, limit):
            return ""
    return f"has the right numbers in the wrong order on {where}"


def _equal(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (got == expected) | (got.isnan() & expected.isnan())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
