"""Rows in FP8 with a float32 scale for each group of columns, for FP8 GEMMs and rows on the wire."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import FLOAT8, Fp8Rows
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


@triton.jit
def to_float8(x):
    """Return (values, scale) of each row of x, float32 `[M, N]`: the largest magnitude becomes 448.

    NaN and infinity give NaN.
    """
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-10)  # so that a group of zeros has a scale
    return (x * tl.div_rn(448.0, largest)[:, None]).to(tl.float8e4nv), tl.div_rn(largest, 448.0)


@kernel
def _quantise(x, values, scales, x_row, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value, scale = to_float8(tl.load(x + row * x_row + column, mask=column < WIDTH, other=0.0).to(tl.float32))
    tl.store(values + row * WIDTH + column, value, mask=column < WIDTH)
    ALL: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    tl.store(scales + row * ALL + group, scale, mask=group < ALL)


def groups_of_program(group_size: int, groups: int) -> int:
    """Return the number of groups of a row that a program quantises: about 1,024 columns."""
    return min(max(1, 1024 // group_size), next_power_of_2(groups))


def quantise(x: Tensor, group_size: int) -> Fp8Rows:
    """Run `weft.kernels.float8.quantise` on x `[T, width]`, with contiguous rows. group_size: a power of two."""
    rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    values = x.new_empty(rows, width, dtype=FLOAT8)
    scales = x.new_empty(rows, cdiv(width, group_size), dtype=torch.float32)
    if rows:
        groups = groups_of_program(group_size, scales.shape[1])
        _quantise[(rows, cdiv(scales.shape[1], groups))](
            x,
            values,
            scales,
            x.stride(0),
            WIDTH=width,
            GROUP=group_size,
            GROUPS=groups,
            num_warps=4,
            **overlap.options(),
        )
    return Fp8Rows(values, scales, group_size)
