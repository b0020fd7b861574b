"""How fast a training is: what a step computes, and what this device reaches at best.

MFU, the model FLOPs utilisation (PaLM, Chowdhery et al. 2022, appendix B), is `step_flops` over seconds · GPUs · the
rate of one GPU. The rate taken here is not that of the data sheet but what `matmul_rate` measures on the card itself.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from fivefold.model import GPTConfig


def step_flops(model: GPTConfig, batch: int, sequence: int) -> float:
    """Floating point operations of one step on `batch` sequences of `sequence` tokens: matrix products of the model.

    A token's forward is 2 operations for each weight that it meets, of the experts top_k, and 4·s·h in each layer's
    attention core, QKᵀ and PV; a backward is twice its forward. As in `cost.step_flops`, the half that a causal mask
    hides is not taken off, and what is computed again by recomputation is not counted.
    """
    m, head = model, model.hidden // model.heads
    attention = m.hidden * (m.heads + 2 * m.kv_heads) * head + m.hidden * m.heads * head
    mlp = 2 * m.hidden * m.ffn
    experts = m.hidden * m.experts + m.top_k * mlp
    weights = m.layers * attention + (m.layers - m.moe_layers) * mlp + m.moe_layers * experts + m.hidden * m.vocabulary
    return 3 * batch * sequence * (2 * weights + m.layers * 4 * sequence * m.hidden)


def num_parameters(model: GPTConfig) -> int:
    """Parameters of the whole model, each once; a tied embedding too."""
    m, head = model, model.hidden // model.heads
    qkv = (m.heads + 2 * m.kv_heads) * head
    attention = qkv * (m.hidden + 1) + m.heads * head * m.hidden + m.hidden
    mlp = 2 * m.hidden * m.ffn + m.ffn + m.hidden
    experts = m.experts * (m.hidden + 2 * m.hidden * m.ffn)
    norms = (2 * m.layers + 1) * 2 * m.hidden
    embeddings = (1 if m.tied else 2) * m.vocabulary * m.hidden
    return m.layers * attention + (m.layers - m.moe_layers) * mlp + m.moe_layers * experts + norms + embeddings


def matmul_rate(device: str, dtype: torch.dtype, n: int = 8192, repeats: int = 10) -> float:
    """FLOPs a second of the product of two (n, n) matrices on this rank's device: the best of `repeats`."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):  # the first also loads the kernel
        _finish(device)
        began = time.perf_counter()
        a @ b
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds[1:])


def num_gpus() -> int:
    """How many GPUs the ranks of this run use: one each, or as many as there are where they share."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() * min(local, torch.cuda.device_count()) // local


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
