"""`fivefold train`: what it can be asked, and the one line that says what cannot be."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")
DTYPES = ("float32", "bfloat16", "float64")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command; the defaults are the capstone of the course, which trains on a laptop."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    group = parser.add_argument_group("the run")
    group.add_argument("--layout", default="dp1", help="degrees, such as dp2,cp2,pp2,tp2,ep2")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks compute")
    _number(group, "--steps", 50, "in all, those before a checkpoint too")
    group.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")
    _number(group, "--chunks", 2, "stages a rank, for the interleaved schedule")
    group.add_argument("--json", type=Path, metavar="F", help="write a report to this file")
    _number(group, "--eval-every", 25, "steps between two held-out losses")
    _number(group, "--log-every", 1, "steps between two lines of the table")

    group = parser.add_argument_group("the model")
    _number(group, "--layers", 4, "layers")
    _number(group, "--hidden", 64, "width of the residual stream")
    _number(group, "--heads", 4, "query heads")
    _number(group, "--kv-heads", 2, "key and value heads")
    _number(group, "--ffn", 128, "inner width of the MLP and of each expert")
    _number(group, "--experts", 4, "experts in a layer that has them")
    _number(group, "--top-k", 2, "experts of a token")
    group.add_argument("--moe-every", type=int, default=2, metavar="N", help="every N-th layer has experts; 0: none")
    group.add_argument("--untied", action="store_true", help="an output layer with a weight of its own")

    group = parser.add_argument_group("a step")
    _number(group, "--batch", 16, "sequences, over all ranks and micro-batches")
    _number(group, "--sequence", 64, "tokens of each")
    _number(group, "--micro-batches", 4, "how many the pipeline works on")
    group.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate")
    group.add_argument("--max-norm", type=float, default=1.0, help="of the gradient, after clipping")
    group.add_argument("--seed", type=int, default=0, help="of the weights and of the data")

    group = parser.add_argument_group("how it is computed")
    group.add_argument("--sequence-parallel", action="store_true", help="split what TP leaves whole by tokens")
    group.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="in backward")
    group.add_argument("--fused-attention", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    group.add_argument("--dtype", choices=DTYPES, help="default: float32, on a GPU bfloat16 with float32 masters")

    group = parser.add_argument_group("checkpoints")
    group.add_argument("--checkpoint", type=Path, metavar="DIR", help="save in this folder, at the end too")
    group.add_argument("--save-every", type=_positive, metavar="N", help="steps between two checkpoints")
    group.add_argument("--resume", action="store_true", help="go on from the newest in the folder, on any layout")


def train(options: argparse.Namespace) -> int:
    """Run the command. Whatever can be said without ranks is said before one starts; raises ValueError."""
    job = job_of(options)
    _check_ranks(job)
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"--json {options.json}: there is no folder {options.json.parent}: make it first")
    from fivefold import checkpoint
    from fivefold.train_loop import launch

    try:
        report = launch(job, course_of(options, job))
    finally:
        if options.checkpoint and _leads():
            checkpoint.discard_unfinished(options.checkpoint)
    if options.json and _leads():
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def job_of(options: argparse.Namespace):
    """What to train, as `train.Job`; raises ValueError, one line, where the numbers do not go together."""
    import torch

    from fivefold.layout import Layout
    from fivefold.model import GPTConfig
    from fivefold.train import Job

    gpu = options.device == "cuda"
    dtype = options.dtype or ("bfloat16" if gpu else "float32")
    model = GPTConfig(
        layers=options.layers, hidden=options.hidden, heads=options.heads, kv_heads=options.kv_heads, ffn=options.ffn,
        experts=options.experts, top_k=options.top_k, moe_every=options.moe_every, tied=not options.untied,
        seed=options.seed, dtype=getattr(torch, dtype),
    )  # fmt: skip
    return Job(
        Layout.parse(options.layout), model, options.schedule, options.chunks, options.micro_batches, options.batch,
        options.sequence, lr=options.lr, max_norm=options.max_norm, sequence_parallel=options.sequence_parallel,
        recomputation=options.recompute, seed=options.seed, device=options.device,
        fused_attention=gpu if options.fused_attention is None else options.fused_attention,
    )  # fmt: skip


def course_of(options: argparse.Namespace, job):
    """Steps, intervals and checkpoints, as `train_loop.Course`."""
    from fivefold import checkpoint
    from fivefold.train_loop import Course

    if not options.checkpoint and (options.resume or options.save_every):
        raise ValueError("--resume and --save-every need a folder: add --checkpoint DIR")
    path = checkpoint.newest(options.checkpoint) if options.resume else None
    done = checkpoint.check(path, job.model)["step"] if path else 0
    if done >= options.steps:
        raise ValueError(f"{path} has had {done} steps already: ask for more than that with --steps")
    folder = str(options.checkpoint) if options.checkpoint else None
    resume = str(path) if path else None
    return Course(options.steps, options.eval_every, options.log_every, folder, options.save_every or 100, resume)


def _check_ranks(job) -> None:
    from fivefold.layout import check_sizes

    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        check_sizes(job.layout, ranks=int(os.environ["WORLD_SIZE"]))


def _leads() -> bool:
    """Under torchrun there are as many of this process as ranks."""
    return os.environ.get("RANK", "0") == "0"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _number(group: argparse._ArgumentGroup, name: str, default: int, help: str) -> None:
    group.add_argument(name, type=_positive, default=default, metavar="N", help=help)
