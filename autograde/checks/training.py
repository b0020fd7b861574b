"""What checks of split layers do on the ranks: build the layer on its group, train it, look at what it keeps.

The judge, in `layers`, calls `train` too, for what one process gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autograde.case import Case, ranks_in_words

RATE = 0.1  # of plain gradient descent: weights after a step show a gradient that is scaled, AdamW's would hide it


@dataclass(frozen=True, kw_only=True)
class Layer(Case):
    """A layer on groups of ranks, each group with inputs of its own; a rank has 1/t of the `inner` features.

    `steps` are those of training; 0 is for what else the constructor takes: other exchanges, no bias, sizes that do not
    fit.
    """

    groups: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]  # the leading dimensions of the input
    h: int
    inner: int
    steps: int = 1

    def __str__(self) -> str:
        sizes = f"{math.prod(self.tokens)} tokens, h {self.h}, inner {self.inner}"
        many = f", {self.steps} steps" if self.steps > 1 else ""
        return f"{ranks_in_words(self.groups)}, {sizes}{many}{'' if self.steps else ', other arguments'}"

    def uneven(self) -> str:
        """In words: the size that ranks are to refuse, one larger than `inner`."""
        return f"inner {self.inner + 1}"

    def random(self, what: int, *shape: int) -> Tensor:
        """Random numbers, the same for every `what` and shape."""
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Kind:
    """A kind of layer: how it is built, and what of it a rank has.

    `whole` gives the constructor's tensors, in order, by the names that the parameters have. `cut` names the dimension
    along which ranks cut a parameter, "x" or "output"; all else is whole on every rank. `own` are exchanges to put in
    the place of the layer's.
    """

    whole: Callable[[Layer], dict[str, Tensor]]
    cut: Mapping[str, int]
    own: Mapping[str, Callable]

    def batches(self, case: Layer, place: int) -> list[tuple[Tensor, Tensor]]:
        """The whole inputs of the group at `place`, one a step, each with the gradient of the whole output."""
        width, out = (case.inner if self.cut.get(name) == -1 else case.h for name in ("x", "output"))
        numbers = [100 + 10 * step + place for step in range(max(case.steps, 1))]
        return [(case.random(n, *case.tokens, width), case.random(n + 300, *case.tokens, out)) for n in numbers]

    def piece(self, name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
        """What the `rank`-th of `size` ranks has of a tensor: "weight", "weight.grad", "weight after 2 steps"."""
        dim = self.cut.get(name.removeprefix("the ").split(" ")[0].removesuffix(".grad"))
        return tensor if dim is None else tensor.chunk(size, dim)[rank].clone()


def try_layer(solution: Any, case: Layer, kind: Kind) -> dict:
    """Build the layer on this rank's group and train it: the bytes that it keeps, which of them are not its own but
    those of a tensor that it was given, and what `train` returns."""
    group, place = group_of(case.groups)
    rank, size = group.rank(), group.size()
    batches = [
        (kind.piece("x", x, rank, size), kind.piece("output", incoming, rank, size))
        for x, incoming in kind.batches(case, place)
    ]
    if not case.steps:
        return _other_arguments(solution, case, kind, group, batches[0][0])
    whole = kind.whole(case)
    layer = solution(*whole.values(), group)
    kept = kept_storages(layer)
    shared = [name for name, tensor in whole.items() if tensor.untyped_storage().data_ptr() in kept]
    return {"kept": sum(kept.values()), "shared": shared} | train(layer, dict(layer.named_parameters()), batches)


def group_of(groups: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup, int]:
    """This rank's group, and that group's place among `groups`. Every rank makes all of them, in the same order."""
    made = [dist.new_group(list(ranks)) for ranks in groups]
    place = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[place], place


def train(
    forward: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Train on each batch, an input and the gradient of the output for it, by plain gradient descent.

    Returns {"output": …, "gradient": …}: the first step's output; its gradients, of the input and of every parameter
    that has one. With more steps "gradient" also holds the last gradient of the input and the parameters after it, for
    what only a second step shows: a layer that computes with weights which no step changes. An output that is not of
    its gradient's shape ends the training.
    """
    output, gradients = None, {}
    for x, incoming in batches:
        x = x.clone().requires_grad_()
        for parameter in parameters.values():
            parameter.grad = None
        y = forward(x)
        output = y.detach() if output is None else output
        if y.shape != incoming.shape:
            break
        y.backward(incoming)
        found = {"x": x} | dict(parameters)
        gradients = gradients or {f"{name}.grad": p.grad.clone() for name, p in found.items() if p.grad is not None}
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    if len(batches) > 1:
        gradients[f"x.grad of step {len(batches)}"] = x.grad
        gradients |= {f"{name} after {len(batches)} steps": p.detach().clone() for name, p in parameters.items()}
    return {"output": {"the output": output}, "gradient": gradients}


def kept_storages(module: nn.Module) -> dict[int, int]:
    """Bytes behind the tensors that a module and those inside it hold, by address; a view counts with all behind it."""
    storages = {}
    for part in module.modules():
        for tensor in _tensors(vars(part)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _other_arguments(solution: Any, case: Layer, kind: Kind, group: dist.ProcessGroup, x: Tensor) -> dict:
    """What else the constructor takes, without biases.

    The output with exchanges of our own and how often they were called, the output and the parameters without, and how
    a size that cannot be cut is refused.
    """
    plain = [tensor if tensor.dim() > 1 else None for tensor in kind.whole(case).values()]
    uneven = kind.whole(replace(case, inner=case.inner + 1)).values()
    calls = dict.fromkeys(kind.own, 0)

    def counted(name: str) -> Callable:
        def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
            calls[name] += 1
            return kind.own[name](x, group)

        return exchange

    layer = solution(*plain, group)
    return {
        "own": solution(*plain, group, **{name: counted(name) for name in kind.own})(x).detach(),
        "calls": calls,
        "plain": layer(x).detach(),
        "parameters": sorted(name for name, _ in layer.named_parameters()),
        "refused": _refusal(lambda: solution(*uneven, group)),
    }


def _refusal(build: Callable[[], Any]) -> str:
    """The name of the exception that `build` raises, empty where it raises none."""
    try:
        build()
    except Exception as error:
        return type(error).__name__
    return ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, list | tuple | set):
        yield from (tensor for item in value for tensor in _tensors(item))
