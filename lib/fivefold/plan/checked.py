"""The planner against runs of this library: time beside a replay of the run, memory beside the ledger's bytes.

With experts it says too little: it takes them to be loaded evenly, and the trainer pads each to the fullest.
"""

from __future__ import annotations

from fivefold.layout import Layout
from fivefold.plan.layout import Plan
from fivefold.plan.memory import fits
from fivefold.plan.model import COURSE, Model, Work
from fivefold.plan.time import step_seconds
from fivefold.runtime.cluster import GPU, Cluster, Link

BATCH, TOKENS, MICRO_BATCHES = 16, 64, 4
MODEL = Model(4, 64, 8, 4, 256, 256, gated=False, tied=True, bias=True, name="a small GPT")
EXPERTS = Model(4, 64, 8, 4, 256, 256, 4, 2, 2, gated=False, tied=True, bias=True, name="a small GPT with experts")
# Slow enough that a small model's messages are to its computation what a large one's are on GPUs.
TOY = Cluster(GPU("toy", 2e11, 1e9, 1e12), Link("inside", 1e-7, 2e10), Link("between", 2e-7, 5e9), gpus_per_server=4)
LAYOUTS = [
    ("dp1", "one_f_one_b", 1), ("tp2", "one_f_one_b", 1), ("tp4", "one_f_one_b", 1), ("cp2", "one_f_one_b", 1),
    ("pp2", "one_f_one_b", 1), ("pp4", "one_f_one_b", 1), ("pp2", "interleaved", 2), ("pp4", "gpipe", 1),
    ("dp4", "one_f_one_b", 1), ("dp4,tp2", "one_f_one_b", 1), ("dp2,pp2,tp2", "one_f_one_b", 1),
    ("dp2,pp2,tp2", "interleaved", 2), ("cp2,pp2,tp2", "one_f_one_b", 1),
    ("dp4,ep4", "one_f_one_b", 1), ("dp2,cp2,tp2,ep2", "one_f_one_b", 1),
]  # fmt: skip


def compare(layout: str, schedule: str = "one_f_one_b", chunks: int = 1) -> dict:
    """Train one step on `layout`, of EXPERTS if it names ep, else of MODEL: what a replay on TOY and the ledger say,
    beside the planner."""
    from fivefold import run
    from fivefold.model import GPTConfig
    from fivefold.runtime.replay import replay
    from fivefold.train import Job

    degrees, m = Layout.parse(layout), EXPERTS if "ep" in layout else MODEL
    every = m.moe_every if m.experts else 0
    config = GPTConfig(
        m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.experts, m.top_k, moe_every=every, vocabulary=m.vocabulary
    )
    job = Job(
        degrees, config, {"one_f_one_b": "1f1b"}.get(schedule, schedule), chunks, MICRO_BATCHES, BATCH, TOKENS,
        sequence_parallel=degrees.tp > 1,
    )  # fmt: skip
    ledger = run(_one_step, degrees.world_size, job, measure=True, timeout=300).ledger
    replayed = replay(ledger, TOY).makespan
    plan = Plan(degrees, 1, schedule, chunks, BATCH // MICRO_BATCHES // degrees.dp)
    work = Work(BATCH * TOKENS, TOKENS)
    seconds, memory = step_seconds(m, plan, work, TOY, COURSE).total, fits(m, plan, work, TOY, COURSE)
    kept = max(_bytes(rank.memory) for rank in ledger.ranks)
    return {
        "run": f"{layout} {schedule}", "replay_ms": round(replayed * 1e3, 4), "plan_ms": round(seconds * 1e3, 4),
        "time_error": round(seconds / replayed - 1, 4), "ledger_kb": round(kept / 1e3, 1),
        "plan_kb": round(memory.total / 1e3, 1), "memory_error": round(memory.total / kept - 1, 4),
    }  # fmt: skip


def _one_step(job) -> None:
    from fivefold.train import train

    train(job, 1)


def _bytes(memory) -> int:
    return memory.parameters + memory.gradients + memory.optimizer + memory.peak_saved
