"""A child that a rank forks is no rank: its calls raise, its end tells nobody, and its parent goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from comm.forks import in_a_child
from library.worlds import run_ranks
from weft.comm.forks import ProcessBound
from weft.comm.host_memory import HostMemory
from weft.comm.reference import ReferenceWorld
from weft.comm.shm import ShmTransport
from weft.comm.torchdist import TorchDistTransport
from weft.library.communicator import Communicator
from weft.planner.spec import Mesh


def refused(call: Callable[[], object], parent: int) -> None:
    with pytest.raises(weft.CommError, match=rf"belongs to process {parent}, from which this process was forked"):
        call()


def try_every_call(comm: Communicator, held: torch.Tensor) -> None:
    parent, x, ones = os.getppid(), torch.full((2, 4), 100.0), [1, 1]
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce_add_rms_norm(x, x, x[0], 1e-6),
        lambda: comm.all_gatherv(x, [2, 2]),
        lambda: comm.reduce_scatterv(x, ones),
        lambda: comm.reduce_scatterv_add_rms_norm(x, ones, x[:1], x[0], 1e-6),
        lambda: comm.all_to_allv(x, ones, ones),
        lambda: comm.broadcast(x),
        lambda: comm.lse_reduce_scatter(x[None, :, :2], x[:1, :2]),
        lambda: comm.all_reduce_all_gatherv(x, [2]),
        lambda: comm.reduce_scatterv_all_reduce(x, [2]),
        lambda: comm.supports("all_reduce", x),
        comm.barrier,
        comm.check,
    ):
        refused(call, parent)
    with pytest.raises(RuntimeError, match=r"no communicator '.*' is open in this process"):
        torch.ops.weft.all_reduce(x, comm.name)
    with comm:
        pass
    comm.close()
    del held


def a_rank_that_forks() -> None:
    comm = Communicator(max_bytes=1 << 16)
    x = torch.full((3,), float(comm.rank + 1))
    held = comm.all_reduce(x)
    for _ in range(2):
        if comm.rank == 0:
            in_a_child(lambda: try_every_call(comm, held))
        assert comm.all_reduce(x).tolist() == [3.0] * 3
        comm.barrier()
        comm.check()
    comm.close()


def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, a_rank_that_forks)


def test_every_object_of_one_process_is_refused_in_a_child(tmp_path: Path) -> None:
    """Transports that are used without a communicator, and what they are made of."""
    mesh = Mesh()
    made: list[ProcessBound] = [
        ShmTransport(mesh, 0, tmp_path / "shm"),
        TorchDistTransport(mesh, 0, dist.HashStore()),
        HostMemory(mesh, 0, tmp_path / "memory", 5.0),
        *ReferenceWorld(1).transports(),
    ]

    def check() -> None:
        parent = os.getppid()
        for each, methods in zip(made, every, strict=True):
            for name in methods:
                refused(lambda each=each, name=name: getattr(each, name), parent)
            each.close()  # type: ignore[attr-defined]

    every = [{m for m in dir(type(each)) if not m.startswith("_")} - {"close", "fork_error"} for each in made]
    assert all({"barrier", "check"} <= methods for methods in every)
    in_a_child(check)
    assert dist.is_initialized()
    for each in made:
        if not isinstance(each, TorchDistTransport):  # which has no group of one rank
            each.barrier((0,))  # type: ignore[attr-defined]
        each.close()  # type: ignore[attr-defined]
    assert not dist.is_initialized()
