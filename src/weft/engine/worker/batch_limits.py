"""Defaults of max_running and max_batch_tokens on GPUs, by the GPUs' memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.engine.config.config import EngineConfig
from weft.engine.config.device import device_of, dtype_of, on_gpus
from weft.engine.models.load import model_shape
from weft.engine.worker.memory import CacheNeed, parameter_bytes

LARGE_BATCH_TOKENS = 8192
LARGE_BATCH_BYTES = 12 << 30
"""Minimum memory next to the weights for steps of LARGE_BATCH_TOKENS rows, which need some GiB."""
SEQUENCES = (1024, 512, 256, 128)
"""Candidates for max_running. Larger graphs of decode steps are slow to capture, and gain little over two steps."""
SEQUENCE_TOKENS = 256
"""Tokens per running sequence that the cache must hold: a short chat."""
CACHE_SHARE = 0.5
"""Maximum share of the memory next to the weights for this cache: steps and their graphs need the rest."""


def with_batch_limits(config: EngineConfig) -> EngineConfig:
    """Return the configuration with max_batch_tokens and max_running, if omitted, for ranks on GPUs.

    Raises ModelError, and LayoutError if the layout has too many ranks for the model.
    """
    if not on_gpus(config) or None not in (config.max_batch_tokens, config.max_running):
        return config
    layers = model_shape(config.read_model(), config.mesh, dtype_of(config))
    return choose_limits(CacheNeed.of(config, layers), parameter_bytes(layers), gpu_bytes(config))


def gpu_bytes(config: EngineConfig) -> int:
    """Return the memory of the smallest GPU of this host's ranks."""
    gpus = (device_of(config, rank) for rank in range(config.ranks_of_host))
    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)


def choose_limits(need: CacheNeed, weights: int, gpu_bytes: int) -> EngineConfig:
    """Return the configuration with limits for GPUs with this memory. weights: bytes of a rank's weights."""
    config = need.config
    free_bytes = int(config.gpu_memory_fraction * gpu_bytes) - weights
    if config.max_batch_tokens is None and free_bytes >= LARGE_BATCH_BYTES:
        config = replace(config, max_batch_tokens=max(LARGE_BATCH_TOKENS, config.batch_tokens))
    if config.max_running is not None:
        return config
    for sequences in SEQUENCES:
        tokens = sequences * SEQUENCE_TOKENS
        if sequences > config.mixed_tokens or (config.kv_tokens is not None and tokens > config.cached_tokens):
            continue
        limited = replace(config, max_running=sequences)
        if replace(need, config=limited).bytes(-(-tokens // config.interleave.span)) <= CACHE_SHARE * free_bytes:
            return limited
    return config
