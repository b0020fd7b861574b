"""The Slurm script, as far as a machine without Slurm and GPUs can show it: two pretended nodes, on CPUs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
SMALL = ["--layers", "2", "--hidden", "16", "--ffn", "16", "--batch", "4", "--micro-batches", "2", "--sequence", "16"]
STAND_INS = {
    "scontrol": "printf 'localhost\\nother\\n'",
    "srun": 'for node in 1 2; do "$@" & pids="$pids $!"; done; for pid in $pids; do wait $pid || exit 1; done',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
}


@pytest.fixture
def slurm(tmp_path):
    """What Slurm would say in the environment of a job on two nodes, and stand-ins for its commands."""
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "2"}
    own = {"PATH": path, "DEVICE": "cpu", "LAYOUT": "dp2,tp2", "PORT": str(port), "SLURM_SUBMIT_DIR": str(tmp_path)}
    return os.environ | job | own


def test_two_nodes_train_together_and_go_on_from_their_checkpoint(slurm, tmp_path):
    """Four ranks on two nodes; stopped after two steps and queued again, the job goes on with the third."""
    report = tmp_path / "report.json"
    for steps in (2, 3):
        command = ["bash", str(SCRIPT), *SMALL, "--steps", str(steps), "--json", str(report)]
        done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("dp2,tp2 on 4 ranks") == 1
    found = json.loads(report.read_text())
    assert [row["step"] for row in found["steps"]] == [3]
    assert found["resumed_from"] == str(tmp_path / "checkpoints" / "step-00000002")


def test_the_script_is_sound():
    """It parses, asks Slurm for one task a node, and says that it waits for GPUs."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text()
    assert "#SBATCH --ntasks-per-node=1\n" in text and "Not yet run on GPUs" in text
