"""Description of a measurement's host."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

import torch


def describe_host() -> dict[str, str | int]:
    """Return CPU, cores, memory, GPUs and versions, for the head of every result."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    try:
        weft = metadata.version("weft")
    except metadata.PackageNotFoundError:  # run from a source tree
        weft = "source"
    host: dict[str, str | int] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": int(memory) >> 20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft,
    }
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        host |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        host |= {"cuda": torch.version.cuda or "", "nccl": nccl}
    return host


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
