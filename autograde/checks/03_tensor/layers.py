"""Checks of lesson 03: linear layers and the MLPs made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from autograde.checks.layers import LayerCheck
from autograde.checks.training import Kind, Layer, try_layer


def _tripled(x: Tensor, group: Any) -> Tensor:
    return 3 * x


def _weighed(x: Tensor, group: Any) -> Tensor:
    return (2 + group.rank()) * x


def _linear(case: Layer, out: int, width: int) -> dict[str, Tensor]:
    return {"weight": case.random(0, out, width), "bias": case.random(1, out)}


def _mlp(case: Layer) -> dict[str, Tensor]:
    column, row = _linear(case, case.inner, case.h), {"weight": case.random(2, case.h, case.inner)}
    row["bias"] = case.random(3, case.h)
    return {f"column.{name}": t for name, t in column.items()} | {f"row.{name}": t for name, t in row.items()}


def _gated(case: Layer) -> dict[str, Tensor]:
    return {"w_in": case.random(0, 2 * case.inner, case.h), "row.weight": case.random(1, case.h, case.inner)}


COLUMN = Kind(
    lambda case: _linear(case, case.inner, case.h), {"weight": 0, "bias": 0, "output": -1}, {"enter": _tripled}
)
ROW = Kind(lambda case: _linear(case, case.h, case.inner), {"weight": 1, "x": -1}, {"leave": _weighed})
PAIR = Kind(_mlp, {"column.weight": 0, "column.bias": 0, "row.weight": 1}, {"enter": _tripled, "leave": _weighed})
GATED = Kind(_gated, {"w_in": 1, "row.weight": 1}, {})


class ColumnLinear(LayerCheck):
    exercise = "tensor.ColumnLinear"
    kind, exchanges = COLUMN, ("backward",)

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, COLUMN)

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        return F.linear(enter(x), p["weight"], p["bias"])


class RowLinear(LayerCheck):
    exercise = "tensor.RowLinear"
    points = {"output": 3, "gradient": 2, "traffic": 1, "memory": 1, "arguments": 1}
    kind, exchanges = ROW, ("forward",)

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, ROW)

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        product = leave(F.linear(x, p["weight"]))
        return product if p["bias"] is None else product + p["bias"]


class MLP(LayerCheck):
    exercise = "tensor.MLP"
    points = {"output": 1, "gradient": 1, "traffic": 1, "memory": 1, "arguments": 1}
    kind, exchanges = PAIR, ("forward", "backward")

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, PAIR)

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        hidden = F.gelu(F.linear(enter(x), p["column.weight"], p["column.bias"]))
        product = leave(F.linear(hidden, p["row.weight"]))
        return product if p["row.bias"] is None else product + p["row.bias"]


class GatedMLP(LayerCheck):
    exercise = "tensor.GatedMLP"
    points = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1}
    kind, exchanges = GATED, ("forward", "backward")

    @staticmethod
    def program(solution: Any, case: Layer) -> dict:
        return try_layer(solution, case, GATED)

    @staticmethod
    def parameters(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return whole | {"w_in": whole["w_in"].unflatten(0, (2, -1))}

    @staticmethod
    def dense(p: Mapping, x: Tensor, enter: Callable, leave: Callable) -> Tensor:
        gate, up = p["w_in"]
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), p["row.weight"])
