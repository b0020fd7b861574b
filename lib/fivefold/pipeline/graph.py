"""The graph that autograd has built of one forward: where weights enter it, and what its operations keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fivefold.runtime.saved import Kept


@dataclass
class Entrance:
    """An operation where weights enter the graph.

    Given the gradients of its results, it can be asked for the gradients of these weights alone.
    """

    results: list[GradientEdge]
    weights: list[Tensor]


@dataclass
class Parts:
    """A graph taken apart by what each half of a split backward has to do in it."""

    entrances: list[Entrance]  # from the output towards the input
    early: list[Tensor]  # weights whose gradients come with that of the input, or not without computing it again
    passed: list[Node]  # operations that have nothing left to do once the gradient of the input is known


def take_apart(output: Tensor | GradientEdge, input: Tensor | None) -> Parts:
    """Follow the graph from `output` towards `input`, and find where weights enter, a weight being any other leaf.

    A weight enters at the first operation where it meets something else; what is made of it alone, such as its
    transpose, or the rows that an embedding looks up in it, is on its side. Its gradient is an early one where it
    enters at several operations, since one of them may lie behind the other, or at one that cannot be split.
    """
    results, enters = follow(output if isinstance(output, GradientEdge) else get_gradient_edge(output), input)
    entrances: dict[Node, Entrance] = {}
    early = []
    for weight, nodes in enters.items():
        if len(nodes) > 1 or not can_be_split(nodes[0]):
            early.append(weight)
        else:
            entrances.setdefault(nodes[0], Entrance(results[nodes[0]], [])).weights.append(weight)
    return Parts(list(entrances.values()), early, [node for node in results if node not in entrances])


def release(node: Node) -> None:
    """Free what an operation keeps for its backward, which must not run again."""
    for saved in _saved_by(node):
        if isinstance(saved.data, Kept):
            saved.data.release()
        elif isinstance(saved.data, Tensor) and saved.data.dim():  # a number may be one of Python's, wrapped
            saved.register_hooks(lambda tensor: None, lambda nothing: nothing)  # keep None in the tensor's place


def follow(top: GradientEdge, input: Tensor | None) -> tuple[dict[Node, list[GradientEdge]], dict[Tensor, list[Node]]]:
    """The gradients that arrive at each operation on the way from the output, and where each weight enters."""
    results = {top.node: [top]}
    enters: dict[Tensor, list[Node]] = {}
    queue = [top.node]
    for node in queue:  # grows as the graph is followed
        for below, number in node.next_functions:
            if below is None:
                continue
            leaf = _only_leaf(below)
            if leaf is not None and leaf is not input:
                enters.setdefault(leaf, []).append(node)
                continue
            if below not in results:
                results[below] = []
                queue.append(below)
            if GradientEdge(below, number) not in results[below]:
                results[below].append(GradientEdge(below, number))
    return results, enters


def _only_leaf(node: Node) -> Tensor | None:
    """The leaf at the end of a chain of operations that nothing else enters; None where something does."""
    while not hasattr(node, "variable"):
        below = [child for child, _ in node.next_functions if child is not None]
        if len(below) != 1:
            return None
        node = below[0]
    return node.variable


def can_be_split(node: Node) -> bool:
    """Whether the operation leaves out of its backward what it is not asked for, and needs nothing computed again.

    An autograd.Function computes, and communicates, whatever its author has written. Where saved tensors are in other
    hands, as in `torch.utils.checkpoint`, each use may mean one more recomputation.
    """
    if isinstance(node, BackwardCFunction):
        return False
    return all(saved.data is None or isinstance(saved.data, Tensor | Kept) for saved in _saved_by(node))


def _saved_by(node: Node) -> Iterator[Any]:
    for name in _names_of_saved(type(node)):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, tuple) else (saved,)


@cache
def _names_of_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
