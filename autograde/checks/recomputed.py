"""What checks of recomputation do on the ranks: go forward and backward, and see what is kept, and what is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.runtime.ledger import phase
from fivefold.tensor import MLP, causal_attention
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autograde.checks.tokens import Tokens

DROP = 0.3


class Made(TorchDispatchMode):
    """Notes the floating-point storages that are made inside: `held` tells how many bytes of them are still there.

    Whoever holds them: what is saved for backward, a list on `ctx`, a variable of the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.is_floating_point():
                storage = StorageWeakRef(result.untyped_storage())
                if storage not in given:  # no view, and nothing that is changed in place
                    self.made[storage] = result.untyped_storage().nbytes()
        return results

    def held(self, besides: Tensor, wanted: int) -> int:
        """In bytes, without `besides`; what is more than `wanted` is looked at again for a while, since gloo's threads
        let go of a tensor a little after its program."""
        apart, until = StorageWeakRef(besides.untyped_storage()), time.monotonic() + 0.5
        while True:
            held = sum(size for storage, size in self.made.items() if storage != apart and not storage.expired())
            if held <= wanted or time.monotonic() > until:
                return held
            time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Passes(Tokens):
    """One pass forward and one backward, of an attention core or of a block. `frozen` inputs need no gradient."""

    heads: int = 1
    frozen: tuple[int, ...] = ()

    def qkv(self) -> list[Tensor]:
        """Queries of all heads, keys and values of half as many: (b, heads, s, h)."""
        shapes = [(self.b, heads, self.s, self.h) for heads in (self.heads, self.heads // 2, self.heads // 2)]
        return [self.random(i, *shape).requires_grad_(i not in self.frozen) for i, shape in enumerate(shapes)]

    def weights(self) -> list[Tensor | None]:
        """Those of an MLP, in the order in which it takes them."""
        shapes = [(4 * self.h, self.h), (4 * self.h,), (self.h, 4 * self.h), (self.h,)]
        return [self.random(10 + i, *shape) for i, shape in enumerate(shapes)]


def core(q: Tensor, k: Tensor, v: Tensor, made: list | None = None) -> Tensor:
    """An attention core with dropout; what it makes on the way is noted in `made`."""

    def drop(probabilities: Tensor) -> Tensor:
        dropped = F.dropout(probabilities, DROP)
        if made is not None:
            made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (probabilities, dropped))
        return dropped

    return causal_attention(q, k, v, drop)


def try_selective(solution: Callable, case: Passes) -> dict:
    """The core through `solution`, forward and backward. Its inputs come from a graph that can be gone through once."""
    made: list[StorageWeakRef] = []
    leaves, one = case.qkv(), torch.ones(1, dtype=torch.float64)
    wrapped = solution(partial(core, made=made))
    with phase("forward"):
        inputs = [x * one for x in leaves]
        with Made() as all_made:
            out = wrapped(*inputs)
    held = all_made.held(out, sum(8 * x.numel() for x in inputs))
    alive, drawn = sum(not storage.expired() for storage in made), torch.rand(4)
    # from here on the output itself is needed by nobody
    storage, output, out = StorageWeakRef(out.untyped_storage()), out.detach().clone(), out * 1
    output_alive = not storage.expired()
    also = [x for x in inputs if x.requires_grad]  # used elsewhere too, as the input of a layer is
    with phase("backward"):
        torch.autograd.backward([out, *also], [case.random(20, *out.shape), *map(torch.ones_like, also)])
    grads = {f"{name}.grad": x.grad for name, x in zip("qkv", leaves, strict=True)}
    found = {"output": output, "gradient": grads, "alive": alive, "output alive": output_alive, "held": held}
    found["times"] = len(made) // 2
    return found | {"drawn": [drawn, torch.rand(4)]}


class Residual(nn.Module):
    """x + scale · dropout(mlp(x)): a block that is split over ranks, with a context."""

    def __init__(self, mlp: Callable[[Tensor], Tensor]):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + scale * F.dropout(self.mlp(x), DROP)


def try_full(solution: Callable, case: Passes) -> dict:
    """A block through `solution`, forward and backward."""
    block = Residual(MLP(*case.weights(), dist.group.WORLD))
    x = case.random(0, case.b, case.s, case.h).requires_grad_()
    with phase("forward"), Made() as all_made:
        out = solution(block)(x * 1, 0.5)
    held, drawn = all_made.held(out, 8 * x.numel()), torch.rand(4)
    out.backward(case.random(20, *out.shape))
    grads = {f"{name}.grad": p.grad for name, p in [("x", x), *block.named_parameters()]}
    return {"output": out.detach(), "gradient": grads, "drawn": [drawn, torch.rand(4)], "held": held}


def flops(rank_ledger: Any, name: str) -> int:
    """The operations of a phase."""
    return sum(getattr(e, "flops", 0) for e in rank_ledger.entries if getattr(e, "phase", "") == name)
