"""Comparison of hosts: versions and options, and the model's files, by digests that cost less than a second."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

import weft
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import on_gpus
from weft.engine.models.config_json.directory import config_file
from weft.engine.models.weights.checkpoint import weight_files

BLOCK = 64 << 10
"""Bytes read at the beginning, the middle and the end of each weight file: its header, and samples."""
SOURCES = (".py", ".cc", ".h", ".inl", ".cu", ".cuh")
OF_A_HOST = (
    *("model", "threads", "cpu_bind", "host_memory_gib", "node_rank", "interface"),
    *("cluster_key", "master_addr", "join_timeout_s", "gpus"),
)
"""Options with a value per host."""
OF_NODE_0 = (
    *("max_waiting", "max_choices", "max_restarts", "restart_window_s", "restart_backoff_s", "overlap", "seed"),
    *("shrink", "shrink_to"),
    "chat_template",
)
"""Options of the controller alone, which other hosts do not use."""
ADVICE = {
    **dict.fromkeys(("weft", "torch", "python", "nccl"), "install the same on every host"),
    "devices": "give every host the same GPUs, or all --device cpu",
    **dict.fromkeys(("config.json", "tokenizer", "weights"), "copy the same model directory to every host"),
}


def facts(config: EngineConfig) -> dict[str, str]:
    """Return the facts of this host, by their names in errors. Raises ModelError if weights are missing."""
    python = ".".join(platform.python_version_tuple()[:2])
    facts = {"weft": source_version(), "torch": str(torch.__version__), "python": python}
    if on_gpus(config):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["devices"] = _devices(config)
    facts["config.json"] = _of_files([config_file(config.model)])
    facts["tokenizer"] = _of_files(sorted(config.tokenizer.glob("tokenizer*")))
    if config.load_format == "auto":
        facts["weights"] = _of_files(weight_files(config.model))
    return facts


def options(config: EngineConfig) -> dict[str, Any]:
    """Return the options that must be the same on every host, in JSON's types."""
    return {name: value for name, value in config.to_dict().items() if name not in OF_A_HOST + OF_NODE_0}


def difference(
    node: int, host: str, theirs: tuple[dict[str, str], dict[str, Any]], ours: tuple[dict[str, str], dict[str, Any]]
) -> str | None:
    """Return one line on the first difference of `theirs`, of `node` on `host`, and `ours`; None if there is none."""
    for name, value in ours[0].items():
        if (other := theirs[0].get(name)) != value:
            return f"node {node} ({host}) has other {name}: {other}, where node 0 has {value}; {ADVICE[name]}"
    for name, value in ours[1].items():
        if (other := theirs[1].get(name)) != value:
            option = f"--{name.replace('_', '-')}"
            return f"node {node} ({host}) was started with {option} {other}, node 0 with {value}; give both the same"
    return None


def of_this_host(config: EngineConfig) -> dict[str, Any]:
    """Return the options that a host keeps when it adopts node 0's other options."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name in OF_A_HOST}


def _devices(config: EngineConfig) -> str:
    """Return the models of this host's GPUs in use, or CPUs: results differ between models."""
    if not on_gpus(config):
        return "CPUs"
    names = Counter(torch.cuda.get_device_name(gpu) for gpu in range(config.ranks_of_host))
    return " + ".join(f"{count} × {name}" for name, count in names.items())


def _of_files(paths: list[Path]) -> str:
    """Return a digest of files' names, sizes and sampled blocks."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for at in sorted({0, max(0, size // 2 - BLOCK // 2), max(0, size - BLOCK)}):
                file.seek(at)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:12]


@cache
def source_version(root: Path = Path(weft.__file__).parent, omit: str = "/") -> str:
    """Return Weft's version and a digest of its source: checkouts of one version may differ.

    omit: beginning of the paths below `root` that do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(each for each in root.rglob("*") if each.suffix in SOURCES):
        if not (name := path.relative_to(root).as_posix()).startswith(omit):
            digest.update(name.encode() + path.read_bytes())
    return f"{weft.__version__} ({digest.hexdigest()[:12]})"
