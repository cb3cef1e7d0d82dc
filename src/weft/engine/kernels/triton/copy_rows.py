"""Permutation of rows, with their number on the device."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, persistent


@kernel(do_not_specialize_on_alignment=["index", "live"])
def _copy(
    source, index, live, to, source_row, to_row, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    count = tl.load(live)
    across: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK_N) * across, tl.num_programs(0)):
        row = block // across * BLOCK_N + tl.arange(0, BLOCK_N)
        column = (block % across * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
        place = tl.load(index + row, mask=row < count, other=-1)[:, None]
        inside = (place >= 0) & (column < WIDTH)
        x = tl.load(source + place.to(tl.int64) * source_row + column, mask=inside)
        tl.store(to + row.to(tl.int64)[:, None] * to_row + column, x, mask=inside)


def copy_rows(source: Tensor, index: Tensor, live: Tensor, to: Tensor) -> None:
    """Copy to[i] = source[index[i]] for the first `live` rows of `to`; rows with an index of −1, and later ones, do not
    change. source: `[N, width]`. index: int32 `[T]`. live: int32 `[1]`, at most T. to: `[T, width]`, of source's dtype.
    Last dimensions are contiguous. Raises ValueError if shapes or dtypes do not match."""
    rows, width = to.shape
    if source.shape[1:] != to.shape[1:] or source.dtype != to.dtype or index.shape != (rows,):
        raise ValueError(f"source is {list(source.shape)}, index {list(index.shape)}, to {list(to.shape)}")
    if (width > 1 and (source.stride(1) != 1 or to.stride(1) != 1)) or index.stride(-1) != 1:
        raise ValueError("the last dimensions of source, index and to must be contiguous")
    if not rows or not width:
        return
    block_w = min(1024, max(16, next_power_of_2(width)))
    block_n = max(1, 4096 // block_w)
    _copy[(persistent(cdiv(rows, block_n) * cdiv(width, block_w)),)](
        source, index, live, to, source.stride(0), to.stride(0), WIDTH=width, BLOCK_N=block_n, BLOCK_W=block_w,
        num_warps=4,
    )  # fmt: skip
