import math

import pytest
import torch
import torch.nn.functional as F
from fivefold import attention
from hypothesis import given, settings
from hypothesis import strategies as st

# Of the largest value compared: a few roundings of sums that are tens of terms long.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
LARGE_LOGITS = 1e4  # one rounding of a logit of 1e4 changes its probability by 1e4 roundings


def close(got, expected, dtype=torch.float64, conditioning=1.0):
    """Equal within the dtype's tolerance of the largest value; infinities in the same places; no NaN."""
    got, expected = got.double(), expected.double()
    assert got.shape == expected.shape
    assert torch.equal(got.isinf(), expected.isinf()) and not got.isnan().any()
    finite = ~expected.isinf()
    scale = expected[finite].abs().max().clamp(min=1.0) if finite.any() else 1.0
    assert not finite.any() or (got - expected)[finite].abs().max() <= TOLERANCE[dtype] * conditioning * scale


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut(tensor, sizes, dim):
    return list(torch.split(tensor, list(sizes), dim))


pieces = st.lists(st.integers(1, 5), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)


@given(pieces, seeds, st.booleans(), st.randoms())
def test_online_softmax_in_any_order(sizes, seed, growing, random):
    """Blocks of any sizes, in any order, with logits up to ±1e4 that grow from block to block, give torch's softmax."""
    n = sum(sizes)
    scores = randn(2, 3, n, seed=seed) * 1e4 / 3
    if growing:
        scores = scores.sort(dim=-1).values
    scores = scores.clamp(-1e4, 1e4)
    values = randn(2, n, 5, seed=seed + 1)
    blocks = list(zip(cut(scores, sizes, -1), cut(values, sizes, -2), strict=True))
    if not growing:
        random.shuffle(blocks)
    out, lse = attention.online_softmax(iter(blocks))
    close(out, torch.softmax(scores, -1) @ values)
    close(lse, torch.logsumexp(scores, -1))


@given(pieces, seeds)
def test_online_softmax_of_masked_rows(sizes, seed):
    """A row that sees nothing in some blocks is exact, and one that sees nothing at all is 0 with lse -inf."""
    n = sum(sizes)
    visible = randn(4, n, seed=seed + 2) > 0.8
    visible[0] = False
    scores = randn(4, n, seed=seed).masked_fill(~visible, -math.inf)
    values = randn(n, 3, seed=seed + 1)
    out, lse = attention.online_softmax(zip(cut(scores, sizes, -1), cut(values, sizes, 0), strict=True))
    close(lse, torch.logsumexp(scores, -1))
    close(out, torch.softmax(scores, -1).nan_to_num(0.0) @ values)
    assert (out[0] == 0).all() and lse[0] == -math.inf


@given(pieces, seeds, st.randoms())
def test_merge_in_any_order_and_any_tree(sizes, seed, random):
    """Partial outputs merged pairwise, in any order and any tree, give torch's softmax, unseen blocks included."""
    n = sum(sizes)
    scores = randn(6, n, seed=seed) * torch.tensor([1.0, 1.0, 1e2, 1e4, 1e4, 1.0])[:, None]
    scores[0] = -math.inf
    scores[1, randn(n, seed=seed + 2) > 0] = -math.inf
    values = randn(n, 5, seed=seed + 1)
    parts = []
    for s, v in zip(cut(scores, sizes, -1), cut(values, sizes, 0), strict=True):
        parts.append((torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s, -1)))
    while len(parts) > 1:
        random.shuffle(parts)
        parts.append(attention.merge(*parts.pop(), *parts.pop()))
    close(parts[0][0], torch.softmax(scores, -1).nan_to_num(0.0) @ values, conditioning=LARGE_LOGITS)
    close(parts[0][1], torch.logsumexp(scores, -1))


def test_merge_with_nothing_changes_nothing():
    """A part merged with one that has seen nothing stays as it is, bit for bit; nothing with nothing is 0 and -inf."""
    out, lse = randn(3, 4, seed=1), randn(3, seed=2) * 1e3
    nothing = torch.zeros(3, 4, dtype=torch.float64), torch.full((3,), -math.inf, dtype=torch.float64)
    for merged in (attention.merge(out, lse, *nothing), attention.merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    for got, expected in zip(attention.merge(*nothing, *nothing), nothing, strict=True):
        assert torch.equal(got, expected)


def test_merge_of_half_precision():
    """Outputs in bf16 are merged in the precision of their lse, so that many merges do not lose what one would keep."""
    out, lse = attention.merge(
        randn(3, 4, seed=1, dtype=torch.bfloat16),
        randn(3, seed=2, dtype=torch.float32),
        randn(3, 4, seed=3, dtype=torch.bfloat16),
        randn(3, seed=4, dtype=torch.float32),
    )
    assert out.dtype == lse.dtype == torch.float32


@st.composite
def problems(draw, square=False):
    """Random q, k, v, dout with odd and unequal sizes, and grouped-query heads."""
    b, kv_heads, shared, d = (draw(st.integers(1, top)) for top in (2, 3, 3, 9))
    sq = draw(st.integers(1, 11))
    sk = sq if square else draw(st.integers(1, 11))
    seed = draw(seeds)
    shapes = (b, kv_heads * shared, sq, d), (b, kv_heads, sk, d), (b, kv_heads, sk, d), (b, kv_heads * shared, sq, d)
    return [randn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def dense(q, k, v, dout=None, mask=None, **options):
    """torch's scaled_dot_product_attention: its output, and with dout the gradients of q, k and v by autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout)) if dout is not None else out.detach()


@settings(deadline=None)
@given(problems(), st.booleans())
def test_block_attention_is_torchs(problem, masked):
    """One block's forward and backward, masked or not, with grouped heads, equal torch's attention and its autograd."""
    q, k, v, dout = problem
    mask = randn(q.shape[2], k.shape[2], seed=5) > 0 if masked else None
    if masked:
        mask[:, 0] = True  # torch's answer for a row that sees nothing differs between versions
    out, lse = attention.block_attention(q, k, v, mask)
    grads = attention.block_attention_backward(dout, q, k, v, out, lse, mask)
    for got, expected in zip((out, *grads), dense(q, k, v, dout, mask), strict=True):
        close(got, expected)


@settings(deadline=None)
@given(problems(), pieces, seeds)
def test_blocks_merge_to_the_whole(problem, sizes, seed):
    """Blocks of keys at shuffled positions, causal by position: merged outputs and summed gradients are those of dense
    attention, though some rows see nothing of a block."""
    q, _, _, dout = problem
    n, b, kv_heads, d = sum(sizes), q.shape[0], problem[1].shape[1], q.shape[3]
    k, v = randn(b, kv_heads, n, d, seed=seed), randn(b, kv_heads, n, d, seed=seed + 1)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    q_positions = torch.arange(q.shape[2])
    mask = attention.causal_mask(q_positions, order)
    assert torch.equal(mask, torch.ones(q.shape[2], n, dtype=torch.bool).tril()[:, order])
    q_seeing = mask.any(dim=1)
    blocks = list(zip(*(cut(x, sizes, dim) for x, dim in ((k, 2), (v, 2), (mask, 1))), strict=True))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    for block in blocks:
        out, lse = attention.merge(out, lse, *attention.block_attention(q, *block))
    grads = [attention.block_attention_backward(dout, q, bk, bv, out, lse, bm) for bk, bv, bm in blocks]
    dq, dk, dv = sum(g[0] for g in grads), *(torch.cat([g[i] for g in grads], 2) for i in (1, 2))
    seen = q_seeing.nonzero()[:, 0]
    expected = dense(q[:, :, seen], k, v, dout[:, :, seen], mask[seen])
    for got, want in zip((out[:, :, seen], dq[:, :, seen], dk, dv), expected, strict=True):
        close(got, want)
    assert (out[:, :, ~q_seeing] == 0).all() and (dq[:, :, ~q_seeing] == 0).all()


def test_rows_that_see_nothing():
    """Fully masked rows: output, dq and their share of dk and dv are exactly 0, lse is -inf, nothing is NaN."""
    q, k, v, dout = (randn(1, 2, 3, 4, seed=i) for i in range(4))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    out, lse = attention.block_attention(q, k, v, mask)
    grads = attention.block_attention_backward(dout, q, k, v, out, lse, mask)
    assert (out[:, :, 1] == 0).all() and (lse[:, :, 1] == -math.inf).all() and (grads[0][:, :, 1] == 0).all()
    rest = [0, 2]
    out, lse = attention.block_attention(q[:, :, rest], k, v, mask[rest])
    kept = attention.block_attention_backward(dout[:, :, rest], q[:, :, rest], k, v, out, lse, mask[rest])
    close(grads[1], kept[1])
    close(grads[2], kept[2])


def test_large_logits():
    """With logits up to ±1e4 and more, forward and backward stay finite and equal torch's in fp64."""
    q, k, v, dout = (randn(2, 2, 7, 8, seed=i) for i in range(4))
    q = q * 1e4
    out, lse = attention.block_attention(q, k, v)
    grads = attention.block_attention_backward(dout, q, k, v, out, lse)
    for got, expected in zip((out, *grads), dense(q, k, v, dout), strict=True):
        close(got, expected, conditioning=LARGE_LOGITS)
    assert lse.abs().max() > 1e4


def test_scale_and_dtypes():
    """A scale of one's own is used forward and backward; bf16 comes back as bf16, with its lse in float32."""
    q, k, v, dout = (randn(2, 2, 5, 8, seed=i) for i in range(4))
    out, lse = attention.block_attention(q, k, v, scale=0.7)
    grads = attention.block_attention_backward(dout, q, k, v, out, lse, scale=0.7)
    for got, expected in zip((out, *grads), dense(q, k, v, dout, scale=0.7), strict=True):
        close(got, expected)
    half = [x.bfloat16() for x in (q, k, v)]
    out, lse = attention.block_attention(*half)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    close(out, dense(*half), torch.bfloat16)
    grads = attention.block_attention_backward(dout.bfloat16(), *half, out, lse)
    assert {g.dtype for g in grads} == {torch.bfloat16}


def test_heads_that_cannot_be_shared():
    """Query heads that are no multiple of the key heads are refused in one line."""
    with pytest.raises(ValueError, match="^3 query heads cannot share 2 key heads: choose a divisor$"):
        attention.block_attention(randn(1, 3, 2, 4, seed=0), randn(1, 2, 2, 4, seed=1), randn(1, 2, 2, 4, seed=2))


def forward_and_backward(q, k, v, dout, fused, causal, sizes=None):
    """Attention over key blocks of `sizes`, merged, and its gradients: by the kernels, or by explicit mathematics."""
    sizes = sizes or [k.shape[2]]
    parts = list(zip(cut(k, sizes, 2), cut(v, sizes, 2), strict=True))
    if fused:
        forward, backward, rule = attention.fused_block_attention, attention.fused_block_attention_backward, causal
    else:
        forward, backward = attention.block_attention, attention.block_attention_backward
        rule = attention.causal_mask(*[torch.arange(q.shape[2], device=q.device)] * 2) if causal else None
    out, lse = forward(q, *parts[0], rule)
    for part in parts[1:]:
        out, lse = attention.merge(out, lse, *forward(q, *part, rule))
    out = out.to(q.dtype)
    grads = [backward(dout, q, *part, out, lse, rule) for part in parts]
    return out, lse, sum(g[0] for g in grads), *(torch.cat([g[i] for g in grads], 2) for i in (1, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_fused_equals_explicit(dtype, data):
    """The kernels' forward and backward equal the explicit ones: causal, whole, and merged from blocks of keys."""
    causal = data.draw(st.booleans())
    q, k, v, dout = (x.to(dtype) for x in data.draw(problems(square=causal)))
    sizes = None
    if not causal and k.shape[2] > 1:
        first = data.draw(st.integers(1, k.shape[2] - 1))
        sizes = [first, k.shape[2] - first]
    explicit = forward_and_backward(q, k, v, dout, False, causal, sizes)
    for got, expected in zip(forward_and_backward(q, k, v, dout, True, causal, sizes), explicit, strict=True):
        assert got.dtype == expected.dtype
        close(got, expected, dtype)


def test_fused_of_no_tokens():
    """No keys give out 0 and lse -inf, no queries give nothing; the gradients are zeros (the kernel itself crashes)."""
    q, none = randn(1, 4, 3, 8, seed=1), torch.zeros(1, 2, 0, 8, dtype=torch.float64)
    out, lse = attention.fused_block_attention(q, none, none)
    assert torch.equal(out, torch.zeros_like(q)) and (lse == -math.inf).all()
    dq, dk, dv = attention.fused_block_attention_backward(q, q, none, none, out, lse)
    assert torch.equal(dq, torch.zeros_like(q)) and dk.shape == dv.shape == none.shape
    out, lse = attention.fused_block_attention(q[:, :, :0], q[:, :2], q[:, :2])
    assert out.shape == (1, 4, 0, 8) and lse.shape == (1, 4, 0)


def test_fused_causal_needs_a_square():
    """Causal attention of unequal numbers of queries and keys is refused: which key lines up with which is not said."""
    q, k = randn(1, 1, 3, 8, seed=1), randn(1, 1, 5, 8, seed=2)
    with pytest.raises(ValueError, match="3 queries over 5 keys"):
        attention.fused_block_attention(q, k, k, causal=True)
    with pytest.raises(ValueError, match="3 queries over 5 keys"):
        attention.fused_block_attention_backward(q, q, k, k, q, q[..., 0], causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_on_cuda(dtype, causal):
    """On a GPU too the kernels equal the explicit form in fp64, with grouped heads and an odd number of tokens."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    q, k, v, dout = (randn(2, h, 77, 64, seed=h + i) for i, h in enumerate((4, 2, 2, 4)))
    sizes = None if causal else [30, 47]
    got = forward_and_backward(*(x.to("cuda", dtype) for x in (q, k, v, dout)), True, causal, sizes)
    for a, b in zip(got, forward_and_backward(q, k, v, dout, False, causal, sizes), strict=True):
        close(a.cpu(), b, torch.float32 if dtype == torch.float32 else torch.bfloat16)
