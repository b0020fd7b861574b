"""What leaves a rank: bytes, elements and messages of each way to split a model."""

from __future__ import annotations

from typing import NamedTuple


def collective_bytes(op: str, n: int, num_bytes: float) -> float:
    """Bytes that each of n ranks sends in a collective on a whole tensor of `num_bytes` (M), with the ring.

    "all_reduce" 2(n - 1)/n·M; "reduce_scatter" and "all_gather" (n - 1)/n·M each, so that the two together cost what
    one all-reduce does; "all_to_all", of M bytes on each rank, (n - 1)/n·M; "send" M. The whole tensor of a
    reduce-scatter is its input, that of an all-gather its result. Raises ValueError for another op (Patarasuk and
    Yuan 2009).
    """
    passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    if op == "send":
        return num_bytes
    if op not in passes:
        raise ValueError(f"there is no formula for {op!r}: choose {', '.join(passes)} or send")
    return passes[op] * (n - 1) / n * num_bytes


def collective_messages(op: str, n: int) -> int:
    """Messages that each of n ranks sends in the same collectives: 2(n - 1) for an all-reduce, n - 1 for the others."""
    rounds = {"all_reduce": 2 * (n - 1), "reduce_scatter": n - 1, "all_gather": n - 1, "all_to_all": n - 1, "send": 1}
    if op not in rounds:
        raise ValueError(f"there is no formula for {op!r}: choose {', '.join(rounds)}")
    return rounds[op]


def zero_traffic(parameters: float, ranks: int, stage: int) -> float:
    """Elements that a rank sends in one step and micro-batch of data parallelism with ZeRO's stage 0, 1, 2 or 3.

    Stages 0, 1 and 2 move 2Ψ(n - 1)/n: a reduce-scatter of gradients and an all-gather, of gradients (which makes an
    all-reduce) or of new parameters. Stage 3 moves 3Ψ(n - 1)/n: parameters are gathered before forward and again before
    backward, gradients are reduce-scattered. The paper leaves (n - 1)/n out. Raises ValueError for another stage (ZeRO,
    Rajbhandari et al. 2020, section 7).
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has no stage {stage}: choose 0, 1, 2 or 3")
    return (3 if stage == 3 else 2) * parameters * (ranks - 1) / ranks


def tensor_traffic(b: int, s: int, h: int, t: int) -> float:
    """Elements that a rank sends for one transformer layer, an attention and an MLP, forward and backward.

    b sequences of s tokens, h features, t ranks. Forward takes two all-reduces of the activations, one after the
    attention and one after the MLP; backward takes two before them (Narayanan et al. 2021, section 3.2).
    """
    return 8 * b * s * h * (t - 1) / t


def pipeline_traffic(b: int, s: int, h: int, v: int = 1) -> int:
    """Elements from a rank to the next, for one micro-batch and one direction: bsh for each of its v chunks of layers.

    Forward sends activations on, backward their gradients back: as many (Narayanan et al. 2021, sections 2.2 and 3.2).
    """
    return b * s * h * v


def expert_traffic(tokens: int, h: int, top_k: int, ep: int) -> float:
    """Elements that a rank sends for one mixture-of-experts layer, forward and backward: 4·tokens·top_k·h·(ep - 1)/ep.

    `tokens` are those of the rank. Each goes to top_k experts (dispatch) and its results come back (combine);
    backward does both again. With tokens spread evenly over the ep ranks, one in ep stays at home (GShard, Lepikhin
    et al. 2020).
    """
    return 4 * tokens * top_k * h * (ep - 1) / ep


def ring_attention_traffic(tokens: int, kv_width: int, c: int) -> float:
    """Elements that a rank sends in one layer's forward of context parallelism: 2·tokens/c·kv_width·(c - 1).

    `tokens` is the whole sequence times the batch, `kv_width` the key heads times their size. Each rank's K and V
    visit the c - 1 others, in turn around a ring or at once in an all-gather: the same elements (Ring Attention, Liu
    et al. 2023).
    """
    return 2 * tokens / c * kv_width * (c - 1)


def ulysses_traffic(tokens: int, h: int, ranks: int) -> float:
    """Elements over each link for one layer's forward of all-to-all attention: 4·tokens·h/ranks.

    Four all-to-alls, of Q, K, V and the output, of tokens·h elements each over all ranks: they shrink as ranks are
    added (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.2; it leaves (ranks - 1)/ranks out).
    """
    return 4 * tokens * h / ranks


def megatron_sequence_traffic(tokens: int, h: int) -> int:
    """Elements over each link for one layer's forward of Megatron's sequence parallelism: 4·tokens·h.

    Two all-gathers and two reduce-scatters of tokens·h elements: they do not shrink as ranks are added
    (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.2).
    """
    return 4 * tokens * h


class BytesMoved(NamedTuple):
    """Bytes that a rank sends in one step, each way."""

    pipeline: float
    zero3: float


def pipeline_vs_zero3(
    parameters: float, h: int, tokens: int, ranks: int, num_microbatches: int = 1, element_bytes: int = 2
) -> BytesMoved:
    """`BytesMoved(pipeline, zero3)`: what a rank sends in one step with the model split over `ranks`, either way.

    In pipeline stages or in ZeRO-3 shards, the ranks together train on `tokens` tokens a step. A middle stage of the
    pipeline passes every token on once and its gradient back once: 2·tokens·h elements, whatever the model's size.
    One rank alone sends nothing. ZeRO-3 sends 3Ψ(n - 1)/n elements, whatever the number of tokens, for each of the
    `num_microbatches` that a rank cuts its tokens/ranks into. So a pipeline moves less where the model is large for
    its batch: tokens < 3Ψ(n - 1)/(2nh) with one micro-batch (sections 3.2 of Narayanan et al. 2021 and 7.2 of ZeRO,
    Rajbhandari et al. 2020; seen in table 2 of the former).
    """
    pipeline = 2 * tokens * h if ranks > 1 else 0
    zero3 = 3 * parameters * (ranks - 1) / ranks * num_microbatches
    return BytesMoved(pipeline * element_bytes, zero3 * element_bytes)
