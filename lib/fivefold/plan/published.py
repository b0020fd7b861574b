"""Published runs, and what the planner says of them.

`published.csv` holds 26 rows: Narayanan et al. 2021 (Megatron-LM), tables 1 and 2; the Llama 3 report (2024), table 4;
torchtitan (2024), table 1. Each source counts operations in its own way, and had software of its own:

| source | operations of a step that its figure divides by time | software |
| --- | --- | --- |
| Narayanan 2021 | `cost.step_flops` with "full": what is computed again counts, causal halves too | scores in memory |
| Llama 3 | 6 a parameter and token, and half of attention: a guess, the report does not say | flash |
| torchtitan | 6 a parameter outside the embedding, and the whole of attention, as its program counts | not compiled |

What a source does not state is filled in by one rule for all rows: the micro-batch is the power of two up to 8 that the
planner finds fastest; interleaving cuts a rank's layers into as few chunks as divide them, and where none do into
chunks of one layer.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold import cost
from fivefold.layout import Layout, LayoutError
from fivefold.plan.layout import Plan, check
from fivefold.plan.memory import Memory, fits
from fivefold.plan.model import COMPILED, DEEPSPEED_2021, EAGER, MEGATRON_2021, MODERN, Model, Software, Work, cluster
from fivefold.plan.model import gpt as gpt_model
from fivefold.plan.time import Seconds, step_seconds
from fivefold.runtime.cluster import Cluster

PATH = Path(__file__).with_name("published.csv")
CLUSTERS = {"A100-80GB": "a100", "H100-80GB": "llama3", "H100-96GB": "h100-96gb", "H200": "h200", "H800-80GB": "h800"}
FITTED = {"A100": 9, "H100": 22}  # the row, from 0, on which a GPU type's EFFICIENCY was fitted


@dataclass(frozen=True)
class Run:
    """A published row as the planner sees it. `reported` is in TFLOPS a GPU, as its source counts."""

    source: str
    table: str
    model: Model
    work: Work
    plan: Plan
    gpu: str
    reported: float
    software: Software
    micro_batch_stated: bool = True

    @property
    def gpus(self) -> int:
        return self.plan.layout.world_size

    @property
    def cluster(self) -> Cluster:
        return cluster(CLUSTERS[self.gpu])


@dataclass(frozen=True)
class Prediction:
    run: Run
    plan: Plan  # with what the source left open
    seconds: Seconds
    memory: Memory

    @property
    def tflops(self) -> float:
        return counted_flops(self.run) / self.seconds.total / self.run.gpus / 1e12

    @property
    def error(self) -> float:
        """Predicted over reported, less one."""
        return self.tflops / self.run.reported - 1


def rows() -> list[Run]:
    """The published runs, in the order of the file."""
    with PATH.open(newline="") as file:
        return [read(row) for row in csv.DictReader(file)]


def read(row: dict[str, str]) -> Run:
    """A row of the file, or one like it, as a run. Raises KeyError for a GPU without a cluster of that name."""
    source, gpt = row["source"], row["model"].startswith("GPT")
    model = _model(row, gpt)
    layout = Layout(**{axis: int(row[axis]) for axis in ("dp", "cp", "pp", "tp")})
    work = Work(int(row["global_batch_sequences"]) * int(row["sequence"]), int(row["sequence"]))
    interleaved = layout.pp > 1 and (gpt or "interleaved" in row["schedule"])
    plan = Plan(
        layout, int(row["zero_stage"]), "interleaved" if interleaved else "one_f_one_b",
        chunks(model.layers, layout.pp) if interleaved else 1, int(row["microbatch"] or 1), row["recompute"],
        sequence_parallel=not source.startswith("Narayanan"),
    )  # fmt: skip
    peak = 312 if row["gpu"].startswith("A100") else 989.4  # an MFU is stated of the standard GPU's
    reported = float(row["tflops_per_gpu"] or float(row["percent_of_peak"]) / 100 * peak)
    stated = bool(row["microbatch"])
    return Run(source, row["table"], model, work, plan, row["gpu"], reported, _software(row), stated)


def _model(row: dict[str, str], gpt: bool) -> Model:
    """Sizes that the file leaves out are those of the family: GPT, Llama 3, or Llama 2 where every head has K and V."""
    layers, hidden, heads, kv_heads = (int(row[name]) for name in ("layers", "hidden", "heads", "kv_heads"))
    if gpt:
        return gpt_model(layers, hidden, heads, name=f"{row['model']} {row['params_billion']}B")
    wide = {4096: 14336, 5120: 13824, 8192: 28672, 16384: 53248}
    old = "Llama 2" in row["model"]
    ffn = 11008 if old and hidden == 4096 else wide.get(hidden, round(hidden * 3.5))
    return Model(layers, hidden, heads, kv_heads, ffn, 32000 if old else 128256, name=row["model"])


def _software(row: dict[str, str]) -> Software:
    source = row["source"]
    if source.startswith("Narayanan"):
        return DEEPSPEED_2021 if row["zero_stage"] == "3" else MEGATRON_2021
    if source.startswith("Korthikanti"):
        return replace(MEGATRON_2021, regather=True)
    if source.startswith("torchtitan"):
        return COMPILED if "compile" in f"{row['model']} {row['schedule']}" else EAGER
    return MODERN


def chunks(layers: int, p: int) -> int:
    """Chunks of a rank where a source does not say: as few as divide its layers, else one layer each."""
    if layers % p:
        return -(-layers // p)
    return next((v for v in range(2, layers // p + 1) if layers // p % v == 0), 1)


def predict(
    run: Run, seconds: Callable[..., Seconds] = step_seconds, memory: Callable[..., Memory] = fits
) -> Prediction:
    """What the planner says of a run; an unstated micro-batch is the fastest of 1, 2, 4 and 8.

    `seconds` and `memory` may be a learner's own `step_seconds` and `fits`.
    """
    found = []
    for size in (run.plan.micro_batch,) if run.micro_batch_stated else (1, 2, 4, 8):
        plan = replace(run.plan, micro_batch=size)
        if plan.schedule == "interleaved" and plan.num_microbatches(run.work) % plan.layout.pp:
            plan = replace(plan, schedule="one_f_one_b", chunks=1)
        try:
            check(run.model, plan, run.work)
        except LayoutError:
            continue
        args = run.model, plan, run.work, run.cluster, run.software
        found.append(Prediction(run, plan, seconds(*args), memory(*args)))
    return min(found, key=lambda prediction: prediction.seconds.total)


def counted_flops(run: Run) -> float:
    """Operations of one step as the run's source counts them."""
    model, work = run.model, run.work
    if run.model.bias:  # a GPT: hardware FLOPs in Narayanan et al., model FLOPs elsewhere
        again = run.plan.recompute if run.source.startswith("Narayanan") else "none"
        return cost.step_flops(work.sequences, work.context, model.layers, model.hidden, model.vocabulary, again)
    attention = 12 * model.layers * model.hidden * work.context
    if run.source.startswith("torchtitan"):
        return work.tokens * (6 * (model.parameters - model.embedding_parameters) + attention)
    return work.tokens * (6 * model.parameters + attention / 2)


def errors(predictions: list[Prediction]) -> tuple[float, float]:
    """The median and the largest of the errors' sizes."""
    sizes = [abs(prediction.error) for prediction in predictions]
    return statistics.median(sizes), max(sizes)
