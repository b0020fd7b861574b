"""Training on GPUs: the same numbers as on a CPU, over NCCL with one rank a GPU, and with ranks that share one.

Not yet run on a GPU: written for one, and read with care, but no machine with a GPU was at hand. `pytest -m gpu` on a
machine that has some runs them; those that need two GPUs are skipped where there is one.
"""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from fivefold import checkpoint, cli, run
from fivefold.layout import Layout
from fivefold.model import GPTConfig
from fivefold.train import Job, Trainer, batches, step, train

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

MODEL = GPTConfig(layers=4, hidden=32, heads=4, kv_heads=2, ffn=24, experts=4, vocabulary=256, dtype=torch.float64)
SIZES = {"batch": 8, "num_microbatches": 4, "sequence": 32}


@pytest.fixture(scope="module")
def on_a_cpu():
    return [report["loss"] for report in run(train, 1, Job(model=MODEL, **SIZES), 3).results[0]]


def losses_on_gpus(layout, model=MODEL, **changes):
    job = Job(Layout.parse(layout), model, **SIZES, device="cuda", **changes)
    return [
        [report["loss"] for report in of] for of in run(train, job.layout.world_size, job, 3, device="cuda").results
    ]


def test_one_gpu_gives_the_losses_of_a_cpu(on_a_cpu):
    """In fp64, where both are exact to rounding: every tensor has found its way to the GPU."""
    assert losses_on_gpus("dp1")[0] == pytest.approx(on_a_cpu, rel=1e-10)


def test_ranks_that_share_a_gpu_give_the_losses_of_one_process(on_a_cpu):
    """More ranks than GPUs, on all axes at once: operations are staged through gloo."""
    layout = next(name for name in ("cp2,pp2,tp2,ep2", "dp2,cp2,pp2,tp2,ep4") if Layout.parse(name).world_size > GPUS)
    for of_rank in losses_on_gpus(layout, sequence_parallel=True):
        assert of_rank == pytest.approx(on_a_cpu, rel=1e-10)


@two_gpus
@pytest.mark.parametrize(
    "layout, changes",
    [
        ("dp2,ep2", {}),
        ("cp2,ep2", {"recomputation": "selective"}),
        ("tp2", {"sequence_parallel": True}),
        ("pp2", {"schedule": "1f1b"}),
        ("pp2", {"schedule": "zb-v"}),
        ("pp2", {"schedule": "dualpipe"}),
    ],
)
def test_each_axis_over_nccl_gives_the_losses_of_one_process(on_a_cpu, layout, changes):
    """One rank a GPU, two of them."""
    for of_rank in losses_on_gpus(layout, **changes):
        assert of_rank == pytest.approx(on_a_cpu, rel=1e-10)


@pytest.mark.skipif(GPUS < 8, reason="needs eight GPUs")
@pytest.mark.parametrize("layout", ["cp2,pp2,tp2,ep2", "dp2,cp2,tp2,ep4"])
def test_eight_gpus(on_a_cpu, layout):
    """Two layouts that cover all five axes between them."""
    for of_rank in losses_on_gpus(layout, sequence_parallel=True):
        assert of_rank == pytest.approx(on_a_cpu, rel=1e-10)


def test_fused_attention_in_float32(on_a_cpu):
    """The kernels of the GPU: equal to explicit fp64 to float32's precision."""
    model = GPTConfig(**{**vars(MODEL), "dtype": torch.float32})
    assert losses_on_gpus("dp1", model, fused_attention=True)[0] == pytest.approx(on_a_cpu, rel=1e-4)


def test_bfloat16_with_fused_attention_learns(on_a_cpu):
    """What `--device cuda` does by default: losses stay within 2% of fp64's."""
    model = GPTConfig(**{**vars(MODEL), "dtype": torch.bfloat16})
    assert losses_on_gpus("dp1", model, fused_attention=True)[0] == pytest.approx(on_a_cpu, rel=0.02)


def train_and_save(job, folder):
    trainer = Trainer(job)
    for tokens in batches(job, 2):
        step(trainer, tokens)
    return str(checkpoint.save(trainer, folder, 2))


def go_on(job, path):
    trainer = Trainer(job)
    return [step(trainer, tokens).loss for tokens in batches(job, 3, checkpoint.load(trainer, path))]


def test_a_checkpoint_of_a_gpu_goes_on_on_cpus_and_back(on_a_cpu, tmp_path):
    """Saved by one device, the third step is that of an uninterrupted training on the other."""
    gpu, cpu = (Job(model=MODEL, device=device, **SIZES) for device in ("cuda", "cpu"))
    path = run(train_and_save, 1, gpu, str(tmp_path / "gpu"), device="cuda").results[0]
    assert run(go_on, 1, cpu, path).results[0] == pytest.approx(on_a_cpu[2:], rel=1e-10)
    path = run(train_and_save, 1, cpu, str(tmp_path / "cpu")).results[0]
    assert run(go_on, 1, gpu, path, device="cuda").results[0] == pytest.approx(on_a_cpu[2:], rel=1e-10)


def test_the_command_reports_tokens_a_second_and_mfu(tmp_path):
    """A step's model FLOPs over what the card reaches in a product of large matrices: a share, above nothing."""
    report = tmp_path / "report.json"
    sizes = ["--hidden", "512", "--heads", "8", "--kv-heads", "4", "--ffn", "1024", "--sequence", "512"]
    assert cli.main(["train", "--device", "cuda", "--steps", "6", "--json", str(report), *sizes]) == 0
    found = json.loads(report.read_text())
    assert found["gpus"] == 1 and found["model"]["dtype"] == "bfloat16"
    assert 0 < found["mfu"] < 1 and found["tokens_per_second"] > 0
    assert found["matmul_flops_per_second"] > 1e12


RING = """
import torch, torch.distributed as dist
from fivefold import run
from fivefold.context import pass_on

def program():
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((16_000_000,), float(rank), device="cuda")  # 64 MB: more than NCCL keeps for a receiver to come
    group = dist.new_group(list(range(n)), group_desc="cp")
    for _ in range(3):
        x = pass_on(x, group)()
    dist.all_reduce(x, group=group)
    return x[:2].cpu()

print(f"sum {run(program, {n}, device='cuda').results[0].tolist()}\\n", end="", flush=True)
"""


@two_gpus
def test_under_torchrun_ranks_that_all_send_first_do_not_wait_for_ever(tmp_path):
    """A ring of two over NCCL, without a supervisor that would order the messages: they go in one batch."""
    (tmp_path / "ring.py").write_text(RING.replace("{n}", "2"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, str(tmp_path / "ring.py")], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [1.0, 1.0]") == 2


def everything():
    """Collectives and messages on this rank's GPU, asynchronous ones too."""
    rank, n = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.arange(n * 4, device=device, dtype=torch.float32) + 100 * rank
    summed, traded, passed = x.clone(), torch.empty_like(x), torch.empty_like(x)
    work = dist.all_reduce(summed, async_op=True)
    dist.all_to_all_single(traded, x)
    work.wait()
    sending = dist.isend(x, (rank + 1) % n)
    dist.recv(passed, (rank - 1) % n)
    sending.wait()
    dist.barrier()
    return summed.cpu(), traded.cpu(), passed.cpu()


@pytest.mark.parametrize("n", [GPUS + 1, pytest.param(max(GPUS, 2), marks=two_gpus)])
def test_operations_on_gpus_give_what_they_give_on_a_cpu(n):
    """With ranks that share GPUs, through gloo, and with one rank a GPU, through NCCL."""
    rows = [torch.arange(n * 4, dtype=torch.float32) + 100 * rank for rank in range(n)]
    for rank, (summed, traded, passed) in enumerate(run(everything, n, device="cuda").results):
        assert torch.equal(summed, sum(rows))
        assert torch.equal(traded, torch.cat([row.chunk(n)[rank] for row in rows]))
        assert torch.equal(passed, rows[rank - 1])
