"""GPUs that are lost for good: how a rank finds out, what goes on without it, and which GPU a rank then has.

No GPU is needed: a stand-in for the driver fails as files tell it to, and ranks run on CPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.conftest import WAIT_S
from engine.test_agents import cluster, host, ranks_of
from engine.test_engine import config, prompts
from engine.test_recovery import PARAMS, run_while_a_rank_is_lost
from weft.engine.config import device as device_module
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.config.device import device_of, gpus_of
from weft.engine.controller import recovery
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.controller.startup import resolve_defaults
from weft.engine.hosts import agent as agent_module
from weft.engine.messages.rank_messages import Failure
from weft.engine.models.config_json.fields import ModelError
from weft.engine.processes import rank_processes
from weft.engine.processes.fork_client import ForkServer
from weft.engine.worker import gpu_probe, rank
from weft.engine.worker.gpu_probe import unusable
from weft.planner.spec import LayoutError

__all__ = ["cluster"]
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int fault() {  // in the file of the visible GPU; 0 without one
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAULTS_OF_GPUS"), getenv("CUDA_VISIBLE_DEVICES"));
    FILE *file = fopen(path, "r");
    int code = 0;
    return file && fscanf(file, "%d", &code) == 1 ? code : 0;
}
static unsigned char *memory;
int cuInit(unsigned flags) {
    if (fault() == 1000) for (;;) pause();
    if (fault() == 1001) abort();
    return fault() == 100 ? 100 : 0;
}
int cuDeviceGet(int *device, int index) { return *device = index; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &memory; return device; }
int cuCtxSetCurrent(void *context) { return context == &memory ? 0 : 201; }
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    *address = (unsigned long long)(memory = calloc(bytes, 1));
    return fault() == 2 ? 2 : 0;
}
int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t bytes) {
    if (fault() != 1002) memset((void *)address, value, bytes);
    return fault() == 214 ? 214 : 0;
}
int cuMemcpyDtoH_v2(void *to, unsigned long long address, size_t bytes) {
    memcpy(to, (void *)address, bytes);
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 214 ? "uncorrectable ECC error" : "no device";
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return folder


@pytest.fixture
def faults(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder: a file with a GPU's name holds the error of its driver, which this process and its ranks use."""
    (folder := tmp_path / "faults").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("FAULTS_OF_GPUS", str(folder))
    monkeypatch.setattr(rank_processes, "ForkServer", ForkServer)  # a new one, with this environment
    return folder


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", ""),
        ("2", ""),  # others use its memory
        ("100", "cuInit failed with CUDA error 100, no device"),
        ("214", "cuMemsetD8_v2 failed with CUDA error 214, uncorrectable ECC error"),
        ("1000", "the driver did not return within 1 s"),
        ("1001", "the driver ended the trial with -6"),
        ("1002", "its memory does not hold what is written"),
    ],
)
def test_the_driver_decides_whether_a_gpu_is_lost(
    faults: Path, code: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_probe, "TRIAL_S", 1.0 if code == "1000" else WAIT_S)
    (faults / "GPU-a").write_text(code)
    assert unusable("GPU-a") == why and not unusable("GPU-b")


def test_without_a_driver_no_gpu_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert not unusable("GPU-a")


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the GPUs that CUDA lists; a test may change them."""
    found = ["a", "b", "c"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=found[index]))
    return found


def test_a_rank_keeps_its_gpu(visible: list[str], monkeypatch: pytest.MonkeyPatch, faults: Path) -> None:
    """Rank 0 of the two that are left runs in place 1, which CUDA numbers anew."""
    given = EngineConfig(attn_tp=3, moe_tp=3, device="cuda")
    assert [device_of(given, rank).index for rank in range(3)] == [0, 1, 2]
    assert gpus_of(given) == ("GPU-a", "GPU-b", "GPU-c") and not gpus_of(replace(given, device="cpu"))
    left = replace(given, gpus=gpus_of(given), attn_tp=2, moe_tp=2, places=((1, 2),))
    assert [device_of(left, rank).index for rank in range(2)] == [1, 2], "the controller has seen all"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    rank._take_gpu(replace(left, places=()), 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2", "nothing is lost"
    rank._take_gpu(left, 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-c"
    visible[:] = "b", "c"
    assert [device_of(left, rank).index for rank in range(2)] == [0, 1]
    visible[:] = "a", "c"
    with pytest.raises(LayoutError, match=r"rank 0 runs on GPU 1 \(GPU-b\), which CUDA does not see here"):
        device_of(left, 0)
    (faults / "GPU-b").write_text("214")
    with pytest.raises(rank.GpuLost, match=r"^GPU 1 \(GPU-b\) cannot be used: cuMemsetD8_v2 failed"):
        rank._take_gpu(left, 0)
    rank._take_gpu(left, 1)


def test_gpus_are_named_once(visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "fa3_library", lambda: None)
    limits: Any = dict(max_running=64, max_batch_tokens=2048, dtype="float32")
    given = EngineConfig(attn_tp=3, moe_tp=3, device="cuda", **limits)
    assert not resolve_defaults(given).gpus
    resolved = resolve_defaults(replace(given, shrink=True))
    assert resolved.gpus == ("GPU-a", "GPU-b", "GPU-c")
    visible[:] = "b", "c", "d"
    assert resolve_defaults(resolved).gpus == resolved.gpus


def lost(given: EngineConfig) -> recovery.Recovery:
    """Return ranks, rank 0 of which has just lost its GPU."""
    executor: Any = SimpleNamespace(config=given, mesh=given.mesh)

    def resize(config: EngineConfig) -> None:
        executor.config, executor.mesh = config, config.mesh

    executor.resize = resize
    ranks = recovery.Recovery(given, given, executor)
    ranks.failed(EngineError("rank 0 failed: GPU 0 (GPU-a) cannot be used", (0,), "devices"), given.read_model())
    return ranks


def test_a_layout_that_does_not_fit_is_not_tried(visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "fa3_library", lambda: None)
    limits: Any = dict(max_running=64, max_batch_tokens=2048, dtype="float32")
    given = EngineConfig(attn_tp=2, moe_tp=2, shrink=True, gpus=("GPU-a", "GPU-b"), **limits)
    monkeypatch.setattr(recovery, "gpu_bytes", lambda config: 1 << 40)
    ranks = lost(given)
    assert ranks.lost_places == [(0, 0)] and ranks._executor.config.places == ((1,),)
    assert ranks._executor.config.device == "cuda" and ranks._executor.config.gpus == given.gpus
    monkeypatch.setattr(recovery, "gpu_bytes", lambda config: 1000)
    with pytest.raises(
        EngineError, match=r"^rank 0 of 2 is lost for good, and no smaller layout .*: the weights of rank 0 take .* GiB"
    ):
        lost(given)


def test_a_layout_that_cannot_start_ends_the_engine(model_dir: Path) -> None:
    """Its first start, and not a later one, which something else may disturb."""
    given = config(model_dir, attn_tp=2, shrink=True, device="cpu")
    ranks = lost(given)
    with pytest.raises(
        EngineError, match=r"^rank 0 of 2 is lost for good, and attn_dp=1 .* cannot run: a cache of 9 tokens"
    ):
        ranks.failed(ModelError("a cache of 9 tokens takes 9 GiB"), given.read_model())
    assert not ranks.failed(EngineError("rank 0 was killed", (0,)), given.read_model())
    assert ranks.failed(ModelError("a cache of 9 tokens takes 9 GiB"), given.read_model()) == given.restart_backoff_s


def test_all_lost_gpus_of_a_start_are_heard(model_dir: Path) -> None:
    said = [
        Failure(2, "GPU 2 (GPU-c) cannot be used", user=False, lost_device=True),
        Failure(1, "the others have left", user=False, lost_peer=True),
        Failure(0, "GPU 0 (GPU-a) cannot be used", user=False, lost_device=True),
    ]
    executor: Any = SimpleNamespace(_receive=lambda: said.pop(0) if said else None, _dead=lambda killed: None)
    error: Any = Executor._cause(executor, Failure(1, "x", user=False, lost_peer=True))
    assert (error.ranks, error.for_good) == ((0, 2), "devices")
    assert str(error).startswith("rank 2 failed: GPU 2 (GPU-c) cannot be used; rank 0 failed: GPU 0")


def test_a_lost_gpu_is_left_out_at_the_next_start(
    faults: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three, at once, without waiting for max_restarts."""
    few = [prompt[:20] for prompt in prompts(4)]
    with Engine(config(model_dir)) as engine:
        expected = [r.token_ids for r in engine.generate(few, PARAMS)]
    options: Any = dict(attn_dp=3, ep=3, executor="process", device="cpu", shrink=True)
    with Engine(config(model_dir, gpus=("GPU-a", "GPU-b", "GPU-c"), **options)) as engine:

        def lose() -> None:
            for gpu in "GPU-a", "GPU-c":
                (faults / gpu).write_text("214")
            os.kill(engine._executor.processes[0].pid, signal.SIGKILL)

        run_while_a_rank_is_lost(engine, few, expected, lose, 1, at_starts=False)
        assert engine.state == "degraded" and engine.config.places == ((1,),)
        assert engine.stats().lost_ranks == 2 and engine.stats().failures <= 3
        assert [r.token_ids for r in engine.generate(few, PARAMS)] == expected
    assert "GPU 0 (GPU-a) cannot be used: cuMemsetD8_v2 failed with CUDA error 214" in caplog.text
    assert "lost for good; the engine goes on with attn_dp=1 attn_tp=1 ep=1 moe_tp=1, on GPU 1" in caplog.text


def test_a_rank_that_sleeps_in_the_driver_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float | None] = []
    asleep: Any = SimpleNamespace(pid=7, poll=lambda: None, wait=waits.append, kill=lambda: None)
    ranks: Any = rank_processes.RankProcesses()
    ranks.ranks, ranks.processes, ranks._run = (0, 1), [asleep, asleep], tmp_path / "run"
    ranks.sockets = SimpleNamespace(receive=lambda timeout_s: None, close=lambda: None)
    ranks.stop(grace_s=0)
    assert waits == [0.0, rank_processes.KILLED_S] * 2 and not ranks.running
    assert caplog.text.count("process 7 of a rank was killed and does not end") == 2


def test_a_host_knows_its_own_gpus(
    faults: Path, cluster: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 loses the GPU of rank 3, and node 0 has to stop a rank that could run."""
    few = [prompt[:20] for prompt in prompts(4)]
    with Engine(config(cluster.model)) as engine:
        expected = [r.token_ids for r in engine.generate(few, PARAMS)]
    monkeypatch.setattr(agent_module, "gpus_of", lambda config: ("GPU-c", "GPU-d"))
    given = replace(cluster, shrink=True, gpus=("GPU-a", "GPU-b"))
    with host(replace(cluster, shrink=False), tmp_path / "said") as agent, Engine(given) as engine:

        def lose() -> None:
            (faults / "GPU-d").write_text("100")
            os.kill(ranks_of(agent.pid)[1], signal.SIGKILL)

        run_while_a_rank_is_lost(engine, few, expected, lose, 2, at_starts=False)
        assert engine.config.places == ((0,), (0,)) and engine.stats().lost_ranks == 1
        assert [r.token_ids for r in engine.generate(few, PARAMS)] == expected
        engine.close()
        agent.join(WAIT_S)
