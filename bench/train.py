"""Train on five axes and on one process, and compare what they learn: prints one table.

DP 2 x CP 2 x PP 2 x TP 2 with EP 4, on 16 ranks of this machine, beside one process: the same model, weights and
optimizer, the same batches of `pydoc_data.topics`, in float32. Held-out loss is that of text which is never trained on.

    python bench/train.py [--steps 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from dataclasses import replace
from pathlib import Path

import machine
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.train import Job
from fivefold.train_loop import Course, launch

FIVE_AXES = Job(
    Layout(dp=2, cp=2, pp=2, tp=2, ep=4), GPTConfig(), schedule="1f1b", num_microbatches=4, batch=16, sequence=64,
    sequence_parallel=True, fused_attention=True,
)  # fmt: skip
ONE_PROCESS = replace(FIVE_AXES, layout=Layout(), sequence_parallel=False)


def trained(job: Job, course: Course) -> dict:
    """Seconds from the call to the end, starting ranks and held-out losses included, and both curves."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        report = launch(job, course)
    seconds = round(time.perf_counter() - began, 1)
    losses = {row["step"]: round(row["loss"], 5) for row in report["steps"]}
    held_out = {row["step"]: round(row["held_out"], 5) for row in report["steps"] if row["held_out"] is not None}
    return {
        "layout": report["layout"], "ranks": report["world_size"], "seconds": seconds,
        "median_step_seconds": round(report["median_step_seconds"], 3), "loss": losses, "held_out": held_out,
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    heads = [f"{row['layout']}, {row['ranks']} {'ranks' if row['ranks'] > 1 else 'process'}" for row in rows]
    lines = ["  step  " + "".join(f"{head:>32}" for head in heads), "        " + "loss  held out".rjust(32) * len(rows)]
    for step in rows[0]["held_out"]:
        lines.append(f"{step:6}  " + "".join(f"{r['loss'][step]:>22.4f}{r['held_out'][step]:>10.4f}" for r in rows))
    times = "".join(f"{row['seconds']:>30.1f} s" for row in rows)
    return "\n".join([*lines, f"all of it {times[2:]}"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--json", type=Path, help="write both curves to this file")
    given = options.parse_args()
    course = Course(given.steps, eval_every=max(1, given.steps // 10))
    rows = [trained(job, course) for job in (FIVE_AXES, ONE_PROCESS)]
    print(table(rows))
    apart = max(abs(a - b) for a, b in zip(rows[0]["loss"].values(), rows[1]["loss"].values(), strict=True))
    print(f"no step's loss differs by more than {apart:.5f}")
    if given.json:
        machine.write(given.json, {"steps": given.steps, "largest_difference": apart, "runs": rows})


if __name__ == "__main__":
    main()
