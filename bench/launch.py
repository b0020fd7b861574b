"""How long a run of 8 ranks takes from a notebook: fivefold.run beside torch's spawn and torchrun.

Each starts 8 ranks, joins a group, makes one all-reduce and ends; `run` does so with every call matched and recorded.
The three are measured in turn, inside one Jupyter kernel, and the table gives medians and their ratio to `run`.

    python bench/launch.py [--ranks 8] [--rounds 3] [--json FILE]
"""

import argparse
import json
import statistics
import textwrap
from pathlib import Path

import machine
import nbformat
from nbclient import NotebookClient

SETUP = """
import os, subprocess, sys, tempfile, time
import torch, torch.distributed as dist
from fivefold import run

folder = tempfile.mkdtemp()
open(folder + "/one.py", "w").write('''
import os, torch, torch.distributed as dist
def one(rank, ranks, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
''')
sys.path.insert(0, folder)
import one

def all_reduce():
    x = torch.ones(4)
    dist.all_reduce(x)
    return x

def with_run():
    assert run(all_reduce, RANKS).results[0].tolist() == [RANKS] * 4

def with_spawn():
    torch.multiprocessing.spawn(one.one, (RANKS, tempfile.mktemp(dir=folder)), nprocs=RANKS)

def with_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*command, folder + "/one.py"], check=True, capture_output=True)

def seconds(way):
    began = time.perf_counter()
    way()
    return time.perf_counter() - began

first = seconds(with_run)
"""
ROUND = "print([seconds(way) for way in (with_run, with_spawn, with_torchrun)])"


def measure(ranks: int, rounds: int) -> dict:
    """Seconds of each way in each round, and of the very first run, which waits for torch to be loaded."""
    cells = [f"RANKS = {ranks}", textwrap.dedent(SETUP), *[ROUND] * rounds, "print(first)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    printed = [json.loads(cell.outputs[0].text) for cell in notebook.cells[2:]]
    names = ("fivefold.run", "torch.multiprocessing.spawn", "torchrun")
    found = {name: [values[i] for values in printed[:-1]] for i, name in enumerate(names)}
    return {"ranks": ranks, "seconds": found, "first_run": printed[-1]}


def table(result: dict) -> str:
    median = {name: statistics.median(values) for name, values in result["seconds"].items()}
    ours = median["fivefold.run"]
    lines = [
        f"{result['ranks']} ranks: start, one all-reduce, end; median of {len(result['seconds']['torchrun'])} rounds"
    ]
    lines += [f"  {name:30}{value:8.2f} s   {value / ours:6.1f} x" for name, value in median.items()]
    return "\n".join([*lines, f"  the first run of a notebook took {result['first_run']:.1f} s"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", help="write the figures to this file")
    given = options.parse_args()
    result = measure(given.ranks, given.rounds)
    print(table(result))
    if given.json:
        machine.write(Path(given.json), result)


if __name__ == "__main__":
    main()
