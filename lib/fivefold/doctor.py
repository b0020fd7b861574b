"""What this machine can do: the course needs some of it, the rest is good to have."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it works, what was seen, and whether the course needs it."""

    name: str
    works: bool
    seen: str
    needed: bool = True


class Missing(Exception):
    """Something does not work; the message says what was seen and what to do."""


def examine() -> list[Finding]:
    """Look at everything, in the order in which one thing needs another."""
    return [
        _finding("Python", _python),
        _finding("torch", _torch),
        _finding("ranks", _ranks),
        _finding("notebooks", _notebooks),
        _finding("grading", _grading),
        _finding("machine", _machine, needed=False),
        _finding("GPUs", _gpus, needed=False),
        _finding("sandbox", _sandbox, needed=False),
    ]


def table(findings: list[Finding]) -> str:
    """A line for each finding, and a last one that says what follows from them."""
    wide = max(len(finding.name) for finding in findings) + 2
    lines = [f"  {_mark(finding)} {finding.name.ljust(wide)}{finding.seen}" for finding in findings]
    broken = [finding.name for finding in findings if finding.needed and not finding.works]
    end = f"The course cannot run here yet: see {', '.join(broken)}." if broken else "The course runs on this machine."
    return "\n".join([*lines, "", end])


def _mark(finding: Finding) -> str:
    return "✓" if finding.works else "✗" if finding.needed else "–"


def _finding(name: str, look: Callable[[], str], needed: bool = True) -> Finding:
    try:
        return Finding(name, True, look(), needed)
    except Exception as error:  # whatever is wrong with a machine is a finding
        seen = str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"
        return Finding(name, False, " ".join(seen.split())[:300], needed)


def _python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _torch() -> str:
    import torch
    import torch.distributed as dist

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise Missing(f"{torch.__version__} is too old: pip install 'torch>=2.9'")
    if not dist.is_available() or not dist.is_gloo_available():
        raise Missing(f"{torch.__version__} was built without gloo: install torch from pip or conda-forge")
    known = {"gloo": True, "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return f"{torch.__version__}, backends {', '.join(name for name, available in known.items() if available)}"


def _ranks() -> str:
    from fivefold import run

    begin = time.perf_counter()
    run(_sum, 2, echo=False)  # the first run starts the fork server
    middle = time.perf_counter()
    results = run(_sum, 4, echo=False).results
    if results != [6.0] * 4:
        raise Missing(f"four ranks summed 0 to 3 and got {results}")
    return f"4 ranks started and reduced in {time.perf_counter() - middle:.2f} s, after {middle - begin:.1f} s once"


def _sum() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def _notebooks() -> str:
    _require("jupyterlab", "ipykernel", "ipywidgets")
    from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager

    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    kernel = KernelSpecManager().get_kernel_spec(NATIVE_KERNEL_NAME).argv[0]
    if os.path.isabs(kernel) and os.path.dirname(kernel) != os.path.dirname(sys.executable):
        raise Missing(
            f"the kernel {NATIVE_KERNEL_NAME} starts {kernel}: run {sys.executable} -m ipykernel install --sys-prefix"
        )
    return f"JupyterLab {_version('jupyterlab')}, kernel {NATIVE_KERNEL_NAME}"


def _grading() -> str:
    _require("papermill", "nbgrader", "nbclient", "nbformat", "jupytext")
    return f"papermill {_version('papermill')}, nbgrader {_version('nbgrader')}"


def _machine() -> str:
    memory = psutil.virtual_memory()
    free = shutil.disk_usage(os.path.expanduser("~")).free
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    seen = f"{cores} cores, {memory.available / 1e9:.0f} GB of memory free, {free / 1e9:.0f} GB of disk free"
    if memory.available < 2e9:
        raise Missing(f"{seen}: eight ranks need about 2 GB of memory")
    return seen


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Missing("none; only the last lesson can use them, and it runs without")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _sandbox() -> str:
    """Only a teacher needs it, for grading what others wrote."""
    program = shutil.which("bwrap")
    if not program:
        raise Missing("bubblewrap is not installed; a teacher who grades a class needs it (package bubblewrap)")
    probe = [program, "--unshare-user", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
    if done.returncode:
        raise Missing(f"bubblewrap may not make namespaces here ({done.stderr.strip()}): allow user namespaces")
    return "bubblewrap works"


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Missing(f"{', '.join(missing)} not installed: run make setup, or pip install {' '.join(missing)}")


def _version(package: str) -> str:
    return importlib.metadata.version(package)
