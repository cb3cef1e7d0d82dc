"""Scattered writes of single int32s on the device, which the host has staged in pinned memory."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import kernel

BLOCK = 1024


@kernel
def _write_staged(count, offsets, values, to, BLOCK: tl.constexpr):
    n = tl.load(count)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(values + i, mask=i < n)
        tl.store(to + tl.load(offsets + i, mask=i < n), value, mask=i < n)
    tl.debug_barrier()  # everything is read, and the host may write there again
    tl.store(count, 0)


def write_staged(count: Tensor, offsets: Tensor, values: Tensor, to: Tensor) -> None:
    """Write values to their destinations, in no order, then set `count` to 0. All but `to` may be pinned memory.

    Args:
        count: int32 `[1]`, number of values.
        offsets: int64 `[≥ count]`, in elements from the beginning of `to`; they may be in other tensors of the device.
        values: int32 `[≥ count]`.
        to: int32.
    """
    _write_staged[(1,)](count, offsets, values, to, BLOCK=BLOCK, num_warps=8)
