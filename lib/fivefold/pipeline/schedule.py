"""The first four schedules: naive, GPipe, 1F1B and interleaved 1F1B.

In all of them p is the number of ranks, m the number of micro-batches and r a rank.
"""

from __future__ import annotations

from fivefold.pipeline.actions import Schedule, in_order, looped, straight


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """One micro-batch after the other: forward through all ranks, backward through all ranks, then the next.

    num_ranks: p, one stage on each. num_microbatches: m.
    Returns a Schedule whose list on every rank is F B, m times. One rank works at a time: time m·p·(T_F + T_B).
    """
    words = ["F", "B"] * num_microbatches
    lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]
    return Schedule("naive", num_microbatches, straight(num_ranks), lists)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    num_ranks: p, one stage on each. num_microbatches: m.
    Returns a Schedule whose list on every rank is F, m times, then B, m times. Idle by makespan: (p-1)(T_F + T_B) on
    every rank. Live activations: m.
    Huang et al. 2019, GPipe, section 2.3.
    """
    words = ["F"] * num_microbatches + ["B"] * num_microbatches
    lists = [in_order(words, stages=[rank]) for rank in range(num_ranks)]
    return Schedule("GPipe", num_microbatches, straight(num_ranks), lists)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Backwards start as soon as they can, so that few activations are alive; as fast as GPipe.

    num_ranks: p, one stage on each. num_microbatches: m, also fewer than p.
    Returns a Schedule. Rank r warms up with min(p-1-r, m) forwards, then alternates one forward and one backward, then
    does the backwards that are left. Idle by makespan: (p-1)(T_F + T_B). Live activations on rank r: min(p-r, m).
    Narayanan et al. 2021, Efficient large-scale language model training, section 2.2.1.
    """
    lists = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        words = ["F"] * warmup + ["F", "B"] * (num_microbatches - warmup) + ["B"] * warmup
        lists.append(in_order(words, stages=[rank]))
    return Schedule("1F1B", num_microbatches, straight(num_ranks), lists)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B with v thinner stages on every rank: the bubble is v times smaller, the borders p·v-1 instead of p-1.

    num_ranks: p. num_microbatches: m, a multiple of p. num_chunks: v; rank r has the stages r, p+r, 2p+r, ...
    Returns a Schedule. Forwards take p micro-batches through chunk 0, the same p through chunk 1, and so on to the last
    chunk, then the next p; backwards take them in the same way from the last chunk to the first. Rank r warms up with
    min(2(p-r-1) + (v-1)p, mv) forwards, then alternates one forward and one backward, then does the backwards left.
    Idle by makespan: (p-1)(T_F + T_B), of one chunk. Live chunks on rank 0: at most (v+1)p - 1.
    Raises ValueError where p does not divide m, or p or v is below 1.
    Narayanan et al. 2021, Efficient large-scale language model training, section 2.2.2.
    """
    p, m, v = num_ranks, num_microbatches, num_chunks
    routes = looped(p, v)
    if m % p:
        raise ValueError(
            f"interleaved needs a multiple of {p} micro-batches on {p} ranks, {m} were given: choose {m - m % p + p}"
        )
    forwards = [f"F{k // p % v}" for k in range(m * v)]
    backwards = [f"B{v - 1 - k // p % v}" for k in range(m * v)]
    lists = []
    for rank in range(p):
        warmup = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        steady = [word for pair in zip(forwards[warmup:], backwards, strict=False) for word in pair]
        words = forwards[:warmup] + steady + backwards[m * v - warmup :]
        lists.append(in_order(words, stages=range(rank, v * p, p)))
    return Schedule("interleaved 1F1B", m, routes, lists)
