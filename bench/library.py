"""The library beside PyTorch's own, on 4 ranks of this machine: prints one table.

    tensor + sequence   a transformer block with its tokens split, beside DTensor's plan for the same block
    ring attention      the fast ring under a causal mask, beside torch's ring (and its all-gather variant), balanced
    ZeRO 3              a step of training, beside FSDP2 with torch's AdamW

Both sides run in one run, in turn, with the same numbers: what they compute is compared first. Who begins changes from
round to round. Given are the medians over rounds of the time from barrier to barrier, and the median of the rounds'
ratios, which a busy machine disturbs less. Pipelines are compared in bench/pipeline.py.

    python bench/library.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import machine
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from torch import Tensor, nn

RANKS = 4
TARGET = 1.0

Ways = dict[str, Callable[[], list[Tensor]]]


def measure(ways: Ways, rounds: int) -> dict:
    """Seconds of each way in each round, and how far its results are from the first one's, relative to the largest.

    Results are those of the second call, which sees what the first has changed.
    """
    results = [[way(), way()][1] for way in ways.values()]
    apart = max(_apart(results[0], other) for other in results[1:])
    seconds = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first is not counted
        for name in list(ways)[:: 1 if number % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            ways[name]()
            dist.barrier()
            if number:
                seconds[name].append(round(time.perf_counter() - began, 6))
    return {"seconds": seconds, "apart": apart}


def _apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def block(rounds: int, b: int = 2, s: int = 256, h: int = 256, heads: int = 8) -> dict:
    """Forward and backward of one block on s/t tokens a rank; norms' gradients are left to the end of a step."""
    torch.manual_seed(0)
    group, t = dist.group.WORLD, dist.get_world_size()
    shapes = {"qkv": (3 * h, h), "out": (h, h), "in": (4 * h, h), "down": (h, 4 * h)}
    weights = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    biases = {name: torch.randn(shape[0]) for name, shape in shapes.items()}
    x, dout = (torch.randn(b, s, h).chunk(t, 1)[dist.get_rank()].contiguous() for _ in range(2))

    def way(module: nn.Module) -> Callable[[], list[Tensor]]:
        def both_directions() -> list[Tensor]:
            inputs = x.clone().requires_grad_()
            module.zero_grad()
            out = module(inputs)
            out.backward(dout)
            return [out.detach(), inputs.grad]

        return both_directions

    return measure({"ours": way(_our_block(weights, biases, h, heads, group)),
                    "DTensor": way(_dtensor_block(weights, biases, h, heads))}, rounds)  # fmt: skip


_core = partial(F.scaled_dot_product_attention, is_causal=True)


def _our_block(weights: dict, biases: dict, h: int, heads: int, group: dist.ProcessGroup) -> nn.Module:
    from fivefold.sequence import Block, gather_tokens, scatter_tokens
    from fivefold.tensor import MLP, Attention

    ways = {"enter": gather_tokens, "leave": scatter_tokens}
    of_attention = weights["qkv"], biases["qkv"], weights["out"], biases["out"]
    attention = Attention(*of_attention, heads, heads, group, core=_core, **ways)
    mlp = MLP(weights["in"], biases["in"], weights["down"], biases["down"], group, **ways)
    return Block(attention, mlp, nn.LayerNorm(h), nn.LayerNorm(h), group)


class _Heads(nn.Module):
    """Attention of the heads that are here, whichever number of them there is."""

    def __init__(self, h: int, size: int):
        super().__init__()
        self.size = size
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(_core(q, k, v).transpose(1, 2).flatten(2))


class _PlainBlock(nn.Module):
    def __init__(self, h: int, heads: int):
        super().__init__()
        self.norm, self.attention, self.mlp_norm = nn.LayerNorm(h), _Heads(h, h // heads), nn.LayerNorm(h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _dtensor_block(weights: dict, biases: dict, h: int, heads: int) -> nn.Module:
    """The plan of torchtitan: norms on split tokens, one all-gather before q, k and v, local tensors between."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    module = _PlainBlock(h, heads)
    parts = {"attention.out": "out", "mlp.0": "in", "mlp.2": "down"}
    state = {f"{part}.weight": weights[name] for part, name in parts.items()}
    state |= {f"{part}.bias": biases[name] for part, name in parts.items()}
    rows = weights["qkv"].unflatten(0, (heads, 3, -1)), biases["qkv"].unflatten(0, (heads, 3, -1))
    for i, name in enumerate("qkv"):  # ours are laid out by head
        weight, bias = (part[:, i].flatten(0, 1) for part in rows)
        state |= {f"attention.{name}.weight": weight, f"attention.{name}.bias": bias}
    module.load_state_dict(state, strict=False)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": gather, "mlp": gather,
        "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    return parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def ring(rounds: int, b: int = 1, heads: int = 4, s: int = 2048, d: int = 64) -> dict:
    """Forward and backward of causal attention over s tokens, zig-zag."""
    from fivefold.context import fast_ring_attention, token_positions
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    torch.manual_seed(0)
    group, n = dist.group.WORLD, dist.get_world_size()
    positions = token_positions(s, n)
    local = [torch.randn(b, heads, s, d)[:, :, positions[dist.get_rank()]].contiguous() for _ in range(4)]

    def ours() -> list[Tensor]:
        *qkv, dout = (x.clone().requires_grad_() for x in local)
        out = fast_ring_attention(*qkv, group, positions)
        return [out.detach(), *torch.autograd.grad(out, qkv, dout.detach())]

    def theirs(method: torchs._RotateMethod) -> list[Tensor]:
        options = torchs._cp_options
        options.enable_load_balance, options.rotate_method = True, method
        forward = torchs.aten._scaled_dot_product_flash_attention_for_cpu
        backward = torchs.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        *qkv, dout = (x.clone() for x in local)
        out, lse = torchs._templated_ring_attention(group, 2, forward, *qkv, is_causal=True)
        arguments = (group, 2, backward, dout, "grad_out", *qkv, out, lse)
        return [out, *torchs._templated_ring_attention_backward(*arguments, is_causal=True, dropout_p=0.0)]

    methods = {"torch's ring": torchs._RotateMethod.ALL_TO_ALL, "all-gather": torchs._RotateMethod.ALL_GATHER}
    return measure({"ours": ours} | {name: partial(theirs, method) for name, method in methods.items()}, rounds)


def zero3(rounds: int, h: int = 256, layers: int = 6, b: int = 64) -> dict:
    """Forward, backward and AdamW (torch's is the fused one) on a stack of MLPs, each gathered when it runs."""
    from fivefold.zero import Shard, gather_parameters, reduce_gradients
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    n, settings = dist.get_world_size(), {"weight_decay": 0.01}

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        parts = [(nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in range(layers)]
        return nn.Sequential(*(nn.Sequential(*part) for part in parts))

    mine, theirs = model(), model()
    shards = [Shard(list(part.parameters()), dist.group.WORLD, stage=3, **settings) for part in reversed(mine)]
    for part, shard in zip(reversed(mine), shards, strict=True):
        gather_parameters(part, shard)
    mesh = init_device_mesh("cpu", (n,))
    for part in theirs:
        fully_shard(part, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True, **settings)
    x = torch.randn(b, h, generator=torch.Generator().manual_seed(dist.get_rank()))

    def ours() -> list[Tensor]:
        loss = mine(x).square().mean() / n
        finish = reduce_gradients(shards)
        loss.backward()
        finish()
        for shard in shards:
            shard.update(1e-3)
        return [loss.detach() * n]

    def fsdp() -> list[Tensor]:
        loss = theirs(x).square().mean()  # FSDP takes the mean over ranks by itself
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return measure({"ours": ours, "FSDP2": fsdp}, rounds)


CONTESTS = {"tensor + sequence": block, "ring attention": ring, "ZeRO 3": zero3}


def contest(name: str, rounds: int) -> list[dict]:
    """One row for each of the others: medians of seconds, the median ratio, and how far the results are apart."""
    found = run(CONTESTS[name], RANKS, rounds, timeout=600).results
    seconds = found[0]["seconds"]  # from barrier to barrier: the same on all ranks
    ours = seconds.pop("ours")
    return [
        {
            "what": name, "beside": other, "ours": median(ours), "theirs": median(theirs),
            "ratio": median(a / b for a, b in zip(ours, theirs, strict=True)), "target": TARGET,
            "apart": max(result["apart"] for result in found), "rounds": {"ours": ours, "theirs": theirs},
        }
        for other, theirs in seconds.items()
    ]  # fmt: skip


def table(rows: list[dict]) -> str:
    lines = [f"{'':20}{'beside':14}{'ours':>10}{'theirs':>10}{'ratio':>8}{'target':>8}{'apart':>10}"]
    for row in rows:
        times = f"{1000 * row['ours']:>7.1f} ms{1000 * row['theirs']:>7.1f} ms"
        lines.append(
            f"{row['what']:20}{row['beside']:14}{times}{row['ratio']:>8.2f}{row['target']:>8.1f}{row['apart']:>10.1e}"
        )
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--only", choices=CONTESTS, help="one of the three")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    names = [given.only] if given.only else list(CONTESTS)
    rows = [row for name in names for row in contest(name, given.rounds)]
    print(table(rows))
    if given.json:
        machine.write(given.json, {"ranks": RANKS, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
