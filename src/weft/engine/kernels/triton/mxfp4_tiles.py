"""Weights in MXFP4 (`weft.engine.kernels.mxfp4`): whole ones dequantised, and tiles of them for other kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.mxfp4 import Mxfp4
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel


@triton.jit
def dequantised(values, scales, row, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Return `[BLOCK_K, rows]`: the columns from k on of these rows of a matrix with WIDTH columns, 0 beyond them.

    values, scales: of the matrix; scales of up to GREATEST_SCALE. k, BLOCK_K, WIDTH: multiples of 32. DTYPE: bfloat16
    and float32 hold every value.
    """
    half, group = k // 2 + tl.arange(0, BLOCK_K // 2), k // 32 + tl.arange(0, BLOCK_K // 32)
    row = row.to(tl.int64)[None, :]
    packed = tl.load(values + row * (WIDTH // 2) + half[:, None], mask=(half < WIDTH // 2)[:, None], other=0)
    power = tl.load(scales + row * (WIDTH // 32) + group[:, None], mask=(group < WIDTH // 32)[:, None], other=0)
    # A code's sign as the sign of a float32, and its other bits around the start of the mantissa: its value times 2 to
    # the power of −126, also the subnormal one.
    both = packed.to(tl.int32)
    low, high = ((both << 28) >> 6) & -0x7E400000, ((both << 24) >> 6) & -0x7E400000
    value = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_K // 32, 32, row.shape[1]))
    factor = ((power.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(value.to(tl.float32, bitcast=True) * factor[:, None, :], (BLOCK_K, row.shape[1])).to(DTYPE)


@kernel
def _dequantise(
    values, scales, out, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K
    column = k + tl.arange(0, BLOCK_K)
    tile = dequantised(values, scales, tl.where(row < ROWS, row, 0), k, WIDTH, BLOCK_K, out.dtype.element_ty)
    to = out + row.to(tl.int64)[None, :] * WIDTH + column[:, None]
    tl.store(to, tile, mask=(row < ROWS)[None, :] & (column < WIDTH)[:, None])


def dequantise(weight: Mxfp4, dtype: torch.dtype) -> Tensor:
    """Return the values `[…, N, K]` in a dtype, with the bits of `weft.engine.kernels.mxfp4.dequantise`."""
    out = weight.values.new_empty(weight.shape, dtype=dtype)
    width = weight.shape[-1]
    rows, block_n, block_k = out.numel() // width, 16, 256
    _dequantise[(cdiv(rows, block_n), cdiv(width, block_k))](
        weight.values, weight.scales, out, ROWS=rows, WIDTH=width, BLOCK_N=block_n, BLOCK_K=block_k,
        **overlap.options(),
    )  # fmt: skip
    return out
