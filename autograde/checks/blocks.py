"""What the check of a transformer block in sequence parallelism does on the ranks: build it, train it, drop out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fivefold.runtime.ledger import phase
from fivefold.sequence import gather_tokens, scatter_tokens
from fivefold.tensor import MLP, Attention
from torch import Tensor, nn

from autograde.checks.tokens import Tokens, group_of
from autograde.checks.training import train

ALONE = "a block alone"  # the phase in which a block keeps what is its own
CONTEXT = (0.5, "places")  # what comes after x
KEEP = 0.6  # of what passes a dropout
WEIGHTS = {  # each with the parameters that are made of it
    "attention_norm": ("attention_norm.weight", "attention_norm.bias"),
    "mlp_norm": ("mlp_norm.weight", "mlp_norm.bias"),
    "qkv": ("attention.qkv.weight",),
    "qkv_bias": ("attention.qkv.bias",),
    "out": ("attention.out.weight",),
    "out_bias": ("attention.out.bias",),
    "w_in": ("mlp.column.weight",),
    "b_in": ("mlp.column.bias",),
    "w_out": ("mlp.row.weight",),
    "b_out": ("mlp.row.bias",),
}
CUT = {"qkv": 0, "qkv_bias": 0, "out": 1, "w_in": 0, "b_in": 0, "w_out": 1}  # the dimension; what is not here is whole


@dataclass(frozen=True, kw_only=True)
class Layers(Tokens):
    """A transformer layer on tokens; its weights follow from the case."""

    heads: int
    size: int  # of a head
    inner: int

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name; those of a norm are (2, h), its weight and its bias."""
        h, width, inner = self.h, self.heads * self.size, self.inner
        shapes = [
            (2, h),
            (2, h),
            (3 * width, h),
            (3 * width,),
            (h, width),
            (h,),
            (inner, h),
            (inner,),
            (h, inner),
            (h,),
        ]
        return {name: self.random(50 + i, *shapes[i]) for i, name in enumerate(WEIGHTS)}

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """The whole input of the rank's group, and the gradient of its output."""
        place = self.place(rank)[0]
        return tuple(self.random(what + place, self.b, self.s, self.h) for what in (0, 20))


def try_block(solution: Callable, case: Layers) -> dict:
    """Train a block of the library's layers for a step, and measure one of parts that keep nothing themselves."""
    group, rank = group_of(case), dist.get_rank()
    parts = _parts(case, group)
    block = solution(*parts.values(), group)
    parameters = {f"{n}.{own}": p for n, part in parts.items() for own, p in part.named_parameters()}
    registered = {id(parameter) for parameter in block.parameters()}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in registered]
    x, incoming = (case.own(rank, tensor) for tensor in case.batch(rank))
    done = train(block, parameters, [(x, incoming)])
    small = solution(_Double(), _Double(), parts["attention_norm"], parts["mlp_norm"], group)
    with phase(ALONE):
        small(x.clone().requires_grad_())
    return {"output": done["output"]["the output"], "gradient": done["gradient"], "missing": missing}


def try_dropout(solution: Callable, case: Layers) -> dict:
    """What a block makes of zeros where its attention gives 1 everywhere and its MLP 2, and what it hands on."""
    group, found, attention = group_of(case), {}, _One()
    for split in (True, False):
        x = torch.zeros(case.b, case.s // group.size() if split else case.s, case.h, dtype=torch.float64)
        norms = [nn.LayerNorm(case.h, dtype=torch.float64) for _ in range(2)]
        block, never = (solution(attention, _Two(), *norms, group, p=p, split=split) for p in (1 - KEEP, 0.0))
        where = "tokens are split" if split else "every rank has all tokens"
        found[f"in training, where {where}"] = block.train()(x.clone(), *CONTEXT).detach()
        found[f"in evaluation, where {where}"] = block.eval()(x.clone(), *CONTEXT).detach()
        found[f"with p = 0, where {where}"] = never.train()(x.clone(), *CONTEXT).detach()
    return {"outputs": found, "handed": attention.handed}


@dataclass(frozen=True, kw_only=True)
class Column(Tokens):
    """A layer of `out` features on tokens that are split."""

    out: int

    def tensors(self, rank: int) -> list[Tensor]:
        """Whole: x and the gradient of the output, of the rank's group; weight and bias."""
        place = 10 * self.place(rank)[0]
        whole = [self.random(place + i, self.b, self.s, width) for i, width in enumerate((self.h, self.out))]
        return [*whole, self.random(5, self.out, self.h), self.random(6, self.out)]


def try_column(solution: Callable, case: Column) -> dict:
    """A layer with a bias forward and backward, and one without forward only."""
    rank, group = dist.get_rank(), group_of(case)
    x, incoming, weight, bias = case.tensors(rank)
    layer, plain = solution(weight, bias, group), solution(weight, None, group)
    x = case.own(rank, x).clone().requires_grad_()
    with phase("forward"):
        output = layer(x)
    output.backward(incoming.chunk(group.size(), -1)[group.rank()])
    with torch.no_grad():
        without = plain(x)
    found = {"x": x} | dict(layer.named_parameters())
    grads = {f"{name}.grad": tensor.grad for name, tensor in found.items()}
    return {"output": output.detach(), "without a bias": without, "gradient": grads}


def _parts(case: Layers, group: dist.ProcessGroup) -> dict[str, nn.Module]:
    w, ways = case.weights(), {"enter": gather_tokens, "leave": scatter_tokens}
    qkv, heads = (w["qkv"], w["qkv_bias"], w["out"], w["out_bias"]), (case.heads, case.heads)
    return {
        "attention": Attention(*qkv, *heads, group, **ways),
        "mlp": MLP(w["w_in"], w["b_in"], w["w_out"], w["b_out"], group, **ways),
        "attention_norm": _norm(w["attention_norm"]),
        "mlp_norm": _norm(w["mlp_norm"]),
    }


def _norm(both: Tensor) -> nn.LayerNorm:
    layer = nn.LayerNorm(both.shape[1], dtype=both.dtype)
    layer.weight, layer.bias = nn.Parameter(both[0].clone()), nn.Parameter(both[1].clone())
    return layer


class _Double(nn.Module):
    """Keeps nothing for backward and sends nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class _One(nn.Module):
    """Gives 1 everywhere, and notes what comes after x."""

    def forward(self, x: Tensor, *context: object) -> Tensor:
        self.handed = list(context)
        return torch.ones_like(x)


class _Two(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 2.0)
