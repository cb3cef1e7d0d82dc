"""The devices of the ranks, their dtype, and the transports between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.comm.transport_registry import AUTO, REFERENCE, TransportEntry, automatic, check_serves, transports
from weft.engine.attention.backend_registry import (
    ANY_BACKEND,
    BackendEntry,
    Needs,
    automatic_backend,
    backends,
    fa3_library,
)
from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_spec import Spec
from weft.engine.models.layers.model_config import ModelConfig
from weft.kernels import cpu_rows
from weft.kernels.build import OLDEST_GPU
from weft.kernels.float8 import FLOAT8
from weft.planner.spec import LayoutError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def on_gpus(config: EngineConfig) -> bool:
    """Tell whether each rank runs on a GPU. Raises LayoutError if GPUs are requested and missing."""
    entry = None if config.transport == AUTO else transports(config.plugins)[config.transport]
    if config.device == "cpu" or config.executor == "thread":
        if entry is not None and not entry.runs_on("cpu"):
            raise LayoutError(f"transport {config.transport} runs on GPUs only; drop --transport or use --device cuda")
        return False
    gpu_requested = config.device == "cuda" or (entry is not None and not entry.runs_on("cpu"))
    on_cpus = entry is not None and not entry.runs_on("cuda")
    have, world = torch.cuda.device_count(), config.ranks_of_host
    if gpu_requested and not have:
        reason = "torch is built without CUDA" if torch.version.cuda is None else "CUDA sees no GPU"
        raise LayoutError(f"ranks are to run on GPUs, but {reason} here; run weft doctor, or use --device cpu")
    if gpu_requested and have < world:
        raise LayoutError(
            f"the layout has {world} ranks{' on each host' * (config.mesh.hosts > 1)}, a GPU each, and this machine "
            f"has {have} GPU(s) that CUDA sees; choose a smaller layout, or device cpu"
        )
    if gpu_requested and on_cpus:
        raise LayoutError(f"transport {config.transport} runs on CPUs only; drop --transport or use --device cpu")
    return have >= world and not on_cpus


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank of this host, by its index in this process. Raises LayoutError if CUDA does not see
    it."""
    if not on_gpus(config):
        return torch.device("cpu")
    place = config.seat_of(rank)[1]
    if not config.gpus:
        return torch.device("cuda", place)
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == config.gpus[place]:
            return torch.device("cuda", index)
    raise LayoutError(f"rank {rank} runs on GPU {place} ({config.gpus[place]}), which CUDA does not see here any more")


def gpus_of(config: EngineConfig) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of this host's ranks, by place, as CUDA_VISIBLE_DEVICES takes them; none on CPUs."""
    return tuple(map(_uuid, range(config.ranks_of_host))) if on_gpus(config) else ()


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def dtype_of(config: EngineConfig) -> torch.dtype:
    """Return the dtype of weights and activations; auto: bfloat16 on GPUs, float32 on CPUs."""
    if config.dtype == "auto":
        return torch.bfloat16 if on_gpus(config) else torch.float32
    return DTYPES[config.dtype]


def kv_dtype_of(config: EngineConfig) -> torch.dtype:
    """Return the dtype of cached keys and values."""
    return dtype_of(config) if config.kv_dtype == "auto" else FLOAT8


def check_gpu(device: torch.device) -> None:
    """Raise LayoutError if a GPU is older than Weft's kernels support."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_GPU:
        raise LayoutError(
            f"{_name(device)} is older than sm_80, the minimum for bfloat16 matmuls and Weft's kernels: "
            "choose others with CUDA_VISIBLE_DEVICES, or --device cpu"
        )


def _name(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def check_formats(model: ModelConfig, kv_dtype: torch.dtype, device: torch.device) -> None:
    """Raise LayoutError if a GPU lacks the format of the model's matmuls, or FP8 for the cache."""
    storage = model.storage
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if model.float8 and storage.has_products and capability < storage.capability:
        needs = "".join(map(str, storage.capability))
        raise LayoutError(f"{_name(device)} has no matmuls in {storage.name}, which require sm_{needs}: --float8 off")
    if kv_dtype == FLOAT8 and capability < (8, 9):
        raise LayoutError(f"{_name(device)} converts no FP8, which requires sm_89: --kv-dtype auto")


def enabled_transports(config: EngineConfig) -> tuple[TransportEntry, ...]:
    """Return the transports available to the ranks' plans; the first one allocates activations.

    Raises LayoutError if the transport named by the options does not serve this number of ranks or hosts.
    """
    gpus, world = on_gpus(config), config.mesh.world
    if config.executor == "thread" or (gpus and world == 1):  # nothing is exchanged
        return (REFERENCE,)
    known = transports(config.plugins)
    if config.transport == AUTO:
        chosen = automatic(known, "cuda" if gpus else "cpu", config.ranks_of_host)
        alone = config.mesh.hosts > 1 and config.ranks_of_host == 1  # intra-host transports have nothing to carry
        return tuple(entry for entry in chosen if not alone or entry.max_hosts is None)
    check_serves([known[config.transport]], config.mesh)
    return (known[config.transport],)


def attention_backend(
    config: EngineConfig, caches: Callable[[], Sequence[Spec]] = lambda: (), device: torch.device | None = None
) -> BackendEntry:
    """Return the attention backend of the ranks. Raises LayoutError if it does not support the options or the model.

    Args:
        caches: returns the caches of the model's layers; called only if the backend checks them.
        device: device of the rank, if known.
    """
    gpus, option = on_gpus(config), config.attention_backend
    if device is None and gpus and option == ANY_BACKEND and fa3_library() is not None:
        device = device_of(config, 0)
    needs = _needs(config, gpus and config.cuda_graphs, caches, device)
    chosen = automatic_backend(needs) if option == ANY_BACKEND else backends(config.plugins)[option]
    chosen.check(needs)
    return chosen


def eager_because(config: EngineConfig, attention: BackendEntry) -> str | None:
    """Return why decode steps on CPUs cannot be recorded, as far as it is known before the first."""
    if not config.cuda_graphs:
        return "--no-cuda-graphs is given"
    refusal = attention.refusal(_needs(config, True))
    return cpu_rows.missing() if refusal is None else f"attention_backend {attention.option} {refusal.split(':')[0]}"


def _needs(
    config: EngineConfig,
    graphs: bool,
    caches: Callable[[], Sequence[Spec]] = lambda: (),
    device: torch.device | None = None,
) -> Needs:
    gpu_requested = device is not None and device.type == "cuda"
    return Needs(
        device="cuda" if on_gpus(config) else "cpu",
        capability=torch.cuda.get_device_capability(device) if gpu_requested else None,
        dtype=str(dtype_of(config)).removeprefix("torch."),
        kv_dtype=config.kv_dtype,
        caches=caches,
        page_size=config.page_size,
        dcp=config.dcp,
        dcp_prefill=config.dcp_prefill,
        graphs=graphs,
    )
