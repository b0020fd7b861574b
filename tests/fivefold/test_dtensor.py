"""Tensor and sequence parallelism against DTensor's parallelize_module, in float64: every gradient, and the traffic."""

import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime.marks import phase
from fivefold.sequence import gather_tokens, scatter_tokens, sync_replicated_gradients
from fivefold.tensor import MLP, copy_to_ranks, sum_over_ranks
from torch import nn

TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}  # float64: tens of roundings
B, S, H, INNER = 2, 12, 7, 12


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calls(ledger, name):
    """(op, forward or backward, bytes that leave the rank) of the communications in a phase, sorted."""
    lists = [sorted((c.op, c.backward, c.sent) for c in own.communications if c.phase == name) for own in ledger]
    assert lists[0] and all(one == lists[0] for one in lists)
    return lists[0]


def norm_and_mlp():
    torch.manual_seed(0)
    norm = nn.LayerNorm(H)
    nn.init.normal_(norm.weight)
    return nn.Sequential(norm, nn.Linear(H, INNER), nn.GELU(), nn.Linear(INNER, H)).double()


def parallelised(split):
    """The layers as DTensor splits them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if split:
        plan["0"] = SequenceParallel()
        plan |= {"1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel(output_layouts=Shard(1))}
    return parallelize_module(norm_and_mlp(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def side_by_side(split):
    group, n = dist.group.WORLD, dist.get_world_size()
    norm, column, _, row = norm_and_mlp()
    ways = (gather_tokens, scatter_tokens) if split else (copy_to_ranks, sum_over_ranks)
    ours = nn.Sequential(norm, MLP(column.weight, column.bias, row.weight, row.bias, group, *ways))
    theirs, found = parallelised(split), []
    for name, module in (("ours", ours), ("theirs", theirs)):
        x = randn(B, S, H, seed=1)
        x = (x.chunk(n, 1)[dist.get_rank()] if split else x).clone().requires_grad_()
        with phase(name):
            module(x).square().sum().backward()
        found.append([x.grad])
    if split:
        sync_replicated_gradients([norm.weight, norm.bias, ours[1].row.bias], group)
    found[0] += [p.grad for p in ours.parameters()]
    for name, parameter in theirs.named_parameters():
        grad = parameter.grad
        if hasattr(grad, "to_local"):  # a gradient that is not summed yet is `Partial`
            grad = grad.to_local() if name in ("1.weight", "1.bias", "3.weight") else grad.full_tensor()
        found[1].append(grad)
    return found


@pytest.mark.parametrize("split", [False, True])
def test_norm_and_mlp(split):
    """Gradients of the input and of every parameter, and the operations with their bytes, with and without the tokens
    split."""
    done = run(side_by_side, 3, split)
    for ours, theirs in done.results:
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert calls(done.ledger, "ours") == calls(done.ledger, "theirs")
