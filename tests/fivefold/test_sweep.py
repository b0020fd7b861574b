"""A sample of bench/sweep.py, and what it rests on: one process's training equals plain torch's."""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fivefold import run
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.train import SCHEDULES, Job, batches

ROOT = Path(__file__).parents[2]


def load(path):
    """A file that is no module of a package; what it imports may stand beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


sweep, oracle = load(ROOT / "bench/sweep.py"), load(ROOT / "tests/fivefold/test_model.py")


def plain_name(name):
    """What the oracle calls a weight of the library."""
    if name in ("embedding.weight", "head.weight"):
        return name.removesuffix(".weight")
    if name.startswith("norm."):
        return "norm w" if name.endswith("weight") else "norm b"
    _, layer, rest = name.split(".", 2)
    return f"{layer} {oracle.NAMES[rest][0]}"


def plainly_trained(job, steps):
    """torch's own optimizer and clipping on the model in plain torch: losses, norms and weights."""
    weights, optimizer, reports = {}, None, []
    config, m = job.model, job.num_microbatches
    for tokens in batches(job, steps):
        tokens, total = tokens % config.vocabulary, 0.0
        for part in tokens.chunk(m):
            logits, balances, weights = oracle.plain_gpt(config, part[:, :-1], weights)
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / m
            (loss + config.balance_weight * sum(balances) / len(balances) / m).backward()
            total += loss.item()
        optimizer = optimizer or torch.optim.AdamW(weights.values(), lr=job.lr, weight_decay=job.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        reports.append((total, norm.item()))
    return reports, {name: weight.detach() for name, weight in weights.items()}


@pytest.fixture
def one_thread():
    """On matrices as small as these, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("tied, m, max_norm", [(True, 3, 0.5), (False, 2, 100.0)])
def test_one_process_trains_as_plain_torch_does(tied, m, max_norm, one_thread):
    """Five steps: losses, norms and every weight in fp64, with clipping that bites and that does not.

    The oracle has neither a line of the library's model nor one of its optimizer.
    """
    config = GPTConfig(
        layers=3, hidden=24, heads=6, kv_heads=2, ffn=20, vocabulary=67, tied=tied, dtype=torch.float64, seed=3
    )
    job = Job(model=config, num_microbatches=m, batch=2 * m, sequence=20, max_norm=max_norm, weight_decay=0.1)
    result = run(sweep.trained, 1, job, 5).results[0]
    reports, expected = plainly_trained(job, 5)
    assert any(norm > max_norm for _, norm in reports) == (max_norm < 1)
    torch.testing.assert_close(result["steps"], reports, rtol=1e-10, atol=0)
    weights, _ = sweep.whole_weights([result], config)
    assert {plain_name(name) for name in weights} == set(expected)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[plain_name(name)], rtol=0, atol=1e-10, msg=lambda x, n=name: n + x)


def sample(cases, number):
    """A few cases that show every value of every feature that so many can show."""
    left = {item for case in cases for item in case.features.items()}
    for _ in range(number):
        best = max(cases, key=lambda case: len(left.intersection(case.features.items())))
        left.difference_update(best.features.items())
        yield best


EIGHT = list(sample([case for case in sweep.covering() if case.layout.world_size == 8], 10))
ALL_AXES = sweep.Case(Layout(2, 2, 2, 2, 4), "zb-h1", "selective", True, True, False)


@pytest.mark.parametrize("case", [*EIGHT, ALL_AXES], ids=str)
def test_every_layout_trains_as_one_process(case):
    """Losses and norms of steps, and the weights at the end, to 1e-10: every schedule, option and degree up to 8."""
    found = sweep.compare(case, steps=2)
    assert max(found[what] for what in sweep.MEASURES) <= sweep.TOLERANCE, found


def test_copies_of_a_weight_stay_equal_to_the_bit():
    """A tied embedding is on two stages, with other parameters beside it on each; three ranks add up its gradient."""
    case = sweep.Case(Layout(dp=3, pp=2, tp=2), "1f1b", "none", True, True, False)
    assert sweep.compare(case, steps=4)["copies"] == 0


def test_the_sample_shows_everything():
    """Each schedule and each option, and every degree of every axis that 8 ranks have."""
    for kind, values in {
        "schedule": set(SCHEDULES), "recomputation": {"none", "selective", "full"}, "sequence_parallel": {False, True},
        "tied": {False, True}, "fused": {False, True}, "ep": {1, 2, 4},
        **dict.fromkeys(("dp", "cp", "pp", "tp"), {1, 2, 4, 8}),
    }.items():  # fmt: skip
        assert {case.features[kind] for case in EIGHT} == values


def test_the_sweep_has_every_layout():
    """Counted by hand: 8 = 2·2·2 is dealt out to four axes in 20 ways, with EP 1, 2 and 4 where it divides in 46."""
    cases = sweep.covering()
    eight = {case.layout for case in cases if case.layout.world_size == 8}
    sixteen = {replace(case.layout, ep=1) for case in cases if case.layout.world_size == 16}
    assert len(eight) == 46 and len({replace(layout, ep=1) for layout in eight}) == 20
    assert len(sixteen) == 35 and sum(case.layout.world_size == 16 for case in cases) >= 40
    options = {("schedule", name) for name in SCHEDULES}
    covered = set().union(*(case.covers for case in cases))
    assert all((schedule, ("ep", ep), ("recomputation", how)) in covered for schedule in options for ep in (1, 2, 4)
               for how in ("none", "selective", "full"))  # fmt: skip


def not_over_tp(role, mesh, sequence_parallel):
    """Leaves out the sum over tp of what sequence parallelism makes partial."""
    return [mesh.ep_dp if role.expert else mesh.dp_cp]


def each_counts(shards, copies, max_norm, mesh):
    """Counts a gradient as often as ranks have it."""
    from fivefold.zero import clip_grad_norm

    return clip_grad_norm([shard.gradient for shard in shards], max_norm, mesh.world)


@pytest.mark.parametrize("part, wrong", [("train.gradient_groups", not_over_tp), ("train.clip", each_counts)])
def test_the_comparison_sees_a_wrong_trainer(part, wrong, monkeypatch):
    """The sweep cannot pass for want of looking: norms and weights differ."""
    case = sweep.Case(Layout(tp=2), "1f1b", "none", True, True, False)
    expected = sweep.reference(sweep.on_one_process(sweep.job(case)), 2)
    monkeypatch.setattr(sweep, "reference", lambda job, steps: expected)
    monkeypatch.setattr(sweep, "run", partial(run, parts={part: wrong}))
    found = sweep.compare(case, steps=2)
    assert found["norm"] > 1e-6 and found["weights"] > 1e-6
