"""What a measurement ran on."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def describe_host() -> dict[str, str | int]:
    """CPU, cores, memory, GPUs and versions, for the head of every result."""
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


def write_results(path: Path | None, what: str, found: Sequence[Any]) -> None:
    """Writes the `row()` of each figure, a line each, below the command that measured them and the host; nothing where
    there is no path, or nothing was found.
    """
    if path is None or not found:
        return
    head = json.dumps({"what": what, "host": describe_host()}, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(each.row()) for each in found)
    path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
