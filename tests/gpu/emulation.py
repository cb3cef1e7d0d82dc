"""The CUDA kernels on a CPU: transport peer, its module compiled against `emulated/`, which stands in for CUDA.

Ranks are threads of this process, and their tensors lie in main memory. What a GPU computes is emulated to the bit but
for its square roots; how it schedules, and what it costs, is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.peer import PeerTransport
from weft.comm.peer_launch import PeerTuning
from weft.comm.reference import ComputeLock
from weft.comm.transport import Ranks
from weft.kernels.build import CSRC, load
from weft.planner.spec import Mesh

SOURCE = Path(__file__).parent / "emulated"
WAIT_S = 240.0
"""Time-out for ranks that come soon unless something is wrong; a busy machine may take long."""
FLAGS = ("-O1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")  # longjmp goes from stack to stack


@cache
def emulated_kernels() -> Any:
    """The module, compiled (15 s)."""
    return load("weft_emulated", SOURCE / "peer.cc", CSRC / "cuda", flags=FLAGS)


class Threads:
    """The hosts' side of a world of threads, of one host or more."""

    def __init__(self, world: int):
        self.handles: dict[int, int] = {}
        self.meeting = threading.Barrier(world)
        self.compute_lock = ComputeLock(WAIT_S)

    def barrier(self, group: Ranks) -> None:
        with self.compute_lock.waiting():
            self.meeting.wait(WAIT_S)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class EmulatedTransport(PeerTransport):
    """A rank whose calls return once their kernel has ended."""

    def __init__(self, mesh: Mesh, rank: int, threads: Threads, **options: Any):
        self._threads = threads
        super().__init__(mesh, rank, "", torch.device("cpu"), **{"timeout_s": WAIT_S} | options)

    def _connect(self, mesh: Mesh, path: Path | str) -> Threads:
        self._threads.handles[self.rank] = self._handle
        self._threads.barrier(self.on_host)
        self._kernels.connect_here(self._handle, [self._threads.handles[r] for r in self.on_host])
        return self._threads

    def _load(self) -> Any:
        return emulated_kernels()

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _stream(self) -> int:
        return self.rank + 1

    def _synchronize(self) -> None:
        pause = 1e-4
        with self._threads.compute_lock.waiting():
            while not self._kernels.idle(self._stream()):
                time.sleep(pause)
                pause = min(2 * pause, 5e-3)  # looking costs more than the kernels, where there are many ranks

    def exchange(self, *args: Any, **options: Any) -> Tensor:
        result = super().exchange(*args, **options)
        self._synchronize()
        self.check()
        return result

    def merge_scatterv(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        result = super().merge_scatterv(*args, **options)
        self._synchronize()
        self.check()
        return result


def run_emulated(
    mesh: Mesh, work: Callable[..., None], tuning: PeerTuning, plain: bool = False, **options: Any
) -> None:
    """Run `work(transport, mesh, device)` in a thread a rank. Raise the first error.

    plain: on a GPU before Hopper, where what takes Hopper ends the process.
    """
    emulated_kernels().set_plain(plain)  # compiled before there are threads that ask for it
    threads, errors = Threads(mesh.world), []

    def main(rank: int) -> None:
        try:
            with threads.compute_lock.computing():
                transport = EmulatedTransport(mesh, rank, threads, tuning=tuning, **options)
                work(transport, mesh, transport.device)
                transport.close()
        except BaseException as error:
            errors.append(error)
            threads.meeting.abort()

    ranks = [threading.Thread(target=main, args=(rank,)) for rank in range(mesh.world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
