"""Train on every layout: do losses and weights come out as on one process?

A case is a layout of the five axes with a schedule and options: recomputation, sequence parallelism, tied embeddings,
attention by fused kernels. It trains a small model for five steps in float64, on as many ranks as the layout has; so
does one process. The loss and the norm of each step, and every weight at the end, put together from the ranks, have to
be the same to 1e-10.

All layouts of 8 ranks are in it with every EP that divides, all of 16 ranks with one EP or more. What goes with them is
chosen by a covering design. A case covers pairs (of two axes' degrees, a degree and an option, two options) and triples
(of the schedule and two of EP and the options). For each layout in turn the case is taken that covers most of what no
case before it did; then cases are added until each pair and triple that can be has been in one.

    python bench/sweep.py [--ranks 8] [--every N] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import machine
import torch
from fivefold import run
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.train import SCHEDULES, Job, Trainer, batches, step
from torch import Tensor

TOLERANCE = 1e-10
STEPS = 5
MEASURES = ("loss", "norm", "weights", "copies")  # copies: of one weight, on the ranks that hold it
VOCABULARY = 67  # a prime, so that every tp needs padding; the text's bytes are folded into it
AXES = ("dp", "cp", "pp", "tp", "ep")


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str
    recomputation: str
    sequence_parallel: bool
    tied: bool
    fused: bool  # attention by fused kernels

    @property
    def features(self) -> dict[str, Any]:
        """What this case is an example of, by kind."""
        degrees = {axis: getattr(self.layout, axis) for axis in AXES}
        return degrees | {name: value for name, value in vars(self).items() if name != "layout"}

    @property
    def covers(self) -> set[tuple]:
        """Its pairs of features, and the triples of its schedule with two of EP and the other options."""
        items = list(self.features.items())
        options = [item for item in items if item[0] in ("ep", "recomputation", "sequence_parallel", "tied")]
        schedule = ("schedule", self.schedule)
        return set(combinations(items, 2)) | {(schedule, *pair) for pair in combinations(options, 2)}

    def __str__(self) -> str:
        marks = {"sp": self.sequence_parallel, self.recomputation: self.recomputation != "none", "fused": self.fused}
        return " ".join([str(self.layout), self.schedule, *filter(marks.get, marks), "tied" if self.tied else "untied"])


def num_microbatches(schedule: str, p: int) -> int:
    """Where the schedule lets one choose: more than ranks on a short pipeline, fewer on a long one."""
    needed = {"dualpipe": 2 * p, "zb-v": 2 * p - 1, "interleaved": 2 * p if p < 4 else p}
    return needed.get(schedule, p + 1 if p <= 4 else 5)


def job(case: Case) -> Job:
    """The smallest sizes that a case's layout can split: uneven stages, few tokens, buckets of a few matrices."""
    layout = case.layout
    m = num_microbatches(case.schedule, layout.pp)
    stages = layout.pp * (2 if case.schedule in ("interleaved", "zb-v") else 1)
    heads, kv_heads = (8, 4) if layout.tp <= 4 else (16, layout.tp)
    model = GPTConfig(
        layers=max(3, stages + (stages < 16)), hidden=2 * heads, heads=heads, kv_heads=kv_heads, ffn=48,
        vocabulary=VOCABULARY, tied=case.tied, dtype=torch.float64,
    )  # fmt: skip
    return Job(
        layout, model, case.schedule, num_microbatches=m, batch=m * layout.dp * (2 if layout.dp <= 2 else 1),
        sequence=max(16, 2 * layout.cp), sequence_parallel=case.sequence_parallel, recomputation=case.recomputation,
        fused_attention=case.fused, bucket_bytes=20_000,
    )  # fmt: skip


def on_one_process(job: Job) -> Job:
    """The same training without any axis, in the plainest way."""
    return replace(
        job, layout=Layout(), schedule="1f1b", sequence_parallel=False, recomputation="none", fused_attention=False
    )


def layouts(world_size: int) -> Iterator[Layout]:
    """All layouts of that many ranks, with EP 1, 2 and 4 where it divides DP x CP."""
    for degrees in product(*[[d for d in range(1, world_size + 1) if world_size % d == 0]] * 4):
        if math.prod(degrees) == world_size:
            dp, cp, pp, tp = degrees
            yield from (Layout(dp, cp, pp, tp, ep) for ep in (1, 2, 4) if dp * cp % ep == 0)


def variants(layout: Layout) -> list[Case]:
    """The cases of a layout: schedules that its pp allows, and sequence parallelism where there is a TP group."""
    names = [name for name in SCHEDULES if layout.pp < 16 or name not in ("interleaved", "zb-v", "dualpipe")]
    if layout.pp % 2:
        names.remove("dualpipe")
    split = (False, True) if layout.tp > 1 else (False,)
    options = product(names, ("none", "selective", "full"), split, (True, False), (False, True))
    return [Case(layout, *some) for some in options]


@cache
def covering() -> list[Case]:
    """Every layout of 8 ranks, every one of 16 up to its EP, then what is left: each time the case that covers most."""
    found = {layout: [(case, case.covers) for case in variants(layout)] for n in (8, 16) for layout in layouts(n)}
    everything = [item for items in found.values() for item in items]
    left = set().union(*(covers for _, covers in everything))
    chosen: list[Case] = []

    def take(candidates: list[tuple[Case, set]]) -> None:
        case, covers = max(candidates, key=lambda item: len(left & item[1]))
        chosen.append(case)
        left.difference_update(covers)

    for layout in layouts(8):
        take(found[layout])
    for base in (layout for layout in layouts(16) if layout.ep == 1):
        take([item for layout in found if replace(layout, ep=1) == base for item in found[layout]])
    while left:
        take(everything)
    return chosen


def trained(job: Job, steps: int) -> dict:
    """What one rank says after some steps: each step's loss and norm, and its part of the weights."""
    trainer = Trainer(job)
    reports = [step(trainer, tokens % VOCABULARY) for tokens in batches(job, steps)]
    parts = [(vars(role), parameter) for parameter, role in trainer.roles.items()]
    return {
        "steps": [(report.loss, report.norm) for report in reports], "parts": parts,
        "tp": trainer.mesh.coordinates.tp, "ep": trainer.mesh.expert_rank,
    }  # fmt: skip


def whole_weights(results: list[dict], model: GPTConfig) -> tuple[dict[str, Tensor], float]:
    """The weights of the whole model from the parts on all ranks, and how far copies of a part are from each other."""
    pieces: dict[str, dict[tuple[int, int], Tensor]] = defaultdict(dict)  # name -> (expert rank, tp rank) -> piece
    splits, apart = {}, 0.0
    for result in results:
        for role, tensor in result["parts"]:
            name, splits[name] = role["name"], role["split"]
            place = (result["ep"] if role["expert"] else 0, result["tp"] if role["split"] is not None else 0)
            first = pieces[name].setdefault(place, tensor)
            apart = max(apart, (first - tensor).abs().max().item())
    whole = {}
    for name, found in pieces.items():
        rows = [[found[e, t] for t in range(1 + max(t for _, t in found))] for e in range(1 + max(e for e, _ in found))]
        joined = [torch.cat(row, splits[name]) if len(row) > 1 else row[0] for row in rows]
        tensor = torch.cat(joined) if len(joined) > 1 else joined[0]
        whole[name] = tensor[: model.vocabulary] if name in ("embedding.weight", "head.weight") else tensor
    return whole, apart


@cache
def reference(job: Job, steps: int) -> dict:
    """One process's results."""
    return run(trained, 1, job, steps, timeout=600).results[0]


def compare(case: Case, steps: int = STEPS) -> dict:
    """Train both ways; the largest differences of losses, norms and weights, and of copies of a weight."""
    split = job(case)
    alone = reference(on_one_process(split), steps)
    began = time.perf_counter()
    done = run(trained, case.layout.world_size, split, steps, timeout=600)
    weights, apart = whole_weights(done.results, split.model)
    expected, _ = whole_weights([alone], split.model)
    if weights.keys() != expected.keys():
        raise ValueError(f"weights of other names: {sorted(weights.keys() ^ expected.keys())}")
    pairs = [pair for result in done.results for pair in zip(result["steps"], alone["steps"], strict=True)]
    return {
        "loss": max(abs(ours[0] - theirs[0]) for ours, theirs in pairs),
        "norm": max(abs(ours[1] - theirs[1]) for ours, theirs in pairs),
        "weights": max((weights[name] - expected[name]).abs().max().item() for name in expected),
        "copies": apart, "seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


def record(case: Case) -> dict:
    """A line of the sweep: the case, and what came of it."""
    head = asdict(case) | {"layout": str(case.layout), "ranks": case.layout.world_size, "m": job(case).num_microbatches}
    try:
        found = compare(case)
    except Exception as error:  # a case that cannot be trained is a result of the sweep
        return head | {"passed": False, "error": f"{type(error).__name__}: {error}"}
    return head | found | {"passed": max(found[what] for what in MEASURES) <= TOLERANCE}


def summary(cases: list[Case], records: list[dict]) -> dict:
    """How many cases and failures, the largest differences: over all, and for each value of each feature."""
    by: dict[tuple, dict] = {}
    for case, found in zip(cases, records, strict=True):
        for place, (kind, value) in enumerate([("all", ""), ("ranks", found["ranks"]), *case.features.items()]):
            empty = {"cases": 0, "failed": 0} | dict.fromkeys(MEASURES, 0.0)
            row = by.setdefault((place, str(value).rjust(2), f"{kind} {value}".strip()), empty)
            row["cases"] += 1
            row["failed"] += not found["passed"]
            row |= {what: max(row[what], found.get(what, 0.0)) for what in MEASURES}
    return {name: by[place, value, name] for place, value, name in sorted(by)}


def table(by: dict[str, dict]) -> str:
    lines = [f"{'largest difference':26}{'cases':>6}{'failed':>8}" + "".join(f"{what:>10}" for what in MEASURES)]
    for name, row in by.items():
        figures = "".join(f"{row[what]:>10.1e}" for what in MEASURES)
        lines.append(f"{name:26}{row['cases']:>6}{row['failed']:>8}{figures}")
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, choices=(8, 16), help="only the layouts of so many ranks")
    options.add_argument("--every", type=int, default=1, help="only each Nth case")
    options.add_argument("--json", type=Path, help="write every case and the summary to this file")
    given = options.parse_args()
    cases = [case for case in covering() if given.ranks in (None, case.layout.world_size)][:: given.every]
    records, began = [], time.perf_counter()
    for number, case in enumerate(cases, start=1):
        records.append(record(case))
        state = "" if records[-1]["passed"] else f"  FAILED {records[-1].get('error', records[-1])}"
        print(f"{number}/{len(cases)}  {case}{state}", file=sys.stderr, flush=True)
    by, seconds = summary(cases, records), round(time.perf_counter() - began)
    print(table(by) + f"\n{len(cases)} cases of {STEPS} steps in {seconds} s; none may differ by more than {TOLERANCE}")
    if given.json:
        machine.write(
            given.json, {"tolerance": TOLERANCE, "steps": STEPS, "seconds": seconds, "summary": by, "cases": records}
        )
    return int(by["all"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
