"""Sequence parallelism against one dense process, in float64; its bytes are counted."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.runtime.marks import phase
from fivefold.sequence import (
    Block,
    RegatheringColumnLinear,
    dropout,
    gather_tokens,
    region_rng,
    scatter_tokens,
    sync_replicated_gradients,
)
from fivefold.tensor import (
    MLP,
    Attention,
    VocabEmbedding,
    VocabLogits,
    split_dimensions,
    vocab_cross_entropy,
)
from torch import nn

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}  # float64: hundreds of roundings, through two steps of AdamW
B, S, H, HEADS, D, INNER, V = 2, 12, 7, 12, 2, 24, 11  # 12 tokens and heads: 1, 2, 3 or 4 ranks


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got, expected):
    torch.testing.assert_close(got, expected, **TOLERANCE)


def calls(ledger, name):
    """(op, forward or backward, bytes that leave the rank) of the communications in a phase, the same on all ranks."""
    lists = [
        [(c.op, "backward" if c.backward else "forward", c.sent) for c in own.communications if c.phase == name]
        for own in ledger
    ]
    assert all(one == lists[0] for one in lists)
    return lists[0]


def pairs(group_size):
    rank = dist.get_rank()
    groups = [dist.new_group(range(i, i + group_size)) for i in range(0, dist.get_world_size(), group_size)]
    group, outcome = groups[rank // group_size], {}
    for name, function, tokens in (("gather", gather_tokens, 6 // group_size), ("scatter", scatter_tokens, 6)):
        x = randn(tokens, 2, 3, seed=rank).transpose(0, 1).requires_grad_()  # (2, tokens, 3), not contiguous
        with phase(name):
            out = function(x, group)
            incoming = randn(3, *out.shape[:2], seed=10 + rank).movedim(0, 2)
            out.backward(incoming)
        outcome[name] = x.detach(), out.detach(), incoming, x.grad
    return outcome


@pytest.mark.parametrize("world_size, group_size", [(1, 1), (3, 3), (4, 2)])
def test_the_conjugate_pair(world_size, group_size):
    """Into split layers: all tokens, and gradients summed for their owner. Out of them: the reverse. Values, gradients
    and bytes, in groups smaller than the world too."""
    done = run(pairs, world_size, group_size)
    for first in range(0, world_size, group_size):
        members = done.results[first : first + group_size]
        x, out, incoming, grad = ([member["gather"][i] for member in members] for i in range(4))
        for r in range(group_size):
            assert torch.equal(out[r], torch.cat(x, 1))
            close(grad[r], sum(incoming).chunk(group_size, 1)[r])
        x, out, incoming, grad = ([member["scatter"][i] for member in members] for i in range(4))
        for r in range(group_size):
            close(out[r], sum(x).chunk(group_size, 1)[r])
            assert torch.equal(grad[r], torch.cat(incoming, 1))
    sent = 8 * 2 * 6 * 3 * (group_size - 1) / group_size
    gather, scatter = [("all_gather", sent), ("reduce_scatter", sent)], [("reduce_scatter", sent), ("all_gather", sent)]
    for name, expected in (("gather", gather), ("scatter", scatter)):
        expected = [(op, way, size) for (op, size), way in zip(expected, ("forward", "backward"), strict=True)]
        assert calls(done.ledger, name) == (expected if group_size > 1 else [])


def weights():
    return {
        "norm_a": 1 + randn(2, H, seed=1),
        "norm_m": 1 + randn(2, H, seed=2),
        "qkv": randn(3 * HEADS * D, H, seed=3),
        "qkv_bias": randn(3 * HEADS * D, seed=4),
        "out": randn(H, HEADS * D, seed=5),
        "out_bias": randn(H, seed=6),
        "w_in": randn(INNER, H, seed=7),
        "b_in": randn(INNER, seed=8),
        "w_out": randn(H, INNER, seed=9),
        "b_out": randn(H, seed=10),
    }


def norm(both):
    layer = nn.LayerNorm(both.shape[1], dtype=both.dtype)
    layer.weight, layer.bias = nn.Parameter(both[0].clone()), nn.Parameter(both[1].clone())
    return layer


def block_of(w, heads, group, split, p=0.0, core=None):
    ways = {"enter": gather_tokens, "leave": scatter_tokens} if split else {}
    attention = Attention(w["qkv"], w["qkv_bias"], w["out"], w["out_bias"], heads, heads, group, core, **ways)
    mlp = MLP(w["w_in"], w["b_in"], w["w_out"], w["b_out"], group, **ways)
    return Block(attention, mlp, norm(w["norm_a"]), norm(w["norm_m"]), group, p, split)


def dense_block(x, w):
    """A block of torch's own functions; the fused weight is laid out by head."""
    qkv = F.linear(F.layer_norm(x, (H,), *w["norm_a"]), w["qkv"], w["qkv_bias"]).view(B, S, HEADS, 3, D)
    out = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4), is_causal=True)
    x = x + F.linear(out.transpose(1, 2).flatten(2), w["out"], w["out_bias"])
    inner = F.gelu(F.linear(F.layer_norm(x, (H,), *w["norm_m"]), w["w_in"], w["b_in"]))
    return x + F.linear(inner, w["w_out"], w["b_out"])


NAMES = {
    "norm_a": ("block.attention_norm.weight", "block.attention_norm.bias"),
    "norm_m": ("block.mlp_norm.weight", "block.mlp_norm.bias"),
    "qkv": "block.attention.qkv.weight",
    "qkv_bias": "block.attention.qkv.bias",
    "out": "block.attention.out.weight",
    "out_bias": "block.attention.out.bias",
    "w_in": "block.mlp.column.weight",
    "b_in": "block.mlp.column.bias",
    "w_out": "block.mlp.row.weight",
    "b_out": "block.mlp.row.bias",
    "embedding": "embedding.weight",
    "logits": "logits.weight",
}
TOKENS = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1)


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, eps=0.01)  # a key's bias has gradient 0, but for noise


def train(split, regather):
    """A whole small model, two steps: losses, gradients of the first step, and weights."""
    group, w, model = dist.group.WORLD, weights(), nn.Module()
    ways = {"enter": gather_tokens, "leave": scatter_tokens} if split else {"enter": None, "leave": None}
    model.embedding = VocabEmbedding(randn(V, H, seed=11), group, ways["leave"])
    model.block = block_of(w, HEADS, group, split)
    model.logits = VocabLogits(randn(V, H, seed=12), group, ways["enter"])
    if regather:
        model.block.attention.qkv = RegatheringColumnLinear(w["qkv"], w["qkv_bias"], group)
        model.block.mlp.column = RegatheringColumnLinear(w["w_in"], w["b_in"], group)
    cut = split_dimensions(model)
    replicated = [p for name, p in model.named_parameters() if name not in cut]
    optimizer, outcome = optimizer_of(model.parameters()), {"losses": []}
    for step in range(2):
        optimizer.zero_grad()
        x = model.embedding(TOKENS)
        with phase(f"block {step}"):
            y = model.block(x)
        loss = vocab_cross_entropy(model.logits(y), TARGETS, group)
        loss.mean().backward()
        if split:
            with phase(f"sync {step}"):
                sync_replicated_gradients(replicated, group)
        outcome["losses"].append(loss.detach())
        if step == 0:
            outcome |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return outcome | {name: p.detach() for name, p in model.named_parameters()}, cut


def dense_train():
    w = weights() | {"embedding": randn(V, H, seed=11), "logits": randn(V, H, seed=12)}
    w = {name: nn.Parameter(value) for name, value in w.items()}
    optimizer, outcome = optimizer_of(w.values()), {"losses": []}
    for step in range(2):
        optimizer.zero_grad()
        logits = F.linear(dense_block(F.embedding(TOKENS, w["embedding"]), w), w["logits"])
        loss = F.cross_entropy(logits.mT, TARGETS, reduction="none")
        loss.mean().backward()
        outcome["losses"].append(loss.detach())
        if step == 0:
            outcome |= {f"{name}.grad": p.grad.clone() for name, p in w.items()}
        optimizer.step()
    return outcome | {name: p.detach() for name, p in w.items()}


def whole(results):
    """Pieces joined along their dimension, what is whole equal on every rank, under the names of the dense model."""
    cut, joined = results[0][1], {"losses": results[0][0]["losses"]}
    for suffix in ("", ".grad"):
        for name, places in NAMES.items():
            values = []
            for place in (places,) if isinstance(places, str) else places:
                pieces = [result[0][place + suffix] for result in results]
                assert place in cut or all(torch.equal(piece, pieces[0]) for piece in pieces)
                values.append(torch.cat(pieces, cut[place]) if place in cut else pieces[0])
            joined[name + suffix] = values[0] if len(values) == 1 else torch.stack(values)
        for name in ("embedding", "logits"):
            joined[name + suffix] = joined[name + suffix][:V]
    return joined


@pytest.mark.parametrize(
    "world_size, split, regather", [(1, True, False), (2, False, False), (3, True, False), (4, True, True)]
)
def test_a_model_trains_as_one_process(world_size, split, regather):
    """Losses, gradients of every parameter and weights after two steps of embedding, block, logits and loss:
    with tokens split, with tensor parallelism alone, and with the gathered tokens gathered again."""
    done = run(train, world_size, split, regather)
    close(whole(done.results), dense_train())
    for result in done.results:
        close(result[0]["losses"], done.results[0][0]["losses"])


def block_alone(split):
    group, n = dist.group.WORLD, dist.get_world_size()
    x = randn(B, S, H, seed=20)
    x = (x.chunk(n, 1)[dist.get_rank()] if split else x).clone().requires_grad_()
    block = block_of(weights(), HEADS, group, split)
    with phase("block"):
        block(x).square().sum().backward()
    with phase("sync"):
        sync_replicated_gradients(
            [p for name, p in block.named_parameters() if name not in split_dimensions(block)], group
        )
    return x.grad


def test_the_same_bytes_as_tensor_parallelism():
    """Each all-reduce becomes a reduce-scatter and an all-gather that send its bytes; the gradient of x is the dense
    one; the gradients of what is replicated take one all-reduce of their own size."""
    x = randn(B, S, H, seed=20).requires_grad_()
    dense_block(x, weights()).square().sum().backward()
    with_tokens, without = run(block_alone, 3, True), run(block_alone, 3, False)
    close(torch.cat(with_tokens.results, 1), x.grad)
    close(without.results[0], x.grad)
    half = 8 * B * S * H * 2 / 3
    for way in ("forward", "backward"):
        expected = sorted([("all_gather", way, half), ("reduce_scatter", way, half)] * 2)
        assert sorted(c for c in calls(with_tokens.ledger, "block") if c[1] == way) == expected
        assert [c for c in calls(without.ledger, "block") if c[1] == way] == [("all_reduce", way, 2 * half)] * 2
    assert calls(with_tokens.ledger, "sync") == [("all_reduce", "forward", 8 * 6 * H * 2 * 2 / 3)]


def masks():
    rank = dist.get_rank()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.manual_seed(100 + rank // 2)  # equal within a group of two
    outcome = {"split": [], "equal": [], "outside": []}
    for _ in range(2):
        for name in ("split", "equal"):
            with region_rng(half, split=name == "split"):
                outcome[name].append(torch.rand(50))
            outcome["outside"].append(torch.rand(50))
    state = torch.get_rng_state()
    again = []
    for _ in range(2):
        torch.set_rng_state(state)
        with region_rng(half, split=True):
            again.append(torch.rand(50))
    with pytest.raises(ZeroDivisionError), region_rng(half, split=True):
        raise ZeroDivisionError
    after = torch.rand(50)
    return outcome | {"again": again, "after": after}


def test_random_numbers_by_region():
    """Where the ranks of a group hold pieces their numbers differ, where they hold the same they are equal; regions and
    passes differ; outside nothing is disturbed, not by an error either; a restored state gives the same numbers."""
    results = run(masks, 4).results
    a, b, c, _ = results
    drawn = [tuple(t.tolist()) for r in results for name in ("split", "equal", "outside") for t in r[name]]
    assert len(set(drawn)) == 4 * 2 + 2 * 2 + 2 * 4  # every rank's own; each group's equal ones; each group's outside
    for name in ("equal", "outside"):
        assert all(torch.equal(x, y) for x, y in zip(a[name], b[name], strict=True))
        assert not any(torch.equal(x, y) for x, y in zip(a[name], c[name], strict=True))
    assert torch.equal(a["again"][0], a["again"][1]) and not torch.equal(a["again"][0], b["again"][0])
    assert torch.equal(a["after"], b["after"])
    generator = torch.Generator().manual_seed(100)
    torch.randint(2**62, (), generator=generator)  # one integer a region is all that a region takes from outside
    assert torch.equal(torch.rand(50, generator=generator), a["outside"][0])


def test_dropout():
    """Elements are zero or scaled, at the rate asked for; masks by region; the gradient has the same mask; in
    evaluation a block drops nothing."""

    def program():
        torch.manual_seed(3)
        group, x = dist.group.WORLD, torch.ones(40, 50, requires_grad=True)
        own, same = dropout(x, 0.25, group, split=True), dropout(x, 0.25, group, split=False)
        own.sum().backward()
        block, y = block_of(weights(), HEADS, group, False, p=0.5), randn(B, S, H, seed=20)
        return own.detach(), same.detach(), x.grad, block.eval()(y).detach(), block.train()(y).detach()

    a, b = run(program, 2).results
    for own, same, grad, evaluated, trained in (a, b):
        assert set(own.flatten().tolist()) == {0.0, torch.tensor(4 / 3).item()}
        assert 0.2 < (own == 0).float().mean() < 0.3 and torch.equal(grad, own)
        assert torch.equal(same, a[1]) and not torch.equal(same, own) and torch.equal(trained, a[4])
        close(evaluated, dense_block(randn(B, S, H, seed=20), weights()))
    assert 0.5 < (a[0] == b[0]).float().mean() < 0.75  # independent: 0.625


def test_tokens_that_cannot_be_split():
    """A sequence that the ranks do not divide is refused in one line that says what to change."""

    def program():
        with pytest.raises(ValueError, match="7 tokens cannot be split over 3 ranks: choose a multiple of 3"):
            scatter_tokens(torch.ones(2, 7, 3), dist.group.WORLD)

    run(program, 3)
