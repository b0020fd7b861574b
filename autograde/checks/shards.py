"""What checks of ZeRO share: shards of odd sizes over unequal groups, and AdamW in one process beside them.

The optimizer's `eps` is large here: with a small one AdamW divides a gradient by its own size, and a gradient that is
scaled goes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fivefold.runtime.marks import now
from fivefold.zero import Shard
from torch import Tensor, nn

from autograde.checks.among import Among

ADAMW: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 0.3, "weight_decay": 0.1}
RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Shares(Among):
    """Shards of parameters of these shapes; `everyone` are the numbers of those that are over all ranks of the world,
    the others are over the rank's group. `ready` have their gradient already, as after `reduce_gradients`.

    `without` are (shard, parameter) pairs that have no gradient on odd ranks.
    """

    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    everyone: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    without: tuple[tuple[int, int], ...] = ()
    steps: int = 2
    dtype: str = "float64"

    def __str__(self) -> str:
        counts = " and ".join(str(self.size(i)) for i in range(len(self.shapes)))
        wide = "" if self.dtype == "float64" else f", {self.dtype}"
        ready = ", gradients reduced already" if self.ready else ""
        return f"{super().__str__()}, shards of {counts} parameters{wide}{ready}"

    def size(self, i: int) -> int:
        """Elements of shard i."""
        return sum(math.prod(shape) for shape in self.shapes[i])

    def ranks(self, i: int, rank: int) -> tuple[int, ...]:
        """The ranks that share shard i with `rank`."""
        return tuple(range(self.world_size)) if i in self.everyone else self.peers(rank)

    def length(self, i: int, rank: int) -> int:
        """Elements of a piece of shard i, with padding."""
        return -(-self.size(i) // len(self.ranks(i, rank)))

    def values(self, i: int, rank: int) -> list[Tensor]:
        """The parameters of shard i: equal on all ranks that share it."""
        return self._random(900 + 7 * i + self.ranks(i, rank)[0], self.shapes[i])

    def gradients(self, i: int, rank: int, step: int) -> list[Tensor | None]:
        """Those of one rank; small whole numbers, whose sums are exact in half precision, where dtype is that."""
        grads = self._random(100 * step + 10 * i + rank, self.shapes[i])
        if self.dtype != "float64":
            grads = [(2 * grad).round().clamp(-4, 4) for grad in grads]
        missing = [k for shard, k in self.without if shard == i] if rank % 2 else []
        return [None if k in missing else grad for k, grad in enumerate(grads)]

    def summed(self, i: int, rank: int, step: int) -> list[Tensor]:
        """Sums over the ranks that share shard i; zero where nobody has a gradient."""
        total = [torch.zeros_like(value) for value in self.values(i, rank)]
        for peer in self.ranks(i, rank):
            for k, grad in enumerate(self.gradients(i, peer, step)):
                total[k] += 0 if grad is None else grad
        return total

    def pieces(self, i: int, tensors: Sequence[Tensor], rank: int) -> Tensor:
        """The piece of `rank` of tensors laid out one after the other, padded with zeros."""
        n, length = len(self.ranks(i, rank)), self.length(i, rank)
        flat = torch.cat([t.flatten() for t in tensors])
        flat = torch.cat([flat, flat.new_zeros(n * length - len(flat))])
        return flat.view(n, length)[self.ranks(i, rank).index(rank)].clone()

    def trained(self, i: int, rank: int) -> list[list[Tensor]]:
        """The parameters of shard i after each step of torch's AdamW in one process, in float32 or wider."""
        kind = getattr(torch, self.dtype)
        wide = [nn.Parameter(v.to(torch.promote_types(kind, torch.float32))) for v in self.values(i, rank)]
        optimizer, found = torch.optim.AdamW(wide, lr=RATE, **ADAMW), []
        for step in range(self.steps):
            for p, grad in zip(wide, self.summed(i, rank, step), strict=True):
                p.grad = grad.to(p.dtype)
            optimizer.step()
            found.append([p.detach().clone().to(kind) for p in wide])
        return found

    def _random(self, what: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10_000 * self.seed + what)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [t.to(getattr(torch, self.dtype)) for t in tensors]


def shards_of(case: Shares, group: dist.ProcessGroup) -> list[Shard]:
    """This rank's shards, with the parameters in them."""
    rank = dist.get_rank()
    return [
        Shard(
            [nn.Parameter(v) for v in case.values(i, rank)],
            dist.group.WORLD if i in case.everyone else group,
            **ADAMW,
        )
        for i in range(len(case.shapes))
    ]


@contextmanager
def measured() -> Iterator[dict[str, int]]:
    """Measure what runs inside; afterwards the dict has the peaks of what this rank held, in bytes.

    Only what needs it is measured: other cases of the same check can then share a run.
    """
    from fivefold.runtime.meter import Meter  # loads much that a case without it can do without

    recorder, held = now.recorder, dict[str, int]()
    with Meter(recorder) as meter:
        yield held
    now.recorder = recorder
    held |= {name: getattr(meter.memory, name) for name in ("parameters", "gradients", "optimizer")}
