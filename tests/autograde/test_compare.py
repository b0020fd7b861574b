"""Comparing what ranks returned with what was expected: nothing wrong passes, and the words say what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autograde.compare import allowed, compare, compare_all

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows(n=3, shape=(4, 5), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


def seen(got, expected, tolerance="rounding"):
    finding = compare("output", "y", got, expected, tolerance)
    assert finding.passed is False
    return finding.seen


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_in_another_order_passes_and_a_part_left_out_does_not(dtype):
    """The tolerance follows the dtype: it covers rounding of a sum of 64 numbers, and no missing summand."""
    numbers = torch.randn(64, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    forwards, backwards = numbers[0].clone(), numbers[-1].clone()
    for i in range(1, 64):
        forwards, backwards = forwards + numbers[i], backwards + numbers[-1 - i]
    assert compare("output", "y", [forwards], [backwards]).passed
    assert not compare("output", "y", [forwards - numbers[3]], [backwards]).passed


@pytest.mark.parametrize("dtype", FLOATS)
def test_tolerances_are_ordered_and_bounded(dtype):
    """Exact, rounding and layers allow more and more, and never so much that a wrong factor of two passes."""
    limits = [allowed(dtype, name) for name in ("exact", "rounding", "layers")]
    assert limits[0] == 0 < limits[1] <= limits[2] < 0.1


def test_small_gradients_are_judged_as_strictly_as_large_ones():
    """An error of one part in a thousand fails at every size, also where it is 1e-6 in absolute terms."""
    for scale in (1e-3, 1.0, 1e4):
        expected = [row * scale for row in rows()]
        assert not compare("gradient", "x.grad", [row * 1.001 for row in expected], expected).passed
        assert compare("gradient", "x.grad", [row * (1 + 1e-15) for row in expected], expected).passed


def test_the_first_place_that_differs_is_told():
    """Of several differences the first in order is named, with both numbers, its rank and the error."""
    expected = rows()
    got = [row.clone() for row in expected]
    got[1][2, 3], got[2][0, 0] = 7.0, 9.0
    finding = compare("output", "y", got, expected)
    assert finding.seen == "y is wrong on ranks 1, 2 and right on rank 0"
    assert f"expected {expected[1][2, 3].item():.4g}, got 7 at [2, 3] on rank 1" in finding.detail


def test_numbers_that_differ_look_different():
    """As many digits as it takes, also where the fifth or the fifteenth is the first that differs."""
    for got, expected in ((0.0015114, 0.0015113), (1 + 1e-12, 1.0)):
        wanted, _, seen = compare("seconds", "y", [got], expected).detail.partition(" on rank")[0].partition(", got ")
        assert wanted.removeprefix("expected ") != seen
    assert compare("n", "n", [7.0], 1.25).detail.startswith("expected 1.25, got 7 on rank 0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: [4 * row for row in e], "y is 4.00 times the expected one on every rank"),
        (lambda e: [e[0], e[1] / 4, e[2]], "y is 0.25 times the expected one on rank 1"),
        (lambda e: [-row for row in e], "y has the wrong sign on every rank"),
        (lambda e: [torch.zeros_like(e[0]), *e[1:]], "y is zero on rank 0"),
        (lambda e: [e[1], e[2], e[0]], "y on rank 0 is what rank 1 should have"),
        (lambda e: [e[0].flip(0), *e[1:]], "y has the right numbers in the wrong order on rank 0"),
        (lambda e: [e[0] / 0, *e[1:]], "y has infinite numbers on rank 0"),
        (lambda e: [e[0] * math.nan, *e[1:]], "y has NaN on rank 0"),
        (lambda e: [None, *e[1:]], "y is missing on rank 0"),
        (lambda e: [e[0].tolist(), *e[1:]], "y is a list, expected a plain tensor, on rank 0"),
        (lambda e: [e[0].float(), *e[1:]], "y is float32, expected float64, on rank 0"),
        (lambda e: [e[0].T, *e[1:]], "y has the shape (5, 4), expected (4, 5), on rank 0"),
        (lambda e: [torch.nn.Parameter(e[0]), *e[1:]], "y is a Parameter, expected a plain tensor, on rank 0"),
        (lambda e: [e[0].to_sparse(), *e[1:]], "y is a sparse tensor, expected a plain tensor, on rank 0"),
        (lambda e: e[:2], "y came from 2 ranks, expected 3"),
    ],
)  # fmt: skip
def test_kinds_of_wrong_results_are_named(change, words):
    """Each kind of wrong result gets the sentence that points at it."""
    expected = rows()
    assert seen(change(expected), expected) == words


def test_parts_that_were_not_summed_are_named():
    """Where every rank holds its part and the parts add up to what is expected, that is what the words say."""
    parts = rows()
    assert seen(parts, sum(parts)) == "y is one rank's part: the sum over the ranks is the expected one"


def test_what_is_not_finite_must_be_the_same():
    """The log-sum-exp of a row that saw nothing is -inf: it passes where it is expected and nowhere else."""
    expected = torch.tensor([1.0, -math.inf, math.nan], dtype=torch.float64)
    assert compare("output", "lse", [expected.clone()], [expected]).passed
    for wrong in (
        [1.0, math.inf, math.nan],
        [1.0, -1e300, math.nan],
        [1.0, -math.inf, 0.0],
        [-math.inf, 1.0, math.nan],
    ):
        assert not compare("output", "lse", [torch.tensor(wrong, dtype=expected.dtype)], [expected]).passed


def test_plain_data_must_be_equal():
    """Lists and tuples are one kind, True is not 1, and a tensor inside is compared as a tensor."""
    assert compare("groups", "the groups", [[(0, 1), (2, 3)]], [[[0, 1], [2, 3]]]).passed
    assert compare("n", "n", [3], 3).passed and compare("n", "n", [3.0], 3).passed
    for got, expected in (
        [True, 1],
        [1, True],
        [[0, 1], [0, 2]],
        ["a", "b"],
        [{"a": 1}, {"a": 1, "b": 2}],
        [None, "a"],
    ):
        assert not compare("x", "x", [got], [expected]).passed
    nested = {"a": torch.ones(2)}
    assert compare("x", "x", [{"a": torch.ones(2)}], [nested]).passed
    assert not compare("x", "x", [{"a": torch.zeros(2)}], [nested]).passed


def test_named_values_are_compared_name_by_name():
    """A missing name, one too many and a wrong one all fail, and the error that passes is the largest of all."""
    expected = [{"weight": row, "bias": row[0]} for row in rows()]
    near = [{"weight": e["weight"] * (1 + 4e-16), "bias": e["bias"]} for e in expected]
    assert compare_all("gradient", near, expected).error > 0
    assert (
        compare_all("gradient", [{"weight": e["weight"]} for e in near], expected).seen == "bias is missing on rank 0"
    )
    more = [e | {"scale": torch.ones(1)} for e in near]
    assert compare_all("gradient", more, expected).seen == "scale is on rank 0 and should not be"
    assert compare_all("gradient", more, expected, extra=True).passed
    assert compare_all("gradient", [e["bias"] for e in near], expected).seen.startswith("rank 0 returned")


numbers = st.floats(width=64) | st.integers(-(2**62), 2**62)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=5,
)
tensors = st.builds(
    lambda shape, fill, dtype: torch.full(shape, fill, dtype=torch.float64).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([0.0, 1.0, -2.5, math.nan, math.inf, 1e300]),
    st.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(plain | tensors, min_size=2, max_size=2))
def test_whatever_comes_back_gets_a_finding_and_never_passes(got):
    """No outcome, however odd, raises or is taken for a random matrix."""
    expected = rows(2)
    assert compare("output", "y", got, expected).passed is False
    assert compare_all("output", got, [{"y": row} for row in expected]).passed is False


def test_a_tensor_that_only_some_ranks_have_is_compared_there():
    """A name that other ranks do not have, as for the weights of a pipeline's stages, is no way round the numbers."""
    right, wrong = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    assert compare("weights", "w", [right, None], [right.clone(), None]).passed
    assert not compare("weights", "w", [wrong, None], [right, None]).passed
    assert not compare("weights", "w", [None, right], [right, None]).passed
    outcomes, expected = [{"a": right}, {"b": wrong}], [{"a": right}, {"b": right}]
    finding = compare_all("weights", outcomes, expected)
    assert finding.passed is False and "rank 1" in finding.seen
