"""The figure and the widget of activation memory: their numbers are those of a measured run and of the paper."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fivefold import plots, recompute, run, sequence, tensor, widgets
from fivefold.plots import style
from fivefold.plots.activations import RECOMPUTED, TOKENS, Layer, kept_bytes, more_computing, more_sent
from fivefold.runtime.marks import phase
from fivefold.runtime.traffic import size
from fivefold.widgets import activations
from torch import nn

GPT3 = Layer(b=1, s=2048, h=12288, a=96)
SMALL = Layer(b=2, s=24, h=48, a=6)


def one_step(ways):
    """Forward and backward of a layer for each way, in half precision, with dropout."""
    group, t = dist.group.WORLD, dist.get_world_size()
    h, whole = SMALL.h, partial(torch.ones, dtype=torch.bfloat16)
    for tokens, again in ways:
        split = tokens != "whole"
        exchanges = {"enter": sequence.gather_tokens, "leave": sequence.scatter_tokens} if split else {}
        core = partial(tensor.causal_attention, drop=partial(sequence.dropout, p=0.1, group=group, split=True))
        core = recompute.selective(core) if again == "selective" else core
        weights = whole(3 * h, h), whole(3 * h), whole(h, h), whole(h)
        attention = tensor.Attention(*weights, SMALL.a, SMALL.a, group, core, **exchanges)
        mlp = tensor.MLP(whole(4 * h, h), whole(4 * h), whole(h, 4 * h), whole(h), group, **exchanges)
        if tokens == "gathered again":
            attention.qkv = sequence.RegatheringColumnLinear(*weights[:2], group)
            mlp.column = sequence.RegatheringColumnLinear(whole(4 * h, h), whole(4 * h), group)
        norms = nn.LayerNorm(h, dtype=torch.bfloat16), nn.LayerNorm(h, dtype=torch.bfloat16)
        block = sequence.Block(attention, mlp, *norms, group, 0.1, split)
        x = torch.randn(SMALL.b, SMALL.s // t if split else SMALL.s, h).bfloat16().requires_grad_()
        with phase(f"forward {tokens} {again}"):
            y = (recompute.full(block) if again == "full" else block)(x * 1)
        with phase(f"backward {tokens} {again}"):
            y.sum().backward()


def test_what_is_drawn_is_what_a_program_keeps_computes_and_sends():
    """Each way at once on three ranks: bytes but for what is small (a mask of one byte a pair of tokens, and 8 bytes a
    token for the norms), operations, and bytes beside those of tensor parallelism, from the ledger."""
    t, ways = 3, [(tokens, again) for tokens in TOKENS for again in RECOMPUTED]
    own = run(one_step, t, ways, measure=True).ledger[0]

    def total(of, way):
        entries = [e for e in own.entries if getattr(e, "phase", "").endswith(f"ward {way[0]} {way[1]}")]
        return sum(getattr(entry, of, 0) for entry in entries)

    for tokens, again in ways:
        kept = own.memory.phases[f"forward {tokens} {again}"]
        small = {"none": SMALL.s**2, "selective": 0, "full": 0}[again]
        small += 8 * SMALL.b * SMALL.s // (t if tokens != "whole" else 1) * (again != "full")
        assert kept - small == pytest.approx(sum(kept_bytes(t, SMALL, tokens, again).values()))
        ratio = total("flops", (tokens, again)) / total("flops", (tokens, "none"))
        assert ratio - 1 == pytest.approx(more_computing(SMALL, again))
        ratio = total("sent", (tokens, again)) / total("sent", ("whole", "none"))
        assert ratio == pytest.approx(more_sent(t, tokens, again))


def test_the_papers_numbers_for_gpt3():
    """Korthikanti et al. 2022: selective recomputation saves 70% (section 5), and both ways together leave a fifth of
    what tensor parallelism alone keeps (abstract)."""
    both = [sum(kept_bytes(8, GPT3, "gathered again", again).values()) for again in ("none", "selective")]
    assert 1 - both[1] / both[0] == pytest.approx(0.70, abs=0.005)
    assert sum(kept_bytes(8, GPT3).values()) / both[1] == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("tokens", TOKENS)
def test_bars_have_the_length_of_what_they_stand_for(tokens, recompute):
    """The filled parts of all rows are in proportion to the bytes; numbers stand beside them and in the alt text; no
    text is cut off."""
    degrees = (1, 2, 4, 8, 16)
    figure = plots.activation_memory(8, GPT3, tokens, recompute, degrees)
    axes, sums = figure.figure.axes[0], [sum(kept_bytes(t, GPT3, tokens, recompute).values()) for t in degrees]
    bars = [p for p in axes.patches if p.get_facecolor()[3] > 0 and p.get_y() > 0.3]
    outlines = [p for p in axes.patches if p.get_facecolor()[3] == 0 and p.get_y() > 0.3]
    plain = [sum(kept_bytes(t, GPT3).values()) for t in degrees]
    scale = outlines[0].get_width() / plain[0]
    assert [p.get_width() / scale for p in outlines] == pytest.approx(plain)
    assert sum(p.get_width() for p in bars) / scale == pytest.approx(sum(sums))
    for amount in sums:
        assert size(amount) in figure.alt and size(amount) in [text.get_text() for text in axes.texts]
    figure.figure.draw_without_rendering()
    for text in figure.figure.findobj(style.matplotlib.text.Text):
        place = text.get_window_extent()
        assert not text.get_text() or place.x0 >= 0 and place.x1 <= figure.figure.bbox.x1, text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": 3}, "3 ranks are not among"),
        ({"tokens": "all"}, "choose one of"),
        ({"recompute": "some"}, "choose one of"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(change, message):
    """Another number of ranks, another word."""
    with pytest.raises(ValueError, match=message):
        plots.activation_memory(**({"t": 8, "layer": GPT3, "tokens": "whole", "recompute": "none"} | change))


def test_every_position_of_the_controls_can_be_drawn(monkeypatch):
    """Each control through all its values, the others where they begin; the picture changes with it."""
    seen = {}
    monkeypatch.setattr(activations, "explore", lambda draw, controls: seen.update(draw=draw, controls=controls))
    widgets.activation_memory(4)
    start = {name: control.value for name, control in seen["controls"].items()}
    assert start["t"] == 4
    for name, control in seen["controls"].items():
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        alts = {seen["draw"](**(start | {name: value})).alt for value in values}
        assert len(alts) == len(values), name
