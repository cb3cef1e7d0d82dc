"""GPUs of two hosts: peer inside a host and NCCL across, in graphs, give one host's tokens.

A host is a process with NCCL_HOSTID of its own, so that NCCL takes the network between them, here loopback. On a
machine with too few GPUs for both, they share GPUs, whose kernels then take turns: slow, and right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_agents import reserved_ports
from weft.engine.config.config import EngineConfig
from weft.engine.output.tokenizer_files import load_tokenizer
from weft_bench import word_problems

GPUS = torch.cuda.device_count()
PROBLEMS = word_problems.generate("heldout", 6, seed=7)
SHAPE: dict[str, Any] = dict(dtype="float32", max_running=4, max_batch_tokens=64, step_timeout_s=40.0)
SHAPE |= dict(kv_tokens=2048, max_model_len=256)  # hosts may share a GPU
LAYOUTS: dict[str, dict[str, Any]] = {
    "1x2": dict(attn_tp=2, ep=2),
    "2x1": dict(attn_dp=2, ep=2),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "2x2 ep": dict(attn_dp=2, attn_tp=2, ep=4),
}
WAIT_S = 80.0


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    tokenizer = load_tokenizer(EngineConfig())
    chats = [word_problems.prompt(p.question) for p in PROBLEMS]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    return dict(prompts=prompts, max_tokens=32, device="cuda" if GPUS else "cpu") | SHAPE


class Host:
    """A host as a process that sees these GPUs. log: begins the names of the files of what it says."""

    def __init__(self, options: dict[str, Any], gpus: list[int], log: Path, **environ: str):
        apart = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} | apart
        command = [sys.executable, "-m", "gpu.host", json.dumps(options)]
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, env=os.environ | seen | environ, stdout=out, stderr=err)


def result(hosts: list[Host]) -> dict[str, Any]:
    """Return the first host's printed result. Fail with every host's messages on an error or a time-out."""
    deadline = time.monotonic() + WAIT_S
    while (codes := [host.process.poll() for host in hosts]) != [0] * len(hosts) and time.monotonic() < deadline:
        if any(codes):  # the others hear of it
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.1)
    for host in hosts:
        host.process.kill()
        host.process.wait()
    said = [f"node {n}: exit code {code}\n{hosts[n].err.read_text()}" for n, code in enumerate(codes)]
    assert codes == [0] * len(hosts), "\n\n".join(said)
    found: dict[str, Any] = json.loads(hosts[0].out.read_text().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def expected(asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the tokens of one rank."""
    tokens: list[list[int]] = result([Host(asked, [0], tmp_path_factory.mktemp("one") / "host")])["tokens"]
    return tokens


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_are_one_hosts(name: str, asked: dict[str, Any], expected: list[list[int]], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    each = layout.get("attn_dp", 1) * layout.get("attn_tp", 1) // 2
    if each > GPUS:
        pytest.skip(f"needs {each} GPUs on each host; this machine has {GPUS}")
    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    meeting = dict(nnodes=2, master_addr="127.0.0.1", cluster_key=str(key), interface="lo")
    hosts = []
    with reserved_ports() as port:
        for node in (0, 1):
            gpus = [(node * each + i) % max(GPUS, 1) for i in range(each)]
            environ = {"NCCL_HOSTID": f"{tmp_path.name}-{node}", "NCCL_SOCKET_IFNAME": "lo"}
            options = asked | layout | meeting | dict(node_rank=node, master_port=port)
            hosts.append(Host(options, gpus, tmp_path / f"node-{node}", **environ))
        found = result(hosts)
    assert found["tokens"] == expected and not found["failures"]
    by = {transport for transport in ("peer", "torchdist/nccl") if any(transport in step for step in found["steps"])}
    assert by == ({"torchdist/nccl"} if each == 1 else {"peer", "torchdist/nccl"}), found["steps"]
    assert "capturing graphs" in found["stages"]
