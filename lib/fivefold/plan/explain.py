"""Every number of a plan in words: which formula made it, with which sizes, over which link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold import cost
from fivefold.plan.layout import Plan, stage_layers
from fivefold.plan.links import place
from fivefold.plan.memory import fits, rank_parameters
from fivefold.plan.model import MODERN, Model, Software, Work
from fivefold.plan.time import Seconds, stage_seconds, step_seconds
from fivefold.runtime.cluster import Cluster
from fivefold.runtime.traffic import size

if TYPE_CHECKING:
    from fivefold.plan.search import Choice


def table(choices: Sequence[Choice], work: Work) -> str:
    """The choices, a line each: seconds, tokens a second, memory, and the share of each part of the time."""
    lines = [f"{'':4}{'step':>9}{'tokens/s':>11}{'memory':>10}  " + "".join(f"{name:>8}" for name in Seconds._fields)]
    for number, (plan, memory, seconds) in enumerate(choices, start=1):
        shares = "".join(f"{part / seconds.total:>8.1%}" for part in seconds)
        rate = f"{work.tokens / seconds.total:,.0f}"
        room = "" if memory.fits else ", does not fit"
        lines.append(f"{number:<4}{seconds.total:>7.3f} s{rate:>11}{size(memory.total):>10}  {shares}  {plan}{room}")
    return "\n".join(lines)


def explain(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> str:
    """The time and the memory of one plan, part by part, each with its formula and its link."""
    seconds, memory = step_seconds(model, plan, work, cluster, software), fits(model, plan, work, cluster, software)
    why = reasons(model, plan, work, cluster, software)
    lines = [f"{plan}: {seconds.total:.3f} s a step, {work.tokens / seconds.total:,.0f} tokens a second"]
    for name, value in seconds._asdict().items():
        if value:
            lines.append(f"  {name:<12}{value:>8.3f} s {value / seconds.total:>6.1%}  {why[name]}")
    room = "fits" if memory.fits else "does not fit"
    lines.append(f"{size(memory.total)} on the fullest rank, of {size(memory.limit)}: {room}")
    for name in ("parameters", "gradients", "optimizer", "activations"):
        value = getattr(memory, name)
        lines.append(f"  {name:<12}{size(value):>10} {value / memory.total:>6.1%}  {why[name]}")
    return "\n".join(lines)


def reasons(model: Model, plan: Plan, work: Work, cluster: Cluster, software: Software = MODERN) -> dict[str, str]:
    """For each part of the time and of the memory, the formula with this plan's sizes, and the link."""
    layout, m = plan.layout, plan.num_microbatches(work)
    p, t, c, v = layout.pp, layout.tp, layout.cp, plan.chunks
    layers = stage_layers(model, plan)[0]
    links = {axis: f"{link.name} ({link.bandwidth / 1e9:.0f} GB/s)" for axis, link in place(layout, cluster).items()}
    stage, held = stage_seconds(model, plan, work, cluster, software), rank_parameters(model, plan)
    tokens, element = plan.tokens(work), software.element_bytes
    activation, times = element * tokens * model.hidden, f"{m} micro-batches x {layers} layers x"
    ways = 3 if plan.recompute == "full" else 2.5 if plan.sequence_parallel and software.regather else 2
    alive = cost.peak_activations(plan.schedule, p, m, v)
    kv = 2 * element * tokens * c * model.kv_width / min(t, model.kv_heads)
    across = max(links.get("dp", ""), links.get("cp", ""), key=lambda name: "NVLink" not in name)
    split = {"optimizer": plan.zero >= 1, "gradients": plan.zero == 3 or (plan.zero == 2 and m == 1)}
    shards = layout.dp * c
    state = f"{sum(held) / 1e9:.2f}e9 parameters a rank"
    return {
        "compute": f"{m} micro-batches x {stage.compute * 1e3:.1f} ms: products at {cluster.efficiency:.0%} of "
        f"{cluster.gpu.flops / 1e12:.0f} TFLOPS, the rest at {cluster.gpu.memory_bandwidth / 1e12:.2f} TB/s",
        "tp": f"{times} {ways:g} x 2 all-reduces of b·s/c·h = {size(activation)}, 2(t-1)/t of it over "
        f"{links.get('tp')}",
        "cp": f"{times} 3 gathers or sums of K and V = {size(kv)}, (c-1)/c of it over {links.get('cp')}",
        "ep": f"{times} 4 all-to-alls of top-k x tokens x h = {size(activation / t * model.top_k)} over "
        f"{links.get('ep')}",
        "pp": f"{m} micro-batches x 2 x {v} chunks, b·s/c·h/t = {size(activation / t)} each over {links.get('pp')}",
        "dp": f"{state}: what is left of gradients of {software.gradient_bytes} bytes and parameters of {element} over "
        f"{across} beside computation",
        "bubble": f"{plan.schedule}: {p} stages, {m} micro-batches, {v} chunks; (p-1)/(vm) of 1F1B's work is "
        f"{cost.bubble(p, m, v, 'ideal'):.1%}",
        "parameters": f"{state} x {element} bytes" + (f" / {shards}, two layers gathered" if plan.zero == 3 else ""),
        "gradients": f"{state} x {software.gradient_bytes} bytes" + (f" / {shards}" if split["gradients"] else ""),
        "optimizer": f"{state} x {software.optimizer_bytes} bytes" + (f" / {shards}" if split["optimizer"] else ""),
        "activations": f"{alive:.3g} micro-batches in flight x {layers} layers, recomputation {plan.recompute}; logits",
    }
