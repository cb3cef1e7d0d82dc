"""torchdist over NCCL, a process a GPU: the oracle matrix; and a model's logits on GPUs, by NCCL and by peer."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from support import small_model

from comm.oracle import check_calls, check_edges
from weft.comm.peer import PeerTransport
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.cost import costs
from weft.planner.spec import Mesh
from weft_bench.nccl_window import NcclWindowTransport

GPUS = torch.cuda.device_count()
MESHES = [m for m in (Mesh(2, 1, 2, 1), Mesh(1, 2, 1, 2), Mesh(2, 2, 2, 2), Mesh(1, 4, 4, 1)) if m.world <= GPUS]
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs or more; this machine has {GPUS}")


def rank_main(rank: int, mesh: Mesh, directory: str, prompts: list[list[int]]) -> None:
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    transport = TorchDistTransport(mesh, rank, f"file://{directory}/rendezvous", backend="nccl")
    calls = check_calls(transport, mesh, (torch.float32, torch.bfloat16), device)
    for counts in ([3] * mesh.attn_dp, [(5 * g + 1) % 7 for g in range(mesh.attn_dp)], [1] + [0] * (mesh.attn_dp - 1)):
        calls += check_edges(transport, mesh, tuple(counts), torch.float64, device)
    assert calls > 0
    model = load_model(Path(directory) / "model", load_config(Path(directory) / "model"), mesh, rank, device=device)
    peer = PeerTransport(mesh, rank, f"{directory}/peer", torch.device(device))
    prompt = prompts[mesh.group_of(rank)]
    seqs = [SeqRows(len(prompt), 0, [[1, 0, 2]], True)] if prompt else []
    batch = build_batch(prompt, seqs, 4, device=device)
    for built in (transport, peer):
        runner = ModelRunner(
            model, mesh, rank, [built], [CacheGroup(Rule(), 4)], page_size=4, costs=costs("h200-nvlink")
        )
        logits = runner.forward(batch, tuple(len(p) for p in prompts[: mesh.attn_dp]))
        torch.save(logits.cpu(), f"{directory}/{type(built).__name__}-{rank}.pt")
    peer.check()
    peer.close()
    transport.close()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_calls_edges_and_logits(mesh: Mesh, tmp_path: Path) -> None:
    model: Any = small_model("qwen2_moe", 4, tmp_path / "model")
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
    mp.spawn(rank_main, (mesh, str(tmp_path), prompts), nprocs=mesh.world)
    for rank in range(mesh.world):
        prompt = prompts[mesh.group_of(rank)]
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, -1]
        for name in ("TorchDistTransport", "PeerTransport"):
            got = torch.load(tmp_path / f"{name}-{rank}.pt")[0]
            assert (got - wanted).norm() / wanted.norm() <= 1e-4, name  # float32 on both, other kernels


def window_main(rank: int, mesh: Mesh, directory: str) -> None:
    faulthandler.dump_traceback_later(40, exit=True)  # where it waits, if it does
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    transport = NcclWindowTransport(mesh, rank, f"file://{directory}/window", device)
    assert check_calls(transport, mesh, (torch.float32, torch.bfloat16), str(device)) > 0
    x = torch.ones(4, 8, device=device)
    with pytest.raises(CommError, match="arena_bytes"):
        transport.all_reduce(x.expand(1 << 22, 4, 8).reshape(-1, 8), tuple(range(mesh.world)))
    transport.close()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("mesh", MESHES[-1:], ids=str)
def test_windows(mesh: Mesh, tmp_path: Path) -> None:
    mp.spawn(window_main, (mesh, str(tmp_path)), nprocs=mesh.world)
