"""Wrong solutions of lesson 03 that a check once accepted, or explained with a misconception that was not theirs."""

from __future__ import annotations

import pytest
from fivefold.runtime.parts import Source

from autograde.check import evaluate
from autograde.library import definition

HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.tensor import ColumnLinear, RowLinear, causal_attention, check_heads, copy_to_ranks, shard, sum_over_ranks
from torch import Tensor, nn
"""

COPY = """
class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def copy_to_ranks(x, group):
    return _Copy.apply(x, group)
"""

COLUMN = """
class ColumnLinear(nn.Module):
    def __init__(self, weight, bias, group, enter=None):
        super().__init__()
        self.group, self.enter = group, enter or copy_to_ranks
        self.weight = nn.Parameter(shard(weight, group))
        self.bias = None if bias is None else nn.Parameter(shard(bias, group))

    def forward(self, x):
        return F.linear(self.enter(x, self.group), self.weight, self.bias)
"""

ROW = """
class RowLinear(nn.Module):
    def __init__(self, weight, bias, group, leave=None):
        super().__init__()
        self.group, self.leave = group, leave or sum_over_ranks
        self.weight = nn.Parameter(shard(weight, group, dim=1))
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x):
        total = self.leave(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
"""

GATED = """
class GatedMLP(nn.Module):
    def __init__(self, w_in, w_out, group, enter=None, leave=None):
        super().__init__()
        self.group, self.enter = group, enter or copy_to_ranks
        self.w_in = nn.Parameter(shard(w_in.unflatten(0, (2, -1)), group, dim=1))
        self.row = RowLinear(w_out, None, group, leave)

    def forward(self, x):
        x = self.enter(x, self.group)
        return self.row(F.silu(F.linear(x, self.w_in[0])) * F.linear(x, self.w_in[1]))
"""

TEXTS = {"copy_to_ranks": COPY, "ColumnLinear": COLUMN, "RowLinear": ROW, "GatedMLP": GATED}

HOOK_ON_X = """
def copy_to_ranks(x, group):
    def total(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    if x.requires_grad:
        x.register_hook(total)
    return x
"""

ZEROS_FOR_NONE = "torch.zeros(weight.shape[0], dtype=weight.dtype) if bias is None else bias"
NO_BIAS = "None if bias is None else nn.Parameter"

# A name for each: the exercise, lines to be replaced, what stands in their place, the property that has to fail.
WRONG = {
    "the incoming gradient is overwritten": ("copy_to_ranks", "grad.clone()", "grad", "gradient"),
    "contiguous, which is no copy": ("copy_to_ranks", "grad.clone()", "grad.contiguous()", "gradient"),
    "the group is kept on the class": ("copy_to_ranks", "ctx.group", "_Copy.group", "gradient"),
    "a hook on x itself": ("copy_to_ranks", COPY, HOOK_ON_X, "gradient"),
    "a barrier first": (
        "copy_to_ranks",
        "total = grad.clone()",
        "total = grad.clone()\n        dist.barrier(ctx.group)",
        "traffic",
    ),
    "zeros for no bias, split": (
        "ColumnLinear",
        f"{NO_BIAS}(shard(bias, group))",
        f"nn.Parameter(shard({ZEROS_FOR_NONE}, group))",
        "arguments",
    ),
    "enter is called twice": (
        "ColumnLinear",
        "return F",
        "self.enter(x, self.group)\n        return F",
        "arguments",
    ),
    "zeros for no bias": (
        "RowLinear",
        f"{NO_BIAS}(bias.clone())",
        f"nn.Parameter(({ZEROS_FOR_NONE}).clone())",
        "arguments",
    ),
    "a bias that is not copied": ("RowLinear", "nn.Parameter(bias.clone())", "nn.Parameter(bias)", "memory"),
    "a view of the whole": (
        "GatedMLP",
        "shard(w_in.unflatten(0, (2, -1)), group, dim=1)",
        "w_in.unflatten(0, (2, -1)).chunk(group.size(), 1)[group.rank()]",
        "memory",
    ),
}

# Lines of the library's own text, what stands in their place, the property that has to fail: mistakes that nobody makes
# often enough for a hint of their own.
LIBRARY = "from __future__ import annotations\nfrom collections.abc import Callable\n" + HEAD
SUBTLY_WRONG = {
    "keys repeated before the core": (
        "tensor.Attention", "heads = self.core(q, k, v)",
        "heads = self.core(q, *(x.repeat_interleave(self.per_group, 1) for x in (k, v)))", "arguments"),
    "f twice": (
        "tensor.Attention", "qkv = self.qkv(x)", "qkv = self.qkv(copy_to_ranks(x, self.qkv.group))", "gradient"),
    "numbers in the padding": (
        "tensor.VocabEmbedding", "F.pad(weight, (0, 0, 0, -len(weight) % group.size()))",
        "torch.cat([weight, torch.ones(-len(weight) % group.size(), weight.shape[1], dtype=weight.dtype)])",
        "gradient"),
    "tokens changed": (
        "tensor.VocabEmbedding", "local = tokens - self.group.rank() * len(self.weight)",
        "local = tokens.sub_(self.group.rank() * len(self.weight))", "output"),
    "logits changed": (
        "tensor.vocab_cross_entropy", "logits = logits - largest[..., None]", "logits.sub_(largest[..., None])",
        "output"),
    "only -100 is ignored": (
        "tensor.vocab_cross_entropy", "targets == ignore_index", "targets == -100", "output"),
    "nobody waits": ("tensor.OverlappedColumnLinear", "work.wait()", "pass", "gradient"),
    "a ColumnLinear": (
        "tensor.OverlappedColumnLinear", "return _OverlappedLinear.apply(x, self.weight, self.bias, self.group)",
        "return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)", "overlap"),
}  # fmt: skip

RAISING = {
    "no dim": ("RowLinear", "group, dim=1", "group"),
    "dim 0": ("RowLinear", "dim=1", "dim=0"),
    "a split bias": ("RowLinear", "bias.clone()", "shard(bias, group)"),
    "no super": ("RowLinear", "        super().__init__()\n", ""),
}


def verdict_on(name: str, old: str, new: str):
    assert old in TEXTS[name]
    text = HEAD + TEXTS[name].replace(old, new)
    return evaluate(f"tensor.{name}", Source((("cell [7]", text),), name))


@pytest.mark.parametrize("name", TEXTS)
def test_without_the_mistake_each_is_accepted(name):
    """The programs that the others are made of get every point, so what they lack is the mistake's."""
    verdict = verdict_on(name, TEXTS[name], TEXTS[name])
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_solution_stays_rejected(mistake):
    """Each fails at the property that it breaks."""
    name, old, new, broken = WRONG[mistake]
    verdict = verdict_on(name, old, new)
    assert broken in [finding.property for finding in verdict.findings if finding.passed is False], str(verdict)


@pytest.mark.parametrize("mistake", SUBTLY_WRONG)
def test_the_librarys_text_with_a_mistake_is_rejected(mistake):
    """Each fails at the property that it breaks, where the outcome alone is right too."""
    exercise, old, new, broken = SUBTLY_WRONG[mistake]
    where = definition(exercise)
    assert old in where.source
    text = LIBRARY + where.source.replace(old, new)
    verdict = evaluate(exercise, Source((("cell [7]", text),), where.name))
    assert broken in [finding.property for finding in verdict.findings if finding.passed is False], str(verdict)


@pytest.mark.parametrize("mistake", RAISING)
def test_a_solution_that_raised_is_not_explained_by_one_that_ran(mistake):
    """No hint of another mistake stands beside an error, and no line of the library or of the check below it."""
    verdict = verdict_on(*RAISING[mistake])
    assert verdict.points < verdict.max_points and verdict.misconception is None, str(verdict)
    assert "/lib/fivefold/" not in str(verdict) and "/checks/" not in str(verdict), str(verdict)


def test_lines_of_the_library_are_not_shown():
    """Where a solution is built on the library's pieces, the table has the solution's own lines."""
    verdict = verdict_on("RowLinear", "dim=1))", "dim=1) * 2)")
    shown = str(verdict) + "".join(verdict.folded.values())
    assert "all_reduce" in shown and "cell [7] line" in shown
    assert "fivefold" not in shown.replace("fivefold.tensor", "") and "autograde" not in shown, shown
