"""Peer memory on real GPUs, a process each: the oracle matrix, graphs whose counts change, lost peers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from gpu.replays import Step, replay
from gpu.works import SHOTS, any_bits, everything, fill, refuse, sums_in_order, wait_in_vain
from weft.comm.peer import PeerTransport
from weft.comm.transport import PeerLost
from weft.planner.spec import Mesh

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU; this machine has none")
MESHES = [Mesh(1, 2, 2, 1), Mesh(3, 1, 3, 1), Mesh(2, 2, 2, 2), Mesh(1, 4, 4, 1), Mesh(4, 2, 8, 1)]
ROUNDS = 1_000


def rank_main(rank: int, mesh: Mesh, directory: str, options: dict[str, Any], work: Callable[..., None]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    transport = PeerTransport(mesh, rank, f"{directory}/peer", device, **options)
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one cannot be captured
        work(transport, mesh, device)
    transport.check()
    transport.close()


def run_gpus(mesh: Mesh, directory: Path, work: Callable[..., None], **options: Any) -> None:
    """A process a GPU."""
    if mesh.world > GPUS:
        pytest.skip(f"takes {mesh.world} GPUs, this machine has {GPUS}; the emulated kernels run in this layout")
    mp.spawn(rank_main, (mesh, str(directory), options, work), nprocs=mesh.world)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_call_edge_and_epilogue(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, partial(everything, tunings=SHOTS, large=True), max_bytes=32 << 20)


def captured(transport: PeerTransport, step: Step) -> Step:
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


def replay_all(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    for tuning in SHOTS.values():
        transport.tuning = tuning
        replay(transport, mesh, device, ROUNDS, captured)


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2, 1), Mesh(2, 2, 2, 2)], ids=str)
def test_a_graph_serves_every_count(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, replay_all)


def test_a_wait_in_vain_ends(tmp_path: Path) -> None:
    run_gpus(MESHES[0], tmp_path, wait_in_vain, timeout_s=0.5)


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2, 1), Mesh(2, 2, 2, 2), Mesh(4, 2, 8, 1)], ids=str)
def test_calls_may_be_as_large_as_max_bytes(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, partial(fill, tunings=SHOTS), max_bytes=1 << 20)


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2, 1), Mesh(2, 2, 2, 2), Mesh(4, 2, 8, 1)], ids=str)
def test_what_is_not_summed_arrives_bit_for_bit(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, partial(any_bits, tunings=SHOTS), max_bytes=1 << 20)


@pytest.mark.parametrize("mesh", [Mesh(1, 4, 4, 1), Mesh(2, 2, 2, 2), Mesh(4, 2, 8, 1)], ids=str)
def test_sums_are_in_rank_order(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, partial(sums_in_order, tunings=SHOTS), max_bytes=1 << 20)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_gpus(MESHES[0], tmp_path, refuse)


def lose_a_peer(rank: int, mesh: Mesh, directory: str) -> None:
    """Rank 1 is killed in mid-run; the others hear of it from a call or a check, and can go."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    transport = PeerTransport(mesh, rank, f"{directory}/peer", device, timeout_s=2.0)
    x, group = torch.ones(4, 64, device=device), tuple(range(mesh.world))
    with pytest.raises(PeerLost, match="rank 1"):
        for index in range(1 << 30):
            transport.all_reduce(x, group)
            if index % 10 == 0:
                torch.cuda.synchronize()
            if index == 30 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    transport.close()


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs; this machine has {GPUS}")
def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    world = min(GPUS, 4)
    mesh, context = Mesh(1, world, world, 1), mp.get_context("spawn")
    ranks = [context.Process(target=lose_a_peer, args=(rank, mesh, str(tmp_path))) for rank in range(mesh.world)]
    for process in ranks:
        process.start()
    ranks[1].join(120)
    killed = time.monotonic()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0, 0][:world]
    assert time.monotonic() - killed < 15  # two of which a kernel may wait; the rest is the end of a process
