"""Peer memory on real GPUs, a process each: the oracle matrix, graphs whose counts change, and a model's edges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from comm.oracle import check_calls, check_edges, check_epilogues, close, counts_of
from weft.comm.peer import PeerTransport
from weft.comm.transport import CommError, CommTimeout, Epilogue, finish
from weft.place.spec import Mesh

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, this machine has {GPUS}")
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
MESHES = [Mesh(1, 2, 2, 1)] if GPUS < 4 else [Mesh(2, 2, 2, 2), Mesh(1, 4, 4, 1)]


def rank_main(rank: int, mesh: Mesh, directory: str, options: dict[str, Any], work: Callable[..., None]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    transport = PeerTransport(mesh, rank, f"{directory}/peer", device, **options)
    work(transport, mesh, device)
    transport.check()
    transport.close()


def run_gpus(mesh: Mesh, directory: Path, work: Callable[..., None], **options: Any) -> None:
    mp.spawn(rank_main, (mesh, str(directory), options, work), nprocs=mesh.world)


def everything(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    check_calls(transport, mesh, SUMMED, str(device))
    for counts in counts_of(mesh):
        check_edges(transport, mesh, counts, torch.float32, str(device))
    check_epilogues(transport, mesh, SUMMED, str(device))
    check_calls(transport, mesh, (torch.bfloat16,), str(device), scale=67)
    check_epilogues(transport, mesh, (torch.bfloat16,), str(device), scale=31)


@pytest.mark.parametrize("one_hop_bytes", [0, 1 << 30], ids=["two hops", "one hop"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_call_edge_and_epilogue(mesh: Mesh, one_hop_bytes: int, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, everything, one_hop_bytes=one_hop_bytes)


def replay(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Three edges captured in one graph, replayed with other counts and contents each time, each replay checked."""
    n, rank, group, most, width = mesh.world, transport.rank, tuple(range(mesh.world)), 24, 512
    counts = torch.zeros(n, dtype=torch.int32, device=device)
    own = torch.zeros(most, width, dtype=torch.bfloat16, device=device)
    every = torch.zeros(n * most, width, dtype=torch.bfloat16, device=device)
    residual = torch.zeros(n * most, width, dtype=torch.bfloat16, device=device)
    weight = torch.linspace(-1, 2, width, device=device).bfloat16()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        transport.all_gatherv(own, group, counts)  # loads the kernels before the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gathered = transport.all_gatherv(own, group, counts)
            scattered = transport.reduce_scatterv(every, group, counts)
            summed = transport.all_reduce(every, group, Epilogue(residual, weight, 1e-6))
    generator = torch.Generator().manual_seed(11)
    for turn in range(300):
        sizes = torch.randint(0, most + 1, (n,), generator=generator)
        if turn % 7 == 0:
            sizes[turn % n] = 0
        total = int(sizes.sum())
        inputs = torch.randn(n, n * most, width, generator=generator).bfloat16()
        base = torch.randn(n * most, width, generator=generator).bfloat16()
        with torch.cuda.stream(stream):
            counts.copy_(sizes.to(torch.int32))
            own.copy_(inputs[rank, :most])
            every.copy_(inputs[rank])
            residual.copy_(base)
            for out in (gathered, scattered, summed):
                out.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
        transport.check()
        wanted = torch.cat([inputs[r, : sizes[r]] for r in range(n)])
        assert torch.equal(gathered[:total].cpu(), wanted), f"turn {turn}: gather"
        total_sum = inputs.double().sum(0)
        start = int(sizes[:rank].sum())
        close(scattered[: sizes[rank]].cpu(), total_sum[start : start + sizes[rank]], f"turn {turn}: scatter")
        expected = finish(inputs.float().sum(0).bfloat16(), Epilogue(base, weight.cpu(), 1e-6))
        close(summed[1].cpu(), expected[1], f"turn {turn}: norm")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_graph_serves_every_count(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, replay)


def wait_in_vain(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Rank 0 calls, the others do not: its kernel ends, and says so."""
    if transport.rank == 0:
        transport.all_reduce(torch.ones(4, 64, device=device), tuple(range(mesh.world)))
        torch.cuda.synchronize()
        with pytest.raises(CommTimeout, match="for rank"):
            transport.check()
        transport._kernels.clear_error(transport._handle)


def test_a_wait_in_vain_ends(tmp_path: Path) -> None:
    run_gpus(MESHES[0], tmp_path, wait_in_vain, timeout_s=0.5)


def refuse(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    group = tuple(range(mesh.world))
    with pytest.raises(CommError, match="inbox_bytes="):
        transport.all_reduce(torch.ones(1 << 20, 16, device=device), group)
    with pytest.raises(CommError, match="not int32"):
        transport.all_reduce(torch.ones(4, 64, device=device, dtype=torch.int32), group)
    counts = torch.full((mesh.world,), 99, dtype=torch.int32, device=device)
    transport.all_gatherv(torch.ones(4, 64, device=device), group, counts)
    torch.cuda.synchronize()
    with pytest.raises(CommError, match="more rows than the tensors hold"):
        transport.check()
    transport._kernels.clear_error(transport._handle)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_gpus(MESHES[0], tmp_path, refuse)
