"""The check of a layer that is split over a group of ranks: its values, training, traffic, memory and arguments.

A check names its kind of layer and writes the layer for one process, `dense`; all that is expected follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from autograde.check import Check
from autograde.checks.training import Kind, Layer, train
from autograde.compare import compare, compare_all
from autograde.traffic import Calls, expect, size_in_words
from autograde.verdict import Finding

Exchange = Callable[[Tensor], Tensor]
WHOLE = "Is the whole kept, or a view of it, which keeps it as well? A copy of this rank's part is all that is needed."


class LayerCheck(Check):
    """A layer against one process, in which the same weights are trained whole; each rank is to have its piece."""

    points: ClassVar[dict[str, float]] = {"output": 1, "gradient": 2, "traffic": 1, "memory": 1, "arguments": 1}
    kind: ClassVar[Kind]
    exchanges: ClassVar[tuple[str, ...]] = ()  # the ways in which one all-reduce is made: "forward", "backward"

    def cases(self, seed: int, level: str) -> list[Layer]:
        """Groups of unlike sizes, one of them a rank alone; hidden ones also of ranks that are no neighbours."""
        if level == "visible":
            sizes = [(4, ((0, 1, 2, 3),), (2, 3), 5, 12, 1), (4, ((0, 1, 2), (3,)), (7,), 4, 6, 2)]
            sizes += [(4, ((0, 1), (2, 3)), (1, 2), 3, 4, 0)] if "arguments" in self.points else []
        else:
            k = 1 + seed % 3
            sizes = [(5, ((0, 2), (1, 3, 4)), (2, k), 4 + k, 6 * k, 2), (2, ((0, 1),), (1, 1, 4), 3, 2 * k, 3)]
        training = tuple(name for name in self.points if name != "arguments")
        return [
            Layer(
                world_size=world, groups=groups, tokens=tokens, h=h, inner=inner, steps=steps, seed=seed + number,
                properties=training if steps else ("arguments",),
            )
            for number, (world, groups, tokens, h, inner, steps) in enumerate(sizes)
        ]  # fmt: skip

    @staticmethod
    def dense(p: Mapping[str, Tensor | None], x: Tensor, enter: Exchange, leave: Exchange) -> Tensor:
        """The layer in one process, or a rank's part of it; `p` has None for a bias that is left out."""
        raise NotImplementedError

    @classmethod
    def layer(cls, case: Layer) -> Callable[..., Tensor]:
        """`dense` for this case: for layers that take more than their shapes tell."""
        return cls.dense

    @staticmethod
    def parameters(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole parameters in the shape that the layer gives them, from what its constructor takes."""
        return whole

    def judge(self, case: Layer, outcomes: list[Any], ledger: Any) -> Iterator[Finding]:
        if not case.steps:
            yield from self._judge_arguments(case, outcomes)
            return
        expected = _expected(type(self), case)
        for name in ("output", "gradient"):
            got = [outcome[name] for outcome in outcomes]
            yield compare_all(name, got, [e[name] for e in expected], "layers")
        yield self._judge_traffic(case, ledger)
        if "memory" in self.points:
            yield self._judge_memory(case, outcomes)

    def _judge_traffic(self, case: Layer, ledger: Any) -> Finding:
        """One all-reduce a step each way that is named, of h numbers a token; a rank alone needs none."""
        size = {rank: len(ranks) for ranks in case.groups for rank in ranks}
        calls = [case.steps * (size[rank] > 1) for rank in range(case.world_size)]
        forward, backward = (calls if way in self.exchanges else 0 for way in ("forward", "backward"))
        number = 8 * case.h * math.prod(case.tokens)
        return expect("traffic", ledger, Calls("all_reduce", forward, backward, number, case.groups))

    def _judge_memory(self, case: Layer, outcomes: list[Any]) -> Finding:
        """The bytes of a rank's pieces, and no more: no whole matrix is kept, nor a tensor that is somebody else's."""
        whole = self.parameters(self.kind.whole(case))
        for rank, outcome in enumerate(outcomes):
            pieces = [piece.numel() for piece in self._pieces(case, rank, whole).values()]
            kept, wanted = outcome["kept"], 8 * sum(pieces)
            if kept != wanted:
                seen = f"rank {rank} keeps {size_in_words(kept)} of weights, expected {size_in_words(wanted)}"
                look = WHOLE if kept > wanted else ""
                return Finding("memory", False, f"{seen} ({kept / wanted:.3g} times)", look=look)
            if outcome["shared"]:
                seen = f"rank {rank} keeps the very {outcome['shared'][0]} that it was given"
                return Finding("memory", False, seen, look="Whoever gave it may still need it as it was: keep a copy.")
        every = 8 * sum(tensor.numel() for tensor in whole.values())
        return Finding("memory", True, f"{size_in_words(outcomes[0]['kept'])} of {size_in_words(every)} a rank")

    def _judge_arguments(self, case: Layer, outcomes: list[Any]) -> Iterator[Finding]:
        """Built without biases, so that one in the wrong place costs nothing here."""
        whole = self.parameters(self.kind.whole(case))
        whole = {name: tensor if tensor.dim() > 1 else None for name, tensor in whole.items()}
        exchanged, plain, dense = [], [], self.layer(case)
        for rank in range(case.world_size):
            place, ranks, number = _place(case, rank)
            x = self.kind.batches(case, place)[0][0]
            own = {name: self._own(name, number) for name in ("enter", "leave")}
            piece = self.kind.piece("x", x, number, len(ranks))
            exchanged.append(dense(self._pieces(case, rank, whole), piece, **own))
            plain.append(self.kind.piece("output", dense(whole, x, _same, _same), number, len(ranks)))
        given = " and ".join(f"{name}=" for name in self.kind.own)
        name = f"the output with {given} of the check's own"
        yield compare("arguments", "the output without a bias", [o["plain"] for o in outcomes], plain, "layers")
        yield compare("arguments", name, [o["own"] for o in outcomes], exchanged, "layers")
        yield from self._judge_calls(outcomes, [name for name, tensor in whole.items() if tensor is not None])
        refused = outcomes[0]["refused"]
        if refused != "ValueError":
            done = f"raises {refused}" if refused else "is taken without a word"
            seen = f"{case.uneven()}, which {len(case.groups[0])} ranks cannot share, {done}"
            yield Finding("arguments", False, seen, "expected a ValueError that says so")

    def _judge_calls(self, outcomes: list[Any], weights: list[str]) -> Iterator[Finding]:
        """An exchange is called once a forward; a bias that is not there is no parameter."""
        for rank, outcome in enumerate(outcomes):
            for name, number in outcome["calls"].items():
                if number != 1:
                    yield Finding("arguments", False, f"{name} is called {number} times on rank {rank}, expected 1")
            extra = [name for name in outcome["parameters"] if name not in weights]
            if extra:
                yield Finding("arguments", False, f"without a bias, rank {rank} has a parameter {extra[0]}",
                              "expected None in its place")  # fmt: skip

    def _own(self, name: str, number: int) -> Exchange:
        """The exchange that the case puts in the layer's place, as seen by the `number`-th rank of its group."""
        own = self.kind.own.get(name)
        return (lambda x: own(x, _Number(number))) if own else _same

    def _pieces(self, case: Layer, rank: int, whole: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        _, ranks, number = _place(case, rank)
        size = len(ranks)
        return {n: None if tensor is None else self.kind.piece(n, tensor, number, size) for n, tensor in whole.items()}


class _Number:
    """What an exchange asks of its group here, where there is none."""

    def __init__(self, number: int):
        self.number = number

    def rank(self) -> int:
        return self.number


def _same(x: Tensor) -> Tensor:
    return x


def _place(case: Layer, rank: int) -> tuple[int, tuple[int, ...], int]:
    """The place of a rank's group, its ranks, and the rank's number in it."""
    place = next(place for place, ranks in enumerate(case.groups) if rank in ranks)
    return place, case.groups[place], case.groups[place].index(rank)


@lru_cache(maxsize=64)
def _expected(check: type[LayerCheck], case: Layer) -> list[dict]:
    """What `training.try_layer` is to return on each rank: pieces of what one process gets for each group."""
    expected: list[dict] = [{} for _ in range(case.world_size)]
    dense = check.layer(case)
    for place, ranks in enumerate(case.groups):
        p = {n: tensor.clone().requires_grad_() for n, tensor in check.parameters(check.kind.whole(case)).items()}
        done = train(lambda x, p=p: dense(p, x, _same, _same), p, check.kind.batches(case, place))
        for number, rank in enumerate(ranks):
            expected[rank] = {
                key: {name: check.kind.piece(name, tensor, number, len(ranks)) for name, tensor in values.items()}
                for key, values in done.items()
            }
    return expected
