"""Our schedules in the eyes of `torch.distributed.pipelining`: its lists, its checks, its executor.

Run as a script, this file is the executor's side: four processes over gloo, driven by a test below.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fivefold.pipeline import (
    Receive,
    Schedule,
    Send,
    gpipe,
    in_order,
    interleaved,
    naive,
    one_f_one_b,
    order_messages,
    straight,
    zb_h1,
    zb_h2,
    zb_v,
)
from torch.distributed.pipelining import PipelineStage, schedules

SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, p, 2 * p - 1, 2 * p, 3 * p + 2)]


def parsed(schedule: Schedule) -> dict[int, list]:
    """The lists as torch reads them from our CSV."""
    rows = schedule.to_csv().splitlines()
    return {rank: [schedules._Action.from_str(word) for word in row.split(",")] for rank, row in enumerate(rows)}


def without_gaps(actions: list) -> list:
    return [action for action in actions if action is not None]


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_zb_v_is_torchs(p, extra):
    """Action for action the list of ScheduleZBVZeroBubble."""
    m = 2 * p - 1 + extra
    torchs = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    for rank, actions in parsed(zb_v(p, m)).items():
        assert actions == without_gaps(schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(torchs, rank))


@pytest.mark.parametrize("p", range(2, 7))
@pytest.mark.parametrize(("rounds", "v"), [(1, 1), (1, 2), (2, 2), (3, 4)])
def test_interleaved_is_torchs(p, rounds, v):
    """Action for action the list of ScheduleInterleaved1F1B."""
    torchs = SimpleNamespace(pp_group_size=p, n_local_stages=v, microbatches_per_round=p, _n_microbatches=rounds * p)
    for rank, actions in parsed(interleaved(p, rounds * p, v)).items():
        theirs = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, rank)
        assert actions == [a for a in without_gaps(theirs) if a.computation_type != schedules.REDUCE_GRAD]


def every_schedule() -> list[Schedule]:
    """All that have one copy of each stage; torch knows no stage on two ranks, so not DualPipe."""
    plain = [make(p, m) for make in (naive, gpipe, one_f_one_b, zb_h1, zb_h2) for p, m in SIZES]
    looped = [interleaved(p, p * k, v) for p in range(1, 6) for k in (1, 2) for v in (1, 2, 3)]
    return plain + looped + [zb_v(p, m) for p, m in SIZES if m >= 2 * p - 1]


def torch_refuses(schedule: Schedule) -> bool:
    """Whether torch's own checks find a list that cannot be run."""
    lists, rank_of = parsed(schedule), schedule.routes[0].__getitem__
    try:
        schedules._validate_schedule(lists, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
        lists = schedules._add_send_recv(lists, rank_of, schedule.num_stages)
        schedules._simulate_comms_compute(lists, rank_of, schedule.num_stages)
    except (AssertionError, ValueError):
        return True
    return False


def test_torchs_checks_pass():
    """Its validation, its own insertion of messages and its dry run take every schedule."""
    assert [str(schedule) for schedule in every_schedule() if torch_refuses(schedule)] == []


def test_torchs_checks_refuse_broken_lists():
    """So that the test above can fail: a backward before its forward, a missing forward, a circle of two ranks."""
    words = [
        ["B F F B", "F B F B"],
        ["F F B B", "F B B"],
        ["F B F B", "F F B B"],
    ]
    for lists in words:
        ranks = [in_order(text.split(), [rank]) for rank, text in enumerate(lists)]
        assert torch_refuses(Schedule("broken", 2, straight(2), ranks))


def test_torchs_dry_run_takes_our_messages():
    """order_messages, written in torch's names, comes to its end in torch's simulation too."""
    for schedule in every_schedule():
        whole, lists = order_messages(schedule), {}
        for rank, actions in enumerate(whole.actions):
            lists[rank] = [schedules._Action.from_str(torch_name(action)) for action in actions]
        schedules._simulate_comms_compute(lists, schedule.routes[0].__getitem__, schedule.num_stages)


def torch_name(action) -> str:
    """Torch names a receive by the stage that receives."""
    if not isinstance(action, Send | Receive):
        return str(action)
    forward = action.value.kind == "activation"
    stage = action.value.stage + (0 if isinstance(action, Send) else 1 if forward else -1)
    verb = "SEND" if isinstance(action, Send) else "RECV"
    return f"{stage}{verb}_{'F' if forward else 'B'}{action.value.microbatch}"


def test_torchs_executor_gets_the_gradients_of_one_process():
    """Six schedules on four real processes: every parameter's gradient is that of one process, in fp64."""
    chosen = [gpipe(4, 2), one_f_one_b(4, 8), interleaved(4, 4, 2), zb_h1(4, 6), zb_h2(4, 8), zb_v(4, 8)]
    jobs = [(s.to_csv(), [s.stages_of(r) for r in range(4)], s.num_stages, s.num_microbatches) for s in chosen]
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(jobs), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 4
    assert all(error < 1e-12 for of_rank in errors for error in of_rank)


def main() -> None:
    """Read jobs, run each on four forked ranks, print every rank's largest gradient error for each job."""
    jobs = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("fork").SimpleQueue()
        mp.start_processes(serve, (f"file://{folder}/store", jobs, queue), nprocs=4, start_method="fork")
        print(json.dumps([queue.get() for _ in range(4)]))


def serve(rank: int, store: str, jobs: list, queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    queue.put([gradient_error(csv, mine[rank], *sizes) for csv, mine, *sizes in jobs])
    dist.destroy_process_group()


def gradient_error(csv: str, mine: list[int], num_stages: int, num_microbatches: int) -> float:
    """Run one schedule with torch's executor; the largest difference from the dense gradients of this rank's stages."""
    torch.manual_seed(0)
    dense = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()) for _ in range(num_stages))
    )
    dense = dense.double()
    x, y = torch.randn(2, 2 * num_microbatches, 5, dtype=torch.float64)
    torch.nn.functional.mse_loss(dense(x), y).backward()
    expected = {s: [p.grad.clone() for p in dense[s].parameters()] for s in mine}
    dense.zero_grad()
    stages = [PipelineStage(dense[s], s, num_stages, torch.device("cpu")) for s in mine]
    runtime = schedules._PipelineScheduleRuntime(stages, num_microbatches, torch.nn.functional.mse_loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv", delete=False) as file:
        file.write(csv)
    runtime._load_csv(file.name, format="compute_only")
    os.unlink(file.name)
    runtime.step(*([x] if 0 in mine else []), target=y if num_stages - 1 in mine else None)
    found = {s: [p.grad for p in dense[s].parameters()] for s in mine}
    return max(float((a - b).abs().max()) for s in mine for a, b in zip(found[s], expected[s], strict=True))


if __name__ == "__main__":
    main()
