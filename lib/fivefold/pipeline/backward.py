"""The backward of a stage in two halves: the gradient that another rank waits for, and those that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.pipeline.graph import release, take_apart


def _add_gradients(edges: Sequence[GradientEdge], grads: Sequence[Tensor | None], weights: list[Tensor] | None) -> None:
    """Go back from those edges that a gradient has come to, as far as these weights; None: as far as the graph goes."""
    known = [i for i, grad in enumerate(grads) if grad is not None]
    if known:
        torch.autograd.backward([edges[i] for i in known], [grads[i] for i in known], inputs=weights)


def split_backward(
    output: Tensor | GradientEdge, input: Tensor | None, grad: Tensor | None = None
) -> tuple[Tensor | None, Callable[[], None]]:
    """The first half of backward now, the gradient of the input; the second half later, the gradients of the weights.

    output: what a stage made, or its gradient edge, with the graph behind it. input: the leaf that it was made of;
    None, or one that needs no gradient, on the first stage. grad: the gradient of the output, None for a loss. Weights
    are all other leaves.
    Returns the gradient of the input, or None, and a function that adds to the `.grad` of every weight; call it once.
    After both halves all is as after `torch.autograd.backward(output, grad)`: nothing is computed twice, the second
    half communicates nothing that the first has, and a weight used twice gets its gradient of each use once.
    In the first half, gradients arrive at every operation where a weight enters the graph, which `take_apart` knows.
    They are kept, and so is what those operations saved; what all others saved is released. In the second half each of
    them is asked for the gradients of its weights alone. Weights that `take_apart` calls early get theirs in the first.
    Qi et al. 2023, Zero bubble pipeline parallelism, section 1.
    """
    parts = take_apart(output, input)
    inputs = [] if input is None or not input.requires_grad else [get_gradient_edge(input)]
    early = [get_gradient_edge(weight) for weight in parts.early]
    wanted = [*inputs, *early, *(edge for entrance in parts.entrances for edge in entrance.results)]
    arrived = iter(torch.autograd.grad(output, wanted, grad, retain_graph=True, allow_unused=True) if wanted else ())
    input_grad = next(arrived) if inputs else None
    _add_gradients(early, [next(arrived) for _ in early], None)
    owed = [(entrance, [next(arrived) for _ in entrance.results]) for entrance in parts.entrances]
    for node in parts.passed:
        release(node)

    def weight_gradients() -> None:
        while owed:
            entrance, grads = owed.pop(0)
            _add_gradients(entrance.results, grads, entrance.weights)

    return input_grad, weight_gradients
