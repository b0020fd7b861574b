"""Misconceptions of lesson 03: the column layer that hides its all-reduce."""

from __future__ import annotations

from autograde.misconception import Misconception

START = "work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)"

OVERLAPPED_COLUMN_LINEAR = [
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="weight_first",
        hint="This looks like: the weight's gradient is computed first, and then the all-reduce starts. "
        "What is left to do while the sum is on its way?",
        old="""
        x_grad, work = None, None
        if ctx.needs_input_grad[0]:
            x_grad = grad @ weight  # (..., in)
            work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        grad_rows = grad.flatten(0, -2)  # (tokens, out/t)
        weight_grad = grad_rows.T @ x.flatten(0, -2)
        """,
        new="""
        x_grad, work = None, None
        grad_rows = grad.flatten(0, -2)  # (tokens, out/t)
        weight_grad = grad_rows.T @ x.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            x_grad = grad @ weight  # (..., in)
            work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        """,
    ),
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="waited_for_at_once",
        hint="This looks like: the all-reduce is started and at once waited for, as a call without async_op does. "
        "Who needs the sum, and when?",
        old=START,
        new="dist.all_reduce(x_grad, group=ctx.group)",
    ),
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="never_waited_for",
        hint="This looks like: the all-reduce is started, and backward returns before the sum is there. "
        "What does `async_op=True` return, and what is it for?",
        old="""
        if work is not None:
            work.wait()
        """,
        new="",
    ),
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="not_summed",
        hint="This looks like: the gradient of the input is that of this rank's columns alone. "
        "Whose columns did the same input also meet?",
        old=START,
        new="",
    ),
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="whole_world",
        hint="This looks like: the all-reduce runs over all ranks, whatever the group. Which ranks share this layer?",
        old=START,
        new="work = dist.all_reduce(x_grad, async_op=True)",
    ),
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="summed_for_nobody",
        hint="This looks like: the input's gradient is computed and summed also where nobody asks for it. "
        "What tells a backward which of its inputs need a gradient?",
        old="if ctx.needs_input_grad[0]:",
        new="if True:",
    ),
    Misconception(
        exercise="tensor.OverlappedColumnLinear",
        name="weight_summed_too",
        hint="This looks like: the gradient of the weight is added up over the ranks as well. "
        "Does any other rank hold these rows of the weight?",
        old="bias_grad = grad_rows.sum(0) if ctx.needs_input_grad[2] else None",
        new="""
        dist.all_reduce(weight_grad, group=ctx.group)
        bias_grad = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        """,
    ),
]
