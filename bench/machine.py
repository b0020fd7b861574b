"""Results with where they come from: the date, the machine, its load and the command."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

_load_before = os.getloadavg()[0]


def origin() -> dict:
    """Load: jobs that wanted a core, as a mean over a minute, when this process began and now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "processor": _processor(), "system": platform.system()},
        "load": {"before": round(_load_before, 2), "after": round(os.getloadavg()[0], 2)},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(path: Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {_text(value)}" for name, value in (origin() | result).items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _text(value: object) -> str:
    """JSON with one line for each item of a list or dictionary."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    return json.dumps(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
