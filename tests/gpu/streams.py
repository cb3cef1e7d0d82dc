"""Ranks as threads of one process that share one GPU, a stream each: the kernels run side by side, on real hardware."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# A kernel that is loaded when first used may wait for those that run, and they for what its thread would launch next.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from weft.comm.peer import NEVER, PeerTransport, PeerTuning
from weft.comm.transport import Ranks
from weft.place.spec import Mesh


class Threads:
    """The hosts' side of a world of threads."""

    def __init__(self, world: int):
        self.handles: dict[int, int] = {}
        self.meeting = threading.Barrier(world)

    def barrier(self, group: Ranks) -> None:
        self.meeting.wait(60)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class ThreadTransport(PeerTransport):
    """A rank of a world of threads, which share a device."""

    def __init__(self, mesh: Mesh, rank: int, threads: Threads, device: torch.device, **options: Any):
        self._threads = threads
        super().__init__(mesh, rank, "", device, **options)

    def _connect(self, mesh: Mesh, path: Path | str) -> Threads:
        self._threads.handles[self.rank] = self._handle
        self._threads.meeting.wait(60)
        self._kernels.connect_here(self._handle, [self._threads.handles[r] for r in range(mesh.world)])
        return self._threads


def few(tuning: PeerTuning) -> PeerTuning:
    """The same for ranks that share a GPU, which holds only so many waiting kernels.

    Eight blocks a rank, no more, leave room for all, if the next kernel's do not take their places early. What splits
    is the caller's: blocks that only wait take places, too.
    """
    return replace(tuning, blocks=8, wide_blocks=8, norm_blocks=8, early=0)


def run_streams(mesh: Mesh, work: Callable[..., None], **options: Any) -> None:
    """Runs `work(transport, mesh, device)` in a thread a rank, on a stream of its own.

    Raises the first error.
    """
    tuning = few(PeerTuning().split_from(NEVER))

    def rank_main(rank: int, threads: Threads) -> None:
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            transport = ThreadTransport(mesh, rank, threads, torch.device("cuda", 0), tuning=tuning, **options)
            work(transport, mesh, transport.device)
            torch.cuda.current_stream().synchronize()
            transport.check()
            transport.close()

    run_threads(mesh.world, rank_main)


def run_threads(world: int, rank_main: Callable[[int, Threads], None]) -> None:
    """Runs it in a thread a rank. Raises the first error."""
    threads, errors = Threads(world), []

    def main(rank: int) -> None:
        try:
            rank_main(rank, threads)
        except BaseException as error:
            errors.append(error)
            threads.meeting.abort()

    ranks = [threading.Thread(target=main, args=(rank,)) for rank in range(world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
