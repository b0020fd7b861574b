"""Wrong solutions of lesson 05 beside its misconceptions: each loses the points of the property that it breaks."""

from __future__ import annotations

import pytest

from autograde.check import evaluate_alone
from autograde.misconception import Misconception

RING, PASS = "context.ring_attention", "arrive = pass_on(arrive() + dkv, ctx.group)"
WRONG = {
    "a ring that waits in backward alone": (
        RING, PASS, "there = pass_on(arrive() + dkv, ctx.group)()\narrive = partial(torch.clone, there)", {"overlap"},
    ),
    "gradients that travel in half of their precision": (
        RING, PASS, "arrive = pass_on((arrive() + dkv).float(), ctx.group)", {"gradient", "traffic"},
    ),
    "gradients that are averaged": (
        RING, "dk, dv = own + arrive()", "dk, dv = (own + arrive()) / ctx.group.size()", {"gradient"},
    ),
    "an incoming gradient that is overwritten": (
        RING, "dk, dv = own + arrive()", "dk, dv = own + arrive()\ndout.zero_()", {"output"},
    ),
    "the library's other ring": (
        RING,
        "return _RingAttention.apply(q, k, v, group, None if positions is None else positions.to(q.device))",
        "from fivefold.context import fast_ring_attention\nreturn fast_ring_attention(q, k, v, group, positions)",
        {"output", "traffic"},
    ),
    "a merge in place": (
        "attention.merge", "return weight_a * out_a + weight_b * out_b, lse",
        "if out_a.dtype == lse.dtype:\n    return out_a.mul_(weight_a).add_(weight_b * out_b), lse\n"
        "return weight_a * out_a + weight_b * out_b, lse",
        {"output", "large", "nothing"},
    ),
    "work in floating point": (
        "context.causal_work", "return (positions + 1).sum(dim=1)", "return (positions + 1.0).sum(dim=1)",
        {"contiguous", "zigzag"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("exercise", "old", "new", "failing"), WRONG.values(), ids=WRONG)
def test_a_wrong_solution_fails_where_it_is_wrong(exercise, old, new, failing):
    """And nowhere else, unless the run ends there."""
    item = Misconception(exercise=exercise, name="wrong", hint="This looks like: it is wrong. Why?", old=old, new=new)
    verdict = evaluate_alone(exercise, item.program())
    assert {finding.property for finding in verdict.findings if finding.passed is False} == failing, str(verdict)


def test_scores_that_are_joined_as_they_come_are_too_much_memory():
    """No block is kept, but a tensor that grows with the sequence is."""
    source = """
    def online_softmax(blocks):
        scores = values = None
        for block in blocks:
            scores = block[0] if scores is None else torch.cat((scores, block[0]), dim=-1)
            values = block[1] if values is None else torch.cat((values, block[1]), dim=-2)
        return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ values, torch.logsumexp(scores, dim=-1)
    """
    exercise = "attention.online_softmax"
    item = Misconception(exercise=exercise, name="wrong", hint="This looks like: it is wrong. Why?", source=source)
    verdict = evaluate_alone(exercise, item.program())
    assert [finding.property for finding in verdict.findings if finding.passed is False] == ["memory"], str(verdict)
