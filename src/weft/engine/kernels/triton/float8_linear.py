"""Products in FP8: rows and weights as float8_e4m3fn, with a float32 scale for each block of either.

A row has a scale per group of columns, computed when it is quantised. A weight has one per block of rows and columns,
as in its checkpoint. Both split the depth of a product at the same columns. Tensor cores, which on Hopper keep about 14
bits, sum a group's products; these sums are scaled and added in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

A separate kernel quantises rows. A product that quantises them as it loads them takes two to four times as long on an
H200, since each program quantises them again between its loads. With few rows there are few tiles, and one program per
tile would walk through the whole depth. So the depth is split over several programs, and another kernel adds their sums
in the order of the parts: the bits are the same every time, and a row's bits depend on no other row. Hopper's FP8
instructions multiply 64 rows or more by 8 or more: with few rows, the weight's rows are the 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from weft.engine.kernels.triton.dense import add_partials
from weft.engine.kernels.triton.route import pairs_of
from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.kernels.triton import overlap
from weft.kernels.triton.float8_rows import quantise
from weft.kernels.triton.launch import cdiv, kernel, scaled

FEW_ROWS = 64
"""Maximum rows for which experts' products split their depth too."""
MIN_GROUPS, MAX_PARTS = 3, 7
"""(Minimum groups of a part, so that their loads overlap; maximum parts: their sum reads them all.)"""
LIBRARY_ROWS = 1024
"""Minimum rows for dense products by cuBLAS, if it supports them: see `uses_cublas`."""


@kernel(do_not_specialize=["rows", "groups"])
def multiply(
    x, x_scale, weight, scale, order, tile_expert, out, rows, outputs, groups, x_row, out_row, out_part,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr, SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile of x Wᵀ over one part of the depth, `groups` of columns, in that part of `out`. K: 0 if all rows
    have one weight. Else rows are pairs of a token, which is a row of x, and one of its K experts (K = 1: x has a row
    per pair), and a tile has pairs of one expert (see `route`)."""
    overlap.begin()
    ALL: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    if K:
        blocks = tl.cdiv(outputs, BLOCK_N)
        tile = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks
        pair, expert = pairs_of(tile, order, tile_expert, rows, SORTED, BLOCK_M)
        if expert < 0:
            return
        real = pair < rows
        row = (tl.where(real, pair, 0) // K).to(tl.int64)
        weight += expert.to(tl.int64) * outputs * WIDTH
        scale += expert * (tl.cdiv(outputs, UNIT) * ALL)
    else:
        blocks = tl.cdiv(rows, BLOCK_M)  # neighbours share a tile of the weight
        block = tl.program_id(0) // blocks
        pair = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        real = pair < rows
        row = tl.where(real, pair, 0).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = column < outputs
    known = tl.where(wanted, column, 0)
    depth = tl.arange(0, GROUP)
    x += row[:, None] * x_row + depth[None, :]
    x_scale += row * ALL
    weight += known.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    if UNIT % BLOCK_N == 0:  # the tile's columns have one scale
        scale += block * BLOCK_N // UNIT * ALL
    else:
        scale += known // UNIT * ALL
    WEIGHT_FIRST: tl.constexpr = BLOCK_M < 64
    acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
    first = tl.program_id(1) * groups
    last = tl.minimum(first + groups, ALL)
    a_scale, b_scale = tl.load(x_scale + first), tl.load(scale + first)
    for group in range(first, last):
        if WIDTH % GROUP == 0:
            a = tl.load(x + group * GROUP)
            b = tl.load(weight + group * GROUP)
        else:
            inside = depth < WIDTH - group * GROUP
            a = tl.load(x + group * GROUP, mask=inside[None, :], other=0.0)
            b = tl.load(weight + group * GROUP, mask=inside[None, :], other=0.0)
        then = tl.minimum(group + 1, last - 1)  # loads the next group's scales early
        a_next, b_next = tl.load(x_scale + then), tl.load(scale + then)
        if UNIT % BLOCK_N == 0:
            if WEIGHT_FIRST:
                acc += tl.dot(b, tl.trans(a)) * (a_scale * b_scale)[None, :]
            else:
                acc += tl.dot(a, tl.trans(b)) * (a_scale * b_scale)[:, None]
        elif WEIGHT_FIRST:
            acc += tl.dot(b, tl.trans(a)) * (b_scale[:, None] * a_scale[None, :])
        else:
            acc += tl.dot(a, tl.trans(b)) * (a_scale[:, None] * b_scale[None, :])
        a_scale, b_scale = a_next, b_next
    to = out + tl.program_id(1).to(tl.int64) * out_part + pair.to(tl.int64)[:, None] * out_row + column[None, :]
    found = (tl.trans(acc) if WEIGHT_FIRST else acc).to(out.dtype.element_ty)
    tl.store(to, found, mask=real[:, None] & wanted[None, :])


class Fp8Tile(NamedTuple):
    """Tile of a product: rows and columns of a block, parts of the depth, warps, and stages of the pipeline."""

    rows: int
    columns: int
    parts: int
    warps: int
    stages: int


def tile_of(rows: int, outputs: int, groups: int) -> Fp8Tile:
    """Return the fastest tile of a dense product on an H200. With few rows, tiles read the maximum of the weight's
    columns. Narrower tiles of shallow products reach every multiprocessor without parts."""
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    blocks = cdiv(rows, block)
    shallow = rows > 32 and groups <= 16 and blocks * cdiv(outputs, 128) < scaled(128)
    columns = 64 if outputs <= 1024 or shallow else 128
    parts = parts_of(blocks * cdiv(outputs, columns), groups, scaled(128 if rows <= FEW_ROWS else 192))
    return Fp8Tile(block, columns, parts, 4, 5 if rows <= FEW_ROWS else 4)


def parts_of(tiles: int, groups: int, programs: int) -> int:
    """Return the parts of a depth of `groups`, MAX_PARTS at most: `tiles · parts` within `programs`, or one part."""
    return max(1, min(programs // tiles, groups // MIN_GROUPS, MAX_PARTS))


def uses_cublas(rows: int, weight: Fp8Weight, out: Tensor) -> bool:
    """Check if cuBLAS supports the product and is faster: since CUDA 12.9 on Hopper, with one scale per 128 × 128. It
    reads a block's scales four at a time, so the weight must have a multiple of four of them along the depth."""
    (outputs, width), unit = weight.values.shape, weight.unit
    if rows < LIBRARY_ROWS or unit != (128, 128) or width % 512 or outputs % 16 or out.dtype != torch.bfloat16:
        return False
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    hopper = out.is_cuda and torch.cuda.get_device_capability(out.device) == (9, 0)
    return hopper and cuda >= (12, 9) and out.is_contiguous()


def library(x: Fp8Rows, weight: Fp8Weight, out: Tensor) -> None:
    """Compute x Wᵀ by cuBLAS into out. `torch.nn.functional.scaled_mm` calls the same, but allocates its result. Rows
    must be a multiple of four, since their scales are column-major and a column begins at 16 bytes."""
    by_row, by_block = x.scales.t().contiguous().t(), weight.scales.t()
    recipes = F.ScalingType.BlockWise1x128.value, F.ScalingType.BlockWise128x128.value
    given = [by_row], [recipes[0]], [0], [by_block], [recipes[1]], [0], None, out.dtype
    torch.ops.aten._scaled_mm_v2.out(x.values, weight.values.t(), *given, out=out)


def linear(x: Tensor | Fp8Rows, weight: Fp8Weight, out: Tensor, tile: Fp8Tile | None = None) -> Tensor:
    """Compute x Wᵀ; fill and return out `[T, N]`. x: `[T, K]`, or its rows quantised in groups of the weight's columns,
    which are 32, 64 or 128. Rows of x and out are contiguous. Raises ValueError if shapes do not match."""
    weight.check()
    (outputs, width), (unit, group_size) = weight.values.shape, weight.unit
    rows, given, found = (*x.values.shape, x.group_size) if isinstance(x, Fp8Rows) else (*x.shape, group_size)
    if given != width or out.shape != (rows, outputs) or found != group_size:
        raise ValueError(
            f"x is {[rows, given]} by groups of {found}, the weight {list(weight.values.shape)} by {group_size}, out "
            f"{list(out.shape)}"
        )
    if out.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    if not rows:
        return out
    values, scales, _ = x if isinstance(x, Fp8Rows) else quantise(x, group_size)
    if not (values.stride(1) == 1 and scales.is_contiguous()):
        raise ValueError("quantised rows and their scales must be contiguous")
    if tile is None and uses_cublas(rows, weight, out):
        whole = rows // 4 * 4
        library(Fp8Rows(values[:whole], scales[:whole], group_size), weight, out[:whole])
        linear(Fp8Rows(values[whole:], scales[whole:], group_size), weight, out[whole:])
        return out
    groups = cdiv(width, group_size)
    cut = tile or tile_of(rows, outputs, groups)
    depth = cdiv(groups, cut.parts)
    parts = cdiv(groups, depth)
    to = out if parts == 1 else out.new_empty(parts, rows, outputs, dtype=torch.float32)
    multiply[(cdiv(rows, cut.rows) * cdiv(outputs, cut.columns), parts)](
        values, scales, weight.values, weight.scales, values, values, to, rows, outputs, depth, values.stride(0),
        to.stride(-2), to.stride(0), WIDTH=width, GROUP=group_size, UNIT=unit, K=0, SORTED=False, BLOCK_M=cut.rows,
        BLOCK_N=cut.columns, num_warps=cut.warps, num_stages=cut.stages, **overlap.options(),
    )  # fmt: skip
    return out if parts == 1 else add_partials(to, out)
