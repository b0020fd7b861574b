"""What checks of sequence parallelism share: tokens that are split over groups of ranks, and exchanges of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autograde.case import Case, ranks_in_words
from autograde.verdict import numbered

UNLIKE = ((0, 1, 2), (3,))  # groups of unlike sizes, one of them a rank alone
PAIRS = ((0, 1), (2, 3))
APART = ((0, 2), (1, 3, 4))  # ranks that are no neighbours
REGIONS = 300  # one after the other: as many as a few steps of a large model have


@dataclass(frozen=True, kw_only=True)
class Tokens(Case):
    """Activations (b, s, h) whose s tokens are split over each group of ranks."""

    groups: tuple[tuple[int, ...], ...]
    b: int = 1
    s: int = 1
    h: int = 1

    def __str__(self) -> str:
        sizes = f", {numbered(self.b, 'sequence')} of {numbered(self.s, 'token')}" if self.s > 1 else ""
        return f"{ranks_in_words(self.groups)}{sizes}"

    def random(self, what: int, *shape: int) -> Tensor:
        """Random numbers, the same for every `what` and shape."""
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def place(self, rank: int) -> tuple[int, tuple[int, ...], int]:
        """The place of a rank's group, its ranks, and the rank's number in it."""
        place = next(place for place, ranks in enumerate(self.groups) if rank in ranks)
        return place, self.groups[place], self.groups[place].index(rank)

    def calls(self, number: int) -> list[int]:
        """How many calls each rank makes where `number` are needed: none where it is alone in its group."""
        return [number * (len(self.place(rank)[1]) > 1) for rank in range(self.world_size)]

    def bytes(self) -> tuple[int, list[int]]:
        """Those of all tokens, and for every rank those of its own."""
        whole = 8 * self.b * self.s * self.h
        return whole, [whole // len(self.place(rank)[1]) for rank in range(self.world_size)]

    def own(self, rank: int, tensor: Tensor) -> Tensor:
        """The rank's tokens of a whole (b, s, ...)."""
        _, ranks, number = self.place(rank)
        return tensor.chunk(len(ranks), 1)[number]

    def of_group(self, rank: int, rows: list[Any]) -> list[Any]:
        """Of one thing a rank, those of the rank's group."""
        return [rows[other] for other in self.place(rank)[1]]


def group_of(case: Tokens) -> dist.ProcessGroup:
    """This rank's group. Every rank makes all of them, in the same order."""
    made = [dist.new_group(list(ranks)) for ranks in case.groups]
    return made[case.place(dist.get_rank())[0]]


def exchange_cases(seed: int, level: str) -> list[Tokens]:
    """Sizes for `gather_tokens` and `scatter_tokens`."""
    if level == "visible":
        sizes = [(4, UNLIKE, 2, 6, 4), (4, PAIRS, 3, 4, 5)]
    else:
        sizes = [(5, APART, 2, 6 * (1 + seed % 3), 3), (2, ((0, 1),), 1, 8, 2)]
    return [
        Tokens(world_size=world, groups=groups, b=b, s=s, h=h, seed=seed + i)
        for i, (world, groups, b, s, h) in enumerate(sizes)
    ]


@dataclass(frozen=True)
class Exchange:
    """What one of the pair takes and gives, for each rank: the parts that the ranks hold, or all tokens on each."""

    gathers: bool

    def x(self, case: Tokens, rank: int) -> Tensor:
        return _mixed(case, rank, self._share(case, rank, self.gathers))

    def incoming(self, case: Tokens, rank: int) -> Tensor:
        return _mixed(case, 100 + rank, self._share(case, rank, not self.gathers))

    def expected(self, case: Tokens) -> tuple[list[Tensor], list[Tensor]]:
        """For each rank the output and the gradient of x."""
        ranks = range(case.world_size)
        x, incoming = ([of(case, rank) for rank in ranks] for of in (self.x, self.incoming))
        parts, wholes = (x, incoming) if self.gathers else (incoming, x)
        joined = [torch.cat(case.of_group(rank, parts), 1) for rank in ranks]
        summed = [case.own(rank, sum(case.of_group(rank, wholes))) for rank in ranks]
        return (joined, summed) if self.gathers else (summed, joined)

    @staticmethod
    def _share(case: Tokens, rank: int, is_part: bool) -> int:
        return case.s // len(case.place(rank)[1]) if is_part else case.s


def try_exchange(solution: Callable, case: Tokens, exchange: Exchange) -> dict:
    """Output and gradient for this rank's own x and gradient of the output."""
    rank, group = dist.get_rank(), group_of(case)
    x, incoming = exchange.x(case, rank).requires_grad_(), exchange.incoming(case, rank)
    output = solution(x, group)
    found = {"output": output.detach().clone(), "x.grad": None}
    if output.requires_grad and output.shape == incoming.shape:
        torch.autograd.backward([output * 1], [incoming])
        found["x.grad"] = x.grad
    return found | {"x": x.detach()}


def try_regions(solution: Callable, case: Tokens) -> dict:
    """Facts, not numbers: which ones a region draws is its own affair. The all-gather at the end is ours."""
    group = group_of(case)
    torch.manual_seed(case.seed + 7 * case.place(dist.get_rank())[0])  # equal in a group, another one in each
    drawn: dict[bool, list[Tensor]] = {True: [], False: []}
    outside = []
    for number, split in enumerate((True, False, True, True, False, False)):
        with solution(group, split=split):
            drawn[split].append(_drawn())
            torch.rand(group.rank())  # ranks may draw unlike many
        if number < 3:
            outside.append(_drawn())
    state, again, after, failed = torch.get_rng_state(), [], [], []
    for split, extra in product((True, False), (0, 50)):
        torch.set_rng_state(state)
        with solution(group, split=split):
            again.append(_drawn())
            torch.rand(extra)
        after.append(_drawn())
    for split in (True, False):
        torch.set_rng_state(state)
        try:
            with solution(group, split=split):
                torch.rand(50)
                raise KeyError
        except KeyError:
            failed.append(_drawn())
    many = []
    for _ in range(REGIONS):
        with solution(group, split=True):
            many.append(_drawn(1))
    own = torch.stack([*drawn[True], *drawn[False], *outside, *after])
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    return {
        "not the first rank's numbers": group.rank() == 0 or not torch.equal(own[:3], everyone[0][:3]),
        "no number of another rank": len(torch.cat([rows[:3] for rows in everyone]).unique()) == 96 * group.size(),
        "the numbers of the first rank": torch.equal(own[3:6], everyone[0][3:6]),
        "no number twice": len(own[:6].unique()) == 192,
        "no number of many regions twice": len(torch.cat(many).unique()) == REGIONS,
        "no number of outside": len(own[:9].unique()) == len(own[:6].unique()) + 96,
        "the same again": torch.equal(*again[:2]) and torch.equal(*again[2:]),
        "the group's outside": torch.equal(own[6:], everyone[0][6:]),
        "undisturbed": torch.equal(*after[:2]),
        "undisturbed where equal": torch.equal(*after[2:]),
        "undisturbed by an error": torch.equal(after[0], failed[0]) and torch.equal(after[2], failed[1]),
    }


def _drawn(count: int = 32) -> Tensor:
    """Numbers of 48 bits, each made of two neighbours: so draws that are shifted against each other have some alike."""
    drawn = torch.rand(count + 1).double()  # of float32: 24 bits each
    return drawn[:-1] + drawn[1:] / 2**24


@dataclass(frozen=True, kw_only=True)
class Replicated(Tokens):
    """Gradients of parameters of several shapes, of which one has none."""

    shapes: tuple[tuple[int, ...], ...]
    without: int

    def grads(self, rank: int) -> list[Tensor | None]:
        """Not all of them contiguous."""
        grads = [self.random(100 * rank + i, *reversed(shape)).mT for i, shape in enumerate(self.shapes)]
        return [None if i == self.without else grad for i, grad in enumerate(grads)]

    def summed(self, rank: int) -> list[Tensor | None]:
        group = self.of_group(rank, [self.grads(r) for r in range(self.world_size)])
        return [None if i == self.without else sum(g[i] for g in group) for i in range(len(self.shapes))]


def try_sync(solution: Callable, case: Replicated) -> dict:
    group, grads = group_of(case), case.grads(dist.get_rank())
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in case.shapes]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    views = [None if grad is None else grad.detach() for grad in grads]  # of the same memory, as a bucket's are
    solution(iter(parameters), group)  # like model.parameters(), they can be gone through once
    after = {f"gradient {i}": parameter.grad for i, parameter in enumerate(parameters)}
    kept = {f"the tensor that was gradient {i}": grad for i, grad in enumerate(grads)}
    seen = {f"a view of what was gradient {i}": view for i, view in enumerate(views)}
    solution([nn.Parameter(torch.ones(2))], group)  # has no gradient: there is nothing to do
    return {"after": after, "kept": kept, "views": seen, "parameters": [p.detach() for p in parameters]}


def _mixed(case: Tokens, what: int, tokens: int) -> Tensor:
    """Random (b, tokens, h) that is not contiguous."""
    return case.random(what, tokens, case.b, case.h).transpose(0, 1)
