"""One world on several hosts: shm inside each, gloo across. A host is a group of processes that share no segment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from support import held

from planner.executed import execute, whole_result
from planner.meshes import layouts
from planner.test_hosts import layers
from weft.comm.shm import ShmTransport
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError, PeerLost, offer_of
from weft.comm.transport_registry import GLOO, SHM
from weft.planner.cost import PRESETS, AlphaBeta, Network
from weft.planner.plan import Plan, Planner
from weft.planner.spec import Mesh

FOUR = [replace(mesh, hosts=hosts) for mesh in layouts(4) if mesh.world == 4 for hosts in (2, 4)]
NETWORKS = (Network(300.0, 300.0, 1.0), Network(1e-3, 0.0, 1e-3), Network(500.0, 100.0, 100.0))
"""Networks with high latency, few bytes/s and costly calls: a different plan is the cheapest on each."""
TIMEOUT_S = 240.0


def counts_of(mesh: Mesh) -> tuple[int, ...]:
    """Tokens of each DP group: ragged, one group empty."""
    return tuple((5 * g + 3) % 7 if g != 1 else 0 for g in range(mesh.attn_dp))


def plans_of(mesh: Mesh) -> list[Plan]:
    """Different plans of the same layers over shm and gloo, each the cheapest on some network."""
    found: dict[tuple[str, ...], Plan] = {}
    for network in NETWORKS:
        for inside in (replace(PRESETS["cpu-shm"], network=network), AlphaBeta("", 1e-3, 0, 1e-2, 4, 8, network)):
            flat = replace(inside, alpha_us=3 * inside.alpha_us)
            offers = [offer_of(SHM, mesh, inside), offer_of(GLOO, mesh, flat)]
            plan = Planner(mesh, layers(mesh, 2), offers).plan(counts_of(mesh))
            found.setdefault(tuple(f"{step.op}" for read in plan.reads for step in read.steps), plan)
    return list(found.values())


def rank_main(rank: int, plans: dict[Mesh, list[Plan]], directory: str) -> None:
    """A rank of world after world: opens both transports, carries out each plan, keeps by whom."""
    torch.set_num_threads(1)
    carried: dict[tuple[int, str, bool], int] = {}
    for number, mesh in enumerate(plans):
        on_host = ShmTransport(
            mesh, rank, f"{directory}/{number}-{mesh.host_of(rank)}", timeout_s=TIMEOUT_S, block_bytes=1 << 20
        )
        across = TorchDistTransport(mesh, rank, f"file://{directory}/meeting-{number}", timeout_s=TIMEOUT_S)
        counts = counts_of(mesh)
        for plan in plans[mesh]:
            ours = execute({SHM.name: on_host, GLOO.name: across}, plan, counts, 1)
            for read, value, whole in zip(plan.reads, ours, whole_result(plan, counts, 1), strict=True):
                wanted = held(whole, mesh, read.read.target.rows, rank, counts)
                assert torch.allclose(value, wanted, rtol=1e-12, atol=1e-12), f"{mesh}, rank {rank}: {read}"
            for _, step, edge in plan.moves():
                key = number, step.transport, mesh.hosts_of(edge.group) > 1
                carried[key] = carried.get(key, 0) + 1
        across.close()
        on_host.close()
    torch.save(carried, f"{directory}/rank-{rank}.pt")


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, bool], int]:
    """Return the steps that each transport carried per layout, inside hosts and across; equal on every rank."""
    directory = tmp_path_factory.mktemp("hosts")
    mp.start_processes(
        rank_main, ({mesh: plans_of(mesh) for mesh in FOUR}, str(directory)), nprocs=4, start_method="fork"
    )
    found = [torch.load(directory / f"rank-{rank}.pt") for rank in range(4)]
    assert all(each == found[0] for each in found)
    return found[0]


def test_every_layout_gives_plain_sums_over_both_transports(carried: dict[tuple[int, str, bool], int]) -> None:
    for number, mesh in enumerate(FOUR):
        across = sum(n for (at, _, spans), n in carried.items() if at == number and spans)
        assert across and (number, SHM.name, True) not in carried, f"{mesh}: shm serves one host"
        if mesh.hosts == 2:
            assert (number, SHM.name, False) in carried, f"{mesh}: no plan exchanges inside a host"


def test_a_group_that_crosses_hosts_is_none_of_shm(tmp_path: Path) -> None:
    mesh = Mesh(1, 2, 1, 2, hosts=2)
    transport = ShmTransport(mesh, 1, tmp_path / "shm", block_bytes=1 << 20)
    with pytest.raises(CommError, match=r"rank 1: \(0, 1\) is no group of the layout inside this host"):
        transport.all_reduce(torch.ones(2, 4), (0, 1))
    transport.close()


def lose_a_peer(rank: int, directory: str) -> None:
    mesh = Mesh(4, 1, 4, 1, hosts=2)  # ranks 1 and 3 share a host
    if rank % 2 == 0:
        return
    transport = ShmTransport(mesh, rank, f"{directory}/shm", block_bytes=1 << 20)
    transport.barrier((1, 3))
    if rank == 1:
        with pytest.raises(PeerLost, match="rank 1: rank 3 is gone"):
            transport.all_reduce(torch.ones(2, 4), (1, 3))


def test_a_lost_peer_has_its_number_in_the_world(tmp_path: Path) -> None:
    mp.start_processes(lose_a_peer, (str(tmp_path),), nprocs=4, start_method="fork")
