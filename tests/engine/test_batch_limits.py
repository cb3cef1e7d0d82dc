"""Sequences at once and tokens of a step, where options leave them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import dtype_of
from weft.engine.controller.startup import resolve_defaults
from weft.engine.models.load import model_shape
from weft.engine.worker import batch_limits
from weft.engine.worker.batch_limits import choose_limits
from weft.engine.worker.memory import CacheNeed, parameter_bytes

GIB = 1 << 30
QWEN = "qwen3-30b-a3b"


def limits(preset: str, gpu_bytes: int, **options: Any) -> tuple[int, int]:
    small: dict[str, Any] = dict(load_format="dummy", dtype="bfloat16", num_layers=2) | options
    config = EngineConfig(preset_dir(preset), **small)
    layers = model_shape(config.read_model(), config.mesh, dtype_of(config))
    found = choose_limits(CacheNeed.of(config, layers), parameter_bytes(layers), gpu_bytes)
    return found.batch_sequences, found.batch_tokens


def test_cpus_keep_theirs() -> None:
    config = resolve_defaults(EngineConfig(device="cpu"))
    assert (config.batch_sequences, config.batch_tokens) == (64, 2048)
    assert EngineConfig(max_running=4096).batch_tokens == 4096  # each running sequence has a row
    assert EngineConfig(max_batch_tokens=32).batch_sequences == 32
    with pytest.raises(ValueError, match="max_batch_tokens=32 is less than max_running=64"):
        EngineConfig(max_batch_tokens=32, max_running=64)


def test_steps_in_which_sequences_decode() -> None:
    """Also where options leave the number of sequences out, each has a row of such a step."""
    assert EngineConfig().mixed_tokens == 2048 and EngineConfig(max_batch_tokens=32).mixed_tokens == 32
    assert EngineConfig(mixed_batch_tokens=48).batch_sequences == 48
    assert limits(QWEN, 20 * GIB, mixed_batch_tokens=600) == (512, 8192)
    with pytest.raises(ValueError, match="mixed_batch_tokens=32 is less than max_running=64"):
        EngineConfig(mixed_batch_tokens=32, max_running=64)
    with pytest.raises(ValueError, match="mixed_batch_tokens=4096 is more than max_batch_tokens=2048"):
        EngineConfig(mixed_batch_tokens=4096, max_batch_tokens=2048)


def test_the_default_of_all_steps_rises_with_the_limit_of_some() -> None:
    assert EngineConfig(mixed_batch_tokens=4096).batch_tokens == 4096
    assert EngineConfig(mixed_batch_tokens=4096).batch_sequences == 64
    assert limits(QWEN, 20 * GIB, mixed_batch_tokens=4096) == (1024, 8192)
    assert limits(QWEN, 20 * GIB, mixed_batch_tokens=16384) == (1024, 16384)
    assert limits(QWEN, 5 * GIB, mixed_batch_tokens=4096) == (512, 4096)


def test_gpus_by_the_memory_beside_the_weights() -> None:
    """Two layers: 3.5 GiB of weights, 4 KiB of cache a token."""
    assert limits(QWEN, 20 * GIB) == (1024, 8192)
    assert limits(QWEN, 5 * GIB) == (512, 2048)
    assert limits(QWEN, 20 * GIB, gpu_memory_fraction=0.225) == (512, 2048)
    assert limits(QWEN, 4 * GIB) == limits(QWEN, 2 * GIB) == (64, 2048)
    assert limits(QWEN, 20 * GIB, kv_tokens=1 << 16) == (256, 8192)


def test_recurrent_states_bound_sequences() -> None:
    """A sequence keeps a state of its own, however short it is, and another one for the prefix cache."""
    recurrent = dict(preset="qwen3.5-35b-a3b", num_layers=4)
    assert limits(gpu_bytes=20 * GIB, **recurrent) == (256, 2048)
    assert limits(gpu_bytes=20 * GIB, prefix_cache=False, **recurrent) == (512, 2048)


def test_options_win() -> None:
    assert limits(QWEN, 20 * GIB, max_running=48) == (48, 8192)
    assert limits(QWEN, 20 * GIB, max_running=9000) == (9000, 9000)
    assert limits(QWEN, 20 * GIB, max_batch_tokens=512) == (512, 512)
    assert limits(QWEN, 20 * GIB, max_batch_tokens=512, max_running=8) == (8, 512)


def test_the_smallest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 20 * GIB, 1: 16 * GIB}
    config = EngineConfig(preset_dir(QWEN), load_format="dummy", dtype="bfloat16", attn_tp=2, num_layers=2)
    monkeypatch.setattr(batch_limits, "on_gpus", lambda config: True)
    monkeypatch.setattr(batch_limits, "device_of", lambda config, rank: rank)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda rank: SimpleNamespace(total_memory=sizes[rank]))
    found = batch_limits.with_batch_limits(config)
    assert (found.max_running, found.max_batch_tokens) == (1024, 8192)
    sizes[1] = 3 * GIB
    found = batch_limits.with_batch_limits(config)
    assert found.batch_tokens == 2048 and found.batch_sequences < 1024
