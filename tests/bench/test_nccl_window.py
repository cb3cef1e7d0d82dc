"""NCCL's windows with pretended graphs and memory: what lies in the window, and where; gloo makes the calls."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError
from weft.planner.spec import Mesh
from weft_bench.nccl_window import NcclWindowTransport

MESH, BYTES = Mesh(2, 1, 2, 1), 11 * 512


def pretend() -> dict[str, bool]:
    """Pretend, in this process, torch's memory pools, NCCL's registration, and whether a graph is being captured."""
    state = {"capturing": False}
    begin = TorchDistTransport.__init__

    def over_gloo(self: TorchDistTransport, *args: Any, **options: Any) -> None:
        begin(self, *args, **options | {"backend": "gloo"})
        self.backend = "nccl"

    backend = SimpleNamespace(mem_allocator=None, register_mem_pool=lambda pool, symm: None)
    TorchDistTransport.__init__ = over_gloo  # type: ignore[method-assign]
    dist.ProcessGroup._get_backend = lambda group, device: backend  # type: ignore[method-assign]
    torch.cuda.MemPool = lambda allocator: None  # type: ignore[assignment, misc]
    torch.cuda.use_mem_pool = lambda pool: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: state["capturing"]
    return state


def rank_main(rank: int, directory: str) -> None:
    state, cpu, world = pretend(), torch.device("cpu"), (0, 1)
    window = NcclWindowTransport(MESH, rank, f"file://{directory}/w", cpu, arena_bytes=BYTES)
    like, mine = torch.empty(0), torch.full((3, 8), rank + 1.0)
    for capturing in (False, True):
        state["capturing"] = capturing
        places = set()
        for _ in range(20):  # more than the window holds
            x = window.empty(3, 8, like=like).copy_(mine)
            found = window.all_reduce(x, world)
            assert (found == 3).all() and (found.data_ptr() == x.data_ptr()) == capturing
            every = window.all_gatherv(mine, world, (3, 3))
            assert torch.equal(every, torch.cat([mine - rank, mine - rank + 1])) and (mine == rank + 1).all()
            part = window.reduce_scatterv(every, world, (3, 3))
            assert torch.equal(part, 2 * mine)
            assert [window._holds(t) for t in (x, found, every, part)] == [capturing] * 4
            places.add(x.data_ptr())
        assert len(places) > 2 or not capturing, "the next piece each time"
        with pytest.raises(CommError, match=f"arena_bytes={BYTES}"):
            window.all_reduce(torch.ones(BYTES, 8), world)
    window.close()


def test_captured_calls_rotate_through_the_window(tmp_path: Path) -> None:
    mp.start_processes(rank_main, (str(tmp_path),), nprocs=2, start_method="fork")
