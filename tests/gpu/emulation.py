"""The CUDA kernels on a CPU: transport peer, its module compiled against `emulated/`, which stands in for CUDA.

Ranks are threads of this process, and their tensors lie in main memory. What a GPU computes is emulated to the bit but
for its square roots; how it schedules, and what it costs, is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.streams import Threads, ThreadTransport, run_threads
from weft.comm.peer import PeerTuning
from weft.kernels.build import CSRC, load
from weft.place.spec import Mesh

SOURCE = Path(__file__).parent / "emulated"
FLAGS = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")  # longjmp goes from stack to stack


@cache
def emulated_kernels() -> Any:
    """The module, compiled (15 s)."""
    return load("weft_emulated", SOURCE / "peer.cc", CSRC / "cuda", extra_cflags=list(FLAGS))


class EmulatedTransport(ThreadTransport):
    """A rank whose calls return once their kernel has ended."""

    def _load(self) -> Any:
        return emulated_kernels()

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _stream(self) -> int:
        return self.rank + 1

    def _synchronize(self) -> None:
        while not self._kernels.idle(self._stream()):
            time.sleep(1e-4)

    def _run(self, *args: Any, **options: Any) -> Tensor:
        result = super()._run(*args, **options)
        self._synchronize()
        self.check()
        return result


def run_emulated(mesh: Mesh, work: Callable[..., None], tuning: PeerTuning, **options: Any) -> None:
    """Runs `work(transport, mesh, device)` in a thread a rank. Raises the first error."""
    emulated_kernels()  # once, before there are threads that ask for it

    def rank_main(rank: int, threads: Threads) -> None:
        transport = EmulatedTransport(mesh, rank, threads, torch.device("cpu"), tuning=tuning, **options)
        work(transport, mesh, transport.device)
        transport.close()

    run_threads(mesh.world, rank_main)
