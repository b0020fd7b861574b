"""The same program under `torchrun`: same results, same ledger."""

import json
import subprocess
import sys

import torch
import torch.distributed as dist
from fivefold import run

PROGRAM = """
import atexit, glob, json, os, sys
sys.path.insert(0, {folder!r})
names = lambda: [open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm")]
left = {folder!r} + "/threads." + os.environ["RANK"]
atexit.register(lambda: open(left, "w").write(str([name for name in names() if "gloo" in name])))
from fivefold import run
from program import program
found = run(program, 3)
again = run(program, 3)
assert any("gloo" in name for name in names())
if os.environ.get("RANK") == "1":
    calls = [(c.op, c.group, c.bytes, c.peer) for c in found.ledger[1].communications]
    with open({folder!r} + "/found.json", "w") as file:
        json.dump([[r.tolist() for r in found.results], [r.tolist() for r in again.results], calls], file)
try:
    run(program, 4)
except ValueError as error:
    print("refused:", error)
"""

BODY = """
import torch, torch.distributed as dist

def program():
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank))
    if rank == 0:
        dist.send(x + 5, 1)
    elif rank == 1:
        dist.recv(x, 0)
    pair = dist.new_group([0, 1], group_desc="tp")
    if rank < 2:
        dist.all_reduce(x, group=pair)
    dist.all_reduce(x)
    return x
"""


def test_the_same_function_runs_under_torchrun(tmp_path):
    """Messages before any collective, a subgroup, two runs in one world, a clear word about a wrong size.

    And gloo's threads have ended before the interpreter does: one that lets go of a tensor later aborts the process.
    """
    (tmp_path / "program.py").write_text(BODY)
    (tmp_path / "main.py").write_text(PROGRAM.format(folder=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run([*command, str(tmp_path / "main.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results, again, calls = json.loads((tmp_path / "found.json").read_text())
    assert done.stdout.count("run asks for 4 ranks, torchrun started 3") == 3
    assert [path.read_text() for path in sorted(tmp_path.glob("threads.*"))] == ["[]"] * 3

    def same():
        scope: dict = {}
        exec(BODY, scope)
        return scope["program"]()

    expected = run(same, 3)
    assert results == again == [r.tolist() for r in expected.results]
    assert [tuple(c) for c in calls] == [(c.op, c.group, c.bytes, c.peer) for c in expected.ledger[1].communications]
    assert torch.equal(expected.results[0], torch.tensor([12.0, 12.0])) and not dist.is_initialized()
