"""Compare what the ranks returned with what was expected, and say in words what is different.

An error is relative to the largest expected number of that name on any rank, so a gradient of 1e-3 is judged as
strictly as an output of 1e3. How much is allowed follows from the dtype and has a name: see `allowed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autograde.difference import differs, largest_error, pattern, scale_of
from autograde.verdict import Finding, numbered

MULTIPLES_OF_EPSILON = {
    "exact": 0,  # copies, indices, masks
    "rounding": 64,  # the same sums, added up in another order
    "layers": 4096,  # several layers, a softmax, an optimizer's step
    "large logits": 4096 * 10_000,  # one rounding of a logit of 1e4 changes its probability by 1e4 roundings
}
NOTHING = torch.empty(0, dtype=torch.float64)


def allowed(dtype: torch.dtype, tolerance: str = "rounding") -> float:
    """Largest relative error that `tolerance` accepts: a multiple of the dtype's epsilon, never above its root."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    epsilon = torch.finfo(dtype).eps
    return min(MULTIPLES_OF_EPSILON[tolerance] * epsilon, math.sqrt(epsilon))


def compare(
    property: str, name: str, got: Sequence[Any], expected: Any, tolerance: str = "rounding", look: str = ""
) -> Finding:
    """Compare one named value: `got` has one for each rank, `expected` is such a list, or one value for all ranks.

    Tensors must agree in shape and dtype, and in every number up to `tolerance`; plain numbers in value; other plain
    data must be equal. An expected value that is itself a list stands in a list with one for each rank.
    """
    wanted = expected if isinstance(expected, list) else [expected] * len(got)
    if len(wanted) != len(got):
        return Finding(
            property, False, f"{name} came from {numbered(len(got), 'rank')}, expected {len(wanted)}", look=look
        )
    for rank, (one, other) in enumerate(zip(got, wanted, strict=True)):
        problem = _unlike(one, other)
        if problem:
            return Finding(property, False, f"{name} {problem} on rank {rank}", look=look)
    if any(_is_number(other) for other in wanted):
        # Where a rank is to have no number, there is nothing left to compare: both stand as empty tensors.
        pairs = [
            (one, other) if _is_number(other) else (NOTHING, NOTHING) for one, other in zip(got, wanted, strict=True)
        ]
        numbers = [(_tensor(one), _tensor(other)) for one, other in pairs]
        return _numbers(property, name, [one for one, _ in numbers], [other for _, other in numbers], tolerance, look)
    return Finding(property, True, numbered(len(got), "rank"), error=0.0)


def compare_all(
    property: str,
    outcomes: Sequence[Any],
    expected: Sequence[Mapping[str, Any]],
    tolerance: str = "rounding",
    look: str = "",
    extra: bool = False,
) -> Finding:
    """Compare named values, a dict for each rank: the first finding that fails, or one with the largest error.

    Names beyond the expected ones fail too, unless `extra`.
    """
    for rank, (one, other) in enumerate(zip(outcomes, expected, strict=True)):
        if not isinstance(one, Mapping):
            return Finding(property, False, f"rank {rank} returned {_kind(one)}, expected named values", look=look)
        unexpected = [name for name in one if name not in other]
        if unexpected and not extra:
            return Finding(property, False, f"{unexpected[0]} is on rank {rank} and should not be", look=look)
    error = 0.0
    for name in dict.fromkeys(name for other in expected for name in other):
        pairs = [(one.get(name), other.get(name)) for one, other in zip(outcomes, expected, strict=True)]
        finding = compare(property, name, [one for one, _ in pairs], [other for _, other in pairs], tolerance, look)
        if not finding.passed:
            return finding
        error = max(error, finding.error or 0.0)
    return Finding(property, True, numbered(len(outcomes), "rank"), error=error)


def _unlike(got: Any, expected: Any) -> str:
    """What makes two values different before their numbers are looked at; empty if nothing does."""
    if not _is_number(expected):
        return "" if same_plain(got, expected) else f"is {_brief(got)}, expected {_brief(expected)},"
    if got is None:
        return "is missing"
    if not isinstance(expected, torch.Tensor):
        return "" if _is_number(got) and not isinstance(got, torch.Tensor) else f"is {_kind(got)}, expected a number,"
    if type(got) is not torch.Tensor or got.layout != torch.strided:
        return f"is {_kind(got)}, expected a plain tensor,"
    if got.shape != expected.shape:
        return f"has the shape {tuple(got.shape)}, expected {tuple(expected.shape)},"
    return "" if got.dtype == expected.dtype else f"is {_dtype(got)}, expected {_dtype(expected)},"


def _numbers(
    property: str, name: str, got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: str, look: str
) -> Finding:
    limit, scale = max(allowed(e.dtype, tolerance) for e in expected), scale_of(expected)
    places = [differs(g, e, limit * scale) for g, e in zip(got, expected, strict=True)]
    error = max(largest_error(g, e) for g, e in zip(got, expected, strict=True)) / scale
    wrong = [rank for rank, place in enumerate(places) if bool(place.any())]
    if not wrong:
        return Finding(property, True, numbered(len(got), "rank"), error=error)
    rank = wrong[0]
    place = tuple(int(i) for i in places[rank].nonzero()[0])
    at = f" at {list(place)}" if place else ""
    wanted, seen = _apart(expected[rank][place], got[rank][place])
    detail = f"expected {wanted}, got {seen}{at} on rank {rank}"
    detail += f"; relative error {error:.2g}, allowed {limit:.2g}"
    return Finding(property, False, f"{name} {pattern(got, expected, wrong, limit)}", detail, look)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)


def same_plain(got: Any, expected: Any) -> bool:
    """Equality of plain data, in which a list and a tuple are the same and True is not 1."""
    if isinstance(expected, list | tuple):
        alike = isinstance(got, list | tuple) and len(got) == len(expected)
        return alike and all(same_plain(one, other) for one, other in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        alike = isinstance(got, dict) and got.keys() == expected.keys()
        return alike and all(same_plain(got[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        return type(got) is torch.Tensor and got.dtype == expected.dtype and torch.equal(got, expected)
    return type(got) is type(expected) and bool(got == expected)


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[str, str]:
    """Two numbers in words, with as many digits as it takes to tell them apart."""
    for digits in range(4, 18):
        shown = _show(one, digits), _show(other, digits)
        if shown[0] != shown[1]:
            break
    return shown


def _show(value: torch.Tensor, digits: int) -> str:
    return f"{value.item():.{digits}g}" if value.is_floating_point() or value.is_complex() else str(value.item())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    sparse = type(value) is torch.Tensor and value.layout != torch.strided
    name = "sparse tensor" if sparse else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _brief(value: Any) -> str:
    text = (
        repr(value)
        if isinstance(value, bool | int | float | str | bytes | list | tuple | dict | None)
        else _kind(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."
