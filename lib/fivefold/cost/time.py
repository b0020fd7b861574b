"""What takes time: operations, links, bubbles, and the share of the hardware that is used."""

from __future__ import annotations

import math
from typing import NamedTuple


def collective_seconds(
    op: str, n: int, num_bytes: float, alpha: float, beta: float, algorithm: str | None = None
) -> float:
    """Seconds of a collective over n ranks on a whole tensor of `num_bytes` (M), by the α-β model.

    A message of x bytes takes `alpha` seconds to start and `beta` seconds a byte (1 over the bandwidth): alpha +
    beta·x. An algorithm takes rounds one after the other, in each of which a rank sends one message:

    | op                                | algorithm | rounds     | bytes a message |
    | all_reduce                        | ring      | 2(n-1)     | M/n             |
    | reduce_scatter, all_gather        | ring      | n-1        | M/n             |
    | all_to_all (M bytes on each rank) | pairwise  | n-1        | M/n             |
    | broadcast, reduce                 | tree      | ⌈log₂ n⌉   | M               |
    | broadcast (the root sends to all) | flat      | n-1        | M               |
    | all_reduce (reduce, broadcast)    | tree      | 2⌈log₂ n⌉  | M               |
    | send                              | direct    | 1          | M               |

    Where `algorithm` is left out it is the first one of the op in this table. Raises ValueError for a pair that is
    not in it (Thakur et al. 2005, section 3; Patarasuk and Yuan 2009).
    """
    depth = math.ceil(math.log2(n))
    table = {
        ("all_reduce", "ring"): (2 * (n - 1), num_bytes / n),
        ("reduce_scatter", "ring"): (n - 1, num_bytes / n),
        ("all_gather", "ring"): (n - 1, num_bytes / n),
        ("all_to_all", "pairwise"): (n - 1, num_bytes / n),
        ("broadcast", "tree"): (depth, num_bytes),
        ("broadcast", "flat"): (n - 1, num_bytes),
        ("reduce", "tree"): (depth, num_bytes),
        ("all_reduce", "tree"): (2 * depth, num_bytes),
        ("send", "direct"): (1, num_bytes),
    }
    known = [way for way in table if way[0] == op and algorithm in (None, way[1])]
    if not known:
        ways = ", ".join(" ".join(way) for way in table)
        raise ValueError(f"there is no formula for {op} {algorithm or ''}".rstrip() + f": choose one of {ways}")
    rounds, message = table[known[0]]
    return rounds * (alpha + beta * message)


class DataParallelLimits(NamedTuple):
    """What data parallelism alone cannot get past."""

    activation_bytes: float  # on every rank, however many there are
    smallest_batch: int  # sequences a step
    sync_over_compute: float  # seconds of gradient sync over seconds of computation


def data_parallel_limits(
    ranks: int,
    batch: int,
    parameters: float,
    sequence_activation_bytes: float,
    sequence_seconds: float,
    alpha: float,
    beta: float,
) -> DataParallelLimits:
    """The three limits of data parallelism, with ZeRO or without, for `batch` sequences a step over `ranks` ranks.

    - Activations are not sharded: every rank keeps those of one sequence at least, `sequence_activation_bytes`.
    - The batch is one sequence a rank at least: `ranks` sequences.
    - The gradient sync grows against the computation: a ring all-reduce of 2 bytes a parameter takes
      2(n - 1)(alpha + beta·2Ψ/n) seconds, and a rank computes for batch/n·`sequence_seconds` (forward and backward of
      one sequence on one rank). Their ratio is the time that it adds where nothing overlaps.

    `alpha` is in seconds a message, `beta` in seconds a byte. Raises ValueError where the batch is under its limit.
    """
    if batch < ranks:
        raise ValueError(f"a batch of {batch} sequences leaves ranks of dp{ranks} idle: take {ranks} sequences or more")
    sync = 2 * (ranks - 1) * (alpha + beta * 2 * parameters / ranks)
    compute = batch / ranks * sequence_seconds
    return DataParallelLimits(sequence_activation_bytes, ranks, sync / compute)


def bubble(p: int, m: int, v: int = 1, of: str = "total") -> float:
    """The share of time that a rank idles in GPipe and 1F1B (v = 1) and in interleaved 1F1B (v chunks a rank).

    The idle time is that of (p - 1)/v micro-batches, the work that of m.
    - Of the "ideal" time, the work alone: (p - 1)/(vm) (Narayanan et al. 2021, section 2.2).
    - Of the "total" time, work and idle: (p - 1)/(vm + p - 1) (GPipe, Huang et al. 2019, section 2.3).

    p = 8, m = 32: 21.9% of ideal, 17.9% of total. Raises ValueError for another `of`.
    """
    if of not in ("total", "ideal"):
        raise ValueError(f"a bubble is a share of total or of ideal time, not of {of!r}")
    return (p - 1) / (v * m if of == "ideal" else v * m + p - 1)


def bubble_seconds(
    schedule: str, p: int, f: float, b: float, w: float, v: int = 1, overlapped: float | None = None
) -> float:
    """Seconds that a rank idles in one step, from the seconds of one micro-batch on one of p ranks.

    `f` forward, `b` input gradient only, `w` weight gradient; `overlapped` a forward and a full backward that run
    together, f + b + w where it is not given.
    - gpipe, one_f_one_b: (p - 1)(f + b + w); interleaved: that over v;
    - zb_h1: (p - 1)(f + b - w); zb_h2: (p - 1)(f + b - 2w); zb_v: 0, and f, b, w must be equal;
    - dualpipe: (p/2 - 1)(overlapped + (b + w) - 3w).

    For zb_h2 and zb_v it is the idle time between a rank's own first and last action, or of one more iteration
    without a flush; measured to the end of the slowest rank they idle more. Raises ValueError for another schedule,
    and for zb_v with unequal times (Zero Bubble, Qi et al. 2023, tables 1 and 2; DeepSeek-V3, table 2).
    """
    if schedule == "zb_v" and not f == b == w:
        raise ValueError("the bubble of zb_v has a closed form at equal times only: make f, b and w equal")
    together = f + b + w if overlapped is None else overlapped
    seconds = {
        "gpipe": (p - 1) * (f + b + w),
        "one_f_one_b": (p - 1) * (f + b + w),
        "interleaved": (p - 1) * (f + b + w) / v,
        "zb_h1": (p - 1) * (f + b - w),
        "zb_h2": (p - 1) * (f + b - 2 * w),
        "zb_v": 0.0,
        "dualpipe": (p / 2 - 1) * (together + (b + w) - 3 * w),
    }
    if schedule not in seconds:
        raise ValueError(f"there is no schedule {schedule!r}: choose {', '.join(seconds)}")
    return seconds[schedule]


def causal_balance(ranks: int, zigzag: bool = False) -> float:
    """The share of the ideal speed that ring attention reaches under a causal mask: n/(2n - 1), or 1 with zig-zag.

    With contiguous pieces the last rank has something to compute in each of its n steps, a triangle and n - 1 squares,
    and all wait for it; the ranks together have n triangles and n(n - 1)/2 squares. 53.3% at 8 ranks. With zig-zag each
    rank holds an early and a late chunk, and the same work.
    """
    return 1.0 if zigzag else ranks / (2 * ranks - 1)


def min_ring_block(flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens in a block of ring attention from which on sending it hides behind computing: c = FLOPS / bandwidth.

    Attention of c queries over c keys of width d is 4dc² FLOPs; the next K and V are 4cd bytes in 16 bits. The
    bandwidth is that of one direction (Ring Attention, Liu et al. 2023, section 3 and table 2).
    """
    return flops_per_second / bytes_per_second


def min_ring_sequence(flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens that a rank then needs: 6·FLOPS/bandwidth.

    Six blocks are in its memory: the query's, K and V in use, K and V on their way, the output's (Ring Attention,
    Liu et al. 2023, section 3 and table 2).
    """
    return 6 * min_ring_block(flops_per_second, bytes_per_second)


def gpt_parameters(layers: int, h: int, vocabulary: int, s: int) -> float:
    """Parameters of a GPT with an MLP four times as wide as h, learned positions and a tied embedding.

    12·layers·h²·(1 + 13/(12h) + (vocabulary + s)/(12·layers·h)) (Narayanan et al. 2021, equation 2).
    """
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))


def step_flops(batch: int, s: int, layers: int, h: int, vocabulary: int, recompute: str = "full") -> float:
    """Floating point operations of one step of a GPT on `batch` sequences of s tokens: matrix products only.

    A layer's forward is 24·B·s·h²·(1 + s/(6h)), the logits' is 2·B·s·h·vocabulary; a backward is twice its forward.
    With `recompute` "full" the layers' forward runs twice: 96·B·s·l·h²·(1 + s/(6h) + V/(16lh)), as Narayanan et al.
    2021 (equation 3) count. With "none" it is 72·B·s·l·h²·(1 + s/(6h) + V/(12lh)): the *model* FLOPs of an MFU.
    "selective" adds the attention core's forward to that, 4·B·s²·h a layer. The causal mask's half is not taken off.
    Raises ValueError for another `recompute`.
    """
    forward = 24 * batch * s * layers * h**2 * (1 + s / (6 * h))
    again = {"none": 0, "selective": 4 * batch * s**2 * layers * h, "full": forward}
    if recompute not in again:
        raise ValueError(f"recompute cannot be {recompute!r}: choose none, selective or full")
    return 3 * forward + again[recompute] + 6 * batch * s * h * vocabulary


def attention_core_share(s: int, h: int) -> float:
    """The share of a layer's forward FLOPs in the attention core, QKᵀ and PV: s/(6h) over 1 + s/(6h).

    2.7% for GPT-3, 1.6% for MT-NLG 530B: the price of selective recomputation in Korthikanti et al. 2022, section 5.
    The core is computed again once a step and a step is three forwards, so that of a *step* it is a third of this
    share.
    """
    return s / (6 * h) / (1 + s / (6 * h))


def utilisation(flops: float, seconds: float, gpus: int, peak_flops_per_second: float) -> float:
    """The share of the GPUs' peak that `flops` in `seconds` make.

    It is the model FLOPs utilisation (MFU) where flops are the model's (`step_flops` with recompute "none"), and the
    hardware's (HFU) where they hold what is recomputed (PaLM, Chowdhery et al. 2022, appendix B).
    """
    return flops / (seconds * gpus * peak_flops_per_second)
