"""Rival to compare with: NCCL on memory that every rank has registered as a symmetric window.

NCCL's own kernels need no handshake there for small calls (2.27 and later, NVIDIA's user guide, "Window registration");
torch.distributed makes the calls. In a captured CUDA graph these kernels have been seen to race and to give wrong sums
(NCCL 2.28). So this is a plugin for benchmarks, and no transport to serve with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError, Ranks, Sizes
from weft.comm.transport_registry import NCCL, Opening
from weft.planner.spec import Mesh


class NcclWindowTransport(TorchDistTransport):
    """TorchDistTransport over NCCL with exchanges of equal rows through the window; plans know it as NCCL.

    The window is registered with the communicator of each of the rank's groups. Ragged rows use NCCL's other kernels.
    Eager calls copy inputs into the window and results out of it. Captured calls spare both copies: `empty` and each
    result get the next piece of the window, in rotation, and all_reduce leaves its result in the input's memory. A
    tensor of a captured step lasts until the window's size in bytes has been handed out after it.

    arena_bytes: size of the window, half for inputs, half for results. Raises CommError for a call that needs more.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        init_method: str,
        device: torch.device,
        *,
        arena_bytes: int = 256 << 20,
        timeout_s: float = 60.0,
    ):
        super().__init__(mesh, rank, init_method, backend="nccl", timeout_s=timeout_s, in_place=True)
        self._handed_out = 0
        mine = [g for ranks, g in self._groups.items() if g is not None and rank in ranks]
        for group in mine:
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # a communicator comes with its first call
        backends: list[Any] = [group._get_backend(device) for group in mine]
        self._pool = torch.cuda.MemPool(backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._arena = torch.empty(2, arena_bytes // 2, dtype=torch.uint8, device=device)
        for backend in backends:
            backend.register_mem_pool(self._pool, symm=True)

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return (
            self._piece(shape, like) if torch.cuda.is_current_stream_capturing() else super().empty(*shape, like=like)
        )

    def _nccl(self, x: Tensor, kind: str, group: Ranks, sizes: Sizes, place: int) -> Tensor:
        if kind == "all_to_allv" or len(set(sizes)) > 1 or not sizes[0]:
            return super()._nccl(x, kind, group, sizes, place)
        captures = torch.cuda.is_current_stream_capturing()
        own = x if captures and self._holds(x) else self._window(0, x.shape[0], x).copy_(x)
        if kind == "all_reduce":
            self._call(kind, group, lambda g: dist.all_reduce(own, group=g))
            return own if captures else own.clone()
        out = self._window(1, sizes[0] if kind == "reduce_scatterv" else sum(sizes), x)
        call = dist.reduce_scatter_tensor if kind == "reduce_scatterv" else dist.all_gather_into_tensor
        self._call(kind, group, lambda g: call(out, own, group=g))
        return out if captures else out.clone()

    def _window(self, half: int, rows: int, like: Tensor) -> Tensor:
        shape = (rows, *like.shape[1:])
        if torch.cuda.is_current_stream_capturing():
            return self._piece(shape, like)
        size = torch.Size(shape).numel() * like.element_size()
        if size > self._arena.shape[1]:
            raise CommError(f"NCCL windows have arena_bytes={self._arena.numel()}; this call takes {2 * size}")
        return self._arena[half, :size].view(like.dtype).view(shape)

    def _piece(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the next piece of the window, at the same place on every rank."""
        size = torch.Size(shape).numel() * like.element_size()
        if size > self._arena.numel():
            raise CommError(f"NCCL windows have arena_bytes={self._arena.numel()}; a tensor takes {size}")
        begin = self._handed_out if self._handed_out + size <= self._arena.numel() else 0
        self._handed_out = begin + -(-size // 512) * 512
        return self._arena.view(-1)[begin : begin + size].view(like.dtype).view(shape)

    def _holds(self, x: Tensor) -> bool:
        begin = self._arena.data_ptr()
        return begin <= x.data_ptr() < begin + self._arena.numel()


def _open(rank: Opening) -> NcclWindowTransport:
    torch.cuda.set_device(rank.device)
    size, meet = max(256 << 20, 2 * rank.max_bytes()), f"file://{rank.directory}/rendezvous"
    return NcclWindowTransport(rank.mesh, rank.rank, meet, rank.device, arena_bytes=size, timeout_s=rank.timeout_s)


TRANSPORTS = (replace(NCCL, option="nccl_window", open=_open, auto=False),)
