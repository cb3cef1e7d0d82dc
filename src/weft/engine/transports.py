"""Where a rank's process runs, and which transports it opens."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.comm.nccl_window import NcclWindowTransport
from weft.comm.peer import PeerTransport, PeerTuning, check_peer_access
from weft.comm.reference import ReferenceWorld
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import Transport
from weft.engine.arena import arena_need, available_bytes, check_memory, gathered_logits, merged_bytes, sent_bytes
from weft.engine.config import EngineConfig
from weft.engine.device import carriers, device_of, dtype_of, on_gpus
from weft.engine.planning import trace
from weft.place.chain import bucket
from weft.place.cost import Costs, costs, host_table, read_tuning

GPU_COSTS = "h200x4"
"""The cost model of GPUs that were never measured: times of four H200s over NVLink."""


def cost_model(config: EngineConfig) -> Costs:
    """The cost model that a configuration names; auto: this host's table, where it has one with times of what carries
    the ranks' exchanges, else what is known of hosts like it. Raises LayoutError.
    """
    if config.cost != "auto":
        return costs(config.cost)
    if config.executor == "thread":
        return costs("cpu")
    if (table := host_table(on_gpus(config))).is_file():
        found = costs(str(table))
        if not on_gpus(config) or all(name in found.by_transport for name in carriers(config)):
            return found
    return costs(GPU_COSTS if on_gpus(config) else "cpu")


def untuned(config: EngineConfig) -> bool:
    """Whether the ranks are GPUs that exchange rows by a table of this host that is not there, or has fewer ranks.

    By NCCL alone they need none: it measures peer, which takes GPUs that reach each other's memory.
    """
    if config.cost != "auto" or config.mesh.world == 1 or not on_gpus(config) or "peer" not in carriers(config):
        return False
    if not (table := host_table(gpus=True)).is_file():
        return True
    measured = costs(str(table)).by_transport
    return any(max(measured.get(name, {0: None})) < config.mesh.world for name in carriers(config))


def open_transports(config: EngineConfig, rank: int, directory: Path) -> list[Transport]:
    """The transports of a rank, the first being where activations live. Collective. Raises CommError, LayoutError."""
    return [_open(name, config, rank, directory) for name in carriers(config)]


def _open(name: str, config: EngineConfig, rank: int, directory: Path) -> Transport:
    mesh, timeout_s, table = config.mesh, config.step_timeout_s, _table(config)
    if name == "shm":
        need = arena_need(config, config.read_model(), dtype_of(config))
        check_memory(config, need, available_bytes())
        tuning = read_tuning(table, "shm_tuning", ShmTuning) if table else None
        return ShmTransport(
            mesh,
            rank,
            directory / "shm",
            timeout_s=timeout_s,
            blocks=need.blocks,
            block_bytes=need.block_bytes,
            tuning=tuning,
        )
    if name == "peer":
        check_peer_access(mesh.world, rank)
        tuned = read_tuning(table, "peer_tuning", PeerTuning) if table else None
        device = device_of(config, rank)
        return PeerTransport(mesh, rank, directory / "peer", device, max_bytes=_largest(config), tuning=tuned)
    if name == "reference":
        return ReferenceWorld(1).transports()[0]
    backend, meet = name.removeprefix("torchdist/"), f"file://{directory}/rendezvous"
    if config.transport == "nccl_window":
        torch.cuda.set_device(device := device_of(config, rank))
        room = max(256 << 20, 2 * _largest(config))
        return NcclWindowTransport(mesh, rank, meet, device, arena_bytes=room, timeout_s=timeout_s, captured=True)
    return TorchDistTransport(mesh, rank, meet, backend=backend, timeout_s=timeout_s, in_place=backend == "nccl")


def _largest(config: EngineConfig) -> int:
    """Bytes of the largest tensor that a step exchanges between GPUs."""
    # Plans are made for counts rounded up to a power of two.
    mesh, model, dtype = config.mesh, config.read_model(), dtype_of(config)
    rows = sum(bucket((config.max_batch_tokens,) * mesh.attn_dp))
    largest = max(rows * model.hidden_size * dtype.itemsize, gathered_logits(config, model))
    if mesh.dcp == 1 and config.experts != "dispatch":
        return largest
    chain = trace(model, mesh, dtype)
    decoded = min(config.max_running, config.max_batch_tokens)  # a step's decode rows are merged in one call
    return max(largest, merged_bytes(chain, mesh, decoded), sent_bytes(config, chain))


def bind(config: EngineConfig, rank: int) -> None:
    """Keeps this process, and its threads to come, on the rank's cores."""
    if config.cpu_bind is not None:
        os.sched_setaffinity(0, config.cores[rank])


def _table(config: EngineConfig) -> Path | None:
    if config.cost == "auto":
        return table if (table := host_table(on_gpus(config))).is_file() else None
    return Path(config.cost) if config.cost.endswith(".json") else None
