"""The time of one training step of a pipeline: `pipeline.run` beside torch.distributed.pipelining.

The same transformer stages, batches and ranks, in one run; the two take turns, and so does which of them goes first.
Both must end with the same gradients. The table gives medians over the rounds, and their ratio.

    python bench/pipeline.py [--ranks 4] [--microbatches 8] [--hidden 128] [--rounds 11] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time

import torch
import torch.distributed as dist
from fivefold import pipeline, run
from fivefold.pipeline import Schedule, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from torch import nn
from torch.distributed import pipelining

TOKENS, SEQUENCES, LAYERS = 64, 4, 8
TORCHS = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "interleaved 1F1B": "ScheduleInterleaved1F1B",
    "ZB-H1": "ScheduleInterleavedZeroBubble",
    "ZB-V": "ScheduleZBVZeroBubble",
}


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.heads = hidden // 32
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().sum()


def take_turns(schedule: Schedule, hidden: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of a step, ours and torch's, in each round after the first; from barrier to barrier."""
    group, m, last = dist.group.WORLD, schedule.num_microbatches, schedule.num_stages - 1
    torch.manual_seed(0)
    layers = LAYERS // schedule.num_stages
    model = nn.Sequential(*(nn.Sequential(*(Block(hidden) for _ in range(layers))) for _ in range(last + 1)))
    ours = {stage: model[stage] for stage in schedule.stages_of(group.rank())}
    theirs = copy.deepcopy(ours)
    inputs, targets = torch.randn(2, m, SEQUENCES, TOKENS, hidden)
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, stage, last + 1, device) for stage, part in theirs.items()]
    kind = getattr(pipelining, TORCHS[schedule.name])
    alone = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    torchs = kind(stages[0] if alone else stages, m, loss_fn=square, scale_grads=False)
    arguments = [inputs.flatten(0, 1)] if 0 in ours else []
    target = {"target": targets.flatten(0, 1)} if last in ours else {}

    def step(by_us: bool) -> float:
        for part in (ours if by_us else theirs).values():
            part.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        if by_us:
            pipeline.run(schedule, ours, inputs, lambda y, i: square(y, targets[i]), group, inputs[0])
        else:
            torchs.step(*arguments, **target)
        dist.barrier()
        return time.perf_counter() - began

    found = []
    for turn in range(rounds + 1):
        seconds = {by_us: step(by_us) for by_us in ((True, False) if turn % 2 else (False, True))}
        found.append((seconds[True], seconds[False]))
    for stage, part in ours.items():
        for parameter, other in zip(part.parameters(), theirs[stage].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-3)
    return found[1:]


def measure(ranks: int, num_microbatches: int, hidden: int, rounds: int) -> list[dict]:
    m = num_microbatches
    schedules = [gpipe(ranks, m), one_f_one_b(ranks, m), interleaved(ranks, m, 2), zb_h1(ranks, m), zb_v(ranks, m)]
    rows = []
    for schedule in schedules:
        seconds = run(take_turns, ranks, schedule, hidden, rounds, timeout=600).results[0]
        ours, torchs = (statistics.median(times) for times in zip(*seconds, strict=True))
        rows.append({"schedule": schedule.name, "ours": ours, "torch": torchs, "ratio": ours / torchs})
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4))
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--json", help="write the figures to this file")
    given = options.parse_args()
    rows = measure(given.ranks, given.microbatches, given.hidden, given.rounds)
    print(
        f"{given.ranks} ranks, {given.microbatches} micro-batches of {SEQUENCES} x {TOKENS} tokens, {LAYERS} layers of "
        f"{given.hidden}; median of {given.rounds} rounds; torch {torch.__version__}, {platform.machine()}"
    )
    print(f"{'schedule':<18}{'ours, ms':>10}{'torch, ms':>11}{'ratio':>8}")
    for row in rows:
        print(f"{row['schedule']:<18}{1000 * row['ours']:>10.1f}{1000 * row['torch']:>11.1f}{row['ratio']:>8.2f}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({**vars(given), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
