"""Checks of lesson 11: what composition needs, each with unequal degrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold.layout import Layout
from fivefold.mesh import coordinates, groups
from torch import Tensor

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare, compare_all
from autograde.traffic import Calls, expect
from autograde.verdict import Finding

LACKS = "Which other ranks hold the same numbers, and saw other tokens?"
MORE = "Do these hold the same numbers, and did they see other tokens?"
FIRST = "Over the first group, ZeRO shares out the optimizer's state."
KINDS = {  # name: (how it is cut over TP, whether it is an expert's)
    "a whole parameter": (None, False),
    "a split matrix": (1, False),
    "an expert's matrix": (2, True),
}


@dataclass(frozen=True, kw_only=True)
class Glue(Case):
    """A layout, and sizes where they matter."""

    layout: str
    sequence_parallel: bool = False
    batch: int = 0
    micro_batches: int = 1
    tokens: int = 0
    ignored: int = -100
    max_norm: float = 0.0

    def __str__(self) -> str:
        sizes = f", {self.batch} sequences of {self.tokens} tokens in {self.micro_batches}" if self.batch else ""
        sizes += f", ignore_index {self.ignored}" if self.ignored != -100 else ""
        norm = f", at most {self.max_norm:g}" if self.max_norm else ""
        parallel = ", sequence parallelism" if self.sequence_parallel else ""
        return f"{self.layout} on {self.world_size} ranks{sizes}{norm}{parallel}"

    def degrees(self) -> Layout:
        return Layout.parse(self.layout)

    def random(self, what: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def whole_numbers(self, what: int, below: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + what)
        return torch.randint(below, shape, generator=generator)


def _layouts(seed: int, level: str, visible: list[dict], hidden: list[dict]) -> list[Glue]:
    chosen = visible if level == "visible" else hidden
    sizes = (Layout.parse(sizes["layout"]).world_size for sizes in chosen)
    return [Glue(world_size=n, seed=seed + i, **of) for i, (n, of) in enumerate(zip(sizes, chosen, strict=True))]


def _mesh(case: Glue) -> Any:
    from fivefold.mesh import make_mesh

    return make_mesh(case.degrees())


class GradientGroups(Check):
    exercise = "train.gradient_groups"
    points = {"sums": 3, "first group": 1}

    def cases(self, seed: int, level: str) -> list[Glue]:
        visible = [
            {"layout": "dp2,cp2,tp2,ep2"},
            {"layout": "dp2,pp2,tp2,ep2", "sequence_parallel": True},
            {"layout": "cp4,tp2,ep4", "sequence_parallel": True},
        ]
        hidden = [
            {"layout": "dp3,cp2,tp2,ep3", "sequence_parallel": True},
            {"layout": "dp3,cp2,tp2,ep3"},
            {"layout": "dp2,tp3", "sequence_parallel": True},
            {"layout": "pp2,tp3", "sequence_parallel": True},
        ]
        return _layouts(seed, level, visible, hidden)

    @staticmethod
    def program(solution: Any, case: Glue) -> dict:
        """For each kind of parameter the groups, as global ranks."""
        from fivefold.model import Role

        mesh = _mesh(case)
        found = {}
        for kind, (split, expert) in KINDS.items():
            over = solution(Role("w", split, expert), mesh, case.sequence_parallel)
            found[kind] = [dist.get_process_group_ranks(group) for group in over]
        return found

    def judge(self, case: Glue, outcomes: list[Any], ledger: Any) -> Iterator[Finding]:
        for kind in KINDS:
            over = [outcome[kind] for outcome in outcomes]
            yield self._judge_sums(case, kind, over)
            yield self._judge_first(case, kind, over)
        yield expect("sums", ledger, look="The groups are named here, and nothing is summed yet.")

    def _judge_sums(self, case: Glue, kind: str, over: list[list[list[int]]]) -> Finding:
        """Summed over one group after the other, each rank's gradient has every other token's share once."""
        had = [{rank: 1} for rank in range(case.world_size)]
        for number in range(max(map(len, over))):
            before = had
            had = [dict(own) for own in before]
            for rank, chosen in enumerate(over):
                if number < len(chosen):
                    had[rank] = {}
                    for other in chosen[number]:
                        for source, times in before[other].items():
                            had[rank][source] = had[rank].get(source, 0) + times
        for rank, found in enumerate(had):
            wanted = self._contributors(case, kind, rank)
            twice = sorted(source for source, times in found.items() if times > 1)
            if twice:
                seen = f"the gradient of {kind} on rank {rank} has that of rank {twice[0]} {found[twice[0]]} times"
                return Finding("sums", False, seen)
            if missing := sorted(set(wanted) - set(found)):
                seen = f"the gradient of {kind} on rank {rank} lacks the tokens of ranks {missing}"
                return Finding("sums", False, seen, look=LACKS)
            if more := sorted(set(found) - set(wanted)):
                seen = f"the gradient of {kind} on rank {rank} has those of ranks {more} in it"
                return Finding("sums", False, seen, look=MORE)
        return Finding("sums", True, f"{len(KINDS)} kinds of parameters on {case.layout}")

    def _judge_first(self, case: Glue, kind: str, over: list[list[list[int]]]) -> Finding:
        for rank, chosen in enumerate(over):
            wanted = self._contributors(case, kind, rank, tokens_only=True)
            if not chosen or sorted(chosen[0]) != wanted:
                got = sorted(chosen[0]) if chosen else "none"
                seen = f"for {kind} the first group of rank {rank} is {got}, expected {wanted}"
                return Finding("first group", False, seen, look=FIRST)
        return Finding("first group", True, f"{len(KINDS)} kinds of parameters")

    def _contributors(self, case: Glue, kind: str, rank: int, tokens_only: bool = False) -> list[int]:
        """The ranks that hold the very numbers that `rank` holds and saw other tokens, and `rank` itself."""
        layout, (split, expert) = case.degrees(), KINDS[kind]
        me = coordinates(rank, layout)

        def alike(other: int) -> bool:
            at = coordinates(other, layout)
            both_tp = at.tp == me.tp or (split is None and case.sequence_parallel and not tokens_only)
            same_experts = self._experts(at, layout) == self._experts(me, layout)
            return at.pp == me.pp and both_tp and (same_experts or not expert)

        return [other for other in range(case.world_size) if alike(other)]

    @staticmethod
    def _experts(at: Any, layout: Layout) -> int:
        return (at.dp * layout.cp + at.cp) % layout.ep


class LossMean(Check):
    exercise = "train.loss_mean"
    points = {"loss": 2, "gradient": 2, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Glue]:
        """Many tokens are ignored, unlike numbers of them everywhere; on one rank a micro-batch has none at all."""
        visible = [
            {"layout": "dp2,cp2", "batch": 4, "micro_batches": 2, "tokens": 6},
            {"layout": "dp2,pp2,tp2", "batch": 6, "micro_batches": 3, "tokens": 5, "ignored": -1},
        ]
        hidden = [
            {"layout": "dp3,tp2", "batch": 6, "micro_batches": 2, "tokens": 4 + seed % 3},
            {"layout": "dp2,cp3", "batch": 2, "micro_batches": 1, "tokens": 5, "ignored": 3},
        ]
        return _layouts(seed, level, visible, hidden)

    @staticmethod
    def program(solution: Any, case: Glue) -> dict:
        mesh = _mesh(case)
        labels, logits = _own_labels(case, dist.get_rank()), _own_logits(case, dist.get_rank())
        loss = solution([label.clone() for label in labels], mesh, *([case.ignored] if case.ignored != -100 else []))
        leaves = [x.requires_grad_() for x in logits]
        values = [loss(x, i) for i, x in enumerate(leaves)]
        sum(values).backward()
        return {"loss": [value.detach() for value in values], "gradient": [x.grad for x in leaves]}

    def judge(self, case: Glue, outcomes: list[Any], ledger: Any) -> Iterator[Finding]:
        layout = case.degrees()
        expected = [_dense_loss(case, rank) for rank in range(case.world_size)]
        names = [f"loss of micro-batch {i}" for i in range(case.micro_batches)]
        got = [dict(zip(names, outcome["loss"], strict=False)) for outcome in outcomes]
        yield compare_all("loss", got, [dict(zip(names, e["loss"], strict=True)) for e in expected], "rounding")
        names = [f"gradient of the logits of micro-batch {i}" for i in range(case.micro_batches)]
        got = [dict(zip(names, outcome["gradient"], strict=False)) for outcome in outcomes]
        wanted = [dict(zip(names, e["gradient"], strict=True)) for e in expected]
        yield compare_all("gradient", got, wanted, "rounding")
        yield self._judge_traffic(case, layout, ledger)

    def _judge_traffic(self, case: Glue, layout: Layout, ledger: Any) -> Finding:
        """One number over DP x CP for all micro-batches; over TP what each loss needs."""
        across = groups(layout, ("dp", "cp"))
        alone = layout.dp * layout.cp == 1
        calls = [Calls("all_reduce", forward=0 if alone else 1, groups=across)]
        if layout.tp > 1:
            calls.append(Calls("all_reduce", forward=3 * case.micro_batches, groups=groups(layout, "tp")))
        finding = expect("traffic", ledger, *calls, look="How many tokens there are is one number for the whole step.")
        if not finding.passed:
            return finding
        for rank in ledger.ranks:
            for call in rank.communications:
                if sorted(call.ranks) in across and call.bytes > 8:
                    seen = f"rank {rank.rank} sends {call.bytes} B over DP x CP, expected one number"
                    return Finding("traffic", False, seen)
        return finding


def _own_labels(case: Glue, rank: int) -> list[Tensor]:
    """(b, s) for each micro-batch of this rank's place in DP x CP, the same on all of its TP and PP ranks."""
    layout = case.degrees()
    at = coordinates(rank, layout)
    place, rows = at.dp * layout.cp + at.cp, case.batch // case.micro_batches // layout.dp
    labels = case.whole_numbers(place, 12, case.micro_batches, rows, case.tokens)
    hidden = case.whole_numbers(100 + place, 7, case.micro_batches, rows, case.tokens) > place + 1
    hidden[0] |= torch.tensor(place == layout.dp * layout.cp - 1)
    return list(labels.masked_fill(hidden, case.ignored))


def _logits(case: Glue, rank: int) -> list[Tensor]:
    """(b, s, 12) for each micro-batch, whole over the vocabulary."""
    layout = case.degrees()
    at = coordinates(rank, layout)
    place, rows = at.dp * layout.cp + at.cp, case.batch // case.micro_batches // layout.dp
    return list(3 * case.random(200 + place, case.micro_batches, rows, case.tokens, 12))


def _own_logits(case: Glue, rank: int) -> list[Tensor]:
    t, place = case.degrees().tp, coordinates(rank, case.degrees()).tp
    return [x.chunk(t, -1)[place].clone() for x in _logits(case, rank)]


def _dense_loss(case: Glue, rank: int) -> dict[str, list[Tensor]]:
    layout = case.degrees()
    me = coordinates(rank, layout)
    alike = [(r, coordinates(r, layout)) for r in range(case.world_size)]
    places = [r for r, at in alike if (at.pp, at.tp) == (me.pp, me.tp)]  # one rank for each place in DP x CP
    count = sum(int((label != case.ignored).sum()) for r in places for label in _own_labels(case, r))
    leaves = [x.requires_grad_() for x in _logits(case, rank)]
    labels = _own_labels(case, rank)
    losses = [
        F.cross_entropy(x.flatten(0, 1), label.flatten(), ignore_index=case.ignored, reduction="sum") / count
        for x, label in zip(leaves, labels, strict=True)
    ]
    sum(losses).backward()
    return {
        "loss": [loss.detach() for loss in losses],
        "gradient": [x.grad.chunk(layout.tp, -1)[me.tp].clone() for x in leaves],
    }


class Clip(Check):
    exercise = "train.clip"
    points = {"norm": 2, "gradient": 1, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Glue]:
        visible = [
            {"layout": "dp2,tp2", "max_norm": 0.7},
            {"layout": "dp2,tp2", "max_norm": 1e6},
            {"layout": "pp2,tp3", "max_norm": 1.5},
        ]
        hidden = [{"layout": "dp3,pp2", "max_norm": 0.3}, {"layout": "cp2,pp2,tp2", "max_norm": 2.0}]
        return _layouts(seed, level, visible, hidden)

    @staticmethod
    def program(solution: Any, case: Glue) -> dict:
        shards = [SimpleNamespace(gradient=gradient.clone()) for _, gradient in _pieces(case, dist.get_rank())]
        norm = solution(shards, [copies for copies, _ in _pieces(case, dist.get_rank())], case.max_norm, _mesh(case))
        return {"norm": float(norm), "gradient": [shard.gradient for shard in shards]}

    def judge(self, case: Glue, outcomes: list[Any], ledger: Any) -> Iterator[Finding]:
        once = {}
        for rank in range(case.world_size):
            for place, (copies, gradient) in enumerate(_pieces(case, rank)):
                once[(place, rank // copies if place else rank)] = gradient
        norm = torch.cat(list(once.values())).norm()
        yield compare("norm", "the norm", [o["norm"] for o in outcomes], float(norm))
        names = ["the gradient that no other rank has", "the gradient of a pair", "the gradient of all ranks"]
        got = [dict(zip(names, o["gradient"], strict=False)) for o in outcomes]
        findings = []
        for least in (1e-6, 0.0):  # as torch's own does, or without what keeps it from dividing by zero
            scale = torch.clamp(case.max_norm / (norm + least), max=1.0)
            wanted = [
                {name: scale * gradient for name, (_, gradient) in zip(names, _pieces(case, rank), strict=True)}
                for rank in range(case.world_size)
            ]
            findings.append(compare_all("gradient", got, wanted))
        yield next((finding for finding in findings if finding.passed), findings[0])
        finding = expect("traffic", ledger, Calls("all_reduce", forward=1))
        calls = [call for rank in ledger.ranks for call in rank.communications]
        if finding.passed and max(call.bytes for call in calls) > 8:
            finding = Finding("traffic", False, f"{max(call.bytes for call in calls)} B travel, expected one number")
        yield finding


def _pieces(case: Glue, rank: int) -> list[tuple[int, Tensor]]:
    """(copies, gradient): a piece of its own, of another length on each rank and empty on one; one that two or three
    neighbours share; one that all ranks have."""
    layout = case.degrees()
    together = layout.tp if layout.tp > 1 else 2
    return [
        (1, case.random(rank, 0 if rank == 1 else 3 + rank)),
        (together, case.random(100 + rank // together, 4 + rank // together)),
        (case.world_size, case.random(200, 6)),
    ]
