"""What a rank keeps: the states of parameters, and the activations that wait for backward."""

from __future__ import annotations


def zero_bytes(parameters: float, ranks: int, stage: int, optimizer_bytes: float = 12) -> float:
    """Bytes a rank keeps for `parameters` parameters (Ψ) trained with mixed-precision Adam on `ranks` (N) ranks.

    A parameter costs 2 bytes (half precision), its gradient 2, and the optimizer `optimizer_bytes` (K): 12 for Adam's
    float32 copy, momentum and variance. Stage 0 keeps all of them everywhere; stage 1 splits the optimizer evenly over
    the ranks, stage 2 the gradients too, stage 3 all three: averages, without rounding and padding. Activations are
    not counted. Raises ValueError for another stage (ZeRO, Rajbhandari et al. 2020, section 5 and table 1).
    """
    split_by_stage = {0: 0, 1: optimizer_bytes, 2: 2 + optimizer_bytes, 3: 4 + optimizer_bytes}
    if stage not in split_by_stage:
        raise ValueError(f"ZeRO has no stage {stage}: choose 0, 1, 2 or 3")
    split = split_by_stage[stage]
    return parameters * (4 + optimizer_bytes - split + split / ranks)


def activation_bytes(
    b: int, s: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Bytes of activations that a rank keeps for the backward of one transformer layer and b sequences.

    b sequences of s tokens, h features, a heads, t ranks of tensor parallelism; 16-bit activations, dropout masks of
    one byte, an MLP four times as wide as h. `recompute` says what backward computes again: "none"; "selective", the
    attention core; "full", all of the layer, of which the whole input alone is kept. With `sequence_parallel`
    everything else is split by t. Raises ValueError for another `recompute` (Korthikanti et al. 2022, table 2).
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute cannot be {recompute!r}: choose none, selective or full")
    if recompute == "full":
        return 2 * s * b * h
    core = 0 if recompute == "selective" else 5 * a * s / h
    replicated = 10 / t if sequence_parallel else 10
    return s * b * h * (replicated + 24 / t + core / t)


def pipeline_activation_bytes(layer_bytes: float, layers: int, p: int, v: int = 1) -> float:
    """Bytes of activations at their peak on the first of p ranks, under 1F1B, from the bytes of one layer.

    1F1B (v = 1) keeps p micro-batches of layers/p layers: as many bytes as all `layers` of one micro-batch, whatever
    p. Interleaving with v ≥ 2 chunks a rank multiplies that by 1 + (p - 1)/(pv) (Korthikanti et al. 2022, section
    4.2.3). At least p micro-batches are assumed.
    """
    return layer_bytes * layers * (1 if v == 1 else 1 + (p - 1) / (p * v))


def peak_activations(schedule: str, p: int, m: int, v: int = 1) -> float:
    """Micro-batches whose activations the first of p ranks keeps at the peak, in units of all its layers' activations.

    gpipe m; one_f_one_b p; interleaved p + (p - 1)/v, which is (v + 1)p - 1 chunks; zb_h1 p; zb_h2 2p - 1; zb_v p, as
    2p half chunks; dualpipe p + 1, with the parameters held twice. Never more than the m that there are. Raises
    ValueError for another schedule (GPipe 2019; Narayanan et al. 2021; Zero Bubble, Qi et al. 2023, table 2;
    DeepSeek-V3, table 2).
    """
    peaks = {
        "gpipe": m,
        "one_f_one_b": p,
        "interleaved": p + (p - 1) / v,
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zb_v": p,
        "dualpipe": p + 1,
    }
    if schedule not in peaks:
        raise ValueError(f"there is no schedule {schedule!r}: choose {', '.join(peaks)}")
    return min(peaks[schedule], m)
