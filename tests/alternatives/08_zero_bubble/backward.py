"""Right solutions of lesson 08, the backward in two halves, that are written in another way than the library's."""

from __future__ import annotations

import torch
from fivefold.pipeline.graph import Entrance, Parts, can_be_split, follow, release, take_apart
from torch.autograd.graph import GradientEdge, get_gradient_edge


def _add(weights, grads):
    for weight, grad in zip(weights, grads, strict=True):
        if grad is not None:
            weight.grad = grad.clone() if weight.grad is None else weight.grad + grad


def split_backward__by_hand(output, input, grad=None):
    """`torch.autograd.grad` in both halves, and additions written out; dictionaries in the place of iterators."""
    parts = take_apart(output, input)
    edges = {("entrance", i, j): e for i, way in enumerate(parts.entrances) for j, e in enumerate(way.results)}
    edges |= {("early", i, 0): weight for i, weight in enumerate(parts.early)}
    if input is not None and input.requires_grad:
        edges["input", 0, 0] = input
    grads = torch.autograd.grad(output, list(edges.values()), grad, retain_graph=True, allow_unused=True)
    found = dict(zip(edges, grads, strict=True))
    _add(parts.early, [found["early", i, 0] for i in range(len(parts.early))])
    for node in parts.passed:
        release(node)
    passing = []
    for i, way in enumerate(parts.entrances):
        pairs = [(edge, found["entrance", i, j]) for j, edge in enumerate(way.results)]
        passing.append((way.weights, [(edge, grad) for edge, grad in pairs if grad is not None]))

    def later():
        while passing:
            weights, pairs = passing.pop()  # the other way round: from the input to the output
            if pairs:
                ends, incoming = zip(*pairs, strict=True)
                _add(weights, torch.autograd.grad(ends, weights, incoming, allow_unused=True))

    return found.get(("input", 0, 0)), later


class _Debt:
    """One weight gradient that is owed, with what it takes to compute it."""

    def __init__(self, entrance, grads):
        self.entrance, self.grads = entrance, grads

    def pay(self):
        here = [i for i, grad in enumerate(self.grads) if grad is not None]
        if here:
            results = [self.entrance.results[i] for i in here]
            torch.autograd.backward(results, [self.grads[i] for i in here], inputs=self.entrance.weights)
        self.entrance = self.grads = None


def split_backward__debts(output, input, grad=None):
    """Objects that are paid, one after the other; the input's gradient is asked for last."""
    parts, leaf = take_apart(output, input), input if input is not None and input.requires_grad else None
    ends = [edge for entrance in parts.entrances for edge in entrance.results]
    wanted = ends + parts.early + ([leaf] if leaf is not None else [])
    grads = list(torch.autograd.grad(output, wanted, grad, retain_graph=True, allow_unused=True))
    input_grad = grads.pop() if leaf is not None else None
    for weight in reversed(parts.early):
        add = grads.pop()
        if add is not None:
            torch.autograd.backward([get_gradient_edge(weight)], [add])
    debts = []
    for entrance in parts.entrances:
        debts.append(_Debt(entrance, grads[: len(entrance.results)]))
        del grads[: len(entrance.results)]
    list(map(release, parts.passed))

    def later():
        for debt in debts:
            debt.pay()

    return input_grad, later


def take_apart__two_passes(output, input):
    """First which weights are early, then an entrance for each of the others; grouped by a plain loop."""
    top = output if isinstance(output, GradientEdge) else get_gradient_edge(output)
    results, enters = follow(top, input)
    early = [w for w, nodes in enters.items() if len(nodes) != 1 or not can_be_split(nodes[0])]
    late = [(nodes[0], w) for w, nodes in enters.items() if not any(w is other for other in early)]
    entrances = []
    for node in results:
        weights = [w for at, w in late if at is node]
        if weights:
            entrances.append((node, Entrance(list(results[node]), weights)))
    there = [node for node, _ in entrances]
    return Parts([entrance for _, entrance in entrances], early, [n for n in results if n not in there])


class take_apart__class:  # noqa: N801
    """A class in the place of a function; the entrances are found from the operations, not from the weights."""

    def __new__(cls, output, input=None):
        results, enters = follow(get_gradient_edge(output) if isinstance(output, torch.Tensor) else output, input)
        alone = {w: nodes[0] for w, nodes in enters.items() if len(nodes) == 1 and can_be_split(nodes[0])}
        by_node = {node: [w for w, at in alone.items() if at is node] for node in results}
        entrances = [Entrance(results[node], weights) for node, weights in by_node.items() if weights]
        passed = [node for node, weights in by_node.items() if not weights]
        return Parts(entrances=entrances, early=[w for w in enters if w not in alone], passed=passed)
