"""The trainer's glue, with unequal degrees: the right groups, one mean over all tokens, one norm over all ranks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fivefold import mesh, run
from fivefold.layout import Layout
from fivefold.model import GPTConfig, Role
from fivefold.train import (
    SCHEDULES,
    Job,
    Trainer,
    batches,
    clip,
    gradient_groups,
    local_batches,
    loss_mean,
    step,
    train,
)

MODEL = GPTConfig(layers=4, hidden=24, heads=6, kv_heads=3, ffn=12, experts=6, vocabulary=257, dtype=torch.float64)
KINDS = {
    "whole": Role("norm.weight"),
    "split": Role("blocks.0.mlp.row.weight", split=1),
    "expert": Role("blocks.1.mlp.w_in", split=1, expert=True),
}


def groups_of_each_kind(layout, sequence_parallel):
    made = mesh.make_mesh(Layout.parse(layout))
    return {
        kind: [dist.get_process_group_ranks(group) for group in gradient_groups(role, made, sequence_parallel)]
        for kind, role in KINDS.items()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_summed_over_the_ranks_that_saw_other_tokens(sequence_parallel):
    """From what the ranks of dp3,cp2,tp2,ep3 hold: each group is those that have the same part and other tokens."""
    layout = Layout.parse("dp3,cp2,tp2,ep3")
    found = run(groups_of_each_kind, 12, str(layout), sequence_parallel).results

    def place(rank):
        at = mesh.coordinates(rank, layout)
        return at.tp, (at.dp * layout.cp + at.cp) % layout.ep  # which columns, which experts

    everyone = range(12)
    for rank, of in enumerate(found):
        same_columns = [r for r in everyone if place(r)[0] == place(rank)[0]]
        same_experts = [r for r in everyone if place(r) == place(rank)]
        neighbours = [r for r in everyone if r // 2 == rank // 2]  # of its TP group: the innermost axis
        assert of["split"] == [same_columns] and of["expert"] == [same_experts]
        assert of["whole"] == [same_columns, neighbours] if sequence_parallel else [same_columns]


def mean_over(layout, logits, labels):
    """The loss's values and gradients on one rank, which has its columns of the logits of its own sequences."""
    made = mesh.make_mesh(Layout.parse(layout))
    mine = [label.chunk(made.dp.size())[made.dp.rank()] for label in labels]
    loss, found = loss_mean(mine, made), []
    for i, whole in enumerate(logits):
        own = whole.chunk(made.dp.size())[made.dp.rank()].chunk(made.tp.size(), -1)[made.tp.rank()]
        own = own.clone().requires_grad_()
        value = loss(own, i)
        value.backward()
        found.append((value.detach(), own.grad))
    return found


def test_the_loss_is_the_mean_over_all_tokens_that_count():
    """Unequal numbers of ignored tokens on every rank and in every micro-batch, one that has none: torch's own mean."""
    generator = torch.Generator().manual_seed(4)
    logits = [torch.randn(4, 5, 9, generator=generator, dtype=torch.float64) for _ in range(3)]
    labels = [torch.randint(9, (4, 5), generator=generator) for _ in logits]
    labels[0][0, :4] = labels[1][2:] = labels[2][3, 1] = -100
    found = run(mean_over, 6, "dp2,tp3", logits, labels).results
    whole = torch.cat(logits).requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), torch.cat(labels).flatten())
    expected.backward()
    shares = [sum(value for value, _ in of) for of in found]
    for tp in range(3):
        torch.testing.assert_close(shares[tp] + shares[3 + tp], expected.detach(), rtol=1e-13, atol=0)
    for rank, of in enumerate(found):
        of_rank = whole.grad.view(3, 2, 2, 5, 9)[:, rank // 3].chunk(3, -1)[rank % 3]
        torch.testing.assert_close(torch.stack([grad for _, grad in of]), of_rank, rtol=1e-12, atol=1e-16)


def clipped(pieces, max_norm):
    """Each rank has a piece of its own, of another length, one that it shares with its pair, and one that all have."""
    made, rank = mesh.make_mesh(Layout.parse("dp2,tp2")), dist.get_rank()
    own, pair, everyone = pieces["own"][rank], pieces["pair"][rank // 2], pieces["everyone"]
    shards = [SimpleNamespace(gradient=gradient.clone()) for gradient in (own, pair, everyone)]
    norm = clip(shards, [1, 2, 4], max_norm, made)
    return norm, [shard.gradient for shard in shards]


@pytest.mark.parametrize("max_norm", [0.7, 1e6])
def test_the_norm_counts_each_gradient_once(max_norm):
    """Unequal pieces, one of them empty, and copies: `torch.nn.utils.clip_grad_norm_` on all of them in one process."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"own": [3, 0, 7, 2], "pair": [4, 5]}
    pieces = {
        kind: [torch.randn(n, generator=generator, dtype=torch.float64) for n in of] for kind, of in sizes.items()
    }
    pieces["everyone"] = torch.randn(6, generator=generator, dtype=torch.float64)
    found = run(clipped, 4, pieces, max_norm).results
    parameters = [
        torch.nn.Parameter(torch.zeros_like(x)) for x in (*pieces["own"], *pieces["pair"], pieces["everyone"])
    ]
    for parameter, gradient in zip(parameters, (*pieces["own"], *pieces["pair"], pieces["everyone"]), strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for rank, (norm, gradients) in enumerate(found):
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        for got, of in zip(gradients, (rank, 4 + rank // 2, 6), strict=True):
            torch.testing.assert_close(got, parameters[of].grad, rtol=1e-12, atol=0)


SIZES = {"batch": 12, "num_microbatches": 2, "sequence": 24, "max_norm": 0.5, "bucket_bytes": 3000.0}


@pytest.fixture(scope="module")
def one_process():
    return run(train, 1, Job(model=MODEL, **SIZES), 3).results[0]


@pytest.mark.parametrize(
    "layout, changes",
    [
        ("dp3,tp3,ep3", {"sequence_parallel": True}),
        ("cp2,pp2,ep2", {"schedule": "interleaved", "recomputation": "selective"}),
    ],
)
def test_losses_and_norms_are_those_of_one_process(one_process, layout, changes):
    """In fp64, with a norm that clips at every step: a gradient summed or counted wrongly shows in the next loss."""
    job = Job(Layout.parse(layout), MODEL, **SIZES, **changes)
    for reports in run(train, job.layout.world_size, job, 3).results:
        for report, expected in zip(reports, one_process, strict=True):
            assert report["loss"] == pytest.approx(expected["loss"], rel=1e-11, abs=0)
            assert report["norm"] == pytest.approx(expected["norm"], rel=1e-10, abs=0)
            assert report["norm"] > SIZES["max_norm"]


def on_a_device_without_memory(fused, dtype):
    """A step of the dense model on torch's "meta" device, up to its gradients; communication is left out."""
    from fivefold import pipeline, zero
    from fivefold.runtime.group import WatchedGroup

    WatchedGroup._run = lambda *_: SimpleNamespace(wait=lambda: True)
    trainer = Trainer(Job(model=GPTConfig(moe_every=0, dtype=dtype), device="meta", fused_attention=fused))
    tokens = torch.zeros(trainer.job.batch, trainer.job.sequence + 1, dtype=torch.long, device="meta")
    micro_batches = local_batches(tokens, trainer.job.num_microbatches, trainer.mesh)
    loss = loss_mean([part.labels for part in micro_batches], trainer.mesh)
    inputs = [part.inputs for part in micro_batches]
    losses = pipeline.run(trainer.schedule, trainer.stages, inputs, loss, trainer.mesh.pp, trainer.template())
    zero.reduce_gradients(trainer.shards)()
    tensors = [*losses.values(), *(x for shard in trainer.shards for x in (shard.gradient, shard.piece, shard.master))]
    return [(x.device.type, str(x.dtype)) for x in tensors]


@pytest.mark.parametrize("fused", [False, True])
def test_everything_is_on_the_device_of_the_job(fused):
    """Torch refuses to mix a tensor on "meta" with one that was left on the CPU, as it would on a GPU.

    In bfloat16, losses and AdamW's masters are float32, gradients and parameters are not.
    """
    found = run(on_a_device_without_memory, 1, fused, torch.bfloat16).results[0]
    assert {device for device, _ in found} == {"meta"}
    kinds = [dtype.removeprefix("torch.") for _, dtype in found]
    assert kinds[:4] == ["float32"] * 4
    assert kinds[4:] == ["bfloat16", "bfloat16", "float32"] * (len(kinds[4:]) // 3)


def train_in_half_precision(job, steps):
    trainer = Trainer(job)
    reports = [step(trainer, tokens) for tokens in batches(job, steps)]
    masters = [shard.master for shard in trainer.shards]
    apart = max((shard.master - shard.piece.float()).abs().max().item() for shard in trainer.shards)
    return [report.loss for report in reports], sorted({str(master.dtype) for master in masters}), apart


def test_bfloat16_trains_as_float32_does_to_its_precision():
    """On split axes, with float32 masters that parameters are rounded from: losses stay within 2% of float32's."""
    sizes = {"batch": 4, "num_microbatches": 2, "sequence": 16, "sequence_parallel": True}
    wide, half = (
        Job(Layout.parse("cp2,tp2,ep2"), GPTConfig(layers=2, dtype=dtype), **sizes)
        for dtype in (torch.float32, torch.bfloat16)
    )
    expected = [report["loss"] for report in run(train, 4, wide, 6).results[0]]
    losses, dtypes, apart = run(train_in_half_precision, 4, half, 6).results[2]
    assert losses == pytest.approx(expected, rel=0.02) and losses[-1] < 0.95 * losses[0]
    assert dtypes == ["torch.float32"] and 0 < apart < 0.01


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": Layout(tp=5)}, "6 heads cannot be split over tp5: choose 1, 2, 3 or 6"),
        ({"layout": Layout(dp=4, ep=4)}, "6 experts cannot be split over ep4: choose 1 or 2"),
        ({"layout": Layout(pp=5)}, "4 layers cannot fill the 5 stages of pp5: take 5 layers or more"),
        ({"layout": Layout(cp=5)}, "a sequence of 24 tokens cannot be split over cp5: choose 20 or 30"),
        ({"layout": Layout(dp=5)}, "12 sequences a step cannot be split over dp5: choose 1, 2, 3, 4, 6 or 12"),
        ({"num_microbatches": 5}, "12 sequences a rank cannot be split over 5 micro-batches"),
        ({"layout": Layout(pp=2), "schedule": "interleaved", "num_chunks": 3}, "4 layers cannot fill the 6 stages"),
        ({"schedule": "2f2b"}, f"there is no schedule '2f2b': choose {', '.join(SCHEDULES)}"),
    ],
)
def test_a_job_that_cannot_be_names_the_number_to_change(changes, says):
    """In one line, and before any rank starts."""
    with pytest.raises(ValueError) as error:
        Job(**{"model": MODEL, **SIZES, **changes})
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden": 30, "heads": 4}, "hidden 30 is no multiple of twice the 4 heads"),
        ({"kv_heads": 4}, "6 heads cannot share 4 kv heads"),
        ({"top_k": 7}, "top_k is 7: choose 1 to 6"),
    ],
)
def test_a_model_that_cannot_be_is_refused_too(changes, says):
    """Heads that give no even width, that cannot share, and more experts for a token than there are."""
    with pytest.raises(ValueError, match=says):
        replace(MODEL, **changes)
