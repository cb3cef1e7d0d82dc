"""The oracle itself against its definition, on every layout of up to 8 ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support import run_world

from comm.oracle import check_calls, check_edges
from planner.meshes import layouts
from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.comm.transport import CommError
from weft.planner.spec import Mesh, PlacementError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2, 2), Mesh(1, 3, 3, 1), Mesh(2, 3, 1, 6)], ids=str)
def test_every_call(mesh: Mesh) -> None:
    assert all(run_world(ReferenceWorld(mesh.world, audit=False), lambda t: check_calls(t, mesh, DTYPES)))


@pytest.mark.parametrize("mesh", [m for m in layouts(8) if m.world > 1], ids=str)
def test_every_legal_edge(mesh: Mesh) -> None:
    for counts in ([3] * mesh.attn_dp, [(5 * g) % 7 for g in range(mesh.attn_dp)], [1] + [0] * (mesh.attn_dp - 1)):
        assert all(run_world(mesh.world, lambda t, c=tuple(counts): check_edges(t, mesh, c, torch.float64)))


def test_a_dead_rank_wakes_the_others() -> None:
    def main(transport) -> None:
        if transport.rank == 1:
            raise KeyboardInterrupt
        transport.all_reduce(torch.randn(2, 2), (0, 1, 2))

    with pytest.raises((KeyboardInterrupt, CommError)):
        run_world(3, main)


def test_a_missing_rank_times_out() -> None:
    world = ReferenceWorld(2, timeout_s=0.2)
    with pytest.raises(CommError, match=r"rank 0: barrier in \(0, 1\): a peer failed or did not arrive"):
        world.transports()[0].barrier((0, 1))


def test_ranks_compute_one_at_a_time() -> None:
    busy: list[int] = []

    def main(transport: ReferenceTransport) -> None:
        for _ in range(9):
            busy.append(transport.rank)
            time.sleep(1e-3)  # other threads may run
            assert busy == [transport.rank]
            busy.clear()
            transport.barrier((0, 1, 2))

    run_world(3, main)


def test_a_rank_that_computes_forever_fails_the_others() -> None:
    world, begun, end = ReferenceWorld(2, timeout_s=0.2), threading.Event(), threading.Event()

    def compute() -> None:
        with world.compute_lock.computing():
            begun.set()
            end.wait()

    other = threading.Thread(target=compute)
    with (
        world.compute_lock.computing(),
        pytest.raises(CommError, match=r"another rank has computed for 0\.2 s"),
        world.compute_lock.waiting(),
    ):
        other.start()
        begun.wait()
    end.set()
    other.join()


def test_replicated_values_are_not_summed() -> None:
    with pytest.raises(PlacementError, match="replicated"):
        run_world(2, lambda t: t.all_reduce(torch.ones(2, 2), (0, 1)))
    assert all(not out.any() for out in run_world(2, lambda t: t.all_reduce(torch.zeros(2, 2), (0, 1))))


def test_rows_that_a_rank_sends_itself_are_those_that_it_receives() -> None:
    [transport, _] = ReferenceWorld(2).transports()
    for send, receive in (((2, 1), (1, 0)), ((2, 1), (2,)), ((2, 1), (2, 1, 0))):
        with pytest.raises(CommError, match=r"rows sent and .* received do not match"):
            transport.all_to_allv(torch.zeros(3, 4), (0, 1), send, receive)
