"""A process a rank, or a thread, for tests of transports."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from weft.comm.shm import ShmTransport
from weft.comm.torchdist import TorchDistTransport
from weft.planner.spec import Mesh

TRANSPORTS: dict[str, tuple[Callable[..., Any], str]] = {
    "shm": (ShmTransport, "{}/shm"),
    "gloo": (TorchDistTransport, "file://{}/rendezvous"),
}
"""Transports by name, each with the place in a directory where its ranks meet."""


def connect(name: str, mesh: Mesh, rank: int, directory: str, **options: Any) -> Any:
    """A transport whose ranks meet in a directory."""
    transport, place = TRANSPORTS[name]
    return transport(mesh, rank, place.format(directory), **{"timeout_s": 240.0} | options)


def rank_main(
    rank: int, name: str, mesh: Mesh, directory: str, options: dict[str, Any], work: Callable[..., Any], *args: Any
) -> None:
    torch.set_num_threads(1)
    transport = connect(name, mesh, rank, directory, **options)
    try:
        torch.save(work(transport, mesh, *args), f"{directory}/{rank}.pt")
    finally:
        transport.close()


def run_processes(
    name: str, mesh: Mesh, directory: Path, work: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """Run `work(transport, mesh, *args)` in a process a rank; return what each returned. name: a key of TRANSPORTS.

    Forked, so that none has to import torch: that takes longer than most tests.
    """
    arguments = (name, mesh, str(directory), options, work, *args)
    mp.start_processes(rank_main, arguments, nprocs=mesh.world, start_method="fork")
    return [torch.load(directory / f"{rank}.pt") for rank in range(mesh.world)]


def run_threads(mesh: Mesh, directory: Path, work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run over shm with a thread per rank: each maps the arena for itself, and no process has to import torch."""

    def rank_thread(rank: int) -> Any:
        transport = connect("shm", mesh, rank, str(directory), **options)
        try:
            return work(transport, mesh, *args)
        finally:
            transport.close()

    with ThreadPoolExecutor(mesh.world) as pool:
        return list(pool.map(rank_thread, range(mesh.world)))
