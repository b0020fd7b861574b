"""The planner's parts, against brute force over ranks, papers' tables and sums by hand."""

from itertools import product

import pytest
from fivefold import cost, mesh, plan
from fivefold.layout import Layout, LayoutError
from fivefold.plan.links import exchange_seconds, sharing
from fivefold.runtime import timing
from fivefold.runtime.cluster import Cluster
from fivefold.runtime.ledger import Communication

GPT3, LLAMA = plan.MODELS["gpt3-175b"], plan.MODELS["llama3-405b"]


def groups(axis: str, layout: Layout) -> list[list[int]]:
    if axis == "ep":
        return mesh.expert_groups(layout)
    return mesh.groups(layout, ("dp", "cp") if axis == "dp_cp" else axis)


def small_layouts() -> list[Layout]:
    degrees = [d for d in product((1, 2, 3, 4), repeat=4) if d[0] * d[1] * d[2] * d[3] <= 48]
    return [Layout(*d, ep) for d in degrees for ep in (1, 2, 3, 4) if d[0] * d[1] % ep == 0]


@pytest.mark.parametrize("gpus_per_server", [2, 3, 4, 6, 8])
def test_place_agrees_with_every_group_of_ranks(gpus_per_server: int) -> None:
    """An axis has the link inside exactly where no group of it, as `mesh` lists them, is on two servers."""
    cluster = Cluster(gpus_per_server=gpus_per_server)
    for layout in small_layouts():
        found = plan.place(layout, cluster)
        for axis in ("tp", "cp", "pp", "dp", "ep"):
            if getattr(layout, axis) == 1:
                assert axis not in found
                continue
            stays = all(len({r // gpus_per_server for r in group}) == 1 for group in groups(axis, layout))
            assert (found[axis] is cluster.inside) == stays, f"{layout}, {axis}, servers of {gpus_per_server}"


def test_sharing_counts_the_ranks_of_a_group_on_a_server() -> None:
    """Where all servers hold equally many ranks of a group, `sharing` is that number."""
    cluster = Cluster(gpus_per_server=8)
    for degrees in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4, 8)):
        layout = Layout(*degrees)
        for axis in ("tp", "cp", "pp", "dp", "dp_cp"):
            group = groups(axis, layout)[0]
            assert sharing(axis, layout, cluster) == sum(r // 8 == group[0] // 8 for r in group), f"{layout} {axis}"


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_an_exchange_takes_what_the_replay_says(op: str) -> None:
    """Seconds of a collective are those that `runtime.timing`, the replay's model, gives the same group."""
    cluster, size = plan.cluster("h100"), 1e8
    for layout in (Layout(dp=4, tp=8), Layout(dp=32), Layout(dp=8, pp=2, tp=2), Layout(dp=2, cp=4, tp=4)):
        for axis in ("tp", "dp", "cp", "dp_cp"):
            ranks = tuple(groups(axis, layout)[0])
            whole = size / len(ranks) if op == "all_gather" else size  # the ledger counts a shard
            calls = [Communication(0, op, axis, ranks, 0, whole) for _ in ranks]
            expected = timing.seconds(calls, cluster)
            assert exchange_seconds(op, axis, size, layout, cluster) == pytest.approx(expected), f"{layout} {axis}"


def test_parameters_are_those_that_papers_state() -> None:
    """Within 1% of the sizes in the names that papers give: 174.6, 529.6, 1008, 405, 70.6, 8.03 and 46.7 billion."""
    stated = {
        "gpt3-175b": 174.6, "gpt-530b": 529.6, "gpt-1t": 1008.0, "llama3-405b": 405, "llama3-70b": 70.6,
        "llama3-8b": 8.03, "mixtral-8x7b": 46.7,
    }  # fmt: skip
    for name, billions in stated.items():
        assert plan.MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01), name
    assert plan.MODELS["mixtral-8x7b"].active_parameters / 1e9 == pytest.approx(12.9, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("split", [False, True])
def test_a_gpt_layer_keeps_what_the_paper_s_table_says(recompute: str, split: bool) -> None:
    """`layer_bytes` of a GPT is `cost.activation_bytes`, table 2 of Korthikanti et al. 2022."""
    work = plan.Work(2048 * 8, 2048)
    software = plan.Software(flash=False, causal=False, lean=False, dropout=True)
    for t in (1, 2, 8):
        p = plan.Plan(Layout(tp=t), micro_batch=2, recompute=recompute, sequence_parallel=split)
        expected = cost.activation_bytes(2, 2048, 12288, 96, t, split, recompute)
        if recompute == "full" and split:
            expected /= t  # the table says 2sbh; with split tokens a rank keeps its own
        assert plan.layer_bytes(GPT3, p, work, software) == pytest.approx(expected)


def test_zero_splits_what_its_table_says() -> None:
    """States by stage are `cost.zero_bytes`, where a rank holds the whole model and one micro-batch."""
    model, work = plan.gpt(4, 512, 8), plan.Work(64 * 128, 128)
    software = plan.Software(gradient_bytes=2)
    for stage in (0, 1, 2):
        p = plan.Plan(Layout(dp=64), stage)
        memory = plan.fits(model, p, work, plan.cluster("a100"), software)
        states = memory.parameters + memory.gradients + memory.optimizer
        assert states == pytest.approx(cost.zero_bytes(sum(plan.rank_parameters(model, p)), 64, stage))


def test_gradients_that_are_added_up_are_whole() -> None:
    """With several micro-batches stage 2 keeps as much as stage 1."""
    work = plan.Work(1 << 22, 8192)
    one, two = (plan.fits(LLAMA, plan.Plan(Layout(8, 1, 16, 8), zero), work, plan.cluster()) for zero in (1, 2))
    assert one == two


def test_a_rank_holds_its_share_of_parameters() -> None:
    """Ranks of a pipeline and of TP together hold the model once; experts are shared over EP as well."""
    whole = sum(plan.rank_parameters(GPT3, plan.Plan()))
    assert whole == pytest.approx(GPT3.parameters, rel=1e-3)
    mixtral = plan.MODELS["mixtral-8x7b"]
    dense, experts = plan.rank_parameters(mixtral, plan.Plan(Layout(dp=8, ep=8)))
    assert dense + 8 * experts == pytest.approx(mixtral.parameters, rel=1e-3)


def test_llama_3_s_ends_have_fewer_layers() -> None:
    """126 layers on 16 stages of 8 chunks: 8 in the middle, 7 at the ends (Llama 3 report, section 3.3.2)."""
    assert plan.stage_layers(LLAMA, plan.Plan(Layout(pp=16, tp=8), chunks=8)) == (8, 7)


def test_seconds_of_a_pipeline_are_the_sum_by_hand() -> None:
    """Without memory passes and with instant links: m micro-batches of the slowest stage, and the others' once."""
    model = plan.Model(8, 64, 4, 4, 256, 128, gated=False, tied=True)
    work, software = plan.Work(16 * 32, 32), plan.Software(counted=False, causal=False, lean=False)
    cluster = Cluster(gpus_per_server=1 << 20)
    seconds = plan.step_seconds(model, plan.Plan(Layout(pp=4, dp=1)), work, cluster, software)
    layer = 2 * 32 * 12 * 64**2 + 4 * 32 * 32 * 64
    backward = 2 * 2 * 32 * 12 * 64**2 + 2.5 * 4 * 32 * 32 * 64
    head = 3 * 2 * 32 * 64 * 128
    rate = cluster.gpu.flops
    assert seconds.compute == pytest.approx(16 * (2 * (layer + backward) + head) / rate)
    messages = seconds.pp / 16
    assert seconds.bubble == pytest.approx(3 * (2 * (layer + backward) / rate + messages))


def test_search_finds_the_best_of_all_that_can_be() -> None:
    """The list has every plan that fits, once; it is in order; and each uses all GPUs and can be carried out."""
    model, work, cluster = plan.MODELS["llama3-8b"], plan.Work(1 << 19, 8192), plan.cluster("h100")
    found = plan.search(model, work, 16, cluster)
    assert len({choice.plan for choice in found}) == len(found) > 100
    assert all(a.seconds.total <= b.seconds.total for a, b in zip(found, found[1:], strict=False))
    for choice in found:
        plan.check(model, choice.plan, work)
        assert choice.plan.layout.world_size == 16 and choice.memory.fits
        assert choice.memory == plan.fits(model, choice.plan, work, cluster)
    degrees = {choice.plan.layout for choice in found}
    assert {Layout(16), Layout(2, tp=8), Layout(1, 2, tp=8), Layout(4, pp=4)} <= degrees


def test_search_spreads_experts() -> None:
    """Layouts with EP are among those of a mixture of experts, and never among those of a dense model."""
    work, cluster = plan.Work(1 << 19, 4096), plan.cluster("h100")
    assert {c.plan.layout.ep for c in plan.search(plan.MODELS["mixtral-8x7b"], work, 16, cluster)} == {1, 2, 4, 8}
    assert {c.plan.layout.ep for c in plan.search(plan.MODELS["llama3-8b"], work, 16, cluster)} == {1}


def test_nothing_fits_where_there_is_no_room() -> None:
    """405 billion parameters are not trained on 8 GPUs."""
    assert plan.search(LLAMA, plan.Work(1 << 20, 8192), 8, plan.cluster()) == []


def test_tensor_parallelism_over_two_servers_is_slower() -> None:
    """TP 16 over two servers of 8 takes longer for its exchanges than over one server of 16."""
    work, p = plan.Work(1 << 22, 8192), plan.Plan(Layout(dp=4, pp=8, tp=16))
    two, one = (plan.step_seconds(LLAMA, p, work, plan.cluster(gpus_per_server=g)) for g in (8, 16))
    assert two.tp > 1.3 * one.tp and two.compute == one.compute


def test_every_part_is_explained() -> None:
    """`explain` names each part that takes time, with its link, and each part of the memory."""
    mixtral, work, cluster = plan.MODELS["mixtral-8x7b"], plan.Work(1 << 22, 8192), plan.cluster("h100")
    p = plan.Plan(Layout(4, 2, 2, 2, 4), 1, "interleaved", 4, 1)
    text = plan.explain(mixtral, p, work, cluster)
    for word in (*plan.Seconds._fields, "parameters", "gradients", "optimizer", "activations", "NVLink 4", "NDR"):
        assert word in text, word


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (plan.Plan(Layout(tp=3)), "cannot be split over tp3"),
        (plan.Plan(Layout(dp=3)), "cannot be shared by dp3"),
        (plan.Plan(Layout(pp=64), chunks=4, schedule="interleaved"), "cannot fill 256 stages"),
        (plan.Plan(schedule="two_f_one_b"), "there is no schedule"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(wrong: plan.Plan, says: str) -> None:
    """`check` names the number to change."""
    with pytest.raises(LayoutError, match=says):
        plan.check(LLAMA, wrong, plan.Work(1 << 20, 8192))


def test_a_step_is_whole_sequences() -> None:
    """Tokens that are no whole number of sequences are an error with a number that is."""
    with pytest.raises(ValueError, match="take 16384"):
        plan.Work(17000, 8192)
