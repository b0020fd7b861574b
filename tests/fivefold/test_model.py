"""The model under every axis but the pipeline equals an independent one, written in plain torch in one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import context, mesh, run
from fivefold.layout import Layout, LayoutError
from fivefold.model import GPTConfig, Options, Stage, whole

CONFIG = GPTConfig(
    layers=3, hidden=24, heads=6, kv_heads=2, ffn=20, experts=4, vocabulary=67, dtype=torch.float64, seed=5
)


def tokens(config, batch, length):
    generator = torch.Generator().manual_seed(11)
    return torch.randint(config.vocabulary, (batch, length + 1), generator=generator)


def plain_gpt(config, inputs, weights=None):
    """The same mathematics without one line of the library but its weights: logits, balance losses, parameters.

    `weights` are those of an earlier call, to go on with."""
    c = config
    weights = {} if weights is None else weights

    def weight(name, *shape):
        return weights.setdefault(name, whole(c, name, *shape).requires_grad_())

    def constant(name, size, value):
        return weights.setdefault(name, torch.full((size,), value, dtype=c.dtype).requires_grad_())

    def norm(name, x):
        return F.layer_norm(x, (c.hidden,), constant(name + " w", c.hidden, 1.0), constant(name + " b", c.hidden, 0.0))

    b, s = inputs.shape
    d = c.hidden // c.heads
    angle = torch.arange(s)[:, None].double() * c.rope_base ** (-torch.arange(d // 2).double() * 2 / d)
    turn = torch.polar(torch.ones_like(angle), angle)
    embedding = weight("embedding", c.vocabulary, c.hidden)
    x, balances = embedding[inputs], []
    per = c.heads // c.kv_heads
    for layer in range(c.layers):
        rows = (c.heads + 2 * c.kv_heads) * d
        qkv = F.linear(
            norm(f"{layer} n1", x), weight(f"{layer} qkv", rows, c.hidden), constant(f"{layer} qkv b", rows, 0.0)
        )
        groups = qkv.view(b, s, c.kv_heads, per + 2, d)
        q = groups[:, :, :, :per].reshape(b, s, c.heads, d).transpose(1, 2)
        k, v = (groups[:, :, :, per + i].transpose(1, 2) for i in (0, 1))

        def rope(y):
            pairs = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * turn
            return torch.cat([pairs.real, pairs.imag], -1)

        k, v = (y.repeat_interleave(per, 1) for y in (rope(k), v))
        attended = F.scaled_dot_product_attention(rope(q), k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(
            attended, weight(f"{layer} out", c.hidden, c.heads * d), constant(f"{layer} o b", c.hidden, 0.0)
        )
        y = norm(f"{layer} n2", x)
        if c.has_experts(layer):
            probs = F.linear(y, weight(f"{layer} router", c.experts, c.hidden)).softmax(-1).flatten(0, 1)
            chosen = torch.zeros_like(probs).scatter(1, probs.topk(c.top_k).indices, 1.0)
            w_in = weight(f"{layer} experts in", c.experts, c.ffn, c.hidden)
            w_out = weight(f"{layer} experts out", c.experts, c.hidden, c.ffn)
            hidden = F.gelu(torch.einsum("th,efh->tef", y.flatten(0, 1), w_in))
            every = torch.einsum("tef,ehf->teh", hidden, w_out)
            x = x + (every * (probs * chosen)[..., None]).sum(1).view_as(x)
            balances.append(c.experts * (chosen.mean(0) / c.top_k * probs.mean(0)).sum())
        else:
            inner = F.linear(y, weight(f"{layer} in", c.ffn, c.hidden), constant(f"{layer} i b", c.ffn, 0.0))
            out = weight(f"{layer} out of mlp", c.hidden, c.ffn)
            x = x + F.linear(F.gelu(inner), out, constant(f"{layer} m b", c.hidden, 0.0))
    head = embedding if c.tied else weight("head", c.vocabulary, c.hidden)
    return norm("norm", x) @ head.T, balances, weights


def split_model(layout, config, options, batch, length):
    """Loss and gradients of the library's model, gathered to whole matrices by whoever holds them."""
    from fivefold import tensor

    layout = Layout.parse(layout)
    made = mesh.make_mesh(layout)
    positions = context.token_positions(length, layout.cp) if layout.cp > 1 else torch.arange(length)[None]
    stage = Stage(config, range(config.layers), made, positions, True, True, options)
    everything = tokens(config, batch, length)
    mine = everything.chunk(layout.dp)[made.coordinates.dp]
    at = positions[made.coordinates.cp]
    logits = stage(mine[:, :-1][:, at])
    losses = tensor.vocab_cross_entropy(logits, mine[:, 1:][:, at], made.tp)
    (losses.sum() / (batch * length)).backward()
    loss = losses.sum().detach()
    dist.all_reduce(loss, group=made.dp_cp)
    gradients = {}
    for parameter, role in stage.roles().items():
        dist.all_reduce(parameter.grad, group=made.ep_dp if role.expert else made.dp_cp)
        if options.sequence_parallel and role.split is None:
            dist.all_reduce(parameter.grad, group=made.tp)
        gradients[role.name] = parameter.grad
    place = (made.coordinates.tp, made.expert_rank)
    return loss / (batch * length), gradients, place, [b.item() for b in stage.balance()]


NAMES = {  # the library's names -> those of plain_gpt, and the dimension over which tp cuts them
    "attention.qkv.weight": ("qkv", 0), "attention.qkv.bias": ("qkv b", 0), "attention.out.weight": ("out", 1),
    "attention.out.bias": ("o b", None), "mlp.column.weight": ("in", 0), "mlp.column.bias": ("i b", 0),
    "mlp.row.weight": ("out of mlp", 1), "mlp.row.bias": ("m b", None), "mlp.router": ("router", None),
    "mlp.w_in": ("experts in", 1), "mlp.w_out": ("experts out", 2), "attention_norm.weight": ("n1 w", None),
    "attention_norm.bias": ("n1 b", None), "mlp_norm.weight": ("n2 w", None), "mlp_norm.bias": ("n2 b", None),
}  # fmt: skip


def expected_part(name, weights, layout, place):
    """This rank's part of the plain model's gradient."""
    tp, ep = place
    if name in ("embedding.weight", "head.weight"):
        grad = weights["embedding" if "embedding" in weights and name == "embedding.weight" else "head"].grad
        grad = F.pad(grad, (0, 0, 0, -len(grad) % layout.tp))
        return grad.chunk(layout.tp)[tp]
    if name.startswith("norm."):
        return weights["norm w" if name.endswith("weight") else "norm b"].grad
    _, layer, rest = name.split(".", 2)
    plain, dim = NAMES[rest]
    grad = weights[f"{layer} {plain}"].grad
    if rest in ("mlp.w_in", "mlp.w_out"):
        grad = grad.chunk(layout.ep)[ep]
    return grad if dim is None else grad.chunk(layout.tp, dim)[tp]


CASES = [
    ("dp1", {}, {}),
    ("tp2", {"sequence_parallel": True}, {}),
    ("cp3", {"recomputation": "selective"}, {"tied": False}),
    ("dp2,cp2,tp2,ep4", {"sequence_parallel": True, "recomputation": "full"}, {}),
    ("dp2,cp2,tp2,ep2", {"fused_attention": True}, {"moe_every": 1}),
    ("dp4,tp2,ep4", {"recomputation": "selective", "sequence_parallel": True}, {"tied": False}),
]


@pytest.mark.parametrize("layout, options, changes", CASES, ids=[case[0] for case in CASES])
def test_every_axis_gives_one_processs_loss_and_gradients(layout, options, changes):
    """In fp64, every parameter, biases and norms included; vocabulary that tp does not divide, uneven degrees."""
    from dataclasses import replace

    config = replace(CONFIG, **changes)
    batch, length = 4, 24
    found = run(split_model, Layout.parse(layout).world_size, layout, config, Options(**options), batch, length).results
    data = tokens(config, batch, length)
    logits, balances, weights = plain_gpt(config, data[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
    (loss + config.balance_weight * sum(balances) / len(balances)).backward()
    for got, gradients, place, balance in found:
        torch.testing.assert_close(got, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(balance, [b.item() for b in balances], rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            expected = expected_part(name, weights, Layout.parse(layout), place)
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    assert len(gradients) == len(weights)


def test_a_layout_that_does_not_fit_is_one_clear_line():
    """Before any rank starts."""
    for layout, says in [("tp5", "6 heads"), ("pp4", "3 layers cannot fill"), ("dp3,ep3", "4 experts")]:
        with pytest.raises(LayoutError, match=says):
            CONFIG.check(Layout.parse(layout))
    with pytest.raises(ValueError, match="choose none, selective or full"):
        Options(recomputation="some")
