"""Tiles of weights in MXFP4 for other kernels (`weft.engine.kernels.mxfp4`): loaded, and dequantised in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantised(values, scales, row, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Return `[BLOCK_K, rows]`: the columns from k on of these rows of a matrix with WIDTH columns, 0 beyond them.

    values, scales: of the matrix; scales of up to 240. k, BLOCK_K, WIDTH: multiples of 32. DTYPE: bfloat16 and float32
    hold every value.
    """
    half, group = k // 2 + tl.arange(0, BLOCK_K // 2), k // 32 + tl.arange(0, BLOCK_K // 32)
    row = row.to(tl.int64)[None, :]
    packed = tl.load(values + row * (WIDTH // 2) + half[:, None], mask=(half < WIDTH // 2)[:, None], other=0)
    power = tl.load(scales + row * (WIDTH // 32) + group[:, None], mask=(group < WIDTH // 32)[:, None], other=0)
    code = tl.reshape(tl.permute(tl.join(packed & 15, packed >> 4), (0, 2, 1)), (BLOCK_K // 32, 32, row.shape[1]))
    # As the top of a float16 a code is its value times 2 to the power of −14, also the subnormal one.
    code = code.to(tl.int16)
    value = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
    factor = ((power.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(value * factor[:, None, :], (BLOCK_K, row.shape[1])).to(DTYPE)
