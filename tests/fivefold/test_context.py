from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import context, cost, run
from fivefold.layout import Layout
from fivefold.mesh import make_mesh
from fivefold.runtime.ledger import Computation, Wait
from fivefold.runtime.marks import phase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RINGS = ("ring_attention", "fast_ring_attention")
ALL = (*RINGS, "all_gather_attention", "all_to_all_attention")
EXACT = 1e-12  # of the largest value: a few roundings of sums that are tens of terms long, in fp64
LARGE_LOGITS = 1e4  # one rounding of a logit of 1e4 changes its probability by 1e4 roundings


def problem(b, heads, kv_heads, tokens, d, seed=0):
    """q, k, v and the gradient of the output, of a whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, n, tokens, d) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def orders(tokens, n, name=""):
    """No mask, and three orders of the tokens; the fast ring wants them ascending on each rank."""
    shuffled = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).view(n, -1)
    return {
        "full": None,
        "zigzag": context.token_positions(tokens, n),
        "contiguous": torch.arange(tokens).view(n, -1),
        "shuffled": shuffled.sort(dim=1).values if name == "fast_ring_attention" else shuffled,
    }


def mine(tensors, positions, n, rank):
    """A rank's tokens of whole sequences, as leaves."""
    held = torch.arange(tensors[0].shape[2]).view(n, -1) if positions is None else positions
    return [x[:, :, held[rank]].clone().requires_grad_() for x in tensors]


def attend(name, whole, positions, group, wrap=lambda core: core):
    """On a rank: the output for its tokens, and the gradients of its q, k and v."""
    *qkv, dout = mine(whole, positions, group.size(), group.rank())
    core = wrap(lambda q, k, v: getattr(context, name)(q, k, v, group, positions))
    out = core(*qkv)
    assert out.dtype == qkv[0].dtype
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def attend_in_every_order(problems):
    group = dist.group.WORLD
    return [
        attend(name, whole, positions, group)
        for name, whole in problems
        for positions in orders(whole[0].shape[2], group.size(), name).values()
    ]


def dense(whole, causal):
    """torch's attention in one process: the output, and by autograd the gradients of q, k and v."""
    *qkv, dout = [x.double().clone().requires_grad_() for x in whole]
    out = F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def assert_dense(problems, n, tolerance=EXACT):
    """What n ranks return together is one process's attention, within `tolerance` of the largest value."""
    parts = zip(*run(attend_in_every_order, n, problems).results, strict=True)
    for name, whole in problems:
        for order, positions in orders(whole[0].shape[2], n, name).items():
            at = torch.arange(whole[0].shape[2]) if positions is None else positions.flatten()
            outcomes = zip(zip(*next(parts), strict=True), dense(whole, causal=positions is not None), strict=True)
            for i, (got, expected) in enumerate(outcomes):
                got, scale = torch.cat(got, dim=2).double(), expected.abs().max().clamp(min=1.0)
                difference = (got - expected[:, :, at]).abs().max()
                assert difference <= tolerance * scale, f"{name} {order} output {i}: {difference:.1e} of {scale:.1e}"


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_all_equal_one_process(n):
    """Outputs and gradients of q, k and v, full and causal, tokens in any order, grouped heads, odd sizes: torch's."""
    problems = [(name, problem(2, 6, 3, 2 * n * 3, 5, seed=n)) for name in ALL[:3]]
    assert_dense([*problems, (ALL[3], problem(1, 2 * n, n, 2 * n * 3, 7, seed=n))], n)


def rising(whole):
    """Logits that rise from -1e4 with the first key to 1e4 with the last."""
    q, k, v, dout = (x.clone() for x in whole)
    q[..., -1], k[..., -1] = 100 * q.shape[-1] ** 0.5, torch.linspace(-100, 100, k.shape[2])
    return [q, k, v, dout]


def lifted(whole):
    """Logits that lie near one another, all of them near 1e4: exp of any one overflows."""
    q, k, v, dout = (x.clone() for x in whole)
    q[..., -1], k[..., -1] = 100 * q.shape[-1] ** 0.5, 100.0
    return [q, k, v, dout]


def wide(whole):
    """Random logits of ±1e4."""
    q, k, v, dout = whole
    return [q * 1e4, k, v, dout]


def test_growing_logits():
    """Logits of ±1e4, rising with the keys, all alike or random, stay finite and exact, forward and backward."""
    whole = problem(1, 8, 4, 4 * 4, 6)
    problems = [(name, grow(whole)) for grow in (rising, lifted, wide) for name in ALL]
    assert_dense(problems, 4, EXACT * LARGE_LOGITS)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_narrower_numbers(dtype, tolerance):
    """In fp32 and bf16 every variant gives the dtype that came in, and stays near torch's answer in fp64."""
    whole = [x.to(dtype) for x in problem(2, 6, 3, 4 * 3 * 5, 8)]
    assert_dense([(name, whole) for name in ALL], 3, tolerance)


def torch_ring(whole, positions, causal, balance):
    """PyTorch's own ring, on the kernel for CPU, with both ways to send blocks on."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    op = theirs.aten._scaled_dot_product_flash_attention_for_cpu
    group, found = dist.group.WORLD, []
    for method in theirs._RotateMethod:
        options = theirs._cp_options
        options.convert_to_f32, options.enable_load_balance, options.rotate_method = False, balance, method
        *qkv, dout = (x.detach() for x in mine(whole, positions, group.size(), group.rank()))
        out, lse = theirs._templated_ring_attention(group, 2, op, *qkv, is_causal=causal)
        backward = theirs.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        arguments = (group, 2, backward, dout, "grad_out", *qkv, out, lse)
        found.append([out, *theirs._templated_ring_attention_backward(*arguments, is_causal=causal, dropout_p=0.0)])
    return found


def both_rings(whole):
    tables = orders(whole[0].shape[2], dist.get_world_size())
    cases = {"full": (False, False), "contiguous": (True, False), "zigzag": (True, True)}
    theirs = {order: torch_ring(whole, tables[order], *how) for order, how in cases.items()}
    ours = {order: [attend(name, whole, tables[order], dist.group.WORLD) for name in RINGS] for order in cases}
    return theirs, ours


def test_rings_equal_torchs_ring():
    """The explicit and the fast ring give what PyTorch's own ring gives: full, causal, and with its load balance."""
    for theirs, ours in run(both_rings, 4, problem(2, 4, 4, 48, 8)).results:
        for order, expected in theirs.items():
            for got, want in ((g, w) for g in ours[order] for w in expected):
                torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def one_of_each(whole):
    """Every variant once, its messages found again by the name of its group."""
    for name in ALL:
        group = dist.new_group(group_desc=name)
        attend(name, whole, context.token_positions(whole[0].shape[2], group.size()), group)


def test_traffic():
    """A ring sends n - 1 blocks of K and V to its next rank, and in backward n - 1 again and as many gradients, and has
    no collective; the variants have an all-gather and a reduce-scatter, four all-to-alls and four. Bytes as in cost."""
    n, b, kv_heads, tokens, d = 4, 2, 4, 24, 6
    ledger = run(one_of_each, n, problem(b, 2 * kv_heads, kv_heads, tokens, d)).ledger
    block = 8 * cost.ring_attention_traffic(b * tokens, kv_heads * d, n) / (n - 1)
    for rank in range(n):
        calls = {name: [call for call in ledger[rank].communications if call.group == name] for name in ALL}
        for name in RINGS:
            sends = [call for call in calls[name] if call.op == "send"]
            assert {call.op for call in calls[name]} == {"send", "recv"}
            assert {(call.peer, call.bytes) for call in sends} == {((rank + 1) % n, block)}
            assert [call.backward for call in sends] == [False] * (n - 1) + [True] * 2 * (n - 1)
        gather, scatter = calls["all_gather_attention"]
        assert (gather.op, gather.backward, gather.sent) == ("all_gather", False, (n - 1) * block)
        assert (scatter.op, scatter.backward, scatter.sent) == ("reduce_scatter", True, (n - 1) * block)
        trades = calls["all_to_all_attention"]
        assert [(call.op, call.backward) for call in trades] == [("all_to_all", i > 3) for i in range(8)]
        paper = 8 * cost.ulysses_traffic(b * tokens, 2 * kv_heads * d, n)  # it has as many key heads as query heads
        assert sum(call.sent for call in trades[:4]) == paper * (n - 1) / n * 3 / 4
    assert not run(one_of_each, 1, problem(1, 2, 1, 6, 4)).ledger[0].entries


class Largest(TorchDispatchMode):
    """Sees the size of the largest result of an operator."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


MEASURED = {"n": 4, "heads": 4, "kv_heads": 2, "tokens": 64, "d": 4}


def each_ring_in_each_order(whole):
    found = {}
    for name in RINGS:
        for order, positions in orders(MEASURED["tokens"], MEASURED["n"], name).items():
            with phase(f"{name} {order}"), Largest() as largest:
                attend(name, whole, positions, dist.group.WORLD)
            found[f"{name} {order}"] = largest.numel
    return found


@pytest.fixture(scope="module")
def measured():
    n, *sizes = MEASURED.values()
    return run(each_ring_in_each_order, n, problem(1, *sizes), measure=True)


@pytest.mark.parametrize("name", RINGS)
def test_transfers_hide_behind_computation(name, measured):
    """Between the start of each transfer and the wait for it a block is computed; only the last gradient's way home
    has nothing left to hide behind."""
    for rank in measured.ledger.ranks:
        waits = {entry.of: entry.index for entry in rank.entries if isinstance(entry, Wait)}
        works = [entry.index for entry in rank.entries if isinstance(entry, Computation) and entry.flops]
        calls = [call for call in rank.communications if call.op == "recv" and call.phase == f"{name} zigzag"]
        hidden = [any(call.index < work < waits[call.index] for work in works) for call in calls]
        assert hidden == [True] * (3 * (MEASURED["n"] - 1) - 1) + [False]


def test_memory(measured):
    """Saved for backward: q, k, v, out and lse of a rank's own tokens, and the small table. No tensor is ever larger
    than one block's scores, or than K and V of one block."""
    n, heads, kv_heads, tokens, d = MEASURED.values()
    saved = tokens // n * (2 * heads * d + 2 * kv_heads * d + heads)
    for rank in measured.ledger.ranks:
        for name, peak in rank.memory.phases.items():
            assert peak == 8 * (saved + (0 if name.endswith("full") else tokens))
    largest = max(heads * (tokens // n) ** 2, 2 * kv_heads * d * tokens // n)
    assert len(measured.results[0]) == 8 and max(max(result.values()) for result in measured.results) <= largest


def test_the_fast_ring_skips_what_the_mask_hides(measured):
    """FLOPs counted in forward: contiguous rank r computes r + 1 of n blocks; under zig-zag every rank computes its own
    and half of each other; the explicit ring computes all."""
    n, heads, _, tokens, d = MEASURED.values()
    for name, blocks in {
        "fast_ring_attention contiguous": [1, 2, 3, 4],
        "fast_ring_attention zigzag": [1 + 3 / 2] * 4,
        "fast_ring_attention full": [4] * 4,
        "ring_attention zigzag": [4] * 4,
    }.items():
        for rank, expected in zip(measured.ledger.ranks, blocks, strict=True):
            works = [entry for entry in rank.entries if isinstance(entry, Computation) and entry.phase == name]
            flops = sum(work.flops for work in works if not work.backward)
            assert flops == expected * 4 * heads * d * (tokens // n) ** 2


def composed(whole, name):
    """Heads over tp, tokens over cp, two attentions in a row: as it is, and with both recomputed in backward."""
    mesh = make_mesh(Layout(dp=1, cp=2, tp=2))
    heads = [x.chunk(2, dim=1)[mesh.tp.rank()] for x in whole]
    positions = context.token_positions(whole[0].shape[2], 2)

    def plain(core):
        return lambda q, k, v: core(core(q, k, v), k, v)

    def recomputed(core):
        return plain(lambda *qkv: checkpoint(core, *qkv, use_reentrant=False))

    return [attend(name, heads, positions, mesh.cp, wrap) for wrap in (plain, recomputed)]


@pytest.mark.parametrize("name", ALL)
def test_composes_with_tensor_parallelism_and_recomputation(name):
    """In a cp group beside tp, attention over attention: gradients are those of one process, and the same to the bit
    where checkpoint repeats the forward, with its messages, during backward."""
    whole = problem(2, 8, 4, 12, 4)
    *qkv, dout = [x.clone().requires_grad_() for x in whole]
    out = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    out = F.scaled_dot_product_attention(out, *qkv[1:], is_causal=True, enable_gqa=True)
    expected = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
    found, positions = run(composed, 4, whole, name), context.token_positions(12, 2)
    for rank, (plain, recomputed) in enumerate(found.results):
        for got, again, want in zip(plain, recomputed, expected, strict=True):
            assert torch.equal(got, again)
            want = want.chunk(2, dim=1)[rank % 2][:, :, positions[rank // 2]]
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        assert {call.group for call in found.ledger[rank].communications} == {"cp"}


def stand_in(n, rank=0):
    """What a function asks of a group before it communicates."""
    return SimpleNamespace(size=lambda: n, rank=lambda: rank)


def test_wrong_sizes():
    """Heads that the ranks do not divide, a table of another shape or order: one line that says what to change."""
    q, k, v, _ = problem(1, 6, 2, 5, 4)
    with pytest.raises(
        ValueError, match="^6 query heads and 2 key heads cannot be split over the 4 ranks .* divides 2$"
    ):
        context.all_to_all_attention(q, k, v, stand_in(4))
    for name in ALL:
        with pytest.raises(ValueError, match=r"^positions has shape \(4, 6\): give \(4, 5\), a row for each rank"):
            getattr(context, name)(q, k, v, stand_in(4), torch.arange(24).view(4, 6))
    with pytest.raises(ValueError, match="^the positions of a rank do not ascend: "):
        context.fast_ring_attention(q, k, v, stand_in(4), torch.arange(20).flip(0).view(4, 5))
