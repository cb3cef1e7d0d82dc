"""Copies between the host and a device that do not make the host wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.engine.kv.tokens import token_array


def on_device(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """A tensor of the host's numbers. On a GPU it comes from pinned memory, and the host does not wait for the copy."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def fill(to: Tensor, values: Sequence[int]) -> None:
    """to[:len(values)] = values of int32, for a graph that reads `to`: queued as all work is, and the host does not
    wait."""
    host = torch.frombuffer(token_array(values), dtype=torch.int32)
    # Pinned memory that torch keeps until the copy has ended.
    to[: len(host)].copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begins copies to the host: the result waits for them, on any thread, but not for what is begun later."""
    if not tensors[0].is_cuda:
        return lambda: list(tensors)
    copies = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    copied = torch.cuda.Event(blocking=True)  # the thread that waits sleeps
    copied.record()

    def wait() -> list[Tensor]:
        copied.synchronize()
        return copies

    return wait
