"""The planner against the world: published runs, runs of this library on a replay, measured memory, and its own speed.

Published: the throughput of every row of `fivefold/plan/published.csv`, predicted and reported. One number is fitted
for each GPU type, on one row (marked *). Then further runs, pipeline against ZeRO-3, and the rank of
Llama 3's layouts among all that fit.
Runs: a small GPT trained by `fivefold.train` on several layouts; its step on a replay, and its bytes by the ledger.
Search: seconds for 16,384 GPUs, the best of three.

    python bench/plan.py [--no-runs] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import machine
from fivefold import cost, plan
from fivefold.layout import Layout
from fivefold.plan import published
from fivefold.plan.checked import LAYOUTS, compare
from fivefold.runtime.cluster import Cluster

LLAMA3_ROWS = (22, 23, 24)


def published_rows() -> list[dict]:
    found = []
    for number, run in enumerate(published.rows()):
        prediction = published.predict(run)
        found.append({
            "row": number, "source": run.source, "table": run.table, "model": run.model.name, "gpus": run.gpus,
            "gpu": run.gpu, "plan": str(prediction.plan), "reported": round(run.reported, 1),
            "predicted": round(prediction.tflops, 1), "error": round(prediction.error, 4),
            "fitted": number in published.FITTED.values(), "memory": round(prediction.memory.total / 1e9, 1),
            "fits": prediction.memory.fits,
            "seconds": {name: round(part, 4) for name, part in prediction.seconds._asdict().items()},
        })  # fmt: skip
    return found


def unseen() -> list[dict]:
    """Runs that no row of the table is, from where each says.

    Not all are a test: what torchtitan computes again (`Software.half`) was learned from one of them.
    """
    llama8, llama70, llama405 = (plan.MODELS[f"llama3-{size}b"] for size in (8, 70, 405))
    docs = "torchtitan, docs/performance.md and benchmarks (2024)"

    def fsdp(n: int, b: int, again: str, tp: int = 1) -> plan.Plan:
        return plan.Plan(Layout(dp=n, tp=tp), 3, micro_batch=b, recompute=again)

    def tokens(model: plan.Model, p: plan.Plan, b: int, cluster: Cluster, software: plan.Software) -> float:
        work = plan.Work(8192 * p.layout.dp * b, 8192)
        return work.tokens / plan.step_seconds(model, p, work, cluster, software).total / p.layout.world_size

    a100, h96 = plan.cluster("a100"), plan.cluster("h100-96gb")
    cases = [
        ("Llama 3 8B, 64 A100, operators", docs, 2973, llama8, fsdp(64, 1, "selective"), 1, a100, plan.EAGER),
        ("Llama 3 70B, 64 A100, operators", docs, 323, llama70, fsdp(64, 1, "full"), 1, a100, plan.EAGER),
        ("Llama 3.1 405B, 128 H100, TP 8", docs, 109, llama405, fsdp(16, 2, "full", 8), 2, h96, plan.EAGER),
        ("Llama 3.1 8B, 8 H100, compiled", docs, 6667, llama8, fsdp(8, 2, "selective"), 2, h96, plan.COMPILED),
    ]
    found = [
        {"run": name, "source": source, "unit": "tokens/s a GPU", "reported": reported,
         "predicted": round(tokens(model, p, b, cluster, software), 1)}
        for name, source, reported, model, p, b, cluster, software in cases
    ]  # fmt: skip
    for again, parallel, reported in (("selective", True, 54.2), ("full", False, 42.1)):
        model, work = plan.MODELS["gpt-530b"], plan.Work(2240 * 2048, 2048)
        p = plan.Plan(Layout(dp=8, pp=35, tp=8), 0, "interleaved", 3, 1, again, parallel)
        software = plan.Software(**vars(plan.MEGATRON_2021) | {"regather": True})
        seconds = plan.step_seconds(model, p, work, a100, software).total
        flops = cost.step_flops(work.sequences, 2048, model.layers, model.hidden, model.vocabulary, "none")
        mfu = flops / seconds / 2240 / 312e12
        found.append({
            "run": f"GPT 530B, 2,240 A100, {again} recomputation", "source": "Korthikanti et al. 2022", "unit": "% MFU",
            "reported": reported, "predicted": round(100 * mfu, 1),
        })  # fmt: skip
    return [row | {"error": round(row["predicted"] / row["reported"] - 1, 4)} for row in found]


def pipeline_against_zero3(rows: list[dict]) -> list[dict]:
    """By how much pipeline and tensor parallelism are ahead in Narayanan et al. 2021, table 2."""
    pairs = {"175B, 384 GPUs": (16, 10), "175B, 768": (17, 11), "175B, 1,536": (18, 12)}
    pairs |= {"530B, 560 and 640 GPUs": (19, 13), "530B, 1,120": (20, 14), "530B, 2,240": (21, 15)}
    return [
        {"run": name} | {what: round(rows[ours][what] / rows[zero][what] - 1, 3) for what in ("reported", "predicted")}
        for name, (ours, zero) in pairs.items()
    ]


def llama3() -> list[dict]:
    """Where the published layouts stand among all that fit, by predicted time, and what is ahead of them."""
    found, runs = [], published.rows()
    for number in LLAMA3_ROWS:
        run = runs[number]
        choices = plan.search(run.model, run.work, run.gpus, run.cluster)
        theirs = published.predict(run)
        ahead = [choice for choice in choices if choice.seconds.total < theirs.seconds.total * (1 - 1e-9)]
        layouts = list(dict.fromkeys(choice.plan.layout for choice in choices))
        before = [layout for layout in layouts if layout in {choice.plan.layout for choice in ahead}]
        found.append({
            "layout": str(run.plan.layout), "context": run.work.context, "gpus": run.gpus, "fit": len(choices),
            "rank": len(ahead) + 1, "layouts": len(layouts), "rank_of_layout": len(before) + 1,
            "seconds": round(theirs.seconds.total, 3), "best": str(choices[0].plan),
            "best_seconds": round(choices[0].seconds.total, 3),
            "slower_by": round(theirs.seconds.total / choices[0].seconds.total - 1, 4),
        })  # fmt: skip
    return found


def searches() -> list[dict]:
    """Seconds of a search for 16,384 GPUs with nothing in any cache, the best of three."""
    found = []
    for name, context in (("llama3-405b", 8192), ("llama3-405b", 131072), ("mixtral-8x7b", 4096)):
        model, work, cluster = plan.MODELS[name], plan.Work(1 << 24, context), plan.cluster("llama3")
        times = []
        for _ in range(3):
            plan.forget()
            began, worked = time.perf_counter(), time.process_time()
            choices = plan.search(model, work, 16384, cluster)
            times.append((time.perf_counter() - began, time.process_time() - worked))
        wall, cpu = min(times)
        took = {"seconds": round(wall, 2), "cpu": round(cpu, 2)}
        found.append({"model": name, "context": context, "fit": len(choices)} | took)
    return found


def show(result: dict) -> str:
    lines = [f"{'model':20}{'GPUs':>7}  {'plan':58}{'reported':>9}{'predicted':>10}{'error':>8}"]
    for row in result["published"]:
        mark = "*" if row["fitted"] else ""
        lines.append(
            f"{row['model']:20}{row['gpus']:>7,}  {row['plan'][:57]:58}{row['reported']:>9.0f}{row['predicted']:>10.0f}"
            f"{row['error']:>+8.1%}{mark}{'' if row['fits'] else '  (it would not fit, says the planner)'}"
        )
    lines.append(
        f"TFLOPS a GPU as each source counts. Error: median {result['median_error']:.1%}, "
        f"largest {result['largest_error']:.1%}. * a GPU type's one constant was fitted here."
    )
    lines.append("\nFurther runs")
    for row in result["unseen"]:
        both = f"{row['reported']:>9g}{row['predicted']:>10g}"
        lines.append(f"{row['run']:52}{row['unit']:>16}{both}{row['error']:>+8.1%}")
    lines.append("\nPipeline + tensor ahead of ZeRO-3 by       reported  predicted")
    ahead = result["pipeline_vs_zero3"]
    lines += [f"{row['run']:42}{row['reported']:>+9.0%}{row['predicted']:>+11.0%}" for row in ahead]
    lines.append("\nLlama 3's layouts among all that fit")
    for row in result["llama3"]:
        lines.append(
            f"{row['layout']:26} {row['context']:>7,} tokens: rank {row['rank']:,} of {row['fit']:,} plans, layout "
            f"{row['rank_of_layout']} of {row['layouts']}; {row['slower_by']:+.1%} to {row['best']}"
        )
    lines.append("\nSearch for 16,384 GPUs          plans that fit   seconds    CPU")
    for row in result["search"]:
        lines.append(
            f"{row['model']:16}{row['context']:>10,}{row['fit']:>20,}{row['seconds']:>10.2f}{row['cpu']:>7.2f}"
        )
    if result["runs"]:
        lines.append("\nThis library's trainer            replay      plan           ledger      plan")
        for row in result["runs"]:
            lines.append(
                f"{row['run']:30}{row['replay_ms']:>8.3f} ms{row['plan_ms']:>7.3f} ms{row['time_error']:>+7.1%}"
                f"{row['ledger_kb']:>9.0f} kB{row['plan_kb']:>7.0f} kB{row['memory_error']:>+7.1%}"
            )
        lines.append("With experts the planner takes an even load; the trainer pads each expert to the fullest.")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--no-runs", action="store_true", help="leave out what needs ranks")
    options.add_argument("--json", type=Path, help="write the results to this file, and the table beside it")
    given = options.parse_args()
    rows = published_rows()
    sizes = sorted(abs(row["error"]) for row in rows)
    result = {
        "efficiency": plan.EFFICIENCY, "fitted_on": {gpu: rows[n]["model"] for gpu, n in published.FITTED.items()},
        "median_error": (sizes[12] + sizes[13]) / 2, "largest_error": sizes[-1], "published": rows,
        "unseen": unseen(), "pipeline_vs_zero3": pipeline_against_zero3(rows), "llama3": llama3(),
        "search": searches(), "runs": [] if given.no_runs else [compare(*case) for case in LAYOUTS],
    }  # fmt: skip
    print(show(result))
    if given.json:
        machine.write(given.json, result)
        given.json.with_suffix(".txt").write_text(show(result) + "\n")


if __name__ == "__main__":
    main()
