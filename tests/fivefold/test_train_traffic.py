"""One step of training on all five axes: every byte that leaves a rank, and what it keeps, by `cost`'s formulas."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from fivefold import run
from fivefold.cost import (
    activation_bytes,
    collective_bytes,
    expert_traffic,
    peak_activations,
    pipeline_traffic,
    ring_attention_traffic,
    tensor_traffic,
    zero_bytes,
    zero_traffic,
)
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.train import Job, Trainer, batches, step

LAYERS, H, HEADS, KV_HEADS, FFN, EXPERTS, TOP_K, VOCABULARY = 4, 24, 6, 2, 20, 4, 2, 256
CONFIG = GPTConfig(
    layers=LAYERS, hidden=H, heads=HEADS, kv_heads=KV_HEADS, ffn=FFN, experts=EXPERTS, top_k=TOP_K,
    vocabulary=VOCABULARY, dtype=torch.float32,
)  # fmt: skip
LAYOUT = Layout(dp=2, cp=2, pp=2, tp=2, ep=2)
M, B, S = 3, 2, 24  # micro-batches, sequences of each on a rank, tokens of a sequence
FLOAT, INT = 4, 8  # bytes


def one_step(job):
    """The sizes of this rank's parameters by what is done with their gradients, and the padding of the shards."""
    trainer = Trainer(job)
    step(trainer, next(batches(job, 1)))
    sizes = defaultdict(int)
    for parameter, role in trainer.roles.items():
        sizes["expert" if role.expert else "dense"] += parameter.numel()
        sizes["replicated"] += parameter.numel() if role.split is None else 0
        sizes["tied"] += parameter.numel() if role.tied else 0
    for shard in trainer.shards:
        kind = "dense" if shard.group is trainer.mesh.dp_cp else "expert"
        sizes[f"{kind} padded"] += shard.length * shard.group.size()
    return dict(sizes)


def evenly(logits, top_k):
    """A router that gives every expert as many tokens, whatever it sees: k in turn to each token."""
    from fivefold.expert import Routing

    probs = logits.softmax(dim=-1)
    tokens, experts = logits.shape
    chosen = torch.arange(tokens * top_k, device=logits.device).view(tokens, top_k) % experts
    return Routing(probs, chosen, probs.gather(-1, chosen))


def expected_bytes(stage, split, sizes):
    """Bytes that leave a rank of the first (0) or the last stage (1): by phase and group."""
    t, c, n, ep = LAYOUT.tp, LAYOUT.cp, LAYOUT.dp * LAYOUT.cp, LAYOUT.ep
    tokens = B * S // c  # of a micro-batch on a rank
    layers, moe_layers = LAYERS // LAYOUT.pp, LAYERS // LAYOUT.pp // 2

    def over(group, elements, op="all_reduce"):
        return collective_bytes(op, group, elements)

    # Tensor: two exchanges each way in a layer, half as many for the embedding and for the output layer.
    tp = layers * tensor_traffic(B, S // c, H, t) + tensor_traffic(B, S // c, H, t) / 4
    gates = moe_layers * over(t, tokens * TOP_K)  # in backward, or half of it in each direction
    choices = moe_layers * over(t, tokens * TOP_K, "all_gather") if split else 0
    balance = 2 * EXPERTS * moe_layers  # counts and probabilities
    loss = over(t, 3 * tokens) if stage else 0
    in_tp = FLOAT * (tp + gates + loss + (over(t, balance) if split else 0)) + INT * choices
    # Context: keys and values go around in forward and in backward, and so do their gradients.
    in_cp = FLOAT * layers * 3 * ring_attention_traffic(B * S, KV_HEADS * (H // HEADS) // t, c)
    in_pp = FLOAT * pipeline_traffic(B, S // c // (t if split else 1), H)
    # Expert: the rows four times, and before they go their numbers. In sequence parallelism they are gathered before.
    in_ep = moe_layers * (FLOAT * expert_traffic(tokens, H, TOP_K, ep) + INT * over(ep, EXPERTS, "all_to_all"))
    world = LAYOUT.world_size
    found = {
        ("pipeline", "tp"): M * in_tp,
        ("pipeline", "cp"): M * in_cp,
        ("pipeline", "pp"): M * in_pp,
        ("pipeline", "ep"): M * in_ep,
        ("pipeline", "dp_cp"): M * FLOAT * over(n, balance),
        ("gradients", "dp_cp"): FLOAT * zero_traffic(sizes["dense padded"], n, 1) / 2,
        ("gradients", "ep_dp"): FLOAT * zero_traffic(sizes["expert padded"], n // ep, 1) / 2,
        ("gradients", "pp"): FLOAT * sizes["tied"],
        ("gradients", "world"): 8 * over(world, 1),  # one number in float64: the square of the norm
        ("optimizer", "dp_cp"): FLOAT * zero_traffic(sizes["dense padded"], n, 1) / 2,
        ("optimizer", "ep_dp"): FLOAT * zero_traffic(sizes["expert padded"], n // ep, 1) / 2,
        ("", "dp_cp"): INT * over(n, 1) + FLOAT * over(n, 1),  # how many tokens there are; the loss
        ("", "pp"): FLOAT * over(LAYOUT.pp, 1),
    }
    if split:
        found["gradients", "tp"] = FLOAT * over(t, sizes["replicated"])
    return found


@pytest.mark.parametrize("split", [False, True])
def test_every_byte_of_a_step_is_in_a_formula(split):
    """16 ranks, all five axes: for each phase and group exactly what `cost` says, and nothing else is sent.

    The router deals out tokens evenly, as the formula for experts assumes; buckets are small and do not divide.
    """
    job = Job(
        LAYOUT, CONFIG, num_microbatches=M, batch=M * B * LAYOUT.dp, sequence=S, sequence_parallel=split,
        bucket_bytes=3_000,
    )  # fmt: skip
    done = run(one_step, LAYOUT.world_size, job, parts={"expert.route": evenly})
    for rank, sizes in zip(done.ledger.ranks, done.results, strict=True):
        sent = defaultdict(float)
        for call in rank.communications:
            sent[call.phase, call.group] += call.sent
        stage = rank.rank // 4 % 2
        expected = expected_bytes(stage, split, sizes)
        assert dict(sent) == pytest.approx(expected, rel=1e-12), f"rank {rank.rank}"
        assert 0 < sizes["dense padded"] - sizes["dense"] and sizes["expert padded"] >= sizes["expert"]
        messages = sum(
            call.op == "send" and call.phase == "pipeline" and call.group == "pp" for call in rank.communications
        )
        assert messages == M


def measured(layout, config, **options):
    """The ledger of one step."""
    layout = Layout.parse(layout)
    sizes = {"num_microbatches": M, "batch": M * B * layout.dp, "sequence": S, "bucket_bytes": 3_000}
    job = Job(layout, config, **(sizes | options))
    return run(one_step, layout.world_size, job, measure=True, parts={"expert.route": evenly})


def test_parameters_and_optimizer_keep_what_zero_says():
    """In bf16, K = 12: the optimizer's state over the ranks that hold a parameter, dense and expert ones apart."""
    done = measured("dp2,cp2,pp2,ep2", replace(CONFIG, dtype=torch.bfloat16))
    for rank, sizes in zip(done.ledger.ranks, done.results, strict=True):
        dense, expert = sizes["dense padded"], sizes["expert padded"]
        memory = rank.memory
        assert memory.optimizer == 12 * (dense / 4 + expert / 2)
        assert memory.parameters == 2 * (dense + expert)
        total = zero_bytes(dense, 4, 1) + zero_bytes(expert, 2, 1)
        states = memory.parameters + memory.optimizer + 2 * (dense + expert)
        assert states == pytest.approx(total, rel=1e-12)
        # Gradients are whole once, and while a bucket is reduced its copy and its piece are there too.
        assert 2 * (sizes["dense"] + sizes["expert"]) <= memory.gradients <= 2 * (dense + expert) * 1.5


def test_a_schedule_keeps_as_many_micro_batches_as_its_formula():
    """Bytes at the peak of the first stage: one micro-batch at a time, two, and then as many as the formula says.

    What all micro-batches share, such as the tables of the rotation, counts once; hence differences.
    """
    peaks = {}
    for schedule, m in [("naive", 5), ("gpipe", 2), ("gpipe", 5), ("1f1b", 5)]:
        done = measured("pp2", CONFIG, schedule=schedule, num_microbatches=m, batch=m * B)
        peaks[schedule, m] = done.ledger[0].memory.peak_saved
    one = peaks["naive", 5]
    more = peaks["gpipe", 2] - one
    assert 0.9 * one < more <= one
    assert peaks["gpipe", 5] - one == (peak_activations("gpipe", 2, 5) - 1) * more
    assert peaks["1f1b", 5] - one == (peak_activations("one_f_one_b", 2, 5) - 1) * more


@pytest.mark.parametrize("split", [False, True])
def test_full_recomputation_keeps_the_input_of_each_layer(split):
    """2sbh bytes in bf16 for each layer more and each micro-batch under way; a t-th of it where tokens are split."""
    peaks = []
    for layers in (4, 8):
        config = replace(CONFIG, layers=layers, dtype=torch.bfloat16)
        done = measured("cp2,tp2", config, sequence_parallel=split, recomputation="full", schedule="gpipe")
        peaks.append(done.ledger[0].memory.peak_saved)
    layer = activation_bytes(B, S // 2, H, HEADS, 2, split, "full") / (2 if split else 1)
    assert peaks[1] - peaks[0] == 4 * M * layer
