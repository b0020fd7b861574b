"""Right solutions of lesson 10 that are written in another way than the library's."""

from __future__ import annotations

import itertools
import math

from fivefold import cost, mesh
from fivefold.cost import BytesMoved
from fivefold.layout import Layout, LayoutError
from fivefold.plan import (
    MODERN,
    Choice,
    Memory,
    Options,
    Plan,
    Seconds,
    check,
    fits,
    layer_bytes,
    message_seconds,
    optimizer_seconds,
    rank_parameters,
    stage_layers,
    stage_seconds,
    state_seconds,
    step_seconds,
)
from fivefold.plan.time import TAKEN


def pipeline_vs_zero3__exchanges(parameters, h, tokens, ranks, num_microbatches=1, element_bytes=2):
    """Added up from the traffic of each exchange."""
    there = cost.pipeline_traffic(1, tokens, h) if ranks > 1 else 0
    gather = cost.collective_bytes("all_gather", ranks, parameters * element_bytes)
    scatter = cost.collective_bytes("reduce_scatter", ranks, parameters * element_bytes)
    zero3 = sum(2 * gather + scatter for _ in range(num_microbatches))
    return BytesMoved(pipeline=(there + there) * element_bytes, zero3=zero3)


def pipeline_vs_zero3__stage_3(parameters, h, tokens, ranks, num_microbatches=1, element_bytes=2):
    """By the formula of ZeRO's stage 3."""
    if ranks == 1:
        return BytesMoved(0.0, 0.0)
    zero3 = num_microbatches * cost.zero_traffic(parameters, ranks, 3)
    return BytesMoved(element_bytes * h * tokens * 2.0, element_bytes * zero3)


def place__all_groups(layout, cluster):
    """Every group of ranks, as the mesh lists them."""
    links = {}
    for axis in ("ep", "dp", "pp", "cp", "tp"):
        if getattr(layout, axis) == 1:
            continue
        lists = mesh.expert_groups(layout) if axis == "ep" else mesh.groups(layout, axis)
        slow = [cluster.slowest_link(group) is cluster.between for group in lists]
        links[axis] = cluster.between if any(slow) else cluster.inside
    return links


def place__coordinates(layout, cluster):
    """Rank by rank: where is the first of my group, where the last?"""
    size, found = cluster.gpus_per_server, {}
    places = {}
    for dp, pp, cp, tp in itertools.product(*map(range, (layout.dp, layout.pp, layout.cp, layout.tp))):
        places[dp, pp, cp, tp] = len(places) // size
    for number, axis in enumerate(("dp", "pp", "cp", "tp")):
        servers = {}
        for key, server in places.items():
            servers.setdefault(key[:number] + key[number + 1 :], set()).add(server)
        if getattr(layout, axis) > 1:
            found[axis] = cluster.inside if max(map(len, servers.values())) == 1 else cluster.between
    if layout.ep > 1:
        servers = {}
        for (dp, pp, cp, tp), server in places.items():
            servers.setdefault((pp, tp, (dp * layout.cp + cp) // layout.ep), set()).add(server)
        found["ep"] = cluster.inside if max(map(len, servers.values())) == 1 else cluster.between
    return found


def fits__stage_by_stage(model, plan, work, cluster, software=MODERN):
    """Each state in turn, with the share of it that ZeRO leaves."""
    n = plan.layout.dp * plan.layout.cp
    m = work.sequences // plan.layout.dp // plan.micro_batch
    middle, _ = stage_layers(model, plan)
    held = dict(zip((n, -(n // plan.layout.ep)), rank_parameters(model, plan), strict=True))

    def kept(size, split):
        return sum(size * count / (abs(over) if split else 1) for over, count in held.items())

    parameters = kept(software.element_bytes, plan.zero == 3)
    if plan.zero == 3:
        parameters += sum(2 * software.element_bytes * c / middle for over, c in held.items() if abs(over) > 1)
    gradients = kept(software.gradient_bytes, plan.zero == 3 or plan.zero == 2 and m == 1)
    optimizer = kept(software.optimizer_bytes, plan.zero >= 1)
    one = layer_bytes(model, plan, work, software)
    activations = one * middle * cost.peak_activations(plan.schedule, plan.layout.pp, m, plan.chunks)
    if plan.recompute in ("selective", "full"):
        activations += layer_bytes(model, plan, work, software, recompute="none")
    numbers = plan.tokens(work) * model.vocabulary / plan.layout.tp
    activations += numbers * (software.element_bytes + 4) * (m if plan.schedule == "gpipe" else 1)
    return Memory(parameters, gradients, optimizer, activations, 0.94 * cluster.gpu.memory)


def fits__keywords(model, plan, work, cluster, software=MODERN):
    """Two calls of one helper, for what is in experts and what is not."""
    m, ranks = plan.num_microbatches(work), plan.layout.dp * plan.layout.cp
    dense, experts = rank_parameters(model, plan)
    layers = stage_layers(model, plan)[0]
    first = _states(dense, ranks, plan.zero, m, layers, software)
    second = _states(experts, ranks // plan.layout.ep, plan.zero, m, layers, software)
    alive = cost.peak_activations(plan.schedule, plan.layout.pp, m, plan.chunks)
    activations = layer_bytes(model, plan, work, software) * alive * layers
    activations += layer_bytes(model, plan, work, software, "none") if plan.recompute != "none" else 0
    logits = plan.tokens(work) * model.vocabulary * (4 + software.element_bytes) / plan.layout.tp
    activations += logits * m if plan.schedule == "gpipe" else logits
    states = dict(zip(("parameters", "gradients", "optimizer"), map(sum, zip(first, second, strict=True)), strict=True))
    return Memory(activations=activations, limit=cluster.gpu.memory - 0.06 * cluster.gpu.memory, **states)


def _states(count, n, zero, m, layers, software):
    sizes = [software.element_bytes, software.gradient_bytes, software.optimizer_bytes]
    over = [n if zero == 3 else 1, n if zero == 3 or (zero == 2 and m == 1) else 1, n if zero else 1]
    states = [size * count / split for size, split in zip(sizes, over, strict=True)]
    if zero == 3 and n > 1:
        states[0] += 2 * sizes[0] * count / layers
    return states


def step_seconds__loop(model, plan, work, cluster, software=MODERN):
    """Micro-batch by micro-batch."""
    args = (model, plan, work, cluster, software)
    stage, message = stage_seconds(*args), message_seconds(*args)
    parts = dict.fromkeys(Seconds._fields, 0.0)
    for _ in range(plan.num_microbatches(work)):
        for name in ("compute", "tp", "cp", "ep"):
            parts[name] += getattr(stage, name)
        parts["pp"] += message
    parts["compute"] += optimizer_seconds(model, plan, cluster, software)
    parts["dp"] = state_part(*args)
    f, b = stage.forward + 0.5 * message, stage.backward + 0.5 * message - stage.weight
    p, v = plan.layout.pp, plan.chunks
    parts["bubble"] = cost.bubble_seconds(schedule=plan.schedule, p=p, f=f, b=b, w=stage.weight, v=v)
    return Seconds(**parts)


def state_part(*args):
    from fivefold.plan import data_seconds

    return data_seconds(*args)


def step_seconds__by_hand(model, plan, work, cluster, software=MODERN):
    """The bubble of each schedule written out."""
    from fivefold.plan import data_seconds

    stage = stage_seconds(model, plan, work, cluster, software)
    message, m = message_seconds(model, plan, work, cluster, software), plan.num_microbatches(work)
    once = stage.forward + stage.backward + message
    if plan.schedule == "interleaved":
        once /= plan.chunks
    if plan.schedule == "zb_h1":
        once -= 2 * stage.weight
    data = data_seconds(model, plan, work, cluster, software)
    first = [m * part for part in stage[:4]]
    first[0] += optimizer_seconds(model, plan, cluster, software)
    return Seconds(*first, m * message, data, (plan.layout.pp - 1) * once)


def search__one_for_each_layout(model, work, gpus, cluster, software=MODERN, options=None):
    """For every layout the best tuning alone: a short list, and no helper of the library."""
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
    options, found = options or Options(), []
    for tp, cp, pp, ep in itertools.product((1, 2, 4, 8, 16), divisors, divisors, (1, 2, 4, 8, 16)):
        if tp > options.most_tp or cp > options.most_cp:
            continue
        dp, left = divmod(gpus, tp * cp * pp)
        if left or cp > 64 or pp > model.layers or dp * cp % ep or (ep > 1 and not model.experts):
            continue
        layout, best = Layout(dp, cp, pp, tp, ep), None
        chunks = [v for v in range(2, 17) if pp > 1 and -(-model.layers // pp) % v == 0]
        ways = [("one_f_one_b", 1), *(("interleaved", v) for v in chunks)]
        for zero, (schedule, v), b, again in itertools.product((1, 3), ways, (1, 2, 4), options.recompute):
            if zero not in options.zero or schedule not in options.schedules or b not in options.micro_batch:
                continue
            plan = Plan(layout, zero, schedule, v, b, again)
            try:
                check(model, plan, work)
            except LayoutError:
                continue
            memory = fits(model, plan, work, cluster, software)
            if not memory.fits:
                continue
            choice = Choice(plan, memory, step_seconds(model, plan, work, cluster, software))
            if best is None or choice.seconds.total < best.seconds.total:
                best = choice
        found += [best] if best else []
    return sorted(found, key=lambda choice: choice.seconds.total)


def search__in_three_steps(model, work, gpus, cluster, software=MODERN, options=None):
    """The cheatsheet to the letter: the smallest cuts that fit, filled with DP, then tuned. Only the best is given."""
    from fivefold.plan import cuts, filled, tunings

    fitting = []
    for cut in cuts(model, work, gpus, options):
        for layout in filled(model, work, gpus, cut):
            plans = list(tunings(model, work, layout, options))
            if any(fits(model, plan, work, cluster, software).fits for plan in plans):
                fitting.append((math.prod((cut.tp, cut.cp, cut.pp)), plans))
    choices = []
    for _, plans in sorted(fitting, key=lambda item: item[0]):
        for plan in plans:
            memory = fits(model, plan, work, cluster, software)
            if memory.fits:
                choices.append(Choice(plan, memory, step_seconds(model, plan, work, cluster, software)))
    return [min(choices, key=lambda choice: choice.seconds.total)] if choices else []


def data_seconds__cases(model, plan, work, cluster, software=MODERN):
    """What may hide where, written as a list of pairs."""
    layout, m = plan.layout, plan.num_microbatches(work)
    if layout.dp * layout.cp == 1:
        return 0.0
    stage = stage_seconds(model, plan, work, cluster, software)
    scatter, gather = state_seconds(model, layout, stage_layers(model, plan), cluster, software)
    if plan.zero == 3:
        times = m * (3 if plan.recompute == "full" else 2)
        whole = m * (stage.forward + stage.backward)
        pairs = {
            "all": [(gather * times + scatter * m, whole)], "gathers": [(gather * times, whole), (scatter * m, None)],
            "none": [(gather * times + scatter * m, None)],
        }  # fmt: skip
    else:
        if plan.zero == 0:
            gather = gather / software.element_bytes * software.gradient_bytes
        pairs = {
            "all": [(gather, stage.forward), (scatter, stage.backward)],
            "gathers": [(gather, stage.forward), (scatter, None)], "none": [(gather, None), (scatter, None)],
        }  # fmt: skip
    return sum(_beside(exchange, room) for exchange, room in pairs[software.overlap])


def _beside(exchange, compute):
    if compute is None:
        return exchange
    room = compute / (1 - TAKEN)
    return exchange * TAKEN if exchange <= room else exchange - compute


def data_seconds__total(model, plan, work, cluster, software=MODERN):
    """The time of both together, less the computation."""
    layout, m, zero3 = plan.layout, plan.num_microbatches(work), plan.zero == 3
    if layout.dp == layout.cp == 1:
        return 0.0
    stage = stage_seconds(model, plan, work, cluster, software)
    scatter, gather = state_seconds(model, layout, stage_layers(model, plan), cluster, software)
    if zero3:
        forward, backward = stage.forward * m, stage.backward * m
        gather, scatter = gather * m * (2 + (plan.recompute == "full")), scatter * m
    else:
        forward, backward = stage.forward, stage.backward
        gather *= software.gradient_bytes / software.element_bytes if plan.zero == 0 else 1
    if software.overlap == "none":
        return gather + scatter
    if zero3 and software.overlap == "all":
        return _together(gather + scatter, forward + backward) - forward - backward
    room = forward + backward if zero3 else forward
    first = _together(gather, room) - room
    return first + (_together(scatter, backward) - backward if software.overlap == "all" else scatter)


def _together(exchange, compute):
    return max(exchange, compute + TAKEN * exchange)
