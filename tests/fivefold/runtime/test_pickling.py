"""Code on its way to the ranks keeps its lines, travels by value where it is the caller's own, can be re-pointed."""

import pickle
import sys

import torch
from fivefold.runtime import pickling
from torch.autograd.function import once_differentiable


def helper():
    return "the caller's own"


def uses_helper():
    return helper()


def uses_torch_ops(x):
    return torch.ops.aten.mul(x, 2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad


def copy(value, refer=None):
    return pickle.loads(pickling.dumps(value, refer))


def test_the_callers_own_functions_travel_with_what_they_use(monkeypatch):
    """A rank need not be able to import the file they are from."""
    data = pickling.dumps(uses_helper)
    nested = pickling.dumps({"parts": [(1, uses_helper)]})
    monkeypatch.delitem(sys.modules, __name__)
    assert pickle.loads(data)() == "the caller's own"
    assert pickle.loads(nested)["parts"][0][1]() == "the caller's own"


def test_a_copied_function_keeps_its_file_and_lines():
    """So that an error on a rank shows the learner's line."""
    assert copy(uses_helper).__code__.co_filename == uses_helper.__code__.co_filename
    assert copy(uses_helper).__code__.co_firstlineno == uses_helper.__code__.co_firstlineno


def test_functions_that_name_torchs_operators_travel():
    """torch.ops is a module that cloudpickle cannot copy."""
    assert copy(uses_torch_ops)(torch.ones(2)).tolist() == [2, 2]


def test_autograd_functions_that_can_be_differentiated_once_travel():
    """Their decorator names a module inside torch's C library, which cannot be imported nor copied."""
    x = torch.ones(2, requires_grad=True)
    copy(Doubled).apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_an_object_can_be_replaced_by_the_librarys_on_the_way():
    """A learner's function that calls another one of theirs gets the library's version of that."""
    again = copy(uses_helper, {id(helper): "layout.Layout"})
    assert str(again()) == "dp1"
