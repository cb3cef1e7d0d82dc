"""Where a rank's process runs, and which transports it opens."""

from __future__ import annotations

import os
from pathlib import Path

from weft.comm.shm import MAX_RANKS, ShmTransport, ShmTuning
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import Transport
from weft.engine.arena import arena_need, available_bytes, check_memory
from weft.engine.config import EngineConfig
from weft.engine.worker import DTYPES
from weft.place.cost import Costs, costs, host_table, read_tuning


def cost_model(config: EngineConfig) -> Costs:
    """The cost model that a configuration names; auto: this host's table, where there is one. Raises LayoutError."""
    return costs(str(table) if (table := _table(config)) else "cpu" if config.cost == "auto" else config.cost)


def uses_shm(config: EngineConfig) -> bool:
    """Whether ranks open shared memory: where asked for, and where left open, if it can hold them all."""
    return config.transport == "shm" or (config.transport == "auto" and config.mesh.world <= MAX_RANKS)


def uses_gloo(config: EngineConfig) -> bool:
    """Whether ranks open torch.distributed."""
    return config.transport != "shm"


def open_transports(config: EngineConfig, rank: int, directory: Path) -> list[Transport]:
    """The transports of a rank, the first being where activations live. Collective. Raises CommError, LayoutError."""
    opened: list[Transport] = []
    if uses_shm(config):
        table = _table(config)
        need = arena_need(config, config.read_model(), DTYPES[config.dtype])
        check_memory(config, need, available_bytes())
        opened.append(
            ShmTransport(
                config.mesh,
                rank,
                directory / "shm",
                timeout_s=config.step_timeout_s,
                blocks=need.blocks,
                block_bytes=need.block_bytes,
                tuning=read_tuning(table, "shm_tuning", ShmTuning) if table else None,
            )
        )
    if uses_gloo(config):
        meet = f"file://{directory}/rendezvous"
        opened.append(TorchDistTransport(config.mesh, rank, meet, timeout_s=config.step_timeout_s))
    return opened


def bind(config: EngineConfig, rank: int) -> None:
    """Keeps this process, and its threads to come, on the rank's cores."""
    if config.cpu_bind is not None:
        os.sched_setaffinity(0, config.cores[rank])


def _table(config: EngineConfig) -> Path | None:
    if config.cost == "auto":
        return host_table() if host_table().is_file() else None
    return Path(config.cost) if config.cost.endswith(".json") else None
