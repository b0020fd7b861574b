"""What one layer costs on one rank: operations, passes over memory, exchanges. Cached: thousands of plans share them.

Seconds of a matrix product are its FLOPs at the rate that large products reach (`Cluster.efficiency` of the peak), and
besides the time to read its operands and write its result once: so thin slices of a matrix run slower. All else reads
and writes memory and is counted in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fivefold.layout import Layout
from fivefold.plan.links import exchange_seconds
from fivefold.plan.model import Model, Software
from fivefold.runtime.cluster import Cluster


class Pass(NamedTuple):
    """Seconds of one layer and one micro-batch on one rank, in one direction, by part."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Pass:
        return Pass(*(factor * part for part in self))

    @property
    def total(self) -> float:
        return sum(self)


class LayerSeconds(NamedTuple):
    """Forward, backward (with what is computed again), and of backward the part that makes weight gradients."""

    forward: Pass
    backward: Pass
    weight: float


@cache
def layer_seconds(
    model: Model, layout: Layout, sequence: int, micro_batch: int, recompute: str, sequence_parallel: bool,
    cluster: Cluster, software: Software, experts: bool = False,
) -> LayerSeconds:  # fmt: skip
    """One layer on one micro-batch; `sequence` is a whole sequence's tokens, of which a rank has sequence/cp."""
    tokens = micro_batch * sequence // layout.cp
    shape = model, layout.tp, tokens, cluster, software
    products = _products_seconds(*shape, experts)
    core = _core_seconds(*shape, sequence)
    passes = _elementwise_seconds(*shape, sequence_parallel, experts)
    forward = Pass(products + core + passes, *_exchanges(model, layout, tokens, cluster, software, experts))
    # A product has two gradients. A flash kernel makes its scores again: five products in the place of two.
    core_backward = core * (2.5 if software.flash else 2)
    backward = forward._replace(compute=2 * products + core_backward + 2 * passes)
    if layout.cp > 1:
        backward = backward._replace(cp=2 * forward.cp)  # K and V once more, and the sum of their gradients
    if sequence_parallel and software.regather and layout.tp > 1:
        backward = backward._replace(tp=1.5 * backward.tp)
    again = Pass()
    if recompute == "full":
        again = forward
    elif recompute == "selective":
        again = Pass(compute=(0 if software.flash else core) + (products / 2 + passes if software.half else 0))
    if software.lean and recompute != "full":
        again = again + Pass(compute=passes / 2)
    return LayerSeconds(forward, backward + again, products)


def product_seconds(rows: float, inner: float, columns: float, cluster: Cluster, software: Software) -> float:
    """Seconds of (rows, inner) times (inner, columns)."""
    seconds = cluster.compute_seconds(2 * rows * inner * columns)
    if not software.counted:
        return seconds
    elements = rows * inner + inner * columns + rows * columns
    return seconds + memory_seconds(software.element_bytes * elements, cluster)


def memory_seconds(num_bytes: float, cluster: Cluster) -> float:
    return num_bytes / cluster.gpu.memory_bandwidth


def head_seconds(model: Model, tp: int, tokens: int, cluster: Cluster, software: Software) -> tuple[float, float]:
    """Forward and backward of the output layer and the loss on one micro-batch."""
    product = product_seconds(tokens, model.hidden, model.vocabulary / tp, cluster, software)
    passes = 12 if software.fused else 18  # bytes a logit, each way: the loss is computed in 32 bits
    loss = memory_seconds(passes * tokens * model.vocabulary / tp, cluster) if software.counted else 0.0
    return product + loss, 2 * product + loss


def _products_seconds(model: Model, tp: int, tokens: int, cluster: Cluster, software: Software, experts: bool) -> float:
    """The products with weights, forward."""
    h, width = model.hidden, model.hidden + 2 * max(model.kv_width, model.hidden // model.heads * tp)
    qkv = product_seconds(tokens, h, width / tp, cluster, software)
    out = product_seconds(tokens, h / tp, h, cluster, software)
    rows = tokens * (model.top_k if experts else 1)
    up = product_seconds(rows, h, (2 if model.gated else 1) * model.ffn / tp, cluster, software)
    down = product_seconds(rows, model.ffn / tp, h, cluster, software)
    return qkv + out + up + down


def _core_seconds(model: Model, tp: int, tokens: int, cluster: Cluster, software: Software, sequence: int) -> float:
    """The attention core, forward: QKᵀ, softmax, PV. Without a flash kernel scores go through memory.

    13 bytes a score: the product writes 2, the masked softmax reads and writes 2 + 2, dropout 2 + 2 and its mask 1,
    the second product reads 2. Half is hidden by the causal mask; `causal` software leaves it out.
    """
    scores = tokens * sequence  # a head's pairs of a query and a key
    flops = 4 * scores * model.hidden / tp * (0.5 if software.causal else 1)
    written = software.counted and not software.flash
    return cluster.compute_seconds(flops) + (memory_seconds(13 * scores * model.heads / tp, cluster) if written else 0)


def _elementwise_seconds(
    model: Model, tp: int, tokens: int, cluster: Cluster, software: Software, sequence_parallel: bool, experts: bool
) -> float:
    """Norms, residual sums, rotations and activation functions of one layer, forward: bytes read and written.

    In 16-bit numbers, for each token, fused: a norm 4h, a sum 6h (7h with a dropout's mask), and there are two of each;
    the rotation of q and k 4 each; the activation 6 for each of ffn where gated, 4 where not. Operator by operator: a
    norm 34h (it goes to 32 bits and back), the rotation 20, the activation 10 and 4. What TP leaves whole is divided
    by sequence parallelism.
    """
    if not software.counted:
        return 0.0
    h, copies = model.hidden, model.top_k if experts else 1
    norm, turn = (4, 4) if software.fused else (34, 20)
    active = (6 if software.fused else 10) if model.gated else 4
    whole = 2 * h * (norm + (7 if software.dropout else 6)) / (tp if sequence_parallel else 1)
    split = (turn * (h + model.kv_width) + active * copies * model.ffn) / tp
    moved = 8 * copies * h / tp if experts else 0  # tokens put in order for the experts, and back
    return memory_seconds(tokens * (whole + split + moved) * software.element_bytes / 2, cluster)


def _exchanges(
    model: Model, layout: Layout, tokens: int, cluster: Cluster, software: Software, experts: bool
) -> tuple[float, float, float]:
    """Forward's exposed seconds over TP (two all-reduces, or as many all-gathers and reduce-scatters), CP and EP."""
    element = software.element_bytes
    tp = 2 * exchange_seconds("all_reduce", "tp", element * tokens * model.hidden, layout, cluster)
    kv = 2 * element * tokens * layout.cp * model.kv_width / min(layout.tp, model.kv_heads)
    cp = exchange_seconds("all_gather", "cp", kv, layout, cluster)
    ep = 0.0
    if experts:
        sent = element * tokens / layout.tp * model.top_k * model.hidden
        ep = 2 * exchange_seconds("all_to_all", "ep", sent, layout, cluster)
    return tp, cp, ep
