"""The CUDA kernels on a CPU: transport peer, its module compiled against `emulated/`, which stands in for CUDA.

Ranks are threads of this process, and their tensors lie in main memory. What a GPU computes is emulated to the bit but
for its square roots; how it schedules, and what it costs, is not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from torch import Tensor
from tvm_ffi import cpp

from gpu.streams import Threads, run_threads
from weft.comm.peer import PeerTransport, PeerTuning
from weft.kernels.build import CSRC, KernelError
from weft.place.spec import Mesh

SOURCE = Path(__file__).parent / "emulated"
FLAGS = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")  # longjmp goes from stack to stack


@cache
def emulated_kernels(kernels: Path = CSRC / "cuda") -> Any:
    """The module, compiled (15 s). kernels: a folder with the CUDA sources."""
    tvm_ffi.register_error("WeftCallError", KernelError)
    text = b"".join(p.read_bytes() for folder in (SOURCE, kernels) for p in sorted(folder.iterdir()) if p.is_file())
    flags = [*FLAGS, f"-DWEFT_SOURCE=0x{hashlib.sha256(text).hexdigest()[:15]}ull"]
    path = cpp.build(
        "weft_emulated",
        sources=str(SOURCE / "peer.cc"),
        extra_cflags=flags,
        extra_include_paths=[str(SOURCE), str(kernels)],
    )
    return tvm_ffi.load_module(path)


class EmulatedTransport(PeerTransport):
    """A rank of a world of threads. Calls return once their kernel has ended."""

    def __init__(self, mesh: Mesh, rank: int, threads: Threads, module: Any, **options: Any):
        self._threads, self._module = threads, module
        super().__init__(mesh, rank, "", torch.device("cpu"), **options)

    def _load(self) -> Any:
        return self._module

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _stream(self) -> int:
        return self.rank + 1

    def _synchronize(self) -> None:
        while not self._kernels.idle(self._stream()):
            time.sleep(1e-4)

    def _connect(self, mesh: Mesh, path: Path | str) -> Threads:
        self._threads.handles[self.rank] = self._handle
        self._threads.meeting.wait(60)
        self._kernels.connect_here(self._handle, [self._threads.handles[r] for r in range(mesh.world)])
        return self._threads

    def _run(self, *args: Any, **options: Any) -> Tensor:
        result = super()._run(*args, **options)
        self._synchronize()
        self.check()
        return result


def run_emulated(mesh: Mesh, work: Callable[..., None], tuning: PeerTuning, module: Any = None, **options: Any) -> None:
    """Runs `work(transport, mesh, device)` in a thread a rank. Raises the first error."""
    module = module or emulated_kernels()

    def rank_main(rank: int, threads: Threads) -> None:
        transport = EmulatedTransport(mesh, rank, threads, module, tuning=tuning, **options)
        work(transport, mesh, transport.device)
        transport.close()

    run_threads(mesh.world, rank_main)
