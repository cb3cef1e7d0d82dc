"""Copies between host and device that do not block the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.engine.kv.tokens import token_array


def on_device(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return a tensor of the host's numbers. On a GPU it is copied from pinned memory without blocking the host."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def fill(to: Tensor, values: Sequence[int]) -> None:
    """Set to[:len(values)] = values (int32), for a graph that reads `to`. The copy is queued without blocking
    the host."""
    host = torch.frombuffer(token_array(values), dtype=torch.int32)
    # Torch keeps the pinned memory until the copy has ended.
    to[: len(host)].copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start copies to the host. The returned call waits for them, on any thread, but not for later work."""
    if not tensors[0].is_cuda:
        return lambda: list(tensors)
    copies = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    copied = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
    copied.record()

    def wait() -> list[Tensor]:
        copied.synchronize()
        return copies

    return wait
