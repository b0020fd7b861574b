"""Checks of lesson 09: how many tokens an expert takes, which ones, and what keeps the load even."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autograde.case import Case
from autograde.check import Check
from autograde.checks.among import APART, FIVE, FOUR, UNEQUAL, Among, planned
from autograde.checks.experts import NUMBER
from autograde.compare import compare
from autograde.traffic import size_in_words
from autograde.verdict import Finding, numbered


@dataclass(frozen=True, kw_only=True)
class Rooms(Case):
    """Arguments of `capacity`: tokens, experts, top_k, factor."""

    sizes: tuple[tuple[int, int, int, float], ...]

    def __str__(self) -> str:
        return numbered(len(self.sizes), "size")


class Capacity(Check):
    exercise = "expert.capacity"
    points = {"value": 1, "rounding": 1}

    def cases(self, seed: int, level: str) -> list[Rooms]:
        """Factors are sums of halves and quarters: no order of the operations rounds them."""
        even = ((64, 8, 1, 1.0), (64, 8, 2, 1.25), (48, 4, 3, 2.0), (32, 16, 4, 0.5), (0, 4, 2, 1.0))
        uneven = ((10, 4, 1, 1.0), (7, 8, 2, 1.25), (1, 64, 1, 0.5), (33, 4, 2, 1.5), (5, 4, 1, 1.0))
        if level == "hidden":
            k = 1 + seed % 9
            even, uneven = ((8 * k, 8, 2, 1.5),), ((8 * k + 1, 8, 1, 1.0), (16 * k + 3, 16, 3, 0.75))
        return [
            Rooms(world_size=1, sizes=sizes, properties=(name,))
            for sizes, name in ((even, "value"), (uneven, "rounding"))
        ]

    @staticmethod
    def program(solution: Any, case: Rooms) -> list:
        return [solution(*sizes) for sizes in case.sizes]

    def judge(self, case: Rooms, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,) = case.properties
        for got, (tokens, experts, top_k, factor) in zip(outcomes[0], case.sizes, strict=True):
            whole, rest = divmod(int(4 * tokens * top_k * factor), 4 * experts)
            wanted = whole + (rest > 0)
            good = type(got) is int and got == wanted
            words = f"{tokens} tokens, {experts} experts, top {top_k}, factor {factor:g}"
            seen = f"room for {got!r} tokens, expected {wanted}" if not good else numbered(len(case.sizes), "size")
            yield Finding(name, good, seen, "" if good else words)


@dataclass(frozen=True, kw_only=True)
class Chosen(Case):
    """Choices of T tokens among E experts, each of which has room for `limit`."""

    tokens: int
    num_experts: int
    top_k: int
    limit: int

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens, {self.num_experts} experts, top {self.top_k}"
        return f"{sizes}, room for {self.limit} each"

    def experts(self) -> Tensor:
        """Some experts are more popular than others."""
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(self.num_experts, self.tokens, generator=generator)
        return (scores.t() + torch.linspace(0.5, 0, self.num_experts)).argsort(1, descending=True)[:, : self.top_k]


class WithinCapacity(Check):
    exercise = "expert.within_capacity"
    points = {"position": 1, "choices": 1, "edges": 1}

    def cases(self, seed: int, level: str) -> list[Chosen]:
        sizes = [(9, 3, 1, 2, "position"), (8, 4, 2, 3, "choices"), (10, 5, 3, 4, "choices")]
        sizes += [(4, 3, 2, 0, "edges"), (5, 3, 2, 5, "edges"), (0, 3, 1, 2, "edges"), (6, 1, 1, 6, "edges")]
        if level == "hidden":
            k = 1 + seed % 3
            sizes = [(12 + k, 5, 1, 2, "position"), (11, 6, 2 + seed % 2, 2 + k, "choices"), (7, 3, 3, 4, "edges")]
        names = "tokens", "num_experts", "top_k", "limit"
        return [
            Chosen(world_size=1, seed=seed + i, properties=(name,), **dict(zip(names, size, strict=True)))
            for i, (*size, name) in enumerate(sizes)
        ]

    @staticmethod
    def program(solution: Any, case: Chosen) -> dict:
        experts = case.experts()
        return {"mask": solution(experts, case.num_experts, case.limit), "experts": experts}

    def judge(self, case: Chosen, outcomes: list, ledger: Any) -> Iterator[Finding]:
        (name,), experts = case.properties, case.experts()
        room, wanted = [case.limit] * case.num_experts, torch.zeros_like(experts, dtype=torch.bool)
        for k in range(case.top_k):
            for t in range(case.tokens):
                if room[experts[t, k]] > 0:
                    room[experts[t, k]] -= 1
                    wanted[t, k] = True
        mask = outcomes[0]["mask"]
        order = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == wanted.shape and case.top_k > 1
        if order:  # as many for each expert, but not the same ones
            taken = [torch.bincount(experts[kept], minlength=case.num_experts) for kept in (mask, wanted)]
            order = torch.equal(*taken)
        look = "Does every first choice come before any second one?" if order else ""
        yield compare(name, "the mask", [mask], wanted, "exact", look)
        yield compare(name, "experts afterwards", [outcomes[0]["experts"]], experts, "exact")


@dataclass(frozen=True, kw_only=True)
class Shares(Among):
    """Tokens of each rank, and the groups over which they are counted together.

    `groups` are those of the first call; `across`, where given, those of a second one, over which the sums go on.
    """

    tokens: tuple[int, ...]
    num_experts: int
    top_k: int
    across: tuple[tuple[int, ...], ...] = ()
    half: bool = False

    def __str__(self) -> str:
        words = f"{super().__str__()}, tokens {' '.join(map(str, self.tokens))}, {self.num_experts} experts"
        words += f", then groups {' '.join(map(str, map(list, self.across)))}" if self.across else ""
        return f"{words}, top {self.top_k}{', bfloat16' if self.half else ''}"

    def together(self, rank: int) -> list[int]:
        """The ranks whose tokens are counted with those of `rank`."""
        rows = next(ranks for ranks in self.across if rank in ranks) if self.across else (rank,)
        return sorted({peer for row in rows for peer in self.peers(row)})

    def probs(self, rank: int) -> Tensor:
        logits = self.numbers(rank, self.tokens[rank], self.num_experts) + torch.linspace(1, 0, self.num_experts)
        return logits.softmax(-1).to(torch.bfloat16 if self.half else torch.float64)

    def experts(self, rank: int) -> Tensor:
        """Not always the likeliest ones: what was chosen is an argument of its own."""
        if self.half:
            return torch.zeros(self.tokens[rank], 1, dtype=torch.int64)
        scores = self.numbers(100 + rank, self.tokens[rank], self.num_experts)
        return (scores + torch.linspace(2, 0, self.num_experts)).argsort(1, descending=True)[:, : self.top_k]


class BalanceLoss(Check):
    exercise = "expert.balance_loss"
    points = {"output": 1, "split": 1, "gradient": 2, "traffic": 1, "precision": 1}

    def cases(self, seed: int, level: str) -> list[Shares]:
        every, rows, columns = ("output", "gradient", "traffic"), ((0, 1), (2, 3)), ((0, 2), (1, 3))
        plans = [
            {"groups": ((0,), (1,), (2,), (3,)), "tokens": (5, 3, 4, 6), "properties": ("output", "gradient")},
            {"groups": UNEQUAL, "tokens": (5, 2, 0, 4), "properties": ("split", "gradient", "traffic")},
            {"groups": rows, "across": columns, "tokens": (3, 7, 1, 5), "properties": ("split", "gradient", "traffic")},
            {"groups": FOUR, "tokens": (301, 301, 301, 301), "half": True, "properties": ("precision",)},
        ]
        if level == "hidden":
            k = 1 + seed % 5
            plans = [
                {"groups": APART, "tokens": (k, 4, 2, 0, 3), "properties": every},
                {"groups": FIVE, "tokens": (0, k, 8, 1, 2), "properties": ("split", "gradient", "traffic")},
            ]
        shapes = [{"num_experts": e, "top_k": k} for e, k in ((4, 1), (5, 2), (3, 3), (4, 1))]
        return planned(Shares, seed, [plan | shape for plan, shape in zip(plans, shapes, strict=False)])

    @staticmethod
    def program(solution: Any, case: Shares) -> dict:
        rank = dist.get_rank()
        made = [[dist.new_group(list(ranks)) for ranks in groups] for groups in (case.groups, case.across)]
        groups = [
            group
            for lists, own in zip((case.groups, case.across), made, strict=True)
            for ranks, group in zip(lists, own, strict=True)
            if rank in ranks
        ]
        probs, experts = case.probs(rank).requires_grad_(), case.experts(rank)
        loss = solution(probs, experts, groups)
        found = {"loss": loss.detach().clone(), "gradient": None, "probs": probs.detach(), "experts": experts}
        if loss.requires_grad and loss.dim() == 0:
            (3 * loss).backward()
            found["gradient"] = probs.grad
        return found

    def judge(self, case: Shares, outcomes: list, ledger: Any) -> Iterator[Finding]:
        losses, grads = [], []
        for rank in range(case.world_size):
            ranks = case.together(rank)
            probs = {r: case.probs(r).double().requires_grad_() for r in ranks}
            joined, chosen = torch.cat(list(probs.values())), torch.cat([case.experts(r) for r in ranks]).flatten()
            share = torch.stack([(chosen == e).double().mean() for e in range(case.num_experts)])
            loss = case.num_experts * (share * joined.mean(0)).sum()
            (3 * loss).backward()
            losses.append(loss.detach())
            grads.append(probs[rank].grad)
        if case.half:
            wide = [loss.float() for loss in losses]
            look = "bfloat16 counts to 256 only, and adds up small numbers badly."
            yield compare("precision", "the loss", [o["loss"] for o in outcomes], wide, "layers", look)
            return
        for name in case.properties:
            if name in ("output", "split"):
                yield compare(name, "the loss", [o["loss"] for o in outcomes], losses)
                given = [case.probs(rank) for rank in range(case.world_size)]
                yield compare(name, "probs afterwards", [o["probs"] for o in outcomes], given, "exact")
        yield compare("gradient", "the gradient of probs", [o["gradient"] for o in outcomes], grads)
        if "traffic" in case.properties:
            yield self._traffic(case, ledger)

    @staticmethod
    def _traffic(case: Shares, ledger: Any) -> Finding:
        """All-reduces of a number or two an expert, in the groups that were given, forward only."""
        most = NUMBER * 2 * case.num_experts
        for rank in range(case.world_size):
            calls = ledger[rank].communications
            lists = [list(ranks) for ranks in (*case.groups, *case.across) if rank in ranks and len(ranks) > 1]
            for call in calls:
                way = "backward" if call.backward else "forward"
                where = f"{call.op.replace('_', '-')} of {size_in_words(call.bytes)} in ranks {list(call.ranks)} {way}"
                if call.op != "all_reduce" or list(call.ranks) not in lists or call.backward:
                    return Finding("traffic", False, f"{where} on rank {rank} should not be there", call.line)
            for ranks in lists:
                total = sum(call.bytes for call in calls if list(call.ranks) == ranks)
                if not 0 < total <= most:
                    seen = f"{size_in_words(total)} all-reduced in ranks {ranks} on rank {rank}"
                    return Finding("traffic", False, f"{seen}, expected two numbers an expert: {size_in_words(most)}")
        return Finding("traffic", True, "two numbers an expert, forward only", f"{size_in_words(most)} in each group")
