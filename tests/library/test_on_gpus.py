"""Library for GPUs, as far as CPUs can show it: its calls over emulated peer memory, and which ranks may meet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.emulation import run_emulated
from library.worlds import same_bits
from weft.comm import meeting, peer
from weft.comm.peer import PeerTransport
from weft.comm.peer_launch import PeerTuning
from weft.kernels.torch_reference import rms_norm, softmax_merge
from weft.library.arguments import MOVED
from weft.library.communicator import Communicator
from weft.library.custom_ops import OPEN
from weft.planner.spec import Mesh

MAX_BYTES = 1 << 16


class Emulated(Communicator):
    """A communicator over a transport that is there already; its tensors lie where the emulated GPU has them."""

    def __init__(self, transport: PeerTransport, mesh: Mesh):
        self.rank, self.world_size, self.mesh = transport.rank, mesh.world, mesh
        self.device, self.max_bytes, self._name = transport.device, MAX_BYTES, f"emulated {transport.rank}"
        self._begin(transport)


def of(rank: int, *shape: int) -> Tensor:
    """Whole numbers of a rank's, which every rank can work out."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(rank)).float() + rank


def moved(comm: Communicator) -> None:
    n, counts = comm.world_size, [2, 0, 3][: comm.world_size]
    for dtype in MOVED:
        every = [torch.full((rows * 3 * dtype.itemsize,), 255 - r, dtype=torch.uint8) for r, rows in enumerate(counts)]
        if dtype == torch.bool:
            every = [x.clamp(max=1) for x in every]
        rows = [x.view(dtype).view(-1, 3) for x in every]
        assert same_bits(comm.all_gatherv(rows[comm.rank], counts), torch.cat(every).view(dtype).view(-1, 3)), dtype
    ones = torch.full((5,), -1, dtype=torch.int32)
    assert comm.broadcast(ones * (comm.rank + 1), 0).tolist() == [-1] * 5
    assert comm.all_to_allv(ones[:n], [1] * n, [1] * n).tolist() == [-1] * n
    crossed = torch.complex(ones.float(), ones.float()).conj()
    assert same_bits(comm.all_gatherv(crossed, [5] * n)[:5], crossed.resolve_conj())


def summed(comm: Communicator) -> None:
    n, rank, counts = comm.world_size, comm.rank, [2, 0, 3][: comm.world_size]
    for shape in ((), (5,), (2, 3), (2, 2, 9), (0, 4)):
        assert same_bits(comm.all_reduce(of(rank, *shape)), sum(of(r, *shape) for r in range(n)))  # type: ignore[arg-type]
    x, total = of(rank, sum(counts), 8), sum(of(r, sum(counts), 8) for r in range(n))
    assert isinstance(total, Tensor)
    assert same_bits(comm.reduce_scatterv(x, counts), total.split(counts)[rank])
    normed, residual = comm.all_reduce_add_rms_norm(x[None], x[None], torch.ones(8), 1e-6)
    assert same_bits(residual, x[None] + total)
    torch.testing.assert_close(normed, rms_norm(residual, torch.ones(8), 1e-6))
    assert same_bits(comm.all_reduce_all_gatherv(x, [sum(counts)]), total)
    assert same_bits(comm.reduce_scatterv_all_reduce(x, [sum(counts)]), total)
    with pytest.raises(ValueError, match="it sums float32, bfloat16, float16"):
        comm.all_reduce(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="a norm takes up to 65536; sum first"):
        comm.all_reduce_add_rms_norm(torch.ones(0, 16392), torch.ones(0, 16392), torch.ones(16392), 1e-6)


def live(comm: Communicator) -> None:
    """Counts on the device: tensors have room for four rows of each rank."""
    n, rank, rows = comm.world_size, comm.rank, [2, 0, 3][: comm.world_size]
    counts = torch.tensor(rows, dtype=torch.int32)
    given = comm.all_gatherv(of(rank, 4, 8), counts, capacity=4)
    assert given.shape == (4 * n, 8)
    assert same_bits(given[: sum(rows)], torch.cat([of(r, 4, 8)[:k] for r, k in enumerate(rows)]))
    x, total = of(rank, 4 * n, 8), sum(of(r, 4 * n, 8) for r in range(n))
    assert isinstance(total, Tensor)
    mine = total[: sum(rows)].split(rows)[rank]
    assert same_bits(comm.reduce_scatterv(x, counts, capacity=[4] * n)[: rows[rank]], mine)
    normed, residual = comm.reduce_scatterv_add_rms_norm(x, counts, x[:4], torch.ones(8), 1e-6, capacity=4)
    assert same_bits(residual[: rows[rank]], x[: rows[rank]] + mine)
    torch.testing.assert_close(normed[: rows[rank]], rms_norm(residual[: rows[rank]], torch.ones(8), 1e-6))
    for call, text in (
        (lambda: comm.all_gatherv(x[:4], counts), "capacity="),
        (lambda: comm.all_gatherv(x[:3], counts, capacity=4), "has 3 rows, but the counts say 4"),
        (lambda: comm.all_gatherv(x[:4], counts.long(), capacity=4), "int32"),
        (lambda: comm.all_gatherv(x[:4], rows, capacity=4), "omit it"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    outs, lses = ([of(r + 9, *shape) for r in range(n)] for shape in ((3, 2 * n, 16), (3, 2 * n)))
    merged, merged_lse = softmax_merge(torch.stack(outs).double(), torch.stack(lses).double())
    only = torch.tensor([2], dtype=torch.int32)
    out, lse = comm.lse_reduce_scatter(outs[rank], lses[rank] / 0.6931471805599453, "2", live=only)
    own = slice(2 * rank, 2 * rank + 2)
    torch.testing.assert_close(out[:2], merged[:2, own].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:2] * 0.6931471805599453, merged_lse[:2, own].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_calls_over_emulated_peer_memory(world: int) -> None:
    def work(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
        comm = Emulated(transport, mesh)
        for check in (moved, summed, live):
            check(comm)
            comm.check()
        with pytest.raises(ZeroDivisionError), comm:
            raise ZeroDivisionError  # of this rank alone, for all that it knows
        assert transport._handle and comm._name not in OPEN  # others may still write to its memory

    run_emulated(Mesh(1, world, 1, world), work, PeerTuning(), max_bytes=MAX_BYTES)


def test_barriers_wait_as_long_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts' barriers have a time-out of their own."""
    waits: list[float] = []

    def host(mesh: Mesh, rank: int, path: str, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return SimpleNamespace(gather_notes=lambda note: [note])

    monkeypatch.setattr(peer, "HostMemory", host)
    kernels = SimpleNamespace(export_handle=lambda *_: None, connect=lambda *_: None)
    for timeout_s in (10.0, 600.0):
        rank = SimpleNamespace(rank=0, world=(0,), _handle=1, _kernels=kernels, _timeout_s=timeout_s)
        PeerTransport._connect(rank, Mesh(), "")  # type: ignore[arg-type]
    assert waits == [120.0, 600.0]


def test_gpus_that_cannot_be_had_together_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    reach = {(0, 1): True, (1, 0): True}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: reach[device.index, other])
    first = meeting.Facts("here", "boot", "pids", {"device": "cuda"}, str(tmp_path), "GPU-a", ("GPU-a", "GPU-b"), "")
    second = replace(first, gpu="GPU-b")

    def problem(*facts: meeting.Facts, rank: int = 0) -> str:
        return meeting._problem(facts, rank, torch.device("cuda", rank))

    assert problem(first, second) == problem(first, second, rank=1) == ""
    assert "same GPU as rank 1" in problem(first, first) and "set_device" in problem(first, first)
    assert "CUDA_VISIBLE_DEVICES" in problem(replace(first, visible=("GPU-a",)), second)
    reach[0, 1] = False
    assert "does not reach the memory of rank 1" in problem(first, second)
    on_cpu = replace(first, terms={"device": "cpu"}, gpu=None, visible=())
    assert "device is cpu, but cuda on rank 0" in problem(first, on_cpu, rank=1)
