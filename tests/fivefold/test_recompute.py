"""Recomputation against the same block without it, and what a block keeps and computes against the paper's formulas."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import run
from fivefold.cost import activation_bytes
from fivefold.recompute import full, selective
from fivefold.runtime.marks import phase
from fivefold.sequence import Block, RegatheringColumnLinear, dropout, gather_tokens, scatter_tokens
from fivefold.tensor import MLP, Attention, causal_attention
from torch import nn

SIZES = {"b": 2, "s": 24, "h": 48, "a": 6}


def weights(dtype):
    h, generator = SIZES["h"], torch.Generator().manual_seed(1)
    shapes = {"qkv": (3 * h, h), "qkv_bias": (3 * h,), "out": (h, h), "out_bias": (h,)}
    shapes |= {"w_in": (4 * h, h), "b_in": (4 * h,), "w_out": (h, 4 * h), "b_out": (h,)}
    return {name: torch.randn(*shape, generator=generator).to(dtype) / 4 for name, shape in shapes.items()}


def block_of(split, regather, recompute, dtype=torch.bfloat16):
    """A block as the paper counts it: biases, and dropout after the softmax, the projection and the MLP."""
    group, w, h, a = dist.group.WORLD, weights(dtype), SIZES["h"], SIZES["a"]
    ways = {"enter": gather_tokens, "leave": scatter_tokens} if split else {}
    core = partial(causal_attention, drop=partial(dropout, p=0.1, group=group, split=True))
    core = selective(core) if recompute == "selective" else core
    attention = Attention(w["qkv"], w["qkv_bias"], w["out"], w["out_bias"], a, a, group, core, **ways)
    mlp = MLP(w["w_in"], w["b_in"], w["w_out"], w["b_out"], group, **ways)
    if regather:
        attention.qkv = RegatheringColumnLinear(w["qkv"], w["qkv_bias"], group)
        mlp.column = RegatheringColumnLinear(w["w_in"], w["b_in"], group)
    norms = nn.LayerNorm(h, dtype=dtype), nn.LayerNorm(h, dtype=dtype)
    return Block(attention, mlp, *norms, group, p=0.1, split=split)


def one_pass(kinds, dtype=torch.bfloat16):
    """Forward and backward of a block for each (split, regather, recompute), from the same random state."""
    (b, s, h, _), n = SIZES.values(), dist.get_world_size()
    outcomes = []
    for i, (split, regather, recompute) in enumerate(kinds):
        torch.manual_seed(5)
        block = block_of(split, regather, recompute, dtype)
        x = torch.randn(b, s // n if split else s, h, generator=torch.Generator().manual_seed(2)).to(dtype)
        x.requires_grad_()
        with phase(f"forward {i}"):
            y = (full(block) if recompute == "full" else block)(x * 1)
        with phase(f"backward {i}"):
            y.square().sum().backward()
        grads = [p.grad for p in block.parameters()]
        outcomes.append((y.detach(), x.grad, grads, torch.rand(3)))
    return outcomes


def kept(done, i, tokens, recompute):
    """Bytes that a rank keeps at the end of forward i, without what the paper leaves out as small: the causal mask, a
    byte for a pair of tokens, and the mean and deviation of each norm, for each of the rank's tokens."""
    small = {"none": SIZES["s"] ** 2, "selective": 0, "full": 0}[recompute]
    statistics = 0 if recompute == "full" else 2 * 2 * SIZES["b"] * tokens * 2
    (size,) = {own.memory.phases[f"forward {i}"] for own in done.ledger}
    return size - small - statistics


KINDS = [
    (split, regather, recompute)
    for recompute in ("none", "selective", "full")
    for split, regather in ((False, False), (True, False), (True, True))
]


@pytest.mark.parametrize("t", [1, 2, 3])
def test_memory_by_the_formulas(t):
    """To the byte, with tensor parallelism and with tokens split, without recomputation and with each: sbh(10 + 24/t +
    5as/(ht)), sbh(34 + 5as/h)/t, without 5as/h where it is selective, 2sbh where it is full. Where the gathered inputs
    of split layers are not gathered again, they are whole: 4sbh that t does not divide."""
    done = run(one_pass, t, KINDS, measure=True)
    for i, (split, regather, recompute) in enumerate(KINDS):
        (b, s, h, _), tokens = SIZES.values(), SIZES["s"] // t if split else SIZES["s"]
        expected = activation_bytes(**SIZES, t=t, sequence_parallel=split, recompute=recompute)
        if recompute == "full":
            expected *= tokens / s
        elif split and not regather:
            expected += 4 * s * b * h * (1 - 1 / t)
        assert kept(done, i, tokens, recompute) == round(expected), (split, regather, recompute)


def flops(done, name):
    (count,) = {
        sum(getattr(e, "flops", 0) for e in own.entries if getattr(e, "phase", "") == name) for own in done.ledger
    }
    return count


@pytest.mark.parametrize("t", [1, 2])
def test_computation_by_the_formulas(t):
    """Forward takes 24bsh² + 4bs²h, shared by t, and backward twice that. Selective recomputation adds the core's
    4bs²h/t once; full adds one forward."""
    done = run(one_pass, t, [(True, False, "none"), (True, False, "selective"), (True, False, "full")], measure=True)
    b, s, h, _ = SIZES.values()
    core = 4 * b * s * s * h // t
    forward = 24 * b * s * h * h // t + core
    assert [flops(done, f"forward {i}") for i in range(3)] == [forward] * 3
    assert [flops(done, f"backward {i}") - 2 * forward for i in range(3)] == [0, core, forward]


@pytest.mark.parametrize("split", [False, True])
def test_the_same_numbers(split):
    """With dropout: output, every gradient, and the random state that is left, are those of the block that keeps
    everything, to the bit."""
    for none, *recomputed in run(
        one_pass, 3, [(split, False, k) for k in ("none", "selective", "full")], torch.float64
    ).results:
        for one in recomputed:
            assert all(torch.equal(a, b) for a, b in zip(one[:2], none[:2], strict=True))
            assert all(torch.equal(a, b) for a, b in zip(one[2], none[2], strict=True))
            assert torch.equal(one[3], none[3])


def test_full_communicates_again():
    """Full recomputation makes the block's forward communication a second time, selective none."""
    done = run(one_pass, 2, [(True, False, "none"), (True, False, "selective"), (True, False, "full")], measure=True)
    for own in done.ledger:
        counts = [sum(c.phase == f"backward {i}" for c in own.communications) for i in range(3)]
        assert counts == [4, 4, 8]


def test_selective_of_a_core_of_its_own():
    """Any function of three tensors, with torch's own dropout, some of them without gradient: values and gradients are
    autograd's for the same mask, and the random state outside is not disturbed."""

    def core(q, k, v):
        return F.dropout(q @ k.mT, 0.5) @ v.exp()

    def outcome(function):
        torch.manual_seed(0)
        q, k, v = (torch.randn(4, 4, dtype=torch.float64, requires_grad=i != 1) for i in range(3))
        out = function(q, k, v)
        before = torch.rand(2)
        out.square().sum().backward()
        return out.detach(), q.grad, v.grad, k.grad, before, torch.rand(2)

    for got, expected in zip(outcome(selective(core)), outcome(core), strict=True):
        assert got is expected is None or torch.equal(got, expected)
