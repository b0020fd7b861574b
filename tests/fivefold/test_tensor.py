"""Tensor parallelism against one dense process and against DTensor, in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.runtime.errors import RankFailed
from fivefold.tensor import MLP, ColumnLinear, RowLinear, copy_to_ranks, sum_over_ranks
from torch import nn

TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}  # float64: tens of roundings, through two steps of AdamW
B, S, H, INNER = 2, 5, 7, 12  # 12 inner features: 1, 2, 3 or 4 ranks


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, expected):
    torch.testing.assert_close(got, expected, **TOLERANCE)


def train(module, x, target, steps=2):
    """Outputs and gradients of the first step, and the weights after two steps of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    first = None
    for _ in range(steps):
        x = x.detach().requires_grad_()
        optimizer.zero_grad()
        out = module(x)
        (out - target).square().sum().backward()
        if first is None:
            first = {"out": out.detach().clone(), "x.grad": x.grad.clone()}
            first |= {f"{name}.grad": p.grad.clone() for name, p in module.named_parameters()}
        optimizer.step()
    return first | {name: p.detach().clone() for name, p in module.named_parameters()}


def whole(results, dims):
    """The tensors of one process: pieces joined along `dims[name]`, and what is not in it equal on every rank."""
    joined = {}
    for name in results[0]:
        pieces = [result[name] for result in results]
        dim = dims.get(name.removesuffix(".grad"))
        if dim is None:
            for piece in pieces:
                assert torch.equal(piece, pieces[0]), name
        joined[name] = pieces[0] if dim is None else torch.cat(pieces, dim)
    return joined


def calls(ledger, op=None):
    """(op, forward or backward, bytes) of every communication, the same on all ranks."""
    lists = [[(c.op, "backward" if c.backward else "forward", c.bytes) for c in own.communications] for own in ledger]
    assert all(one == lists[0] for one in lists)
    return lists[0]


class DenseMLP(nn.Module):
    def __init__(self, w_in, b_in, w_out, b_out):
        super().__init__()
        self.column, self.row = nn.Linear(1, 1), nn.Linear(1, 1)
        self.column.weight, self.column.bias = nn.Parameter(w_in), nn.Parameter(b_in)
        self.row.weight, self.row.bias = nn.Parameter(w_out), nn.Parameter(b_out)

    def forward(self, x):
        return self.row(F.gelu(self.column(x)))


def weights(seed=1):
    return randn(INNER, H, seed=seed), randn(INNER, seed=seed + 1), randn(H, INNER, seed=seed + 2), randn(H, seed=9)


class Layer(nn.Module):
    """A single dense linear layer with the parameter names of ours."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def conjugate_pair(group_size):
    rank = dist.get_rank()
    groups = [dist.new_group(range(i, i + group_size)) for i in range(0, dist.get_world_size(), group_size)]
    group, outcome = groups[rank // group_size], {}
    for name, function in (("copy", copy_to_ranks), ("sum", sum_over_ranks)):
        x = randn(2, 3, seed=rank).requires_grad_()
        incoming = randn(3, 2, seed=10 + rank).t()  # not contiguous
        given = incoming.clone()
        out = function(x, group)
        out.backward(incoming)
        outcome[name] = out.detach(), x.grad
        assert torch.equal(incoming, given) and torch.equal(x.detach(), randn(2, 3, seed=rank))
    return outcome


@pytest.mark.parametrize("world_size, group_size", [(1, 1), (3, 3), (4, 2)])
def test_the_conjugate_pair(world_size, group_size):
    """f is the identity forward and a sum over its group backward, g the reverse; neither changes what it is given."""
    done = run(conjugate_pair, world_size, group_size)
    for rank, outcome in enumerate(done.results):
        first = rank // group_size * group_size
        members = range(first, first + group_size)
        assert torch.equal(outcome["copy"][0], randn(2, 3, seed=rank))
        close(outcome["copy"][1], sum(randn(3, 2, seed=10 + r).t() for r in members))
        close(outcome["sum"][0], sum(randn(2, 3, seed=r) for r in members))
        assert torch.equal(outcome["sum"][1], randn(3, 2, seed=10 + rank).t())
    expected = [("all_reduce", "backward", 48), ("all_reduce", "forward", 48)]
    assert calls(done.ledger) == (expected if group_size > 1 else [])


def column():
    group, n = dist.group.WORLD, dist.get_world_size()
    w, b, _, _ = weights()
    layer, target = ColumnLinear(w, b, group), randn(B, S, INNER, seed=21)
    return train(layer, randn(B, S, H, seed=20), target.chunk(n, -1)[dist.get_rank()])


def row():
    group, n = dist.group.WORLD, dist.get_world_size()
    _, _, w, b = weights()
    layer, x = RowLinear(w, b, group), randn(B, S, INNER, seed=22)
    return train(layer, x.chunk(n, -1)[dist.get_rank()], randn(B, S, H, seed=23))


def mlp():
    layer = MLP(*weights(), dist.group.WORLD)
    return train(layer, randn(B, S, H, seed=24), randn(B, S, H, seed=25))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_linear_layers_and_mlp_train_as_one_process(world_size):
    """Outputs, gradients of the input and of every parameter, and weights after two AdamW steps; each all-reduce."""
    w_in, b_in, w_out, b_out = weights()
    size = 8 * B * S * H

    done = run(column, world_size)
    dense = train(Layer(w_in, b_in), randn(B, S, H, seed=20), randn(B, S, INNER, seed=21))
    close(whole(done.results, {"out": -1, "weight": 0, "bias": 0}), dense)
    assert calls(done.ledger) == [("all_reduce", "backward", size)] * 2 * (world_size > 1)

    done = run(row, world_size)
    dense = train(Layer(w_out, b_out), randn(B, S, INNER, seed=22), randn(B, S, H, seed=23))
    close(whole(done.results, {"x": -1, "weight": 1}), dense)
    assert calls(done.ledger) == [("all_reduce", "forward", size)] * 2 * (world_size > 1)

    done = run(mlp, world_size)
    dense = train(DenseMLP(*weights()), randn(B, S, H, seed=24), randn(B, S, H, seed=25))
    close(whole(done.results, {"column.weight": 0, "column.bias": 0, "row.weight": 1}), dense)
    step = [("all_reduce", "forward", size), ("all_reduce", "backward", size)]
    assert calls(done.ledger) == step * 2 * (world_size > 1)


def test_without_biases():
    """Layers built with None have no bias, and give what one process does."""

    def program():
        w_in, _, w_out, _ = weights()
        layer = MLP(w_in, None, w_out, None, dist.group.WORLD)
        return [name for name, _ in layer.named_parameters()], layer(randn(B, S, H, seed=24)).detach()

    w_in, _, w_out, _ = weights()
    for names, out in run(program, 2).results:
        assert names == ["column.weight", "row.weight"]
        close(out, F.linear(F.gelu(F.linear(randn(B, S, H, seed=24), w_in)), w_out))


def test_sizes_that_cannot_be_split():
    """A size that the ranks do not divide is refused in one line that says what to change."""

    def program():
        MLP(*weights(), dist.group.WORLD)

    with pytest.raises(RankFailed, match="size 12 cannot be split over 5 ranks: choose a multiple of 5"):
        run(program, 5)
