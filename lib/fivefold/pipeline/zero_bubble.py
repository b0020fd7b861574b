"""Schedules that split the backward in two: ZB-H1, ZB-H2, ZB-V and DualPipe.

The weight gradient waits for nobody and nobody waits for it, so it can fill the bubbles.
p is the number of ranks, m the number of micro-batches and r a rank.
"""

from __future__ import annotations

from fivefold.pipeline.actions import Schedule, both_ways, in_order, straight, v_shaped


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with the backward split: a third of its bubble at equal times, in the same memory.

    num_ranks: p, one stage on each. num_microbatches: m, also fewer than p.
    Returns a Schedule. Each rank takes F, I and W in turn, I p-1-r steps behind F and W r steps behind I: as many
    forwards as 1F1B warms up with, then F and I alternate, later F, I and W, and the rest of W comes last.
    Idle by makespan: (p-1)(T_F + T_I - T_W), for m >= p and T_W no longer than T_F and T_I. Alive, from F to W: at
    most p on every rank.
    Qi et al. 2023, Zero bubble pipeline parallelism, section 2.
    """
    p, m = num_ranks, num_microbatches
    lists = []
    for rank in range(p):
        behind = {"F": 0, "I": p - 1 - rank, "W": p - 1}
        words = [kind for step in range(m + p - 1) for kind in "FIW" if 0 <= step - behind[kind] < m]
        lists.append(in_order(words, stages=[rank]))
    return Schedule("ZB-H1", m, straight(p), lists)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up: no bubble inside a rank's own work at equal times, for twice the memory.

    num_ranks: p, one stage on each. num_microbatches: m, also fewer than p.
    Returns a Schedule. Each rank takes F, I and W in turn, I 2(p-1-r) steps behind F and W 2r steps behind I.
    Idle inside a rank's first-to-last window: at most (p-1)(T_F + T_I - 2T_W), for m >= 2p-1 and T_W no longer than
    T_F and T_I; by makespan it is no better than ZB-H1. Alive, from F to W: at most 2p-1 on every rank.
    Qi et al. 2023, Zero bubble pipeline parallelism, section 2.
    """
    p, m = num_ranks, num_microbatches
    lists = []
    for rank in range(p):
        behind = {"F": 0, "I": 2 * (p - 1 - rank), "W": 2 * (p - 1)}
        words = [kind for step in range(m + 2 * p - 2) for kind in "FIW" if 0 <= step - behind[kind] < m]
        lists.append(in_order(words, stages=[rank]))
    return Schedule("ZB-H2", m, straight(p), lists)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two half stages a rank, in a V: no bubble inside a rank's own work at equal times, in 1F1B's memory.

    num_ranks: p; rank r has the stages r (chunk 0) and 2p-1-r (chunk 1). num_microbatches: m, at least 2p-1.
    Returns a Schedule. Rank r: F0, 2(p-r)-1 times; F1 F0, r times; F1 I1 W1, p-r times; then F0 I0 W0 F1 I1 W1 while
    there are F0 left, and I0 W0 F1 I1 W1 while there are F1 left; I0 I1, r times; I0 W0, p-r times; the rest of W1,
    then of W0.
    Idle inside a rank's first-to-last window: 0 at equal times. Alive: at most 2p half stages on every rank.
    Raises ValueError where m is below 2p-1.
    Qi et al. 2023, Zero bubble pipeline parallelism, section 6.
    """
    p, m = num_ranks, num_microbatches
    if m < 2 * p - 1:
        raise ValueError(f"ZB-V needs at least {2 * p - 1} micro-batches on {p} ranks, {m} were given")
    lists = []
    for r in range(p):
        words = (
            ["F0"] * (2 * (p - r) - 1)
            + ["F1", "F0"] * r
            + ["F1", "I1", "W1"] * (p - r)
            + ["F0", "I0", "W0", "F1", "I1", "W1"] * (m - 2 * p + r + 1)
            + ["I0", "W0", "F1", "I1", "W1"] * (p - r - 1)
            + ["I0", "I1"] * r
            + ["I0", "W0"] * (p - r)
            + ["W1"] * r
            + ["W0"] * r
        )
        lists.append(in_order(words, stages=[r, 2 * p - 1 - r]))
    return Schedule("ZB-V", m, v_shaped(p), lists)


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Micro-batches enter at both ends, so that every rank always has a forward and a backward to overlap.

    num_ranks: p, even; rank r has stage r for the first half of the micro-batches and stage p-1-r for the second half,
    so all parameters are held twice. num_microbatches: m, even, at least 2p.
    Returns a Schedule. With h = p/2 and q = min(r, p-1-r), chunk 0 is stage q and chunk 1 stage p-1-q; on ranks
    below h chunk 0 is that of the first half of the micro-batches, on the others that of the second. Rank r: F0,
    2(h-q-1) times; F0 F1, q+1 times; I1 W F1, h-q-1 times; F0&B1 F1&B0, m/2-p+q+1 times, where the two middle ranks
    do the very first pair as F0, then B1; B1 F1&B0, h-q-1 times; B1 B0, q+1 times, the second half of these 2(q+1)
    split, so I; W I0, h-q-1 times; W, q+1 times. W takes the oldest weight gradient owed.
    Idle by makespan: (p/2-1)(T_F&B + T_B - 3T_W), T_B the whole backward, where T_F = T_I and T_W is no longer. Alive:
    p+1 on every rank.
    Raises ValueError where p or m is odd, or m is below 2p.
    DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1.
    """
    p, m = num_ranks, num_microbatches
    if p % 2:
        raise ValueError(f"DualPipe needs an even number of ranks, {p} were given: choose {p + 1}")
    if m % 2 or m < 2 * p:
        raise ValueError(
            f"DualPipe needs an even number of micro-batches, {2 * p} or more on {p} ranks: {m} were given"
        )
    lists = []
    for r in range(p):
        half, q = p // 2, min(r, p - 1 - r)
        steady = ["F0&B1", "F1&B0"] * (m // 2 - p + q + 1)
        if q == half - 1:
            steady[:1] = ["F0", "B1"]
        words = (
            ["F0"] * (2 * (half - q - 1))
            + ["F0", "F1"] * (q + 1)
            + ["I1", "W", "F1"] * (half - q - 1)
            + steady
            + ["B1", "F1&B0"] * (half - q - 1)
            + (["B1", "B0"] * (q + 1))[: q + 1]
            + (["I1", "I0"] * (q + 1))[q + 1 :]
            + ["W", "I0"] * (half - q - 1)
            + ["W"] * (q + 1)
        )
        chunks = [(r, 0), (p - 1 - r, m // 2)]
        stages, first = zip(*(chunks if r < half else reversed(chunks)), strict=True)
        lists.append(in_order(words, stages, first))
    return Schedule("DualPipe", m, both_ways(p), lists)
