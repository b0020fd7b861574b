"""`fivefold train`: its table and report, held-out losses, checkpoints by option, and lines that say what cannot be."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.nn.functional as F
from fivefold import cli, run, text
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.train import Job, Trainer
from fivefold.train_loop import HELD_OUT_BATCHES, held_out_loss

SMALL = ["--layers", "2", "--hidden", "16", "--ffn", "16", "--batch", "4", "--micro-batches", "2", "--sequence", "16"]
MODEL = GPTConfig(layers=4, hidden=16, heads=4, kv_heads=2, ffn=8, experts=4, dtype=torch.float64)


def held_out(job):
    return held_out_loss(Trainer(job))


def plain_held_out(job):
    """In one process, the whole batch at once, by torch's cross entropy."""
    (stage,) = Trainer(job).stages.values()
    _, rest = text.split()
    losses = []
    for number in range(HELD_OUT_BATCHES):
        inputs, labels = text.sequences(rest, job.batch, job.sequence, seed=number)
        losses.append(F.cross_entropy(stage(inputs).flatten(0, 1), labels.flatten()).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "layout, schedule", [("pp2,tp2", "interleaved"), ("pp2", "dualpipe"), ("dp2,cp2,ep4", "1f1b"), ("pp2", "zb-v")]
)
def test_the_held_out_loss_is_that_of_one_process(layout, schedule):
    """Forward through every way in which schedules lay stages on ranks; equal on all of them."""
    sizes = {"model": MODEL, "batch": 8, "num_microbatches": 4, "sequence": 16}
    expected = run(plain_held_out, 1, Job(**sizes)).results[0]
    job = Job(Layout.parse(layout), schedule=schedule, **sizes)
    assert run(held_out, job.layout.world_size, job).results == pytest.approx(
        [expected] * job.layout.world_size, rel=1e-12, abs=0
    )


def test_the_command_prints_a_table_writes_a_report_and_goes_on_on_another_layout(tmp_path, capsys):
    """Six steps in two goes, on layouts that differ, are six steps in one; lines are rank 0's, without its number."""
    first = ["train", *SMALL, "--dtype", "float64", "--json", str(tmp_path / "report.json"), "--eval-every", "3"]
    folder = ["--checkpoint", str(tmp_path / "saved"), "--save-every", "2"]
    assert cli.main([*first, "--steps", "6"]) == 0
    whole = json.loads((tmp_path / "report.json").read_text())
    table = capsys.readouterr().out.splitlines()
    assert "dp1 on 1 rank (cpu), schedule 1f1b" in table and "[rank" not in "".join(table)
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"] and [len(row) for row in rows][2::3] == [5, 5]
    assert cli.main([*first, *folder, "--steps", "4", "--layout", "tp2,cp2", "--sequence-parallel"]) == 0
    half = json.loads((tmp_path / "report.json").read_text())
    assert cli.main([*first, *folder, "--steps", "6", "--layout", "pp2", "--schedule", "gpipe", "--resume"]) == 0
    rest = json.loads((tmp_path / "report.json").read_text())
    for name in ("loss", "held_out", "norm"):
        got = [row[name] for row in half["steps"] + rest["steps"]]
        if name == "held_out":
            del got[3]  # at its last step, which the whole run was not at
            assert got.pop(2) == pytest.approx(whole["steps"][2][name], rel=1e-12) and got[-1] is not None
            continue
        assert got == pytest.approx([row[name] for row in whole["steps"]], rel=1e-10, abs=0)
    assert rest["steps"][-1]["held_out"] == pytest.approx(whole["steps"][-1]["held_out"], rel=1e-12)
    assert rest["resumed_from"].endswith("step-00000004") and rest["checkpoint"].endswith("step-00000006")
    assert rest["tokens_per_second"] == pytest.approx(64 / rest["median_step_seconds"]) and rest["mfu"] is None
    assert sorted(os.listdir(tmp_path / "saved")) == [f"step-0000000{n}" for n in (2, 4, 6)]
    assert cli.main([*first, *folder, "--steps", "6", "--resume"]) == 2
    assert "has had 6 steps already: ask for more than that with --steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layout", "tp3"], "4 heads cannot be split over tp3: choose 1, 2 or 4"),
        (["--layout", "dp2,xx"], "'xx' is not an axis and its degree"),
        (["--layout", "dp3"], "16 sequences a step cannot be split over dp3: choose 1, 2, 4, 8 or 16"),
        (["--kv-heads", "3"], "4 heads cannot share 3 kv heads"),
        (
            ["--schedule", "dualpipe", "--layout", "pp3"],
            "DualPipe needs an even number of ranks, 3 were given",
        ),
        (["--device", "cuda"], "torch sees no GPU here: use device='cpu'"),
        (["--resume"], "--resume and --save-every need a folder: add --checkpoint DIR"),
        (["--checkpoint", "nowhere", "--resume"], "there is no complete checkpoint in nowhere"),
        (["--json", "no/such/folder.json"], "there is no folder no/such: make it first"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(arguments, says, capsys, monkeypatch):
    """Said before any rank starts, and by one process of torchrun's only."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("fivefold.runtime.ranks._server", lambda: pytest.fail("a rank was about to start"))
    assert cli.main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and error.startswith("fivefold: ")
    monkeypatch.setattr(cli, "SPEAKS_LAST", 0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["train", *arguments]) == 2
    assert capsys.readouterr().err == ""


def test_a_wrong_option_is_one_line(capsys):
    """Without the list of all options, which --help gives."""
    for arguments in (["--steps", "0"], ["--schedule", "2f2b"], ["--layers", "x"]):
        with pytest.raises(SystemExit) as error:
            cli.main(["train", *arguments])
        assert error.value.code == 2
        said = capsys.readouterr().err
        assert arguments[0] in said and said.count("\n") == 1


def test_the_same_command_runs_under_torchrun(tmp_path):
    """Two ranks of torchrun's: one table, one report, the losses of one process; a wrong size is said once."""
    report = tmp_path / "report.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = [*torchrun, "fivefold.cli", "train", *SMALL, "--steps", "2", "--json", str(report), "--layout"]
    done = subprocess.run([*command, "tp2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/s\n") == 2 and done.stdout.count("tp2 on 2 ranks") == 1
    found = [row["loss"] for row in json.loads(report.read_text())["steps"]]
    model = GPTConfig(layers=2, hidden=16, ffn=16)
    expected = run(losses, 1, Job(model=model, batch=4, num_microbatches=2, sequence=16)).results[0]
    assert found == pytest.approx(expected, rel=1e-5)
    done = subprocess.run([*command, "tp2,dp2"], capture_output=True, text=True, timeout=200)
    says = "layout dp2,tp2 needs 4 ranks, 2 were given: make the product of the degrees 2"
    assert done.returncode != 0 and done.stderr.count(says) == 1


def losses(job):
    from fivefold.train import train

    return [report.loss for report in train(job, 2)]


def test_ctrl_c_leaves_nothing(tmp_path):
    """In the middle of a training with ranks: exit 130, no process of it, no unfinished checkpoint."""
    command = [sys.executable, "-m", "fivefold.cli", "train", *SMALL, "--steps", "100000", "--layout", "dp2"]
    options = ["--checkpoint", str(tmp_path), "--save-every", "1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not process.stdout.readline().strip().startswith("3 "):
            assert process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 3
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
    deadline = time.monotonic() + 20
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in below):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("step-")]
