"""Tensor parallelism against one dense process, in float64; its traffic counted."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.runtime.marks import phase
from fivefold.tensor import (
    MLP,
    Attention,
    ColumnLinear,
    GatedMLP,
    OverlappedColumnLinear,
    RowLinear,
    copy_to_ranks,
    split_dimensions,
    sum_over_ranks,
)
from torch import nn

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}  # float64: hundreds of roundings, through two steps of AdamW
B, S, H, INNER, D = 2, 5, 7, 12, 4  # 12 inner features: 1, 2, 3 or 4 ranks
KEY_HEADS = {1: 3, 2: 2, 3: 3, 4: 4}
SIZE = 8 * B * S * H  # bytes of an activation
WORLDS = [1, 2, 3, 4]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, expected):
    torch.testing.assert_close(got, expected, **TOLERANCE)


class Dense(nn.Module):
    """One process: `function(x, **parameters)`, with a parameter for each weight given."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x):
        return self.function(x, **dict(self.named_parameters()))


def train(module, x, target, steps=2):
    """Output and gradients of the first step, and the parameters after two steps of AdamW, by name."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=0.01)  # a key's bias has gradient 0, but for noise
    first = None
    for _ in range(steps):
        x = x.detach().requires_grad_(x.is_floating_point())
        optimizer.zero_grad()
        out = module(x)
        (out - target).square().sum().backward()
        if first is None:
            first = {"out": out.detach().clone()} | ({"x.grad": x.grad.clone()} if x.requires_grad else {})
            first |= {f"{name}.grad": p.grad.clone() for name, p in module.named_parameters()}
        optimizer.step()
    return first | {name: p.detach().clone() for name, p in module.named_parameters()}


def whole(results, name, cut, rename):
    """What one process has: pieces joined along their dimension, and what is whole equal on every rank."""
    joined = {}
    for key in results[0][name]:
        pieces = [result[name][key] for result in results]
        parameter = key.removesuffix(".grad")
        dim = cut.get(key, cut.get(parameter))
        assert dim is not None or all(torch.equal(piece, pieces[0]) for piece in pieces), key
        joined[key.replace(parameter, rename.get(parameter, parameter))] = (
            pieces[0] if dim is None else torch.cat(pieces, dim)
        )
    return joined


def calls(ledger, name=None):
    """(op, forward or backward, bytes) of the communications in a phase, the same on all ranks."""
    lists = [
        [
            (c.op, "backward" if c.backward else "forward", c.bytes)
            for c in own.communications
            if name in (None, c.phase)
        ]
        for own in ledger
    ]
    assert all(one == lists[0] for one in lists)
    return lists[0]


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


X, Y = randn(B, S, H, seed=20), randn(B, S, H, seed=21)
X_INNER, Y_INNER = randn(B, S, INNER, seed=22), randn(B, S, INNER, seed=23)


def weights():
    return randn(INNER, H, seed=1), randn(INNER, seed=2), randn(H, INNER, seed=3), randn(H, seed=4)


def attention_weights(kv_heads):
    heads = 3 * kv_heads
    rows = (heads + 2 * kv_heads) * D
    return (
        (randn(rows, H, seed=5), randn(rows, seed=6), randn(H, heads * D, seed=7), randn(H, seed=8)),
        heads,
        kv_heads,
    )


def rotate(q, k):
    """Each pair of elements turned by its token's position, as complex numbers."""
    angles = torch.arange(q.shape[2], dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)  # (s, d/2)
    return tuple(
        torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
        for x in (q, k)
    )


class Rotated(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, rotate)


def layers():
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    w_in, b_in, w_out, b_out = weights()
    heads = attention_weights(KEY_HEADS[n])
    own_x, own_y = X_INNER.chunk(n, -1)[rank], Y_INNER.chunk(n, -1)[rank]
    parts = {
        "column": (ColumnLinear(w_in, b_in, group), X, own_y),
        "overlapped": (OverlappedColumnLinear(w_in, b_in, group), X, own_y),
        "row": (RowLinear(w_out, b_out, group), own_x, Y),
        "mlp": (MLP(w_in, b_in, w_out, b_out, group), X, Y),
        "gated": (GatedMLP(torch.cat([w_in, 2 * w_in.flip(0)]), w_out, group), X, Y),
        "attention": (Attention(*heads[0], *heads[1:], group), X, Y),
        "rotated": (Rotated(Attention(*heads[0], *heads[1:], group)), X, Y),
    }
    outcome = {}
    for name, (module, x, target) in parts.items():
        with phase(name):
            outcome[name] = train(module, x, target)
    return outcome


def dense_attention(x, w, b, w_out, b_out, kv_heads, turn=None):
    """Separate queries, keys and values, cut out of the fused weight by key head, and torch's own attention."""
    w, b = w.unflatten(0, (kv_heads, 5, D)), b.unflatten(0, (kv_heads, 5, D))
    pieces = [(w[:, i].flatten(0, -2), b[:, i].flatten(), count) for i, count in _queries_keys_values(kv_heads)]
    q, k, v = (F.linear(x, wi, bi).view(B, S, count, D).transpose(1, 2) for wi, bi, count in pieces)
    q, k = turn(q, k) if turn else (q, k)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), w_out, b_out)


def _queries_keys_values(kv_heads):
    return [(slice(0, 3), 3 * kv_heads), (slice(3, 4), kv_heads), (slice(4, 5), kv_heads)]


def dense_layers(kv_heads):
    w_in, b_in, w_out, b_out = weights()
    w, b, wo, bo = attention_weights(kv_heads)[0]
    fused = {"w": w, "b": b, "w_out": wo, "b_out": bo}

    def mlp(x, w_in, b_in, w_out, b_out):
        return F.linear(F.gelu(F.linear(x, w_in, b_in)), w_out, b_out)

    def gated(x, gate, up, w_out):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), w_out)

    return {
        "column": (Dense(F.linear, weight=w_in, bias=b_in), X, Y_INNER),
        "overlapped": (Dense(F.linear, weight=w_in, bias=b_in), X, Y_INNER),
        "row": (Dense(F.linear, weight=w_out, bias=b_out), X_INNER, Y),
        "mlp": (Dense(mlp, w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out), X, Y),
        "gated": (Dense(gated, gate=w_in, up=2 * w_in.flip(0), w_out=w_out), X, Y),
        "attention": (Dense(lambda x, **p: dense_attention(x, **p, kv_heads=kv_heads), **fused), X, Y),
        "rotated": (Dense(lambda x, **p: dense_attention(x, **p, kv_heads=kv_heads, turn=rotate), **fused), X, Y),
    }


HEADS = {"qkv.weight": "w", "qkv.bias": "b", "out.weight": "w_out", "out.bias": "b_out"}
NAMES = {
    "mlp": {"column.weight": "w_in", "column.bias": "b_in", "row.weight": "w_out", "row.bias": "b_out"},
    "gated": {"row.weight": "w_out"},
    "attention": HEADS,
    "rotated": {f"attention.{name}": value for name, value in HEADS.items()},
}
CUT = {
    "column": {"weight": 0, "bias": 0, "out": -1},
    "overlapped": {"weight": 0, "bias": 0, "out": -1},
    "row": {"weight": 1, "x.grad": -1},
    "mlp": {"column.weight": 0, "column.bias": 0, "row.weight": 1},
    "gated": {"w_in": 1, "row.weight": 1},
    "attention": {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1},
    "rotated": {"attention.qkv.weight": 0, "attention.qkv.bias": 0, "attention.out.weight": 1},
}


@pytest.mark.parametrize("world_size", WORLDS)
def test_layers_train_as_one_process(world_size):
    """Outputs, gradients of the input and of every parameter, and weights after two AdamW steps, of every layer; one
    all-reduce forward and one backward for each pair of split layers, of b·s·h elements."""
    done = run(layers, world_size)
    for name, (module, x, target) in dense_layers(KEY_HEADS[world_size]).items():
        got = whole(done.results, name, CUT[name], NAMES.get(name, {}))
        if name == "gated":
            got |= {"gate": got["w_in"][0], "up": got.pop("w_in")[1]}
            got |= {"gate.grad": got["w_in.grad"][0], "up.grad": got.pop("w_in.grad")[1]}
        close(got, train(module, x, target))
        forward, backward = [("all_reduce", "forward", SIZE)], [("all_reduce", "backward", SIZE)]
        both = {"column": backward, "overlapped": backward, "row": forward}.get(name, forward + backward)
        assert calls(done.ledger, name) == both * 2 * (world_size > 1), name


def test_what_is_cut():
    """`split_dimensions` names the parameters whose pieces, joined along that dimension, are the whole; no others. A
    module of one's own may have something else that is called split."""

    def program():
        group, (heads, *counts) = dist.group.WORLD, attention_weights(2)
        w_in, _, w_out, b_out = weights()
        module = nn.ModuleDict({"a": Attention(*heads, *counts, group), "b": MLP(w_in, None, w_out, b_out, group)})
        module["c"] = GatedMLP(torch.cat([w_in, w_in]), w_out, group)
        module["d"] = nn.LayerNorm(H, dtype=torch.float64)
        module["d"].split = True
        full = {"a.qkv.weight": heads[0], "a.qkv.bias": heads[1], "a.out.weight": heads[2]}
        full |= {
            "b.column.weight": w_in,
            "b.row.weight": w_out,
            "c.row.weight": w_out,
            "c.w_in": w_in.expand(2, -1, -1),
        }
        mine = {name: module.get_parameter(name).detach() for name in full}
        return split_dimensions(module), mine, full

    results = run(program, 2).results
    cut, _, full = results[0]
    assert set(cut) == set(full)
    for name, dim in cut.items():
        assert torch.equal(torch.cat([mine[name] for _, mine, _ in results], dim), full[name])


def test_without_biases():
    """Layers built with None have no bias, and give what one process does."""

    def program():
        group, (w_in, _, w_out, _), ((w, _, wo, _), *heads) = dist.group.WORLD, weights(), attention_weights(2)
        mlp, attention = MLP(w_in, None, w_out, None, group), Attention(w, None, wo, None, *heads, group)
        names = [name for module in (mlp, attention) for name, _ in module.named_parameters()]
        return names, mlp(X).detach(), attention(X).detach()

    w_in, _, w_out, _ = weights()
    (w, b, wo, bo), _, kv_heads = attention_weights(2)
    for names, mlp, attention in run(program, 2).results:
        assert names == ["column.weight", "row.weight", "qkv.weight", "out.weight"]
        close(mlp, F.linear(F.gelu(F.linear(X, w_in)), w_out))
        close(attention, dense_attention(X, w, 0 * b, wo, 0 * bo, kv_heads))


def test_sizes_that_cannot_be_split():
    """A size that the ranks do not divide is refused in one line that says what to change."""

    def program():
        heads, *counts = attention_weights(3)
        for build in (lambda: MLP(*weights(), dist.group.WORLD), lambda: Attention(*heads, *counts, dist.group.WORLD)):
            with pytest.raises(ValueError, match="choose a multiple of 5"):
                build()
        with pytest.raises(ValueError, match="9 query heads cannot share 2 key heads: choose a divisor"):
            Attention(*heads, 9, 2, dist.group.WORLD)

    run(program, 5)


def test_overlapped_backward_starts_its_all_reduce_first():
    """The weight's gradient is computed while the all-reduce of the input's is on its way, then it is waited for."""

    def program():
        w_in, b_in, _, _ = weights()
        x = X.clone().requires_grad_()
        with phase("overlapped"):
            OverlappedColumnLinear(w_in, b_in, dist.group.WORLD)(x).sum().backward()
        with phase("no gradient"):
            OverlappedColumnLinear(w_in, b_in, dist.group.WORLD)(X).sum().backward()

    done = run(program, 2, measure=True)
    product = 2 * B * S * H * INNER // 2
    for own in done.ledger:
        _, *entries = own.entries  # the first is the work before the layer; then come its forward and its backward
        kinds = [type(entry).__name__ for entry in entries[:5]]
        assert kinds == ["Computation", "Computation", "Communication", "Computation", "Wait"]
        assert [entries[i].flops for i in (0, 1, 3)] == [product] * 3 and entries[4].of == entries[2].index
    assert calls(done.ledger, "no gradient") == []


def test_a_part_reaches_every_layer():
    """What stands in for an exchange on a run is used by the layers that the library builds on it."""

    def program():
        from fivefold.tensor import MLP

        return MLP(*weights(), dist.group.WORLD)(X).detach()

    found = run(program, 1, parts={"tensor.copy_to_ranks": lambda x, group: 2 * x}).results[0]
    w_in, b_in, w_out, b_out = weights()
    close(found, F.linear(F.gelu(F.linear(2 * X, w_in, b_in)), w_out, b_out))
