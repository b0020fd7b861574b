"""What checks of recomputation do on the ranks: go forward and backward, and see what is kept, and what is drawn."""

from __future__ import annotations

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

from autograde.checks.tokens import Tokens

DROP = 0.3


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
        out = wrapped(*inputs)
    alive, drawn = sum(not storage.expired() for storage in made), torch.rand(4)
    # from here on the output itself is needed by nobody
    storage, output, out = StorageWeakRef(out.untyped_storage()), out.detach().clone(), out * 1
    output_alive = not storage.expired()
    also = [x for x in inputs if x.requires_grad]  # used elsewhere too, as the input of a layer is
    with phase("backward"):
        torch.autograd.backward([out, *also], [case.random(20, *out.shape), *map(torch.ones_like, also)])
    grads = {f"{name}.grad": x.grad for name, x in zip("qkv", leaves, strict=True)}
    found = {"output": output, "gradient": grads, "alive": alive, "output alive": output_alive}
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
    with phase("forward"):
        out = solution(block)(x * 1, 0.5)
    drawn = torch.rand(4)
    out.backward(case.random(20, *out.shape))
    grads = {f"{name}.grad": p.grad for name, p in [("x", x), *block.named_parameters()]}
    return {"output": out.detach(), "gradient": grads, "drawn": [drawn, torch.rand(4)]}


def flops(rank_ledger: Any, name: str) -> int:
    """The operations of a phase."""
    return sum(getattr(e, "flops", 0) for e in rank_ledger.entries if getattr(e, "phase", "") == name)
