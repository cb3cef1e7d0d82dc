"""What must be alike on all hosts: versions, and the model's files, by digests that take no second."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import weft
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import on_gpus
from weft.engine.models.checkpoint import weight_files
from weft.engine.models.directory import config_file

BLOCK = 64 << 10
"""Bytes that are read at the begin, the middle and the end of each file of weights: its header, and samples."""
OF_A_HOST = ("model", "cpu_bind", "node_rank", "interface", "cluster_key", "master_addr", "join_timeout_s")
"""Options that each host may have its own of."""
OF_NODE_0 = (
    *("max_waiting", "max_choices", "max_restarts", "restart_window_s", "restart_backoff_s", "overlap", "seed"),
    "chat_template",
)
"""Options of the controller, which other hosts never need."""
ADVICE = {
    "weft": "install the same on every host",
    "torch": "install the same on every host",
    "python": "install the same on every host",
    "nccl": "install the same on every host",
    "devices": "give every host the same GPUs, or all --device cpu",
    "config.json": "copy the same model directory to every host",
    "tokenizer": "copy the same model directory to every host",
    "weights": "copy the same model directory to every host",
}


def facts(config: EngineConfig) -> dict[str, str]:
    """Of this host, by what they are called in errors. Raises ModelError where the weights are not there."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"weft": f"{weft.__version__} ({_source()})", "torch": str(torch.__version__), "python": python}
    if on_gpus(config):
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["devices"] = _devices(config)
    found["config.json"] = _of_files([config_file(config.model)])
    found["tokenizer"] = _of_files(sorted(config.tokenizer.glob("tokenizer*")))
    if config.load_format == "auto":
        found["weights"] = _of_files(weight_files(config.model))
    return found


def options(config: EngineConfig) -> dict[str, Any]:
    """Those that must be the same on every host, as messages carry them."""
    return {name: value for name, value in plain(config).items() if name not in OF_A_HOST + OF_NODE_0}


def plain(config: EngineConfig) -> dict[str, Any]:
    """All options in JSON's types."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return values


def difference(
    node: int, host: str, theirs: tuple[dict[str, str], dict[str, Any]], ours: tuple[dict[str, str], dict[str, Any]]
) -> str | None:
    """One line about the first thing that is not the same on an agent's host as on node 0; None where all is."""
    for name, value in ours[0].items():
        if (found := theirs[0].get(name)) != value:
            return f"node {node} ({host}) has other {name}: {found}, where node 0 has {value}; {ADVICE[name]}"
    for name, value in ours[1].items():
        if (found := theirs[1].get(name)) != value:
            option = f"--{name.replace('_', '-')}"
            return f"node {node} ({host}) was started with {option} {found}, node 0 with {value}; give both the same"
    return None


def of_this_host(config: EngineConfig) -> dict[str, Any]:
    """The options that a host keeps when node 0's are taken for all others."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name in OF_A_HOST}


def _devices(config: EngineConfig) -> str:
    """The kinds of GPUs that the ranks of this host take, or that they take none: other kinds compute other bits."""
    if not on_gpus(config):
        return "CPUs"
    names = Counter(torch.cuda.get_device_name(gpu) for gpu in range(config.ranks_of_host))
    return " + ".join(f"{count} × {name}" for name, count in names.items())


def _of_files(paths: list[Path]) -> str:
    """A digest of their names, sizes and sampled blocks."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for at in sorted({0, max(0, size // 2 - BLOCK // 2), max(0, size - BLOCK)}):
                file.seek(at)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:12]


def _source() -> str:
    """A digest of Weft's own source: a checkout may differ where the version does not."""
    root, digest = Path(weft.__file__).parent, hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cc", ".cu", ".h")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
