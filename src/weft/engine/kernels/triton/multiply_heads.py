"""Product of each head's rows with a matrix of its own, used twice by latent attention (`Absorbed`).

With few rows the time is that of reading the matrices. No kernel writes them, so each program loads its tile before it
waits for the previous kernel (see `overlap`). That is faster if all programs are on the GPU at once: for 16 rows of 16
heads both products of DeepSeek-V2-Lite take 2 µs less than with a library, for 128 heads 2 µs more.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.engine.kernels import model_reference
from weft.engine.kernels.triton.dense import MAX_ROWS
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, scaled

TILE = 8192
"""Elements of a program's part of a matrix."""


@kernel(do_not_specialize=["rows"])
def _multiply_heads(
    x, weight, out, rows, x_row, x_head, weight_head, out_row, out_head,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, WEIGHT_IN: tl.constexpr, WEIGHT_OUT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    weight += head.to(tl.int64) * weight_head
    at = weight + d[:, None] * WEIGHT_IN + column[None, :] * WEIGHT_OUT
    right = tl.load(at, mask=(d < DEPTH)[:, None] & (column < COLUMNS)[None, :], other=0.0, cache_modifier=".cg")
    overlap.begin()
    at = x + row.to(tl.int64)[:, None] * x_row + head * x_head + d[None, :]
    left = tl.load(at, mask=(row < rows)[:, None] & (d < DEPTH)[None, :], other=0.0)
    product = tl.dot(left, right, input_precision="ieee")
    to = out + row.to(tl.int64)[:, None] * out_row + head * out_head + column[None, :]
    tl.store(to, product.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < COLUMNS)[None, :])


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Compute `weft.engine.kernels.model_reference.multiply_heads`; more rows and other dtypes use torch. The last
    dimensions of x and out are contiguous. Raises ValueError if shapes do not match."""
    (rows, heads, depth), columns = x.shape, weight.shape[2]
    if weight.shape[:2] != (heads, depth) or out.shape != (rows, heads, columns):
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}, out {list(out.shape)}")
    block_d = max(16, next_power_of_2(depth))
    block_c = min(max(16, TILE // block_d), max(16, next_power_of_2(columns)))
    tiles = cdiv(columns, block_c)
    like = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    few = 0 < rows <= MAX_ROWS and depth <= 512 and tiles * heads <= scaled(132 * 2)
    if not like or not few or x.stride(-1) != 1 or out.stride(-1) != 1:
        return model_reference.multiply_heads(x, weight, out)
    _multiply_heads[(tiles, heads)](
        x, weight, out, rows, x.stride(0), x.stride(1), weight.stride(0), out.stride(0), out.stride(1),
        DEPTH=depth, COLUMNS=columns, WEIGHT_IN=weight.stride(1), WEIGHT_OUT=weight.stride(2),
        BLOCK_T=max(16, next_power_of_2(rows)), BLOCK_C=block_c, BLOCK_D=block_d, num_warps=4, **overlap.options(),
    )  # fmt: skip
    return out
