"""Closed formulas: the bytes, the operations and the seconds that each way to split a model costs.

Letters are those of the papers: b micro-batch (sequences), s sequence length (tokens), h hidden size, a heads, t, c
and p degrees of tensor, context and pipeline parallelism, m micro-batches, v chunks of layers a rank, n ranks of a
group. Elements become bytes times the size of the dtype. Each docstring names the paper.
"""

from fivefold.cost.memory import activation_bytes, peak_activations, pipeline_activation_bytes, zero_bytes
from fivefold.cost.time import (
    DataParallelLimits,
    attention_core_share,
    bubble,
    bubble_seconds,
    causal_balance,
    collective_seconds,
    data_parallel_limits,
    gpt_parameters,
    min_ring_block,
    min_ring_sequence,
    step_flops,
    utilisation,
)
from fivefold.cost.traffic import (
    BytesMoved,
    collective_bytes,
    collective_messages,
    expert_traffic,
    megatron_sequence_traffic,
    pipeline_traffic,
    pipeline_vs_zero3,
    ring_attention_traffic,
    tensor_traffic,
    ulysses_traffic,
    zero_traffic,
)

__all__ = [
    "BytesMoved",
    "DataParallelLimits",
    "activation_bytes",
    "attention_core_share",
    "bubble",
    "bubble_seconds",
    "causal_balance",
    "collective_bytes",
    "collective_messages",
    "collective_seconds",
    "data_parallel_limits",
    "expert_traffic",
    "gpt_parameters",
    "megatron_sequence_traffic",
    "min_ring_block",
    "min_ring_sequence",
    "peak_activations",
    "pipeline_activation_bytes",
    "pipeline_traffic",
    "pipeline_vs_zero3",
    "ring_attention_traffic",
    "step_flops",
    "tensor_traffic",
    "ulysses_traffic",
    "utilisation",
    "zero_bytes",
    "zero_traffic",
]
