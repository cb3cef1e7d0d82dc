"""Products in FP8: rows and weights as float8_e4m3fn, with a float32 scale for each block of either.

A row has a scale for each run of columns, found when it is quantised; a weight one for each block of rows and columns,
as its checkpoint has them. Both cut the depth of a product at the same columns: a run's products are summed by tensor
cores, which on Hopper keep about 14 bits, then scaled and added in float32 (DeepSeek-V3, arXiv 2412.19437, section
3.3.2). Rows may come quantised, or are quantised as they are loaded: the same bits, for few rows one kernel less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import FLOAT8, Rows, Weight

FEW_ROWS = 64
"""Up to so many rows, products quantise what they load; above, other programs would do so again and again."""


@triton.jit
def to_float8(x):
    """(values, scale) of each row of x, float32 `[M, N]`: the largest becomes 448. NaN and infinity give NaN."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-10)  # a run of zeros has a scale, too
    return (x * tl.div_rn(448.0, largest)[:, None]).to(tl.float8e4nv), tl.div_rn(largest, 448.0)


@triton.jit
def load_rows(at, scale_at, inside, real):
    """(float8 `[M, run]`, scale `[M]`) of the rows at `at`; scale_at: their scales', where they are quantised already.

    inside: which elements there are; real: which rows.
    """
    x = tl.load(at, mask=inside, other=0.0)
    if x.dtype == tl.float8e4nv:
        scale = tl.load(scale_at, mask=real, other=0.0)
    else:
        x, scale = to_float8(x.to(tl.float32))
    return x, scale


@triton.jit
def _quantise(x, values, scales, x_row, WIDTH: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    column = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    value, scale = to_float8(tl.load(x + row * x_row + column, mask=column < WIDTH, other=0.0).to(tl.float32))
    tl.store(values + row * WIDTH + column, value, mask=column < WIDTH)
    ALL: tl.constexpr = (WIDTH + RUN - 1) // RUN
    tl.store(scales + row * ALL + run, scale, mask=run < ALL)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, x_scale, weight, scale, out, rows, x_row, out_row,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = (WIDTH + RUN - 1) // RUN
    blocks = tl.cdiv(rows, BLOCK_M)
    row = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)  # neighbours share a tile of the weight
    column = (tl.program_id(0) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, wanted = row < rows, column < OUTPUTS
    row, known = tl.where(real, row, 0).to(tl.int64), tl.where(wanted, column, 0)
    depth = tl.arange(0, RUN)
    x += row[:, None] * x_row + depth[None, :]
    x_scale += row * RUNS
    weight += known.to(tl.int64)[None, :] * WIDTH + depth[:, None]
    scale += known // UNIT * RUNS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for run in range(0, RUNS):
        if WIDTH % RUN == 0:
            a, a_scale = load_rows(x + run * RUN, x_scale + run, real[:, None], real)
            b = tl.load(weight + run * RUN)
        else:
            inside = depth < WIDTH - run * RUN
            a, a_scale = load_rows(x + run * RUN, x_scale + run, real[:, None] & inside[None, :], real)
            b = tl.load(weight + run * RUN, mask=inside[:, None], other=0.0)
        acc += tl.dot(a, b) * (a_scale[:, None] * tl.load(scale + run)[None, :])
    to = out + row[:, None] * out_row + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & wanted[None, :])


class Tile(NamedTuple):
    """How a product is cut: rows and columns of a block, warps, and stages of the pipeline of loads."""

    rows: int
    columns: int
    warps: int
    stages: int


def tile_of(rows: int, outputs: int) -> Tile:
    """The tile of a dense product: for few rows the columns are cut so that every multiprocessor has some."""
    if rows <= FEW_ROWS:
        columns = 16 if outputs <= 4096 else 32 if outputs <= 8192 else 64
        return Tile(16 if rows <= 16 else 32 if rows <= 32 else 64, columns, 4, 4)
    if rows < 1024:
        return Tile(64, 64, 4, 4)
    return Tile(128, 128, 8, 3)


def quantise(x: Tensor, run: int) -> Rows:
    """Rows of x `[T, width]`, contiguous each, by their largest magnitude in every run of columns (a power of two)."""
    rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    values = x.new_empty(rows, width, dtype=FLOAT8)
    scales = x.new_empty(rows, triton.cdiv(width, run), dtype=torch.float32)
    if rows:
        runs = min(max(1, 1024 // run), triton.next_power_of_2(scales.shape[1]))
        _quantise[(rows, triton.cdiv(scales.shape[1], runs))](
            x, values, scales, x.stride(0), WIDTH=width, RUN=run, RUNS=runs, num_warps=4
        )
    return Rows(values, scales, run)


def linear(x: Tensor | Rows, weight: Weight, out: Tensor, tile: Tile | None = None) -> Tensor:
    """x Wᵀ; fills and returns out `[T, N]`.

    x: `[T, K]`, or its rows quantised by runs of the weight's columns, which are 32, 64 or 128. Rows of x and out are
    contiguous. Raises ValueError where shapes do not fit together.
    """
    weight.check()
    (outputs, width), (unit, run) = weight.values.shape, weight.unit
    values, scales, found = x if isinstance(x, Rows) else (x, weight.scales, run)
    rows = values.shape[0]
    if values.shape[1] != width or out.shape != (rows, outputs) or found != run:
        raise ValueError(
            f"x is {list(values.shape)} by runs of {found}, the weight {list(weight.values.shape)} by {run}, out "
            f"{list(out.shape)}"
        )
    if values.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    if not rows:
        return out
    if rows > FEW_ROWS and not isinstance(x, Rows):
        values, scales, _ = quantise(x, run)
    cut = tile or tile_of(rows, outputs)
    _linear[(triton.cdiv(rows, cut.rows) * triton.cdiv(outputs, cut.columns),)](
        values, scales, weight.values, weight.scales, out, rows, values.stride(0), out.stride(0), WIDTH=width,
        OUTPUTS=outputs, RUN=run, UNIT=unit, BLOCK_M=cut.rows, BLOCK_N=cut.columns, num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip
    return out
