"""Recomputation: keep less for backward, and compute it again there (Chen et al. 2016; Korthikanti et al. 2022).

Whatever draws random numbers must draw the same again, or dropout would zero other elements in backward than it did in
forward. So the random state at the beginning is kept, and put back for the second computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from fivefold.tensor import Core


class _Recomputed(torch.autograd.Function):
    """Keeps the inputs and the random state; backward computes the output again, and goes back through that."""

    @staticmethod
    def forward(ctx, core: Core, *inputs: Tensor) -> Tensor:
        ctx.core, ctx.random_state = core, torch.get_rng_state()
        ctx.devices, ctx.device_states = get_device_states(*inputs)  # those of GPUs
        ctx.save_for_backward(*inputs)
        return core(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        inputs = [x.detach().requires_grad_(needed) for x, needed in wanted]
        with torch.random.fork_rng(ctx.devices), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            set_device_states(ctx.devices, ctx.device_states)
            out = ctx.core(*inputs)
        torch.autograd.backward(out, grad)
        return None, *(x.grad for x in inputs)


def selective(core: Core) -> Core:
    """The attention core that keeps q, k and v for backward, and nothing of what it computes from them.

    `core(q, k, v)` -> out, tensors of any shapes; it has no parameters. Returns a function with the same arguments, the
    same result and the same gradients. Inside, forward builds no graph: scores, probabilities and dropout masks are
    freed at once. Backward computes `core` once more from q, k and v, with the random state that the first computation
    began with, so that masks are the same; the random state outside is left as it is. The core's 5·a·s²·b bytes a layer
    are no longer kept; it costs the core's forward FLOPs once more (Korthikanti et al. 2022, section 5).
    """

    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Recomputed.apply(core, q, k, v)

    return recomputed


def full(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The block, parameters and communication and all, that keeps its input alone and is computed again in backward.

    `block(x, *context)` -> out. Returns a function with the same arguments, result, gradients and random numbers. It
    keeps 2·s·b·h bytes a layer in half precision (a t-th of it where x is this rank's tokens), and costs one more
    forward: about a third more FLOPs. The block's forward communication is made a second time too.
    """

    def recomputed(x: Tensor, *context: Any) -> Tensor:
        return checkpoint(block, x, *context, use_reentrant=False)

    return recomputed
