"""compute-sanitizer over every edge: no access out of bounds, no race in shared memory. A process a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comm.oracle import check_calls, check_epilogues
from gpu.test_peer import GPUS, HOPS
from weft.comm.peer import PeerTransport
from weft.place.spec import Mesh

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs; this machine has {GPUS}"),
    pytest.mark.skipif(not SANITIZER, reason="needs compute-sanitizer, which comes with CUDA"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str, tmp_path: Path) -> None:
    world = 4 if GPUS >= 4 else 2
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else tensors share what is allocated at once
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=exchange"]
    ranks = [
        subprocess.Popen(
            [*command, sys.executable, "-m", "gpu.test_sanitizer", str(rank), str(world), str(tmp_path / "peer")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    for rank, process in enumerate(ranks):
        printed = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"rank {rank}: {printed[-4000:]}"
        assert "ERROR SUMMARY: 0 errors" in printed or "0 hazards displayed" in printed, printed[-4000:]


def main(rank: int, world: int, path: str) -> None:
    """A rank under the tool: its kernels are slow, so they may wait long."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = Mesh(world // 2, 2, world, 1)
    transport = PeerTransport(mesh, rank, path, device, timeout_s=120)
    for tuning in HOPS.values():
        transport.tuning = tuning
        check_calls(transport, mesh, (torch.bfloat16,), str(device))
        check_epilogues(transport, mesh, (torch.bfloat16,), str(device), scale=3)
    transport.check()
    transport.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
