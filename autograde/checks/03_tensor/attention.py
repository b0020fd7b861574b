"""The check of lesson 03's attention: heads that are split over ranks, and share keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autograde.case import ranks_in_words
from autograde.checks.layers import LayerCheck
from autograde.checks.training import Kind, Layer, group_of, try_layer
from autograde.compare import compare
from autograde.verdict import Finding


@dataclass(frozen=True, kw_only=True)
class Heads(Layer):
    """Attention with `inner` key heads, each read by `per_group` query heads, all of `size` numbers."""

    per_group: int
    size: int

    def __str__(self) -> str:
        heads = f"{self.inner * self.per_group} query heads on {self.inner} key heads of size {self.size}"
        many = f", {self.steps} steps" if self.steps > 1 else ""
        more = "" if self.steps else ", other arguments"
        return f"{ranks_in_words(self.groups)}, {self.tokens[0]} × {self.tokens[1]} tokens, {heads}{many}{more}"

    def uneven(self) -> str:
        """In words: the number of heads that ranks are to refuse, one key head more."""
        return f"a layer of {(self.inner + 1) * self.per_group} query heads on {self.inner + 1} key heads"


def _tripled(x: Tensor, group: Any) -> Tensor:
    return 3 * x


def _weighed(x: Tensor, group: Any) -> Tensor:
    return (2 + group.rank()) * x


def _whole(case: Heads) -> dict[str, Tensor]:
    rows, width = case.inner * (case.per_group + 2) * case.size, case.inner * case.per_group * case.size
    return {
        "qkv.weight": case.random(0, rows, case.h) / math.sqrt(case.h),
        "qkv.bias": case.random(1, rows),
        "out.weight": case.random(2, case.h, width),
        "out.bias": case.random(3, case.h),
    }


ATTENTION = Kind(_whole, {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1}, {"enter": _tripled, "leave": _weighed})


def _built(solution: Callable, case: Heads, *arguments: Any, **more: Any) -> Any:
    """A layer from its tensors and its group: how many heads there are follows from their shapes."""
    *tensors, group = arguments
    kv_heads = tensors[2].shape[1] // (case.per_group * case.size)
    return solution(*tensors, kv_heads * case.per_group, kv_heads, group, **more)


def _turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of a rotary embedding: numbers that depend on a token's place in the sequence."""
    places = torch.arange(1, q.shape[2] + 1, dtype=q.dtype)[:, None]
    return q / places, k * places.sqrt()


def _own_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In the place of the attention core: which key head a query head gets is seen in the sum."""
    b, heads, s, d = q.shape
    grouped = q.reshape(b, k.shape[1], heads // k.shape[1], s, d)
    return (2 * grouped + k[:, :, None] - 3 * v[:, :, None]).reshape(b, heads, s, d)


def _plain_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head by head and token by token, as slow and as plain as it gets."""
    per_group, rows = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        own_k, own_v = k[:, head // per_group], v[:, head // per_group]
        scores = [q[:, head, i, None] @ own_k[:, : i + 1].mT / math.sqrt(q.shape[-1]) for i in range(q.shape[2])]
        rows.append(torch.cat([one.softmax(-1) @ own_v[:, : i + 1] for i, one in enumerate(scores)], 1))
    return torch.stack(rows, 1)


def _dense(
    case: Heads,
    p: Mapping,
    x: Tensor,
    enter: Callable,
    leave: Callable,
    core: Callable = _plain_core,
    rotate: Any = None,
) -> Tensor:
    qkv = enter(x) @ p["qkv.weight"].T
    qkv = qkv if p["qkv.bias"] is None else qkv + p["qkv.bias"]
    groups = qkv.split((case.per_group + 2) * case.size, -1)  # one for each key head
    heads = [group.split(case.size, -1) for group in groups]
    q = torch.stack([head for own in heads for head in own[: case.per_group]], 1)
    k, v = (torch.stack([own[case.per_group + i] for own in heads], 1) for i in range(2))
    q, k = rotate(q, k) if rotate else (q, k)
    out = torch.cat(core(q, k, v).unbind(1), -1)
    product = leave(out @ p["out.weight"].T)
    return product if p["out.bias"] is None else product + p["out.bias"]


class Attention(LayerCheck):
    exercise = "tensor.Attention"
    points = {"output": 2, "gradient": 2, "traffic": 1, "memory": 1, "arguments": 2}
    kind, exchanges = ATTENTION, ("forward", "backward")

    def cases(self, seed: int, level: str) -> list[Heads]:
        """Heads of each one's own, and heads that share; in groups of unlike sizes."""
        k = 1 + seed % 3
        if level == "visible":
            sizes = [(4, ((0, 1, 2, 3),), (2, 3), 5, 4, 1, 3, 1), (4, ((0, 1, 2), (3,)), (1, 5), 4, 6, 3, 2, 2)]
            sizes += [(4, ((0, 1), (2, 3)), (2, 4), 3, 4, 2, 3, 0)]
        else:
            sizes = [(5, ((0, 2), (1, 3, 4)), (2, 2 + k), 4 + k, 6, k, 3, 2), (2, ((0, 1),), (1, 4), 3, 2 * k, 2, 1, 1)]
        training = tuple(name for name in self.points if name != "arguments")
        return [
            Heads(
                world_size=world, groups=groups, tokens=tokens, h=h, inner=inner, per_group=per_group, size=size,
                steps=steps, seed=seed + number, properties=training if steps else ("arguments",),
            )
            for number, (world, groups, tokens, h, inner, per_group, size, steps) in enumerate(sizes)
        ]  # fmt: skip

    @staticmethod
    def program(solution: Any, case: Heads) -> dict:
        build = partial(_built, solution, case)
        done = try_layer(build, case, ATTENTION)
        if case.steps:
            return done
        group, place = group_of(case.groups)
        x = ATTENTION.batches(case, place)[0][0]
        tensors = [tensor if tensor.dim() > 1 else None for tensor in _whole(case).values()]
        shapes: list[list[int]] = []

        def core(*heads: Tensor) -> Tensor:
            shapes.extend(list(tensor.shape) for tensor in heads)
            return _own_core(*heads)

        done["core"], done["shapes"] = build(*tensors, group, core=core)(x).detach(), shapes
        done["rotate"] = build(*tensors, group)(x, _turned).detach()
        try:
            solution(*_whole(replace(case, per_group=1)).values(), case.inner, case.inner - 1, group)
        except Exception as error:
            return done | {"not grouped": type(error).__name__}
        return done | {"not grouped": ""}

    @classmethod
    def layer(cls, case: Heads) -> Callable[..., Tensor]:
        return partial(_dense, case)

    def judge(self, case: Heads, outcomes: list, ledger: Any) -> Iterator[Finding]:
        yield from super().judge(case, outcomes, ledger)
        if case.steps:
            return
        whole = {name: tensor if tensor.dim() > 1 else None for name, tensor in _whole(case).items()}
        places = [next(i for i, ranks in enumerate(case.groups) if rank in ranks) for rank in range(case.world_size)]
        for name, words, more in (
            ("rotate", "the output with rotate", {"rotate": _turned}),
            ("core", "the output with core= of the check's own", {"core": _own_core}),
        ):
            x = [ATTENTION.batches(case, place)[0][0] for place in places]
            wanted = [_dense(case, whole, one, lambda y: y, lambda y: y, **more) for one in x]
            yield compare("arguments", words, [o[name] for o in outcomes], wanted, "layers")
        b, s = case.tokens
        sizes = [[case.inner * n // len(case.groups[place]) for n in (case.per_group, 1, 1)] for place in places]
        shapes = [[[b, heads, s, case.size] for heads in own] for own in sizes]
        yield compare("arguments", "what the core gets (shapes of q, k, v)", [o["shapes"] for o in outcomes], shapes)
        refused = outcomes[0]["not grouped"]
        done = f"raise {refused}" if refused else "are taken without a word"
        seen = f"{case.inner} query heads on {case.inner - 1} key heads {done}"
        yield Finding("arguments", refused == "ValueError", seen, "expected a ValueError that says so", error=0.0)
