"""What the check of a mixture-of-experts layer does on the ranks, and what one process with every expert gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import mesh
from fivefold.layout import Layout
from fivefold.runtime.ledger import phase
from fivefold.sequence import gather_tokens, scatter_tokens
from torch import Tensor

from autograde.case import Case
from autograde.checks.training import RATE, kept_storages
from autograde.verdict import numbered

SUMMED = "the check sums gradients"
CUT = {"w_in": 1, "w_out": 2}  # the dimension that tensor parallelism cuts; experts are dimension 0 of both


@dataclass(frozen=True, kw_only=True)
class Mixture(Case):
    """A layer on a layout. `sizes` are (b, s) of each place on DP x CP; its tensor-parallel ranks share the tokens.

    `idle` are experts that no token chooses. `split`: tokens are split over the tensor-parallel ranks, as in sequence
    parallelism.
    """

    layout: str
    num_experts: int
    top_k: int
    sizes: tuple[tuple[int, int], ...]
    factor: float | None = None
    balance: float = 0.0
    idle: tuple[int, ...] = ()
    split: bool = False
    steps: int = 2
    h: int = 4
    inner: int = 6

    def __str__(self) -> str:
        tokens = " ".join(str(b * s) for b, s in self.sizes)
        words = f"{numbered(self.world_size, 'rank')}, {self.layout}, {self.num_experts} experts, top {self.top_k}"
        words += f", tokens {tokens}{' split over tp' if self.split else ''}"
        words += f", nobody chooses {' '.join(map(str, self.idle))}" if self.idle else ""
        return words + (f", capacity factor {self.factor:g}" if self.factor is not None else "")

    @property
    def degrees(self) -> Layout:
        return Layout.parse(self.layout)

    def numbers(self, what: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def weights(self) -> dict[str, Tensor]:
        router = self.numbers(1, self.num_experts, self.h) / 2
        router[list(self.idle), 0] = -60.0
        shapes = (self.num_experts, self.inner, self.h), (self.num_experts, self.h, self.inner)
        return {"router": router, "w_in": self.numbers(2, *shapes[0]), "w_out": self.numbers(3, *shapes[1])}

    def batch(self, step: int, place: int) -> tuple[Tensor, Tensor]:
        """The input of a place on DP x CP, and the gradient of its output; the input's first feature is never small."""
        b, s = self.sizes[place]
        x, incoming = (self.numbers(what + 20 * step + place, b, s, self.h) for what in (100, 200))
        x[..., 0] = 1 + x[..., 0].abs()
        return x, incoming

    def place(self, rank: int) -> int:
        """A rank's place on DP x CP."""
        at, degrees = mesh.coordinates(rank, self.degrees), self.degrees
        return at.dp * degrees.cp + at.cp

    def own(self, rank: int, tokens: Tensor) -> Tensor:
        """What a rank has of (b, s, …)."""
        return tokens.chunk(self.degrees.tp, 1)[rank % self.degrees.tp] if self.split else tokens

    def piece(self, rank: int, name: str, whole: Tensor) -> Tensor:
        """What a rank has of a parameter, or of its gradient."""
        if name not in CUT:
            return whole
        mine = whole.chunk(self.degrees.ep, 0)[self.place(rank) % self.degrees.ep]
        return mine.chunk(self.degrees.tp, CUT[name])[rank % self.degrees.tp]


def try_mixture(solution: Any, case: Mixture) -> dict:
    """Build the layer and train it; the gradients are summed here, over the right groups."""
    made, rank = mesh.make_mesh(case.degrees), dist.get_rank()
    groups = (made.dp_cp, made.tp) if case.split else (made.dp_cp,)
    options = {"enter": gather_tokens, "leave": scatter_tokens} if case.split else {}
    options |= {"capacity_factor": case.factor} if case.factor is not None else {}
    options |= {"balance_weight": case.balance} if case.balance else {}
    options |= {"balance_groups": groups} if case.balance or "traffic" in case.properties else {}
    whole = case.weights()
    layer = solution(*whole.values(), case.top_k, made.ep, made.tp, **options)
    kept = kept_storages(layer)
    shared = [name for name, tensor in whole.items() if tensor.untyped_storage().data_ptr() in kept]
    found = {"kept": sum(kept.values()), "shared": shared}
    parameters = dict(layer.named_parameters())
    over = dict.fromkeys(CUT, (made.ep_dp,)) | {"router": groups}
    for step in range(case.steps):
        x, incoming = (case.own(rank, tensor).clone() for tensor in case.batch(step, case.place(rank)))
        x.requires_grad_()
        layer.zero_grad()
        with phase(f"step {step}"):
            y = layer(x)
            found |= {f"output of step {step}": y.detach().clone()}
            if y.shape != incoming.shape:
                break
            y.backward(incoming)
        with phase(SUMMED):
            for name, parameter in parameters.items():
                for group in over.get(name, ()):
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad, group=group)
        found |= {f"x.grad of step {step}": x.grad}
        found |= {f"{name}.grad of step {step}": p.grad.clone() for name, p in parameters.items()}
        if case.balance:
            balance = getattr(layer, "balance", None)
            found["attached"] = isinstance(balance, Tensor) and balance.requires_grad
            found[f"balance of step {step}"] = balance.detach() if isinstance(balance, Tensor) else balance
        with torch.no_grad():
            for parameter in parameters.values():
                parameter -= RATE * parameter.grad
    return found


@lru_cache(maxsize=64)
def in_one_process(case: Mixture) -> tuple[list[dict[str, Tensor]], list[list[Tensor]]]:
    """For each rank the named values that `try_mixture` is to return; for each step and place, which choices were kept.

    Every expert works on every token, and what was not routed there is multiplied by 0.
    """
    whole = {name: tensor.requires_grad_() for name, tensor in case.weights().items()}
    expected: list[dict[str, Tensor]] = [{} for _ in range(case.world_size)]
    routed: list[list[Tensor]] = []
    for step in range(case.steps):
        batches = [case.batch(step, place) for place in range(len(case.sizes))]
        for tensor in whole.values():
            tensor.grad = None
        inputs = [x.requires_grad_() for x, _ in batches]
        done = [_dense(case, whole, x) for x in inputs]
        probs, chosen = (torch.cat([one[i] for one in done]) for i in (1, 2))
        loss = case.num_experts * (chosen.mean(0) / case.top_k * probs.mean(0)).sum()
        total = sum((y * incoming).sum() for (y, *_), (_, incoming) in zip(done, batches, strict=True))
        (total + case.balance * loss).backward()
        routed.append([taken for *_, taken in done])
        for rank, own in enumerate(expected):
            place = case.place(rank)
            own[f"output of step {step}"] = case.own(rank, done[place][0].detach())
            own[f"x.grad of step {step}"] = case.own(rank, inputs[place].grad)
            for name, tensor in whole.items():
                own[f"{name}.grad of step {step}"] = case.piece(rank, name, tensor.grad)
            own |= {f"balance of step {step}": loss.detach()} if case.balance else {}
        with torch.no_grad():
            for tensor in whole.values():
                tensor -= RATE * tensor.grad
    return expected, routed


def _dense(case: Mixture, whole: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output; probs, and which experts were chosen and which took the token, (T, E)."""
    flat = x.flatten(0, 1)
    probs = torch.softmax(flat @ whole["router"].T, -1)
    rows, room = probs.tolist(), [len(flat) * case.top_k] * case.num_experts
    if case.factor is not None:
        most = -(-int(4 * len(flat) * case.top_k * case.factor) // (4 * case.num_experts))
        room = [most] * case.num_experts
    ranked = [sorted(range(case.num_experts), key=lambda e, row=row: (-row[e], e)) for row in rows]
    chosen, taken = torch.zeros_like(probs), torch.zeros_like(probs)
    for k in range(case.top_k):
        for t, order in enumerate(ranked):
            chosen[t, order[k]] = 1
            if room[order[k]] > 0:
                room[order[k]] -= 1
                taken[t, order[k]] = 1
    made = [F.gelu(flat @ a.T) @ b.T for a, b in zip(whole["w_in"], whole["w_out"], strict=True)]
    out = (torch.stack(made, 1) * (probs * taken)[..., None]).sum(1)
    return out.view_as(x), probs, chosen.detach(), taken.detach()


@dataclass(frozen=True)
class Exchange:
    """Who sends how many rows to whom in one step, as `experts.expect_exchanges` asks."""

    case: Mixture
    taken: Sequence[Tensor]  # for each place on DP x CP

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @property
    def num_experts(self) -> int:
        return self.case.num_experts

    @property
    def h(self) -> int:
        return self.case.h

    def peers(self, rank: int) -> list[int]:
        return next(ranks for ranks in mesh.expert_groups(self.case.degrees) if rank in ranks)

    def sends(self, rank: int) -> list[int]:
        return [self._rows(rank, other) for other in self.peers(rank)]

    def receives(self, rank: int) -> list[int]:
        return [self._rows(other, rank) for other in self.peers(rank)]

    def _rows(self, source: int, target: int) -> int:
        taken = self.taken[self.case.place(source)].chunk(self.case.degrees.ep, 1)
        return int(taken[self.peers(target).index(target)].sum())


@dataclass(frozen=True, kw_only=True)
class Copies(Case):
    """Gradients of a layer that stands on a layout."""

    layout: str
    shapes: tuple[tuple[int, ...], ...] = ((4, 3), (2, 5, 3), (2, 3, 5))

    def __str__(self) -> str:
        return f"{numbered(self.world_size, 'rank')}, {self.layout}"

    def grads(self, rank: int) -> list[Tensor]:
        """Not contiguous."""
        draw = torch.Generator().manual_seed(1000 * self.seed + rank)
        return [torch.randn(*shape[::-1], generator=draw, dtype=torch.float64).permute(*range(len(shape))[::-1])
                for shape in self.shapes]  # fmt: skip

    def groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """Ranks with other tokens; ranks with the same experts."""
        degrees = Layout.parse(self.layout)
        return mesh.groups(degrees, ("dp", "cp")), mesh.expert_data_groups(degrees)


class Layer(torch.nn.Module):
    """Has the parameters of a mixture of experts, and nothing else."""

    def __init__(self, grads: Sequence[Tensor]):
        super().__init__()
        for name, grad in zip(("router", *CUT), grads, strict=True):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(grad.shape, dtype=grad.dtype)))
            getattr(self, name).grad = grad


def try_average(solution: Callable, case: Copies) -> dict:
    made, grads = mesh.make_mesh(Layout.parse(case.layout)), case.grads(dist.get_rank())
    layer = Layer(grads)
    solution(layer, made.dp_cp, made.ep_dp)
    after = {name: parameter.grad for name, parameter in layer.named_parameters()}
    kept = {f"the tensor that was the gradient of {name}": grad for name, grad in zip(after, grads, strict=True)}
    return {"after": after, "kept": kept, "weights": [parameter.detach() for parameter in layer.parameters()]}


def averaged(case: Copies) -> Iterator[dict[str, Tensor]]:
    """For each rank, its gradients of the mean of all ranks' losses."""
    everyone, copies = case.groups()
    for rank in range(case.world_size):
        all_ = next(ranks for ranks in everyone if rank in ranks)
        alike = next(ranks for ranks in copies if rank in ranks)
        yield {
            name: sum(case.grads(other)[i] for other in ranks) / len(all_)
            for i, (name, ranks) in enumerate({"router": all_, "w_in": alike, "w_out": alike}.items())
        }
