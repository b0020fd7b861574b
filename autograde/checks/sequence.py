"""Judge what ranks returned that share the tokens of a sequence, or compute something again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autograde.checks.blocks import ALONE, CONTEXT, CUT, KEEP, WEIGHTS, Layers
from autograde.checks.recomputed import Passes
from autograde.checks.tokens import Exchange, Tokens
from autograde.compare import compare, compare_all
from autograde.traffic import Calls, expect, size_in_words
from autograde.verdict import Finding


def judge_exchange(
    case: Tokens, outcomes: Sequence[Any], ledger: Any, exchange: Exchange, look: str
) -> Iterator[Finding]:
    """Output, gradient and traffic of `gather_tokens` or `scatter_tokens`; `look` is for a wrong gradient."""
    output, gradient = exchange.expected(case)
    x = [exchange.x(case, rank) for rank in range(case.world_size)]
    forward, backward = ("exact", "rounding") if exchange.gathers else ("rounding", "exact")
    yield compare("output", "the output", [o["output"] for o in outcomes], output, forward)
    yield compare("output", "x afterwards", [o["x"] for o in outcomes], x, "exact")
    yield compare("gradient", "x.grad", [o["x.grad"] for o in outcomes], gradient, backward, look)
    whole, own = case.bytes()
    ways = ("forward", "backward") if exchange.gathers else ("backward", "forward")
    gather = Calls("all_gather", **{ways[0]: case.calls(1)}, bytes=own, groups=case.groups)
    scatter = Calls("reduce_scatter", **{ways[1]: case.calls(1)}, bytes=whole, groups=case.groups)
    yield sent("traffic", ledger, f"1 all-gather {ways[0]}, 1 reduce-scatter {ways[1]}", gather, scatter)


REGION_FACTS = [  # property, fact, what is seen where it holds on every rank, and where it does not; where to look
    ("split", "no number of another rank", "every rank has numbers of its own",
     "with split=True, numbers that another rank of the group draws too", ""),
    ("replicated", "the numbers of the first rank", "equal on all ranks of a group",
     "with split=False, other numbers than on the first rank of the group", ""),
    ("passes", "no number twice", "new ones in each region and each pass",
     "two regions, one after the other, have the same numbers, or shifted ones", ""),
    ("passes", "no number of many regions twice", "new ones in each region and each pass",
     "of 300 regions, one after the other, some have the same numbers", "How many seeds can there be?"),
    ("passes", "no number of outside", "new ones in each region and each pass",
     "numbers of a region are drawn once more outside", ""),
    ("restored", "the same again", "with the state put back, the same ones again",
     "torch's state was put back, and the region's numbers are others than before",
     "Recomputation does that. From what alone may a region's numbers follow?"),
    ("outside", "undisturbed", "undisturbed", "numbers outside depend on how many were drawn inside", ""),
    ("outside", "undisturbed where equal", "undisturbed",
     "with split=False, numbers outside depend on how many were drawn inside", ""),
    ("outside", "the group's outside", "undisturbed", "after a region the ranks of a group are not alike", ""),
    ("outside", "undisturbed by an error", "undisturbed", "after an error in a region, other numbers outside", ""),
]  # fmt: skip


def judge_regions(case: Tokens, outcomes: Sequence[Any], ledger: Any) -> Iterator[Finding]:
    """The facts that the ranks found about a region's numbers; beside the check's own all-gather nothing travels."""
    for name, fact, right, wrong, look in REGION_FACTS:
        ranks = [rank for rank, outcome in enumerate(outcomes) if not outcome[fact]]
        yield Finding(name, not ranks, f"{wrong}, on rank {ranks[0]}" if ranks else right, look=look)
    ours = Calls("all_gather", forward=case.calls(1), groups=case.groups)
    look = "Nothing has to travel. What do the ranks of a group have in common already?"
    yield sent("replicated", ledger, "equal on all ranks of a group", ours, look=look)


def judge_block(case: Layers, outcomes: Sequence[Any], ledger: Any) -> Iterator[Finding]:
    """A block against one process; each pair of split layers gathers tokens once and scatters them once each way."""
    ranks = range(case.world_size)
    output, gradient = zip(*(_one_process(case, rank) for rank in ranks), strict=True)
    yield compare("output", "the output", [o["output"] for o in outcomes], list(output), "layers")
    missing = next((outcome["missing"] for outcome in outcomes if outcome["missing"]), None)
    if missing:
        yield Finding("gradient", False, f"the block's parameters() do not have {missing[0]}")
    yield compare_all("gradient", [_summed(case, rank, outcomes) for rank in ranks], gradient, "layers")
    whole, own = case.bytes()
    twice = case.calls(2)
    gather = Calls("all_gather", twice, twice, own, case.groups)
    scatter = Calls("reduce_scatter", twice, twice, whole, case.groups)
    yield sent("traffic", ledger, "2 all-gathers and 2 reduce-scatters each way", gather, scatter)
    yield _judge_kept(case, ledger)


def sent(property: str, ledger: Any, words: str, *calls: Calls, look: str = "") -> Finding:
    """`expect`, in words of one's own where it holds: a rank that is alone in its group sends nothing."""
    finding = expect(property, ledger, *calls, look=look)
    return replace(finding, seen=words) if finding.passed else finding


def judge_dropout(outcomes: Sequence[Any]) -> Finding:
    """Zeros went in; the attention gives 1 and the MLP 2, so what comes out tells what either dropout let pass."""
    for name in outcomes[0]["outputs"]:
        got = [outcome["outputs"][name] for outcome in outcomes]
        if not name.startswith("in training"):
            finding = compare("arguments", f"the output {name},", got, [torch.full_like(y, 3.0) for y in got], "exact")
        else:
            finding = _judge_masks(name, got)
        if not finding.passed:
            return finding
    handed = outcomes[0]["handed"]
    if handed != list(CONTEXT):
        seen = f"block(x, {', '.join(map(repr, CONTEXT))}) hands {handed or 'nothing'} on to the attention"
        return Finding("arguments", False, seen, "expected all that comes after x")
    return Finding("arguments", True, "dropout, in training and evaluation")


def judge_kept(ledger: Any, wanted: Sequence[int], look: str) -> Finding:
    """What each rank keeps for backward at the end of forward: not more than `wanted`."""
    for rank, number in enumerate(wanted):
        kept = ledger[rank].memory.phases.get("forward", 0)
        if kept > number:
            seen = f"rank {rank} keeps {size_in_words(kept)} for backward, expected {size_in_words(number)}"
            return Finding("memory", False, f"{seen} ({kept / number:.3g} times)", look=look)
    return Finding("memory", True, f"{size_in_words(ledger[0].memory.phases.get('forward', 0))} kept on rank 0")


def one_pass(case: Passes, function: Any, tensors: dict[str, Tensor], context: tuple, inputs: int = 3) -> tuple:
    """Output, gradients by name, and the numbers drawn after forward and after backward, in one process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        out = function(*list(tensors.values())[:inputs], *context)
        drawn = [torch.rand(4), torch.rand(4)]
    out.backward(case.random(20, *out.shape))
    return out.detach(), {f"{name}.grad": tensor.grad for name, tensor in tensors.items()}, drawn


def judge_pass(outcomes: list, expected: tuple) -> Iterator[Finding]:
    output, gradient, drawn = expected
    gradient = gradient if isinstance(gradient, list) else [gradient]
    yield compare("output", "the output", [o["output"] for o in outcomes], output, "layers")
    look = "Backward computes forward again. Is everything as it was the first time?"
    yield compare_all("gradient", [o["gradient"] for o in outcomes], gradient, "layers", look)
    for i, when in enumerate(("forward", "backward")):
        got = [o["drawn"][i] for o in outcomes]
        yield compare("random", f"what torch draws after {when}", got, drawn[i], "exact")


def _one_process(case: Layers, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The rank's part of what one process gets: its tokens of the output and of x's gradient, and its weights'."""
    _, ranks, number = case.place(rank)
    w = {name: tensor.requires_grad_() for name, tensor in case.weights().items()}
    x, incoming = case.batch(rank)
    y = _dense_block(case, w, x.requires_grad_())
    y.backward(incoming)
    gradients = {"x.grad": case.own(rank, x.grad)}
    for name, tensor in w.items():
        grad = tensor.grad.chunk(len(ranks), CUT[name])[number] if name in CUT else tensor.grad
        parts = grad if name.endswith("norm") else [grad]
        gradients |= {f"{own}.grad": part for own, part in zip(WEIGHTS[name], parts, strict=True)}
    return case.own(rank, y.detach()), gradients


def _dense_block(case: Layers, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A block of torch's own functions; the fused weight is laid out by head."""
    y = F.layer_norm(x, (case.h,), *w["attention_norm"])
    qkv = F.linear(y, w["qkv"], w["qkv_bias"]).unflatten(-1, (case.heads, 3, case.size))
    out = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4), is_causal=True)
    x = x + F.linear(out.transpose(1, 2).flatten(2), w["out"], w["out_bias"])
    y = F.gelu(F.linear(F.layer_norm(x, (case.h,), *w["mlp_norm"]), w["w_in"], w["b_in"]))
    return x + F.linear(y, w["w_out"], w["b_out"])


def _summed(case: Layers, rank: int, outcomes: Sequence[Any]) -> dict[str, Tensor]:
    """What is whole on every rank saw its tokens only, so its gradient is the sum over the group."""
    whole = [f"{own}.grad" for name in WEIGHTS if name not in CUT for own in WEIGHTS[name]]
    group = case.of_group(rank, [outcome["gradient"] for outcome in outcomes])
    own = outcomes[rank]["gradient"]
    there = [name for name in whole if all(name in grads for grads in group)]
    return {name: sum(g[name] for g in group) if name in there else grad for name, grad in own.items()}


def _judge_kept(case: Layers, ledger: Any) -> Finding:
    """What the two norms keep: their inputs, and a mean and a deviation for each token."""
    for rank in range(case.world_size):
        tokens = case.b * case.s // len(case.place(rank)[1])
        kept, wanted = ledger[rank].memory.phases.get(ALONE, 0), 8 * tokens * (2 * case.h + 4)
        if kept > wanted:
            seen = f"beside attention and MLP rank {rank} keeps {size_in_words(kept)}, expected {size_in_words(wanted)}"
            look = "For how many tokens do the norms, the dropouts and the sums work?"
            return Finding("memory", False, f"{seen} ({kept / wanted:.3g} times)", look=look)
    kept = ledger[0].memory.phases.get(ALONE, 0)
    return Finding("memory", True, f"1/{len(case.groups[0])} of the tokens on rank 0", size_in_words(kept))


def _judge_masks(name: str, got: list[Tensor]) -> Finding:
    codes = [(y * KEEP).round() for y in got]  # 0 nothing passed, 1 the attention, 2 the MLP, 3 both
    for rank, (y, code) in enumerate(zip(got, codes, strict=True)):
        if not torch.allclose(y * KEEP, code) or not bool(((code >= 0) & (code <= 3)).all()):
            seen = f"{name}, elements on rank {rank} are neither dropped nor 1/(1 − p) times as large"
            some = ", ".join(f"{number:.3g}" for number in y.unique().tolist()[:6])
            return Finding("arguments", False, seen, f"of 1 and 2, one or both dropped, came {some}")
        for part, kept in (("attention", code % 2), ("MLP", code // 2)):
            share = float(kept.mean())
            if abs(share - KEEP) > 0.1:  # 8 standard deviations of 1,536 elements
                seen = f"{name}, {1 - share:.0%} of the {part}'s output are dropped on rank {rank}"
                return Finding("arguments", False, f"{seen}, expected {1 - KEEP:.0%}")
    alike = [torch.equal(code, codes[0]) for code in codes[1:]]
    if "split" in name and any(alike):
        return Finding("arguments", False, f"{name}, two ranks drop the same elements")
    if "split" not in name and not all(alike):
        return Finding("arguments", False, f"{name}, the ranks drop different elements")
    return Finding("arguments", True, "")
