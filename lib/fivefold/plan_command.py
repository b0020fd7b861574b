"""`fivefold plan`: the layouts that fit, ranked, and the best one explained."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields

from fivefold import plan

CLUSTERS = ("a100", "h100", "h100-96gb", "h200", "h800", "llama3")


def add_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, the cluster, the step, and how much to print."""
    sizes = "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocabulary=128256"
    parser.add_argument("model", help=f"{', '.join(plan.MODELS)}; or sizes such as {sizes}[,experts=8,top_k=2]")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="all are used")
    parser.add_argument("--context", type=int, required=True, metavar="S", help="tokens of a sequence")
    parser.add_argument("--batch", type=int, metavar="TOKENS", help="of a step (default: about 4 million)")
    parser.add_argument("--cluster", default="h100", choices=CLUSTERS, help="GPU and links (default: h100)")
    parser.add_argument("--servers-of", type=int, default=8, metavar="G", help="GPUs a server (default: 8)")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="how many layouts to show (default: 10)")
    parser.add_argument("--all", action="store_true", help="plans that do not fit too, after those that do")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of the table")


def run(options: argparse.Namespace) -> int:
    """Run the command; 1 where nothing fits. Raises ValueError, one line, where the numbers do not go together."""
    model, work = model_of(options.model), work_of(options)
    if options.gpus < 1 or options.top < 1 or options.servers_of < 1:
        raise ValueError("--gpus, --top and --servers-of are 1 or more")
    cluster = plan.cluster(options.cluster, gpus_per_server=options.servers_of)
    began = time.perf_counter()
    found = (plan.survey if options.all else plan.search)(model, work, options.gpus, cluster)
    seconds = time.perf_counter() - began
    tried = sum(1 for _ in every_plan(model, work, options.gpus))
    fit = sum(choice.memory.fits for choice in found)
    if options.json:
        print(json.dumps(report(model, work, options, found, tried, seconds), indent=2))
        return int(not fit)
    print(
        f"{model.name}: {model.parameters / 1e9:.1f}e9 parameters, {work.sequences:,} sequences of {work.context:,} "
        f"tokens a step, {options.gpus:,} x {cluster.gpu.name}"
    )
    print(f"{tried:,} plans tried, {fit:,} fit, in {seconds:.1f} s")
    if not fit:
        print("nothing fits: take more GPUs, a batch with a sequence for each data-parallel rank, or a shorter context")
        if found:
            print(f"\n{plan.table(found[: options.top], work)}")
        return 1
    print(f"\n{plan.table(found[: options.top], work)}\n\nThe first, part by part:")
    print(plan.explain(model, found[0].plan, work, cluster))
    return 0


def every_plan(model: plan.Model, work: plan.Work, gpus: int):
    """What a search looks at, whether it fits or not."""
    for cut in plan.cuts(model, work, gpus):
        for layout in plan.filled(model, work, gpus, cut):
            yield from plan.tunings(model, work, layout)


def model_of(text: str) -> plan.Model:
    """A model by its name, or by its sizes."""
    if text in plan.MODELS:
        return plan.MODELS[text]
    known = {field.name: field.type for field in fields(plan.Model) if field.name != "name"}
    sizes: dict[str, int | bool] = {}
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if name not in known or not equals or not value.isdecimal():
            names = ", ".join(plan.MODELS)
            raise ValueError(f"no model called {text!r}: choose {names}, or give sizes such as layers=32,hidden=4096,…")
        sizes[name] = bool(int(value)) if known[name] == "bool" else int(value)
    try:
        return plan.Model(**sizes, name="your model")
    except TypeError:
        needed = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
        raise ValueError(f"model {text!r} has no {', '.join(n for n in needed if n not in sizes)}: give each") from None


def work_of(options: argparse.Namespace) -> plan.Work:
    """The step: the batch given, or the power of two sequences a little under 4 million tokens, one a GPU at least."""
    if options.context < 1:
        raise ValueError(f"a context of {options.context} tokens is none: take 1 or more")
    if options.batch is not None:
        return plan.Work(options.batch, options.context)
    sequences = max(1, (1 << 22) // options.context)
    return plan.Work((1 << sequences.bit_length() - 1) * options.context, options.context)


def report(model, work, options, found, tried: int, seconds: float) -> dict:
    """What `--json` prints."""
    return {
        "model": model.name, "parameters": model.parameters, "gpus": options.gpus, "cluster": options.cluster,
        "tokens": work.tokens, "context": work.context, "tried": tried,
        "fit": sum(choice.memory.fits for choice in found), "search_seconds": seconds,
        "plans": [
            {
                "plan": str(choice.plan), "layout": str(choice.plan.layout), "zero": choice.plan.zero,
                "schedule": choice.plan.schedule, "chunks": choice.plan.chunks,
                "micro_batch": choice.plan.micro_batch, "recompute": choice.plan.recompute,
                "fits": choice.memory.fits, "step_seconds": choice.seconds.total, "seconds": choice.seconds._asdict(),
                "tokens_per_second": work.tokens / choice.seconds.total,
                "memory_bytes": choice.memory.total, "memory": choice.memory._asdict(),
            }
            for choice in found[: options.top]
        ],
    }  # fmt: skip
