"""compute-sanitizer over every edge and merge: no access out of bounds, no race in shared memory. A process a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comm.oracle import check_calls, check_epilogues
from gpu.merges import merge_live_rows
from gpu.replays import replay
from gpu.test_peer import GPUS
from gpu.works import SHOTS, any_bits
from weft.comm.peer import PeerTransport
from weft.comm.transport import Epilogue
from weft.planner.spec import Mesh

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs; this machine has {GPUS}"),
    pytest.mark.skipif(not SANITIZER, reason="needs compute-sanitizer, which comes with CUDA"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str, tmp_path: Path) -> None:
    world = 4 if GPUS >= 4 else 2
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else tensors share what is allocated at once
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=weft"]
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
    try:
        for rank, process in enumerate(ranks):
            printed = process.communicate(timeout=300)[0]
            assert process.returncode == 0, f"rank {rank}: {printed[-4000:]}"
            assert "ERROR SUMMARY: 0 errors" in printed or "0 hazards displayed" in printed, printed[-4000:]
    finally:
        for process in ranks:
            process.kill()  # those that wait for one that failed


def main(rank: int, world: int, path: str) -> None:
    """A rank under the tool: its kernels are slow, so they may wait long."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = Mesh(world // 2, 2, world, 1, dcp=2)
    transport = PeerTransport(mesh, rank, path, device, timeout_s=120)
    for name in ("one shot", "two shots", "two shots, split"):
        transport.tuning = SHOTS[name]
        check_calls(transport, mesh, (torch.bfloat16,), str(device))
        check_epilogues(transport, mesh, (torch.bfloat16,), str(device), scale=3, widths=(8, 33))
        replay(transport, mesh, device, 3, lambda _, step: step)
    any_bits(transport, mesh, device, {"one shot": SHOTS["one shot"]})
    merge_live_rows(transport, mesh, device, 3, lambda _, step: step)
    wide(transport, mesh, device)
    transport.check()
    transport.close()


def wide(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Rows that a cluster's blocks share, more of them than clusters."""
    x = torch.ones(40, 7168, dtype=torch.bfloat16, device=device)
    transport.all_reduce(x, tuple(range(mesh.world)), Epilogue(x, x[0], 1e-6))
    torch.cuda.synchronize()
    transport.check()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
