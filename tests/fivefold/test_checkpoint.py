"""Checkpoints: saved on one layout, resumed on another, read by torch itself, and whole or not there at all."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fivefold import checkpoint, run
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.pieces import boxes
from fivefold.runtime.errors import RankKilled
from fivefold.train import Job, Trainer, batches, step
from hypothesis import given
from hypothesis import strategies as st

MODEL = GPTConfig(
    layers=3, hidden=24, heads=6, kv_heads=3, ffn=12, experts=4, vocabulary=257, dtype=torch.float64, seed=3
)  # 257 rows of vocabulary that no tp divides


def job(layout, **changes):
    sizes = {"batch": 16, "num_microbatches": 4, "sequence": 12, "bucket_bytes": 5000.0}  # buckets that cut rows
    return Job(Layout.parse(layout), MODEL, **sizes | changes)


def go_on(job, steps, folder=None, path=None):
    """Train up to `steps` steps, from a checkpoint or from the start; the losses, and the new checkpoint."""
    trainer = Trainer(job)
    first = checkpoint.load(trainer, path) if path else 0
    losses = [step(trainer, tokens).loss for tokens in batches(job, steps, first)]
    return losses, str(checkpoint.save(trainer, folder, steps)) if folder else ""


def one_process(steps):
    """Losses and values of a trainer that was never interrupted, by the names that a checkpoint gives them."""
    trainer = Trainer(job("dp1"))
    losses = [step(trainer, tokens).loss for tokens in batches(trainer.job, steps)]
    values = {}
    for shard in trainer.shards:
        for kind, state in (("parameter", shard.master), ("momentum", shard.momentum), ("variance", shard.variance)):
            for p, flat in zip(shard.parameters, state.split([p.numel() for p in shard.parameters]), strict=True):
                values[f"{kind}/{trainer.roles[p].name}"] = flat.view_as(p)
    return losses, values


@pytest.fixture(scope="module")
def uninterrupted():
    return run(one_process, 1, 5).results[0]


CHAIN = [
    ("cp2,tp3,ep2", {"sequence_parallel": True}, 2),
    ("pp2,tp3", {"schedule": "1f1b", "bucket_bytes": 1e9}, 3),
    ("pp2,cp2,ep2", {"schedule": "dualpipe"}, 4),
    ("dp4,ep2", {"bucket_bytes": 700.0, "recomputation": "full"}, 5),
]


def test_training_goes_on_on_another_layout_as_if_nothing_had_happened(uninterrupted, tmp_path):
    """In fp64, over four layouts that share no degree, ZeRO pieces of other sizes, schedules with stages held twice."""
    losses, path = [], None
    for layout, changes, until in CHAIN:
        made = job(layout, **changes)
        found, path = run(go_on, made.layout.world_size, made, until, str(tmp_path), path).results[0]
        losses += found
    assert losses == pytest.approx(uninterrupted[0], rel=1e-12, abs=0)
    assert checkpoint.read(path)["step"] == 5 and checkpoint.newest(tmp_path) == tmp_path / "step-00000005"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_and_finds_one_process_values(uninterrupted, tmp_path):
    """`torch.distributed.checkpoint` itself loads whole tensors from the pieces: those of one process, nothing else.

    With tp3 the vocabulary is padded, and with pp2 the tied embedding is held twice.
    """
    _, path = run(go_on, 6, job("pp2,tp3"), 5, str(tmp_path)).results[0]
    expected = uninterrupted[1]
    assert set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata) == set(expected)
    found = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def master_and_values(path):
    """What a trainer in bfloat16 has after loading: AdamW's master copy, and the parameters themselves."""
    trainer = Trainer(replace(job("dp2"), model=replace(MODEL, dtype=torch.bfloat16)))
    checkpoint.load(trainer, path)
    return [(shard.master, shard.piece, shard.full, shard.own.start) for shard in trainer.shards]


def test_in_half_precision_the_master_copy_is_what_is_saved(uninterrupted, tmp_path):
    """A checkpoint in fp64 goes on in bfloat16: masters are its values in float32, parameters those rounded."""
    _, path = run(go_on, 2, job("cp2"), 1, str(tmp_path)).results[0]
    shards = run(master_and_values, 2, path).results
    for master, piece, full, start in shards[0] + shards[1]:
        assert master.dtype == torch.float32 and full.dtype == torch.bfloat16
        assert not torch.equal(master, master.bfloat16().float())
        torch.testing.assert_close(piece, master.bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(full[start : start + len(piece)], piece[: len(full) - start], rtol=0, atol=0)
    for of_rank0, of_rank1 in zip(*shards, strict=True):
        assert torch.equal(of_rank0[2], of_rank1[2])


def save_and_die(job, folder, when):
    """A second save that a signal ends: while the pieces are written, before the index, or before the rename."""
    from torch.distributed.checkpoint import filesystem

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(job)
    checkpoint.save(trainer, folder, 1)
    if when == "pieces" and trainer.mesh.rank == 1:
        filesystem._write_item = die
    if when == "index":
        filesystem.FileSystemWriter.finish = die
    if when == "rename":
        checkpoint._rename = die
    checkpoint.save(trainer, folder, 2)


@pytest.mark.parametrize("when", ["pieces", "index", "rename"])
def test_a_save_that_was_killed_is_never_picked_up(when, tmp_path):
    """The one before is the newest; the next save clears away what is left, and is complete."""
    with pytest.raises(RankKilled):
        run(save_and_die, 2, job("dp2"), str(tmp_path), when)
    assert os.listdir(tmp_path).count(".writing-00000002") == 1
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"
    path = checkpoint.newest(tmp_path)
    _, saved = run(go_on, 1, job("dp1"), 2, str(tmp_path), str(path)).results[0]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    assert checkpoint.read(saved)["step"] == 2


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    """The first stays until the second is complete; then one of them is there, and it is the newest."""
    for _ in range(2):
        _, path = run(go_on, 1, job("dp1"), 1, str(tmp_path)).results[0]
    assert os.listdir(tmp_path) == ["step-00000001.1"] and str(checkpoint.newest(tmp_path)) == path


def test_what_cannot_be_resumed_is_one_clear_line(tmp_path):
    """No checkpoint, none that is complete, one of another model, a damaged record: all said before a rank starts."""
    with pytest.raises(ValueError, match=r"there is no complete checkpoint in .*: name another folder"):
        checkpoint.newest(tmp_path / "nowhere")
    (tmp_path / ".writing-00000007").mkdir()
    with pytest.raises(ValueError, match="there is no complete checkpoint"):
        checkpoint.newest(tmp_path)
    made = tmp_path / "step-00000003"
    made.mkdir()
    (made / checkpoint.RECORD).write_text(json.dumps({"step": 3, "model": checkpoint._settings(MODEL)}))
    assert checkpoint.check(made, replace(MODEL, seed=9, dtype=torch.float32))["step"] == 3
    with pytest.raises(ValueError, match="is of a model with layers 3, not 5, ffn 12, not 64: give the sizes"):
        checkpoint.check(made, replace(MODEL, layers=5, ffn=64))
    (made / checkpoint.RECORD).write_text("{")
    with pytest.raises(ValueError, match="is no checkpoint"):
        checkpoint.check(made, MODEL)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_elements_in_order(shape, data):
    """Read one after the other, contiguous, the boxes of a range are exactly its elements; and they are few."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    found = list(boxes(shape, start, stop))
    parts = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in found]
    assert torch.cat([numbers.new_empty(0), *(part.flatten() for part in parts)]).tolist() == list(range(start, stop))
    assert all(part.flatten().diff().eq(1).all() for part in parts) and len(found) <= 2 * len(shape) - 1
