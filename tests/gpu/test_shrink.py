"""GPUs that are lost for good: the engine goes on with the others, and every request with one GPU's tokens."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.test_recovery import PARAMS, run_while_a_rank_is_lost
from gpu.test_engine import prompts_of
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import gpus_of
from weft.engine.controller.engine import Engine
from weft.engine.controller.process_executor import ProcessExecutor
from weft.engine.worker.gpu_probe import unusable

GPUS = torch.cuda.device_count()
NO_GPU = "GPU-00000000-0000-0000-0000-000000000000"
MIB = 1 << 20
SIZES: dict[str, Any] = dict(kv_tokens=2048, max_model_len=256, max_running=4, max_batch_tokens=64)
SIZES |= dict(dtype="float32", device="cuda")


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with Engine(EngineConfig(**SIZES)) as engine:
        return [result.token_ids for result in engine.generate(prompts_of(engine)[:6], PARAMS)]


def free_mib() -> list[int]:
    """Return the free memory of each GPU."""
    return [torch.cuda.mem_get_info(gpu)[0] // MIB for gpu in range(2)]


def kill_first(engine: Engine) -> None:
    """Kill rank 0."""
    assert isinstance(engine._executor, ProcessExecutor)
    os.kill(engine._executor.processes[0].pid, signal.SIGKILL)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_the_driver_says_which_gpu_can_be_used() -> None:
    config = EngineConfig(**SIZES)
    for gpu in gpus_of(config):
        assert not unusable(gpu)
    assert "CUDA error 100" in unusable(NO_GPU)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("gone", [False, True], ids=["1x2 killed at each start", "2x1 not listed by the driver"])
def test_requests_go_on_with_the_gpu_that_is_left(
    gone: bool, expected: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 is lost, so the one that is left has another index than its rank."""
    layout = dict(attn_dp=2, ep=2) if gone else dict(attn_tp=2, ep=2)
    more: dict[str, Any] = dict(shrink=True, restart_backoff_s=0.01, max_restarts=3 if gone else 1)
    before = free_mib()
    with Engine(EngineConfig(**SIZES, **layout, **more)) as engine:
        few = prompts_of(engine)[: len(expected)]
        if gone:
            config = engine._executor.config
            engine._executor.config = replace(config, gpus=(NO_GPU, *config.gpus[1:]))
        run_while_a_rank_is_lost(engine, few, expected, lambda: kill_first(engine), 1, at_starts=not gone)
        assert engine.state == "degraded" and engine.healthy
        assert (engine.config.places, engine.stats().lost_ranks, engine.stats().failures) == (((1,),), 1, 2)
        assert [result.token_ids for result in engine.generate(few, PARAMS)] == expected
        after = free_mib()
        assert abs(before[0] - after[0]) < 100 and before[1] - after[1] > 200, (before, after)
        engine.check_idle()
    assert "rank 0 of 2 is lost for good; the engine goes on with attn_dp=1 attn_tp=1 ep=1 moe_tp=1, on GPU 1" in (
        caplog.text
    )
    assert (f"GPU 0 ({NO_GPU}) cannot be used: cuInit failed with CUDA error 100" in caplog.text) == gone
