"""Live counts that change under tensors of one shape, through `Stream`: emulated here, in CUDA graphs on GPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from gpu.emulation import run_emulated
from gpu.padded import Step, check_padded
from gpu.test_peer import GPUS, captured
from weft.comm.peer import PeerTransport, PeerTuning
from weft.comm.reference import ReferenceWorld
from weft.comm.transport import CommError
from weft.planner.edges import legal_edges
from weft.planner.spec import NAMED_ROWS, Mesh, Rows
from weft.stream.step_rows import EqualRows, PaddedRows, captured_rows

MESHES = [Mesh(2, 2, 2, 2), Mesh(2, 1, 2, 1), Mesh(1, 2, 1, 2)]
SMALL = PeerTuning(blocks=2, threads=32, wide_blocks=3, wide_threads=64, norm_blocks=4, early=0)


def made_again(transport: PeerTransport, step: Step) -> Step:
    return step


@pytest.mark.parametrize(
    "mesh",
    [*MESHES[1:], *(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in (MESHES[0], Mesh(2, 2, 4, 1)))],
    ids=str,
)
def test_emulated(mesh: Mesh) -> None:
    run_emulated(mesh, partial(check_padded, again=made_again), SMALL, max_bytes=1 << 16)


def rank_main(rank: int, mesh: Mesh, directory: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    transport = PeerTransport(mesh, rank, f"{directory}/peer", device, max_bytes=1 << 20)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_padded(transport, mesh, device, captured)
    transport.close()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_in_a_graph(mesh: Mesh, tmp_path: Path) -> None:
    if mesh.world > GPUS:
        pytest.skip(f"needs {mesh.world} GPUs; this machine has {GPUS}")
    mp.spawn(rank_main, (mesh, str(tmp_path)), nprocs=mesh.world)


def test_counts_that_do_not_fit_are_refused() -> None:
    rows = PaddedRows(Mesh(2, 1, 2, 1), 0, 4, torch.device("cpu"))
    for counts in ((5, 0), (1,), (-1, 2)):
        with pytest.raises(ValueError, match="do not fit a capacity"):
            rows.fill(counts)
    rows.fill((4, 1))
    assert [int(rows.live(kind)) for kind in NAMED_ROWS] == [4, 4, 5]


@pytest.mark.parametrize("kind", [PaddedRows, EqualRows])
def test_other_counts_with_the_same_sum_are_filled(kind: type[PaddedRows] | type[EqualRows]) -> None:
    mesh = Mesh(2, 1, 2, 1)
    rows = kind(mesh, 0, 4, torch.device("cpu"))
    gather = next(e for found in legal_edges(mesh).values() for e in found if e.kind == "all_gatherv")
    for counts in ((3, 1), (1, 3), (2, 2), (4, 0), (0, 4), (4, 0), (4, 0)):
        rows.fill(counts)
        assert int(rows.live(Rows.GROUP)) == counts[0]
        if isinstance(rows, PaddedRows):
            assert rows.live_sizes(gather).live.tolist() == list(counts)
            assert rows.slice(torch.arange(8), Rows.WORLD, Rows.GROUP)[: counts[0]].tolist() == [*range(counts[0])]


def test_a_transport_that_takes_no_counts_on_the_device_says_so() -> None:
    mesh = Mesh(2, 1, 2, 1)
    [transport, _] = ReferenceWorld(2).transports()
    rows = PaddedRows(mesh, 0, 4, torch.device("cpu"))
    edge = next(e for found in legal_edges(mesh).values() for e in found if e.kind == "all_gatherv")
    with pytest.raises(CommError, match="takes no row counts in device memory"):
        rows.carry(edge, torch.zeros(4, 3), transport)


def test_groups_exchange_equal_rows_over_a_transport_that_takes_no_counts() -> None:
    mesh, cpu = Mesh(2, 2, 2, 2), torch.device("cpu")
    transport = ReferenceWorld(4).transports()[3]
    rows = captured_rows([transport], mesh, 3, 4, cpu)
    assert isinstance(rows, EqualRows) and rows.capacity == (4, 4)
    for counts in ((3, 1), (4, 0), (0, 4)):
        rows.fill(counts)
        own, group, world = (int(rows.live(kind)) for kind in (Rows.OWN, Rows.GROUP, Rows.WORLD))
        assert (own, group, world) == (2, counts[1], 8), "all but the group's own are computed whole"
    with pytest.raises(ValueError, match="do not fit a capacity"):
        rows.fill((5, 0))
    over_hosts = Mesh(2, 2, 4, 1, hosts=2)
    rows = captured_rows([transport], over_hosts, 3, 4, cpu)
    rows.fill((3, 1))
    live = {kind.name: int(rows.live(kind)) for kind in over_hosts.row_kinds}
    assert live == {"OWN": 2, "attn_dp rows": 4, "GROUP": 1, "WORLD": 8}
    alone = captured_rows([transport], Mesh(1, 2, 1, 2), 1, 4, cpu)
    alone.fill((3,))
    live = [int(alone.live(kind)) for kind in NAMED_ROWS]
    assert live == [2, 3, 3], "where there is one group, its count is the world's"
