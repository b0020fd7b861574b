"""A training from its first step to its last, with held-out losses, checkpoints and a table of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import checkpoint, run, speed, text
from fivefold.runtime.ledger import phase
from fivefold.runtime.marks import forget
from fivefold.train import Job, Trainer, batches, local_batches, loss_mean, step

UNLIMITED = 365 * 24 * 3600.0  # seconds
HELD_OUT_BATCHES = 2


@dataclass(frozen=True)
class Course:
    """What happens along the way."""

    steps: int = 50  # in all, also those before a checkpoint
    eval_every: int = 25  # steps between two held-out losses
    log_every: int = 1  # steps between two lines of the table
    folder: str | None = None  # for checkpoints
    save_every: int = 100
    resume: str | None = None  # the checkpoint to go on from


@dataclass
class Row:
    """One step, as the table and the report have it."""

    step: int
    loss: float
    held_out: float | None  # after this step
    norm: float
    seconds: float
    tokens_per_second: float


def launch(job: Job, course: Course, parts: dict[str, Any] | None = None) -> dict:
    """Train on ranks of this machine, or as one of torchrun's; the report, plain data.

    Rank 0's lines are printed as they come, those of other ranks with their number. `parts` are put in the places of
    the library's functions on every rank, as in `run`.
    """
    size = job.layout.world_size
    return run(train_here, size, job, course, device=job.device, timeout=UNLIMITED, parts=parts, echo=_show).results[0]


def _show(rank: int, line: str) -> None:
    print(line if rank == 0 else f"[rank {rank}] {line}", flush=True)


def train_here(job: Job, course: Course) -> dict | None:
    """One rank's training; rank 0 prints the table and returns the report."""
    trainer = Trainer(job)
    first = checkpoint.load(trainer, course.resume) if course.resume else 0
    pace = _Pace(job, trainer.mesh.rank == 0)
    rows, saved = [], None
    for number, tokens in enumerate(batches(job, course.steps, first), start=first + 1):
        last = number == course.steps
        began = time.perf_counter()
        report = step(trainer, tokens)
        seconds = time.perf_counter() - began
        held_out = held_out_loss(trainer) if last or number % course.eval_every == 0 else None
        rows.append(Row(number, report.loss, held_out, report.norm, seconds, job.batch * job.sequence / seconds))
        if last or number % course.log_every == 0 or held_out is not None:
            pace.show(rows[-1])
        if course.folder and (last or number % course.save_every == 0):
            saved = checkpoint.save(trainer, course.folder, number)
        forget()
    return pace.report(rows, course, saved) if trainer.mesh.rank == 0 else None


def held_out_loss(trainer: Trainer) -> float:
    """The mean loss over text that is never trained on, the same sequences each time; equal on all ranks."""
    with torch.no_grad(), phase("held out"):
        losses = [_loss(trainer, tokens) for tokens in _held_out(trainer.job)]
    return sum(losses) / len(losses)


def _held_out(job: Job) -> Iterator[Tensor]:
    _, held_out = text.split()
    for number in range(HELD_OUT_BATCHES):
        inputs, labels = text.sequences(held_out, job.batch, job.sequence, seed=number)
        yield torch.cat([inputs, labels[:, -1:]], dim=1)


def _loss(trainer: Trainer, tokens: Tensor) -> float:
    job = trainer.job
    parts = local_batches(tokens.to(job.device), job.num_microbatches, trainer.mesh)
    loss = loss_mean([part.labels for part in parts], trainer.mesh)
    outputs = [_forward(trainer, i, part.inputs) for i, part in enumerate(parts)]
    return trainer.total({i: loss(logits, i) for i, logits in enumerate(outputs) if logits is not None})


def _forward(trainer: Trainer, i: int, x: Tensor) -> Tensor | None:
    """Micro-batch i through all stages, one after the other; the logits on the rank that has the last."""
    schedule, group = trainer.schedule, trainer.mesh.pp
    me, route = group.rank(), [schedule.rank_of(stage, i) for stage in range(schedule.num_stages)]
    for stage, here in enumerate(route):
        if here != me:
            continue
        if stage > 0 and route[stage - 1] != me:
            x = trainer.template()
            dist.recv(x, group=group, group_src=route[stage - 1])
        x = trainer.stages[stage](x)
        if stage + 1 < len(route) and route[stage + 1] != me:
            dist.send(x.contiguous(), group=group, group_dst=route[stage + 1])
    return x if route[-1] == me else None


class _Pace:
    """Rank 0's table and report; silent on the others."""

    def __init__(self, job: Job, speaks: bool):
        self.job, self.speaks = job, speaks
        self.flops = speed.step_flops(job.model, job.batch, job.sequence)
        self.gpus = speed.num_gpus() if job.device == "cuda" else 0
        self.rate = speed.matmul_rate(job.device, job.model.dtype) if self.gpus and speaks else None
        if speaks:
            print("\n".join(self._head()), flush=True)

    def _head(self) -> Iterator[str]:
        job, m = self.job, self.job.model
        experts = f", {m.moe_layers} with {m.experts} experts" if m.moe_layers else ""
        size = job.layout.world_size
        yield f"{job.layout} on {size} {'rank' if size == 1 else 'ranks'} ({job.device}), schedule {job.schedule}"
        yield f"GPT of {m.layers} layers{experts}: {speed.num_parameters(m):,} parameters, {_name(m.dtype)}"
        yield f"a step is {job.batch} sequences of {job.sequence} tokens, in {job.num_microbatches} micro-batches"
        if self.gpus:
            yield f"{self.gpus} GPUs, each of {self.rate / 1e12:.0f} TFLOPS in a product of two large matrices"
        if 0 < self.gpus < size:
            yield f"{size} ranks share {self.gpus} GPUs: this shows that the numbers are right, not how fast they come"
        yield ""
        yield "  step      loss  held out  gradient  tokens/s" + ("    MFU" if self.gpus else "")

    def show(self, row: Row) -> None:
        if self.speaks:
            held_out = "" if row.held_out is None else f"{row.held_out:.4f}"
            mfu = f"  {100 * self.mfu(row.seconds):4.1f}%" if self.gpus else ""
            line = f"{row.step:6}  {row.loss:8.4f}  {held_out:>8}  {row.norm:8.3f}  {row.tokens_per_second:8,.0f}{mfu}"
            print(line, flush=True)

    def mfu(self, seconds: float) -> float | None:
        return self.flops / (seconds * self.gpus * self.rate) if self.gpus else None

    def report(self, rows: list[Row], course: Course, saved: Any) -> dict:
        job, seconds = self.job, median(row.seconds for row in rows)
        tokens = job.batch * job.sequence / seconds
        print(f"\nmedian step {seconds:.3g} s, {tokens:,.0f} tokens/s", flush=True)
        if saved:
            print(f"checkpoint in {saved}", flush=True)
        return {
            "layout": str(job.layout), "world_size": job.layout.world_size, "device": job.device,
            "schedule": job.schedule, "num_microbatches": job.num_microbatches, "batch": job.batch,
            "sequence": job.sequence, "model": asdict(job.model) | {"dtype": _name(job.model.dtype)},
            "parameters": speed.num_parameters(job.model), "resumed_from": course.resume,
            "checkpoint": None if saved is None else str(saved), "steps": [asdict(row) for row in rows],
            "median_step_seconds": seconds, "tokens_per_second": tokens, "flops_per_step": self.flops,
            "gpus": self.gpus, "matmul_flops_per_second": self.rate, "mfu": self.mfu(seconds),
        }  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
