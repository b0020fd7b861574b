"""What comes back from ranks is plain data: exact, and unable to execute code."""

import pickle

import pytest
import torch
from fivefold.runtime import wire
from hypothesis import given
from hypothesis import strategies as st

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(plain)
def test_plain_data_survives_exactly(value):
    """Nested to any depth, with its types: a tuple stays a tuple, an int does not become a bool."""
    back = wire.decode(wire.encode(value))
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_survive_with_dtype_and_shape(dtype):
    """Values that share memory arrive as tensors of their own."""
    base = torch.randint(0, 2, (3, 4)).to(dtype)
    first, second, scalar = wire.decode(wire.encode([base, base[1:, ::2], base[0, 0]]))
    assert torch.equal(first, base) and torch.equal(second, base[1:, ::2]) and scalar.shape == ()
    assert first.dtype == second.dtype == dtype


class Always(torch.Tensor):
    """A tensor that claims to equal everything."""

    def __eq__(self, other):
        return True


def test_subclasses_arrive_as_what_they_hold():
    """A comparison that a rank's class would win is made with plain tensors and numbers."""

    class Five(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    tensor, number = wire.decode(wire.encode([torch.ones(2).as_subclass(Always), Five(5)]))
    assert type(tensor) is torch.Tensor and type(number) is int and number != 6


@pytest.mark.parametrize("value, place", [([1, {"a": object()}], r"result\[1\]\['a'\]"), (len, "result is a builtins")])
def test_anything_else_is_refused_by_place(value, place):
    """Functions, modules, objects of unknown classes."""
    with pytest.raises(TypeError, match=place):
        wire.encode(value)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\xff" * 40, pickle.dumps([1, 2])])
def test_other_bytes_are_refused(data):
    """Cut, random, or a pickle."""
    with pytest.raises(ValueError, match="not a result"):
        wire.decode(data)
