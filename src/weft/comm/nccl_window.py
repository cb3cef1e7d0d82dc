"""NCCL on memory that every rank has registered as a symmetric window: a kernel with no handshake for small calls.

NCCL's own kernels (2.27 and later, NVIDIA's user guide, "Window registration"); torch.distributed makes the calls. In a
captured CUDA graph these kernels have been seen to race (NCCL 2.28), so that capture is refused, unless it is asked for
to compare times. So this is no transport of the engine's, but a plugin that benchmarks name.
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
from weft.place.spec import Mesh


class NcclWindowTransport(TorchDistTransport):
    """As TorchDistTransport over NCCL, by whose name and costs plans know it; equal rows go through the window.

    The window is registered with the communicator of each of the rank's groups; ragged rows take NCCL's other kernels.
    arena_bytes: of the window, half for inputs, half for results; taken and registered once. Raises CommError for
    calls that need more. Inputs are copied into the window and results out of it.

    captured: for comparisons alone: **results under capture have been seen wrong**. Calls may then be captured, and
    spare both copies: `empty` gives memory in the window, and so does a call for its result, each the next piece of it,
    in turns. So a tensor of a captured step lasts until as many bytes have been handed out after it as the window has,
    and all_reduce leaves its result in the input's memory.
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
        captured: bool = False,
    ):
        super().__init__(mesh, rank, init_method, backend="nccl", timeout_s=timeout_s, in_place=captured)
        self._captured, self._handed_out = captured, 0
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
        return self._piece(shape, like) if self._captures() else super().empty(*shape, like=like)

    def _nccl(self, x: Tensor, kind: str, group: Ranks, sizes: Sizes, place: int) -> Tensor:
        if kind == "all_to_allv" or len(set(sizes)) > 1 or not sizes[0]:
            return super()._nccl(x, kind, group, sizes, place)
        captures = self._captures()
        own = x if captures and self._holds(x) else self._window(0, x.shape[0], x).copy_(x)
        if kind == "all_reduce":
            self._call(kind, group, lambda g: dist.all_reduce(own, group=g))
            return own if captures else own.clone()
        out = self._window(1, sizes[0] if kind == "reduce_scatterv" else sum(sizes), x)
        call = dist.reduce_scatter_tensor if kind == "reduce_scatterv" else dist.all_gather_into_tensor
        self._call(kind, group, lambda g: call(out, own, group=g))
        return out if captures else out.clone()

    def _captures(self) -> bool:
        """Whether a graph is being captured. Raises CommError where that was not asked for."""
        found = torch.cuda.is_current_stream_capturing()
        if found and not self._captured:
            raise CommError("NCCL windows are not captured in CUDA graphs: their kernels race there")
        return found

    def _window(self, half: int, rows: int, like: Tensor) -> Tensor:
        shape = (rows, *like.shape[1:])
        if self._captures():
            return self._piece(shape, like)
        size = torch.Size(shape).numel() * like.element_size()
        if size > self._arena.shape[1]:
            raise CommError(f"NCCL windows have arena_bytes={self._arena.numel()}; this call takes {2 * size}")
        return self._arena[half, :size].view(like.dtype).view(shape)

    def _piece(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The next piece of the window, at the same place on every rank."""
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
    room, meet = max(256 << 20, 2 * rank.max_bytes()), f"file://{rank.directory}/rendezvous"
    return NcclWindowTransport(
        rank.mesh, rank.rank, meet, rank.device, arena_bytes=room, timeout_s=rank.timeout_s, captured=True
    )


TRANSPORTS = (replace(NCCL, option="nccl_window", open=_open, auto=False),)
