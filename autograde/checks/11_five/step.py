"""Check of lesson 11: a whole step, five ways at once, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from fivefold.layout import Layout
from fivefold.runtime.ranks import run

from autograde.case import Case
from autograde.check import Check
from autograde.compare import compare, compare_all
from autograde.verdict import Finding

RATES = (None, 2e-2)  # of the steps: the job's own, and another
SIZES = {"batch": 8, "num_microbatches": 4, "sequence": 16, "max_norm": 0.5, "bucket_bytes": 4000.0}
REDUCING = ("all_reduce", "reduce_scatter", "all_gather")
SLACK = 1.05  # counts, losses and the experts' loads travel too


@dataclass(frozen=True, kw_only=True)
class Training(Case):
    """A layout, and how its step is computed."""

    layout: str
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tied: bool = True

    def __str__(self) -> str:
        parallel = ", sequence parallelism" if self.sequence_parallel else ""
        return f"{self.layout}, schedule {self.schedule}, {len(RATES)} steps{parallel}"


class Step(Check):
    exercise = "train.step"
    points = {"loss": 2, "norm": 1, "weights": 3, "traffic": 1}

    def cases(self, seed: int, level: str) -> list[Training]:
        visible = [
            {"layout": "dp2,pp2,tp2,ep2", "sequence_parallel": True},
            {"layout": "dp2,cp2,ep4", "tied": False},
            {"layout": "dp2,tp2,ep2"},
        ]
        hidden = [
            {"layout": "cp2,pp2,tp2,ep2", "schedule": "dualpipe", "sequence_parallel": True},
            {"layout": "pp2,tp2", "schedule": "zb-v"},
        ]
        chosen = visible if level == "visible" else hidden
        return [Training(world_size=Layout.parse(of["layout"]).world_size, seed=seed, **of) for of in chosen]

    @staticmethod
    def program(solution: Any, case: Training) -> dict:
        return _train(solution, case, case.layout)

    def judge(self, case: Training, outcomes: list[Any], ledger: Any) -> Iterator[Finding]:
        expected = _one_process(case)
        for name, look in (
            ("loss", "The loss is that of the whole step: what do other ranks know of it?"),
            (
                "norm",
                "The norm is that of the whole model's gradient. Is every gradient whole before it is taken?",
            ),
        ):
            for number in range(len(RATES)):
                got = [outcome[name][number] for outcome in outcomes]
                yield compare(name, f"the {name} of step {number + 1}", got, expected[name][number], "layers", look)
        yield self._judge_weights(expected, outcomes)
        yield self._judge_traffic(outcomes, ledger)

    def _judge_weights(self, expected: dict, outcomes: list[Any]) -> Finding:
        """Each piece that a rank has, against the same place of the whole weight."""
        whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in expected["shapes"].items()}
        for name, offset, piece in expected["weights"]:
            _box(whole[name], offset, piece).copy_(piece)
        got = [{f"{name} at {list(offset)}": piece for name, offset, piece in o["weights"]} for o in outcomes]
        wanted = [
            {f"{name} at {list(offset)}": _box(whole[name], offset, piece) for name, offset, piece in o["weights"]}
            for o in outcomes
        ]
        look = "The losses may be right all the same: which gradients are summed, over which ranks, and how often?"
        return compare_all("weights", got, wanted, "layers", look)

    def _judge_traffic(self, outcomes: list[Any], ledger: Any) -> Finding:
        """Each gradient is reduced once and each weight gathered once, over the ranks that share them."""
        for rank, outcome in enumerate(outcomes):
            over = {tuple(sorted(group)) for group in outcome["groups"]}
            calls = [c for c in ledger[rank].communications if c.op in REDUCING and tuple(sorted(c.ranks)) in over]
            sent = sum(call.sent for call in calls)
            if not outcome["planned"] <= sent <= SLACK * outcome["planned"]:
                seen = (
                    f"rank {rank} sends {sent / outcome['planned']:.2f} times what one reduce-scatter of the gradients"
                )
                return Finding("traffic", False, f"{seen} and one all-gather of the weights take")
        return Finding("traffic", True, "gradients reduced once, weights gathered once")


def _train(step: Any, case: Training, layout: str) -> dict:
    """Two steps: losses, norms, the pieces of the weights that this rank has afterwards, and what was to be sent."""
    import torch.distributed as dist
    from fivefold.model import GPTConfig
    from fivefold.pieces import pieces
    from fivefold.train import Job, Trainer

    model = GPTConfig(
        layers=4, hidden=16, heads=4, kv_heads=2, ffn=12, experts=4, vocabulary=50, tied=case.tied, seed=case.seed,
        dtype=torch.float64,
    )  # fmt: skip
    job = Job(Layout.parse(layout), model, case.schedule, sequence_parallel=case.sequence_parallel, **SIZES)
    trainer = Trainer(job)
    generator = torch.Generator().manual_seed(case.seed)
    reports = []
    for rate in RATES:
        tokens = torch.randint(model.vocabulary, (job.batch, job.sequence + 1), generator=generator)
        reports.append(step(trainer, tokens) if rate is None else step(trainer, tokens, rate))
    weights = [(p.name, p.offset, p.tensor.clone()) for p, _ in pieces(trainer) if p.name.startswith("parameter/")]
    planned = sum(2 * (s.group.size() - 1) * s.length * 8 for s in trainer.shards) * len(RATES)
    return {
        "loss": [float(report.loss) for report in reports],
        "norm": [float(report.norm) for report in reports],
        "weights": [(name.removeprefix("parameter/"), offset, tensor) for name, offset, tensor in weights],
        "shapes": {p.name.removeprefix("parameter/"): p.whole for p, _ in pieces(trainer)},
        "planned": planned,
        "groups": [dist.get_process_group_ranks(shard.group) for shard in trainer.shards],
    }


@lru_cache(maxsize=8)
def _one_process(case: Training) -> dict:
    """The same two steps in one process, whose parts and trainer are proven against a dense model elsewhere."""
    return run(_alone, 1, case).results[0]


def _alone(case: Training) -> dict:
    from dataclasses import replace

    from fivefold.train import step

    schedule = "1f1b" if case.schedule in ("dualpipe", "zb-v") else case.schedule
    return _train(step, replace(case, schedule=schedule, sequence_parallel=False), "dp1")


def _box(whole: torch.Tensor, offset: tuple[int, ...], piece: torch.Tensor) -> torch.Tensor:
    """The place of a piece in the whole."""
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))]
