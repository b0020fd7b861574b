"""The launcher: what comes back, what is printed, and that nothing of a run outlives it."""

import contextlib
import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist
from fivefold import run
from fivefold.runtime import ranks, supervisor
from fivefold.runtime.errors import RankFailed


@dataclass
class Point:
    x: int
    y: torch.Tensor


def give_everything(scale):
    rank = dist.get_rank()
    return {
        "plain": [None, True, rank, 0.1, float("inf"), "é", b"\x00\xff", (1, [2])],
        3: torch.full((2, 3), rank * scale, dtype=torch.bfloat16),
        "point": Point(rank, torch.arange(3)[::2]),
        "view": torch.arange(12.0).view(3, 4).t(),
        "empty": torch.empty(0, 5),
    }


def test_plain_data_and_tensors_come_back_exactly():
    """Types, dtypes, shapes and non-contiguous values survive the way back."""
    results = run(give_everything, 3, 2).results
    for rank, result in enumerate(results):
        assert result["plain"] == [None, True, rank, 0.1, float("inf"), "é", b"\x00\xff", (1, [2])]
        assert torch.equal(result[3], torch.full((2, 3), rank * 2, dtype=torch.bfloat16))
        assert result["point"]["x"] == rank and torch.equal(result["point"]["y"], torch.tensor([0, 2]))
        assert torch.equal(result["view"], torch.arange(12.0).view(3, 4).t())
        assert result["empty"].shape == (0, 5)


def test_output_is_printed_by_line_with_its_rank(capfd):
    """Python's prints, what C code writes and what a child writes, none of it on stderr."""

    def talk():
        print("a line", dist.get_rank())
        sys.stderr.write("to stderr\n")
        os.write(1, b"from below\n")
        subprocess.run(["echo", "from a child"], check=True)
        print("no newline", end="")

    output = run(talk, 2).output
    for rank in (0, 1):
        lines = [line for who, line in output if who == rank]
        assert lines == [f"a line {rank}", "to stderr", "from below", "from a child", "no newline"]
    out, err = capfd.readouterr()
    assert "[rank 1] from below\n" in out and err == ""


def test_a_flood_of_output_is_cut_and_the_run_goes_on():
    """The first megabytes are kept, the rest is read and dropped."""

    def flood():
        for _ in range(50):
            print("x" * 100_000)
        return 7

    found = run(flood, 1, echo=False)
    assert found.results == [7]
    assert found.output[-1][1].startswith("… output cut")
    assert sum(len(line) for _, line in found.output) < 3_000_000


def test_ranks_have_one_thread_the_callers_folder_environment_and_path(monkeypatch, tmp_path):
    """A rank sees what the caller sees, as it is at the moment of the call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_SETTING", "seen")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_module_beside.py").write_text("value = 42")

    def look():
        import a_module_beside

        return torch.get_num_threads(), os.getcwd(), os.environ["A_SETTING"], a_module_beside.value, os.environ["RANK"]

    assert run(look, 2).results == [(1, str(tmp_path), "seen", 42, "0"), (1, str(tmp_path), "seen", 42, "1")]


def test_large_arguments_and_results_pass():
    """More than any socket buffer holds, both ways."""
    big = torch.arange(3_000_000.0)
    result = run(lambda x: (x + dist.get_rank(), "y" * 2_000_000), 2, big).results
    assert torch.equal(result[1][0], big + 1) and len(result[0][1]) == 2_000_000


def below(pid):
    """Every process below `pid`, zombies left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children(recursive=True)
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return []


def files_of(server):
    """What the runs of a fork server have left in the folder for temporary files."""
    return glob.glob(os.path.join(tempfile.gettempdir(), f"fivefold-{server}-*"))


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def stubborn():
    """A rank that ignores SIGTERM in a session of its own, with a child that left it in another."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid() if os.getpid() != os.getpgid(0) else None
    program = "import os,signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        os._exit(0)
    time.sleep(0.2)


@pytest.mark.parametrize("then", ["returns", "raises"])
def test_nothing_outlives_a_run(then):
    """Not a rank, not its grandchild in a session of its own, not a file."""

    def program():
        stubborn()
        if then == "raises":
            raise ValueError("stop")

    run(len, 1, ())  # the server is up
    server = ranks._current[0].process.pid
    with contextlib.suppress(RankFailed):
        run(program, 2)
    assert eventually(lambda: below(server) == [])
    assert eventually(lambda: files_of(server) == [])


CALLER = """
import os, sys, time, torch.distributed as dist
from fivefold import run
from fivefold.runtime import ranks, supervisor
def hold():
    print("holding", flush=True)
    time.sleep(600)
run(len, 1, ())
print("server", ranks._current[0].process.pid, flush=True)
try:
    run(hold, 2, timeout=500)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    time.sleep(600 if "stay" in sys.argv else 0)
"""


def start_caller(*arguments):
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CALLER), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    server = int(caller.stdout.readline().split()[1])
    assert "holding" in caller.stdout.readline() and "holding" in caller.stdout.readline()
    return caller, server


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_caller_leaves_nothing(how):
    """As when a notebook's kernel is killed: its whole process group, with no time to clean up."""
    caller, server = start_caller()
    processes = [psutil.Process(server), *below(server)]
    assert len(processes) == 4
    os.killpg(caller.pid, how)
    caller.wait()
    assert eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))


def test_an_interrupt_ends_the_run_and_the_caller_goes_on():
    """As when a notebook's cell is interrupted: the run is gone, the server stays for the next one."""
    caller, server = start_caller("stay")
    os.kill(caller.pid, signal.SIGINT)
    assert caller.stdout.readline() == "interrupted\n"
    # At once: what the caller cleans up now, no rank can write again. The supervisor may be on its last way out.
    assert len(below(server)) <= 1
    assert eventually(lambda: below(server) == [])
    assert psutil.pid_exists(server)
    caller.kill()
    caller.wait()
    assert eventually(lambda: not psutil.pid_exists(server))


def test_a_killed_server_is_replaced():
    """The next run starts a new one."""
    run(len, 1, ())
    server = ranks._current[0].process
    server.kill()
    server.wait()
    assert run(dist.get_world_size, 2).results == [2, 2]


def test_a_killed_supervisor_is_a_clear_error_and_leaves_nothing():
    """A rank can kill its parent; the caller hears of it, and no rank stays."""

    def murder():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(Exception, match="supervisor was killed"):
        run(murder, 2)
    assert eventually(lambda: below(ranks._current[0].process.pid) == [])


def test_many_runs_leave_no_process_no_file_no_descriptor_and_no_growing_memory():
    """A long session in one notebook: the tenth run and the last one leave the same behind."""

    def state():
        gc.collect()
        server = psutil.Process(ranks._current[0].process.pid)
        eventually(lambda: below(server.pid) == [])
        files = len(files_of(server.pid))
        own = psutil.Process()
        return server.num_fds(), own.num_fds(), own.num_threads(), files, server.memory_info().rss

    def everything_is_loaded():
        return set(supervisor.LATER) <= set(run(lambda: list(sys.modules), 1).results[0])

    while not everything_is_loaded():  # the server loads it while it is idle, and grows by that, once
        time.sleep(1)
    for _ in range(10):
        run(dist.get_rank, 2)
    first = state()
    for _ in range(40):
        run(dist.get_rank, 2)
    last = state()
    grown = [after - before for before, after in zip(first[:4], last[:4], strict=True)]
    assert max(grown) <= 2, grown  # 40 runs would leave 40 of a thing
    assert last[4] - first[4] < 3_000_000


def test_runs_at_once_do_not_meet():
    """Two notebooks, or two threads, at the same time: each has its own ranks, store and report."""
    from concurrent.futures import ThreadPoolExecutor

    def add(k):
        x = torch.tensor([float(k)])
        dist.all_reduce(x)
        return x.item()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: run(add, 3, k).results, range(8)))
    assert found == [[3.0 * k] * 3 for k in range(8)]
