"""NCCL on memory that every rank has registered as a symmetric window: a kernel with no handshake for small calls.

NCCL's own kernels (2.27 and later, NVIDIA's user guide, "Window registration"); torch.distributed makes the calls.
Inputs are copied into the window and results out of it. In a captured CUDA graph these kernels have been seen to race
(NCCL 2.28), so capture is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError, Ranks, Sizes
from weft.place.spec import Mesh


class NcclWindowTransport(TorchDistTransport):
    """As TorchDistTransport over NCCL, but calls of all ranks with equal rows go through the window.

    A window belongs to one communicator, of all ranks; smaller groups and ragged rows take NCCL's other kernels.
    arena_bytes: of the window, half for inputs, half for results; taken and registered once. Raises CommError for
    calls that need more.
    """

    def __init__(self, mesh: Mesh, rank: int, init_method: str, device: torch.device, *, arena_bytes: int = 256 << 20):
        super().__init__(mesh, rank, init_method, backend="nccl")
        self.name, self._world = "nccl_window", tuple(range(mesh.world))
        world = self._groups[self._world]
        assert world is not None
        dist.all_reduce(torch.zeros(1, device=device), group=world)  # a communicator comes with its first call
        backend: Any = world._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._arena = torch.empty(2, arena_bytes // 2, dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool, symm=True)

    def _nccl(self, x: Tensor, kind: str, group: Ranks, sizes: Sizes, place: int) -> Tensor:
        if group != self._world or kind == "all_to_allv" or len(set(sizes)) > 1:
            return super()._nccl(x, kind, group, sizes, place)
        own = self._window(0, x.shape[0], x).copy_(x)
        if kind == "all_reduce":
            self._call(kind, group, lambda g: dist.all_reduce(own, group=g))
            return own.clone()
        out = self._window(1, sizes[0] if kind == "reduce_scatterv" else sum(sizes), x)
        call = dist.reduce_scatter_tensor if kind == "reduce_scatterv" else dist.all_gather_into_tensor
        self._call(kind, group, lambda g: call(out, own, group=g))
        return out.clone()

    def _window(self, half: int, rows: int, like: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise CommError(f"{self.name} is not captured in CUDA graphs: NCCL's window kernels race there")
        size = rows * like.shape[1:].numel() * like.element_size()
        if size > self._arena.shape[1]:
            raise CommError(f"{self.name} has arena_bytes={self._arena.numel()}; this call takes {2 * size}")
        return self._arena[half, :size].view(like.dtype).view(rows, *like.shape[1:])
