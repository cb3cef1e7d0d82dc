"""How many sequences run at once and how many rows a step has, where the options leave it out: by a GPU's memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.engine.attention.caches import cached_layers
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import device_of, dtype_of, kv_dtype_of, on_gpus
from weft.engine.models.load import build_model
from weft.engine.models.model_config import ModelConfig
from weft.engine.worker.memory import cache_bytes, groups_of, parameter_bytes

LARGE_BATCH_TOKENS = 8192
LARGE_BATCH_BYTES = 12 << 30
"""Memory beside the weights from which steps have so many rows: a step of 8192 takes some GiB of it."""
SEQUENCES = (1024, 512, 256, 128)
"""Beyond, graphs of decode steps take long to capture, and gain little over two steps."""
SEQUENCE_TOKENS = 256
"""So many sequences run at once as the cache holds with so many tokens each: those of short chats."""
CACHE_SHARE = 0.5
"""Of the memory beside the weights that the cache takes at least: steps and their graphs take the rest."""


def with_batch_limits(config: EngineConfig) -> EngineConfig:
    """The configuration with max_batch_tokens and max_running, where ranks run on GPUs and these are left out.

    Raises ModelError, and LayoutError where the model does not divide over the layout.
    """
    if not on_gpus(config) or None not in (config.max_batch_tokens, config.max_running):
        return config
    sizes = (torch.cuda.get_device_properties(device_of(config, r)).total_memory for r in range(config.ranks_of_host))
    return chosen_limits(config, config.read_model(), min(sizes))


def chosen_limits(config: EngineConfig, model: ModelConfig, gpu_bytes: int) -> EngineConfig:
    """The same for GPUs of so much memory."""
    dtype = dtype_of(config)
    layers = build_model(model, config.mesh, 0, dtype, torch.device("meta"))
    left = int(config.gpu_memory_fraction * gpu_bytes) - parameter_bytes(layers)
    if config.max_batch_tokens is None and left >= LARGE_BATCH_BYTES:
        config = replace(config, max_batch_tokens=max(LARGE_BATCH_TOKENS, config.max_running or 0))
    if config.max_running is not None:
        return config
    specs = cached_layers(layers)
    for sequences in SEQUENCES:
        tokens = sequences * SEQUENCE_TOKENS
        if sequences > config.batch_tokens or (config.kv_tokens is not None and tokens > config.cached_tokens):
            continue
        found = replace(config, max_running=sequences)
        groups = groups_of(specs, found, -(-tokens // config.interleave.span))
        if cache_bytes(specs, groups, found, kv_dtype_of(config)) <= CACHE_SHARE * left:
            return found
    return config
