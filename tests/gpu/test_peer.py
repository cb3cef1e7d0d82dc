"""Peer memory on real GPUs, a process each: the oracle matrix, graphs whose counts change, and a model's edges."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from comm.oracle import check_calls, check_edges, check_epilogues, counts_of
from gpu.streams import run_streams
from weft.comm.peer import PeerTransport, PeerTuning, Split
from weft.comm.transport import CommError, CommTimeout, Epilogue, PeerLost
from weft.place.spec import Mesh

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU; this machine has none")
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
MESHES = [Mesh(1, 2, 2, 1), Mesh(3, 1, 3, 1), Mesh(2, 2, 2, 2), Mesh(1, 4, 4, 1), Mesh(4, 2, 8, 1)]
TURNS = 12_500 if GPUS >= 4 else 1_000
CAPTURES = threading.Lock()
NEVER = 1 << 40
WIDE = (1032, 7168, 32768)  # elements of rows that several blocks share, if only so many threads each
SPLIT = PeerTuning(
    split_one_hop=Split(0, 2, 0, 4, 128),
    split_two_hops=Split(0, 2, 1, 3, 128),
    split_one_hop_norm=Split(0, 2, 0, 4, 128),
    split_two_hops_norm=Split(0, 2, 1, 3, 128),
)
HOPS = {
    "one hop": PeerTuning(one_hop_bytes=NEVER),
    "two hops": PeerTuning(one_hop_bytes=0),
    "one hop, split": replace(SPLIT, one_hop_bytes=NEVER),
    "two hops, split": replace(SPLIT, one_hop_bytes=0),
}


def rank_main(rank: int, mesh: Mesh, directory: str, options: dict[str, Any], work: Callable[..., None]) -> None:
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    transport = PeerTransport(mesh, rank, f"{directory}/peer", device, **options)
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one cannot be captured
        work(transport, mesh, device)
    transport.check()
    transport.close()


def run_gpus(mesh: Mesh, directory: Path, work: Callable[..., None], **options: Any) -> None:
    """A process a GPU where there are enough; else all ranks share one, a stream each."""
    if mesh.world <= GPUS:
        mp.spawn(rank_main, (mesh, str(directory), options, work), nprocs=mesh.world)
    else:
        run_streams(mesh, work, **options)


def tunings(mesh: Mesh) -> dict[str, PeerTuning]:
    """HOPS, of few blocks where all ranks' kernels share a GPU."""
    if mesh.world <= GPUS:
        return HOPS
    return {name: replace(tuning, blocks=8, wide_blocks=8, norm_blocks=8) for name, tuning in HOPS.items()}


def everything(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    for name, tuning in tunings(mesh).items():
        transport.tuning = tuning
        check_calls(transport, mesh, SUMMED if name == "one hop" else SUMMED[1:2], str(device))
        for counts in counts_of(mesh):
            check_edges(transport, mesh, counts, torch.float32, str(device))
        check_epilogues(transport, mesh, SUMMED, str(device))
        check_calls(transport, mesh, (torch.bfloat16,), str(device), scale=67)
        check_epilogues(transport, mesh, (torch.bfloat16,), str(device), scale=31)
        for cluster in (1, 2, 8):
            transport.tuning = replace(transport.tuning, cluster=cluster)
            check_epilogues(transport, mesh, (torch.bfloat16,), str(device), widths=WIDE)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_call_edge_and_epilogue(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, everything, max_bytes=32 << 20)


def replay(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Six calls in one graph, replayed with other counts and contents each time; every replay is checked, exactly.

    Inputs are small whole numbers, so that sums are exact. Neighbouring turns differ in every row: what is stale shows.
    """
    n, rank, group, most, width, cases = mesh.world, transport.rank, tuple(range(mesh.world)), 8, 256, 61
    dp, tp = mesh.peers("attn_dp", rank), mesh.peers("attn_tp", rank)
    generator = torch.Generator().manual_seed(11)
    sizes = torch.randint(0, most + 1, (cases, n), generator=generator)
    sizes[::7, 1] = 0
    sizes[0], sizes[1] = 0, most
    x = torch.randint(-8, 9, (cases, n, n * most, width), generator=generator).bfloat16()
    residual = torch.randint(-8, 9, (n * most, width), generator=generator).bfloat16()
    wanted = torch.full((cases, 6, n * most, width), float("nan"), dtype=torch.bfloat16)  # NaN: no matter what
    for k in range(cases):
        total, start = int(sizes[k].sum()), int(sizes[k, :rank].sum())
        summed = x[k].float().sum(0).bfloat16()
        wanted[k, 0, :total] = torch.cat([x[k, r, : sizes[k, r]] for r in group])
        wanted[k, 1, : sizes[k, rank]] = summed[start : start + sizes[k, rank]]
        wanted[k, 2] = summed
        per_group, mine = sizes[k, : mesh.attn_dp], mesh.group_of(rank)
        sums = [
            x[k, list(p)].float().sum(0).bfloat16()[:c]
            for p, c in zip(mesh.partitions["attn_tp"], per_group, strict=True)
        ]
        wanted[k, 3, : int(per_group.sum())] = torch.cat(sums)
        before = int(per_group[:mine].sum())
        wanted[k, 4, : per_group[mine]] = summed[before : before + per_group[mine]]
        wanted[k, 5, : sizes[k, rank]] = wanted[k, 1, : sizes[k, rank]] + residual[: sizes[k, rank]]
    sizes, x, wanted = sizes.to(device, torch.int32), x.to(device), wanted.to(device)
    anything = wanted.isnan()
    counts, group_counts = sizes[0].clone(), sizes[0, : mesh.attn_dp].clone()
    own, every = x[0, rank, :most].clone(), x[0, rank].clone()
    outs = torch.empty_like(wanted[0])
    epilogue = Epilogue(residual.to(device), torch.ones(width, device=device).bfloat16(), 1e-6)
    bad = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        results = [
            transport.all_gatherv(own, group, counts),
            transport.reduce_scatterv(every, group, counts),
            transport.all_reduce(every, group),
            transport.all_reduce_all_gatherv(own, tp, dp, group_counts),
            transport.reduce_scatterv_all_reduce(every, dp, tp, group_counts),
            transport.reduce_scatterv(every, group, counts, epilogue)[0],
        ]
        for out, result in zip(outs, results, strict=True):
            out[: result.shape[0]].copy_(result)

    stream = torch.cuda.current_stream()
    with CAPTURES:  # one thread at a time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    transport.barrier(group)  # a capture waits for the GPU's other streams, of ranks that would wait for this one
    for turn in range(TURNS):
        k = turn * 17 % cases
        counts.copy_(sizes[k])
        group_counts.copy_(sizes[k, : mesh.attn_dp])
        own.copy_(x[k, rank, :most])
        every.copy_(x[k, rank])
        outs.fill_(float("inf"))
        graph.replay()
        bad += ((outs != wanted[k]) & ~anything[k]).any() * (turn + 1)
        if turn % 1000 == 999:
            transport.check()
            assert int(bad) == 0, f"a wrong result up to turn {turn}"


def replay_all(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    for tuning in tunings(mesh).values():
        transport.tuning = tuning
        replay(transport, mesh, device)


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2, 1), Mesh(2, 2, 2, 2)], ids=str)
def test_a_graph_serves_every_count(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, replay_all)


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


def fill(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Calls of exactly max_bytes, in which one rank or group has all rows, each in turn."""
    n, rank, group = mesh.world, transport.rank, tuple(range(mesh.world))
    dp, tp = mesh.peers("attn_dp", rank), mesh.peers("attn_tp", rank)
    rows = int(transport.max_bytes or 0) // 4096
    base = (torch.arange(rows, device=device)[:, None] * 7 + torch.arange(1024, device=device)) % 13
    x = base.float() + rank
    summed, of_groups = (
        (n * base + n * (n - 1) / 2).float(),
        [len(p) * base + sum(p) for p in mesh.partitions["attn_tp"]],
    )
    for tuning in tunings(mesh).values():
        transport.tuning = tuning
        assert torch.equal(transport.all_reduce(x, group), summed)
        for one in range(n):
            sizes = tuple(rows * (r == one) for r in group)
            mine = slice(0, sizes[rank])
            assert torch.equal(transport.reduce_scatterv(x, group, sizes), summed[mine])
            assert torch.equal(transport.all_gatherv(x[mine], group, sizes), base + one)
            send = tuple(rows * (r == (rank + one) % n) for r in group)
            receive = tuple(rows * (rank == (r + one) % n) for r in group)
            assert torch.equal(transport.all_to_allv(x, group, send, receive), base + (rank - one) % n)
        for one in range(mesh.attn_dp):
            sizes = tuple(rows * (g == one) for g in range(mesh.attn_dp))
            mine = slice(0, sizes[mesh.group_of(rank)])
            for counts in (sizes, torch.tensor(sizes, dtype=torch.int32, device=device)):
                got = transport.reduce_scatterv_all_reduce(x, dp, tp, counts)
                assert torch.equal(got[mine], summed[mine])
            got = transport.all_reduce_all_gatherv(x[mine], tp, dp, sizes)
            assert torch.equal(got, of_groups[one].float())


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2, 1), Mesh(2, 2, 2, 2), Mesh(4, 2, 8, 1)], ids=str)
def test_calls_may_be_as_large_as_max_bytes(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, fill, max_bytes=1 << 20)


def refuse(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    group = tuple(range(mesh.world))
    with pytest.raises(CommError, match="max_bytes="):
        transport.all_reduce(torch.ones(1 << 20, 16, device=device), group)
    with pytest.raises(CommError, match="not int32"):
        transport.all_reduce(torch.ones(4, 64, device=device, dtype=torch.int32), group)
    counts = torch.full((mesh.world,), 99, dtype=torch.int32, device=device)
    for wrong in (counts.long(), counts.cpu(), counts[:1]):
        with pytest.raises(CommError, match=rf"counts in device memory must be torch.int32 \[{mesh.world}\]"):
            transport.all_gatherv(torch.ones(4, 64, device=device), group, wrong)
    transport.all_gatherv(torch.ones(4, 64, device=device), group, counts)
    torch.cuda.synchronize()
    with pytest.raises(CommError, match="more rows than the tensors hold"):
        transport.check()
    transport._kernels.clear_error(transport._handle)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_gpus(MESHES[2], tmp_path, refuse)


def lose_a_peer(rank: int, mesh: Mesh, directory: str) -> None:
    """Rank 1 is killed in mid-run; the others hear of it from a call or a check, and can go."""
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    transport = PeerTransport(mesh, rank, f"{directory}/peer", device, timeout_s=2.0)
    x, group = torch.ones(4, 64, device=device), tuple(range(mesh.world))
    with pytest.raises(PeerLost, match="rank 1"):
        for turn in range(1 << 30):
            transport.all_reduce(x, group)
            if turn % 10 == 0:
                torch.cuda.synchronize()
            if turn == 30 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    transport.close()


def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    mesh, context = Mesh(1, 4, 4, 1), mp.get_context("spawn")
    ranks = [context.Process(target=lose_a_peer, args=(rank, mesh, str(tmp_path))) for rank in range(mesh.world)]
    for process in ranks:
        process.start()
    ranks[1].join(120)
    killed = time.monotonic()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0, 0]
    assert time.monotonic() - killed < 15  # two of which a kernel may wait; the rest is the end of a process
