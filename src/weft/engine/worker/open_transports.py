"""CPU cores, cost table and transports of a rank's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.comm import peer
from weft.comm.transport import Transport
from weft.comm.transport_registry import NCCL, PEER, Opening, TransportEntry
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import device_of, dtype_of, enabled_transports, on_gpus
from weft.engine.worker.arena import ArenaNeed, arena_need, available_bytes, check_memory
from weft.planner.cost import (
    ETHERNET,
    INFINIBAND,
    Costs,
    costs,
    find_host_table,
    host_costs,
    host_table,
    over_network,
    read_tuning,
)


def cost_model(config: EngineConfig) -> Costs:
    """Return the cost model that a configuration names; auto: this host's table, if it has times of the enabled
    transports, else a preset of similar hosts. Raises LayoutError.

    Exchanges between hosts without times are priced by a usual network.
    """
    if config.cost != "auto":
        cost = costs(config.cost)
    elif config.executor == "thread":
        cost = costs("cpu")
    else:
        names = [entry.name for entry in enabled_transports(config)]
        cost = host_costs(on_gpus(config), names, config.mesh.hosts)
    return cost if config.mesh.hosts == 1 else over_network(cost, INFINIBAND if on_gpus(config) else ETHERNET)


def lacks_cost_table(config: EngineConfig) -> bool:
    """Tell whether this host lacks a cost table for its GPU ranks, or has one for fewer ranks.

    With NCCL alone no table is needed: tuning measures peer, which requires GPUs that access each other's memory.
    """
    if config.cost != "auto" or config.mesh.world == 1 or not on_gpus(config):
        return False
    if PEER not in (enabled := enabled_transports(config)):
        return False
    if not (table := host_table(gpus=True)).is_file():
        return True
    measured = costs(str(table)).by_transport
    return any(max(measured.get(e.name, {0: None})) < config.ranks_of_host for e in enabled)


def open_transports(config: EngineConfig, rank: int, directory: Path) -> list[Transport]:
    """Open a rank's transports; the first one makes activations. Collective. Raises CommError, LayoutError."""
    if config.interface is not None:
        for library in ("GLOO", "NCCL"):  # else gloo resolves the host's name, often to 127.0.1.1
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", config.interface)
    opening = Opening(
        config.mesh,
        rank,
        directory,
        device_of(config, rank),
        lambda: _need(config).block_bytes // 2,
        partial(_arena, config),
        partial(_tuning, config),
        (config.master_addr, config.store_port) if config.mesh.hosts > 1 and config.master_addr else None,
        config.step_timeout_s,
    )
    return [entry.open(opening) for entry in enabled_transports(config)]


def _need(config: EngineConfig) -> ArenaNeed:
    return arena_need(config, config.read_model(), dtype_of(config))


def _arena(config: EngineConfig) -> tuple[int, int]:
    check_memory(config, need := _need(config), available_bytes(limit_gib=config.host_memory_gib))
    return need.blocks, need.block_bytes


def _tuning(config: EngineConfig, key: str, kind: type) -> Any:
    return read_tuning(table, key, kind) if (table := table_file(config)) else None


def bind(config: EngineConfig, rank: int) -> EngineConfig:
    """Bind this process, and its threads to come. Return the configuration unbound: others' cores are unknown here."""
    if config.cores is not None:
        os.sched_setaffinity(0, config.cores[config.place_on_host(rank)])
    torch.set_num_threads(1 if config.threads == "auto" else config.threads)
    return replace(config, cpu_bind="off")


def preset_of(entries: Sequence[TransportEntry], ranks: int) -> str:
    """Return the preset that prices transports of a plan without ranks. ranks: of a host."""
    if all(entry.device == "cpu" for entry in entries):
        return "cpu"
    measured = all(entry in (PEER, NCCL) for entry in entries) and ranks <= peer.MAX_RANKS
    return "h200x4" if measured else "h200-nvlink"


def table_file(config: EngineConfig) -> Path | None:
    """Return the cost table that a configuration names, or this host's; None if it plans by a preset."""
    if config.cost == "auto":
        return find_host_table(on_gpus(config), config.mesh.hosts)
    return Path(config.cost) if config.cost.endswith(".json") else None
