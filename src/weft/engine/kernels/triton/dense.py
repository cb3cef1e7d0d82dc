"""x Wᵀ of few rows, the products of decode steps, in 2-byte floats.

The time of such a product is that of reading its weight. No kernel writes weights, so each program loads its tile of
the weight before it waits for the previous kernel (see `overlap`; past L1, like all loads before that wait), and its
columns of x after the wait. A weight is split in one of two forms, so that every multiprocessor has a tile:

- Tiles of 64 rows or more and a part of the depth. The next kernel adds the parts in their order, or a kernel for that
  alone.
- Tiles of fewer rows and the whole depth, which is split over the program's warps: each has a slice, and the program
  adds their sums. This needs no second kernel, but every program reads all of x.

There are no atomic additions, so the bits are the same at every run, and a row's bits depend on no other row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels import model_reference
from weft.engine.kernels.split_k import SplitKPartials
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, gpu, kernel, next_power_of_2

MAX_ROWS = 64
"""Maximum rows; a library is faster for more."""
MAX_PARTS = 8
"""Maximum parts of the depth. Their sum reads them all."""
FEW_OUTPUTS = 512
"""Maximum outputs of a small product, such as a router's."""
FARTHEST = 1 << 24
"""Maximum distance of two rows in elements, so that 32-bit offsets reach all of a tile."""
LANGUAGE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class DenseTile(NamedTuple):
    """Tile of a product.

    Args:
        columns: rows of the weight in a tile.
        parts: parts of the depth.
        block: depth of a block, a power of two. A part of the depth, or a warp's slice, is some of these blocks.
        warps: warps of a program.
        sliced: each warp multiplies a slice of the only part. Requires at least two warps, and at least `columns`
            outputs.
    """

    columns: int
    parts: int
    block: int
    warps: int
    sliced: bool = False


@triton.jit
def load_partials(at, part, bias, mask, PARTS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Load elements of the sum of partial products (see `SplitKPartials`), in float32; undefined where masked. at:
    pointers into the first part. part: elements from one part to the next. bias: pointers, of at's shape."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        value += tl.load(at + i * part, mask=mask, other=0.0)
    if BIAS:
        value += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    return value.to(DTYPE).to(tl.float32)


@kernel(do_not_specialize=["rows", "outputs"])
def _gemm_few_rows(
    x, weight, bias, out, rows, outputs, x_row, weight_row, out_row, out_part,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # All programs of a part read the same rows at once, so each begins at a different one.
    row = (tl.arange(0, BLOCK_T) + tl.program_id(0)) % BLOCK_T
    wanted, real = column < outputs, row < rows
    depth = tl.program_id(1) * (BLOCKS * BLOCK_K) + tl.arange(0, BLOCK_K)[None, :]
    weight += tl.where(wanted, column, 0).to(tl.int64)[:, None] * weight_row + depth
    x += row.to(tl.int64)[:, None] * x_row + depth
    WHOLE: tl.constexpr = WIDTH % (BLOCKS * BLOCK_K) == 0
    weights = ()
    for i in tl.static_range(BLOCKS):
        if WHOLE:
            b = tl.load(weight + i * BLOCK_K, cache_modifier=".cg")
        else:
            inside = (depth < WIDTH - i * BLOCK_K) & (column >= 0)[:, None]
            b = tl.load(weight + i * BLOCK_K, mask=inside, other=0.0, cache_modifier=".cg")
        weights += (b,)  # type: ignore[assignment]
    overlap.begin()
    values = ()
    for i in tl.static_range(BLOCKS):
        held = real[:, None] & (depth >= 0)
        if not WHOLE:
            held &= depth < WIDTH - i * BLOCK_K
        values += (tl.load(x + i * BLOCK_K, mask=held, other=0.0),)  # type: ignore[assignment]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for i in tl.static_range(BLOCKS):
        acc = tl.dot(weights[i], tl.trans(values[i]), acc)
    if BIAS:
        acc += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[:, None]
    to = out + tl.program_id(1).to(tl.int64) * out_part + row.to(tl.int64)[None, :] * out_row + column[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=wanted[:, None] & real[None, :])


@kernel(do_not_specialize=["rows", "outputs"])
def _gemm_whole_depth(
    x, weight, bias, out, rows, outputs, x_row, out_row,
    WIDTH: tl.constexpr, WEIGHT_ROW: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    start = tl.minimum(tl.program_id(0) * BLOCK_N, outputs - BLOCK_N)  # the last tile may overlap the previous one
    # All programs read the same rows at once, so each begins at a different one.
    row = (tl.arange(0, BLOCK_T) + tl.program_id(0)) & (BLOCK_T - 1)
    depth = tl.arange(0, WARPS)[:, None, None] * (BLOCKS * BLOCK_K) + tl.arange(0, BLOCK_K)[None, None, :]
    weight += start.to(tl.int64) * WEIGHT_ROW + n[None, :, None] * WEIGHT_ROW + depth
    x += row[None, :, None] * x_row + depth
    out += row[None, :] * out_row + start + n[:, None]
    WHOLE: tl.constexpr = WIDTH % (WARPS * BLOCKS * BLOCK_K) == 0
    weights = ()
    for i in tl.static_range(BLOCKS):
        if WHOLE:
            b = tl.load(weight + i * BLOCK_K, cache_modifier=".cg")
        else:
            inside = (depth < WIDTH - i * BLOCK_K) & (n >= 0)[None, :, None]
            b = tl.load(weight + i * BLOCK_K, mask=inside, other=0.0, cache_modifier=".cg")
        weights += (b,)  # type: ignore[assignment]
    first = 0
    # The compiler loads the weights into tensor cores' registers before this loop, so before the wait.
    while first < rows:
        overlap.begin()
        real = row < rows - first
        x_at, out_at = x + tl.cast(first, tl.int64) * x_row, out + tl.cast(first, tl.int64) * out_row
        values = ()
        for i in tl.static_range(BLOCKS):
            held = real[None, :, None] & (depth >= 0)
            if not WHOLE:
                held &= depth < WIDTH - i * BLOCK_K
            values += (tl.load(x_at + i * BLOCK_K, mask=held, other=0.0),)  # type: ignore[assignment]
        slices = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
        for i in tl.static_range(BLOCKS):
            slices = tl.dot(weights[i], tl.permute(values[i], (0, 2, 1)), slices)
        # The sums of two warps meet in one thread, the others in its warp: a sum over warps would synchronise twice.
        left, right = tl.split(tl.reshape(tl.permute(slices, (1, 2, 0)), (BLOCK_N, BLOCK_T, WARPS // 2, 2)))
        total = tl.sum(left + right, 2)
        if BIAS:
            total += tl.load(bias + start + n).to(tl.float32)[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=real[None, :] & (n >= 0)[:, None])
        first += BLOCK_T


@kernel
def _add_gemm_parts(
    parts, bias, out, part, out_row, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = parts + row * OUTPUTS + column
    total = load_partials(at, part, bias + column, column < OUTPUTS, PARTS, BIAS, tl.float32)
    tl.store(out + row * out_row + column, total.to(out.dtype.element_ty), mask=column < OUTPUTS)


def add_partials(parts: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """Fill and return out `[T, N]`: the sum of parts float32 `[parts, T, N]` in their order, then of bias `[N]`. Parts
    and the rows of out are contiguous."""
    count, rows, outputs = parts.shape
    block = min(512, next_power_of_2(outputs))
    _add_gemm_parts[(rows, cdiv(outputs, block))](
        parts, parts if bias is None else bias, out, parts.stride(0), out.stride(0), OUTPUTS=outputs, PARTS=count,
        BIAS=bias is not None, BLOCK=block, num_warps=4, **overlap.options(),
    )  # fmt: skip
    return out


def tile_for(x: Tensor, weight: Tensor, added_next: bool = False) -> DenseTile | None:
    """Return the tile of x Wᵀ, or None to use a library: for other dtypes, many rows, or a large weight. added_next:
    the next kernel adds the parts."""
    (rows, width), outputs = x.shape, weight.shape[0]
    like = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return tile_of(rows, outputs, width, added_next) if like and rows and _is_dense(x, weight) else None


def tile_of(rows: int, outputs: int, width: int, added_next: bool = False) -> DenseTile | None:
    """Return the tile by sizes and the GPU alone; see `tile_for`. The tiles are the fastest on an H200. All programs
    should be on the GPU at once, and the programs of a multiprocessor share its memory."""
    if rows > MAX_ROWS:
        return None
    if added_next and outputs <= FEW_OUTPUTS:  # there are few tiles, so every block is a part
        block = 256 if width <= 256 * MAX_PARTS else 512
        return DenseTile(64, cdiv(width, block), block, 4)
    if not added_next and (whole := _whole_depth(rows, outputs, width)):
        return whole
    cuts = [(64, 512 if width > 1024 else 256 if width > 128 else 128, 4)]
    if rows <= 4:
        cuts += [(64, 256, 4), (128, 256, 8)]
    if rows > 32 and added_next:
        cuts.append((128, 512, 8))
    for columns, block, warps in cuts:
        depth = cdiv(width, block * MAX_PARTS) * block
        parts = cdiv(width, depth)
        tile = DenseTile(columns, parts, block, warps)
        held = 2 * depth * (columns + rows_of_block(rows, tile))
        if cdiv(outputs, columns) * parts <= gpu().shared_bytes // held * gpu().multiprocessors:
            return tile
    return None


def _whole_depth(rows: int, outputs: int, width: int) -> DenseTile | None:
    """Return the tile with the fewest columns that has all programs on the GPU at once. None if registers, or the
    memory that it passes through, do not hold it. It replaces parts and the kernel that adds them, for so few rows that
    reading all of x takes less time than that kernel."""
    # Blocks of 256 stay within a warp. With up to 16 rows, small ones leave registers for programs of the next kernel.
    block = min((256, 128, 64) if rows <= 8 else (64,), key=lambda size: (cdiv(width, 8 * size) * size, -size))
    depth = cdiv(width, 8 * block) * 8 * block
    for columns in (16, 32, 64):
        tile = DenseTile(columns, 1, block, 8, True)
        held = 2 * depth * (columns + rows_of_block(rows, tile))
        programs = gpu().multiprocessors * (2 if held <= 64 << 10 else 1)
        fits = held <= min((192 if rows <= 8 else 128) << 10, gpu().shared_bytes)
        if rows <= 16 and fits and columns <= outputs <= columns * programs:
            return tile
    return None


def rows_of_block(rows: int, tile: DenseTile) -> int:
    """Return the rows that a program processes at once: all, unless the tile is sliced."""
    if tile.sliced:
        return 8 if rows <= 8 else 16
    return max(16, next_power_of_2(rows))


def _is_dense(*tensors: Tensor) -> bool:
    return all(t.dim() == 2 and t.stride(1) == 1 and t.stride(0) <= FARTHEST for t in tensors)


def linear(x: Tensor, weight: Tensor, tile: DenseTile, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + bias, summed in float32 and rounded once. Fill and return out `[T, N]`, by default a new tensor.

    Args:
        x: `[T, K]` of at least one row. weight: `[N, K]`, of the same dtype. bias: `[N]`. Rows of all are contiguous.

    Raises ValueError if shapes do not match.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    _check(x, weight, bias)
    few = tile.sliced and weight.shape[0] < tile.columns
    if out.shape != (x.shape[0], weight.shape[0]) or not _is_dense(out) or few:
        raise ValueError(f"x is {list(x.shape)}, the weight {list(weight.shape)}, out {list(out.shape)} for {tile}")
    parts = _parts_of(weight.shape[1], tile)
    if parts == 1:
        multiply = _multiply_whole_depth if tile.sliced else _multiply
        multiply(x, weight, bias, out, tile)
        return out
    values = out.new_empty(parts, *out.shape, dtype=torch.float32)
    _multiply(x, weight, None, values, tile)
    return add_partials(values, out, bias)


def linear_partials(
    x: Tensor, weight: Tensor, tile: DenseTile, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> SplitKPartials:
    """Return `linear` as split-K partials, for a next kernel that sums them and rounds to dtype (None: x's)."""
    _check(x, weight, bias)
    outputs, width = weight.shape
    values = x.new_empty(_parts_of(width, tile), x.shape[0], outputs, dtype=torch.float32)
    _multiply(x, weight, None, values, tile)
    return SplitKPartials(values, bias, dtype or x.dtype)


def linear_of_any_size(x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` with the tile of its size, or by torch if a library is faster."""
    tile = tile_for(x, weight)
    return model_reference.linear(x, weight, out, bias) if tile is None else linear(x, weight, tile, out, bias)


def linear_or_partials(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor | SplitKPartials:
    """Return `linear_partials` with the tile of its size, else the whole product. dtype: see there."""
    if tile := tile_for(x, weight, added_next=True):
        return linear_partials(x, weight, tile, bias, dtype)
    if dtype is None:
        return linear_of_any_size(x, weight, None, bias)
    if dtype == torch.float32 and x.dtype.itemsize == 2 and bias is None:
        return torch.mm(x, weight.t(), out_dtype=dtype)  # without copies in float32
    return model_reference.linear_or_partials(x, weight, bias, dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    fits = x.dim() == 2 and x.shape[0] and x.shape[1:] == weight.shape[1:] and x.dtype == weight.dtype
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:1] and bias.is_contiguous()
    if not fits or not _is_dense(x, weight):
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, the weight {weight.dtype} {list(weight.shape)}, the bias "
            f"{None if bias is None else list(bias.shape)}; there must be a row, and rows must be contiguous and "
            f"at most {FARTHEST} elements apart"
        )


def _blocks_of(width: int, tile: DenseTile) -> int:
    """Return the blocks of a part of the depth."""
    return cdiv(cdiv(width, tile.parts), tile.block)


def _parts_of(width: int, tile: DenseTile) -> int:
    """Return the parts with a block of their own: rounding up may leave the last ones empty."""
    return cdiv(width, _blocks_of(width, tile) * tile.block)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: DenseTile) -> None:
    """Write the product to out `[T, N]`, or its parts to out `[parts, T, N]`."""
    (outputs, width), rows = weight.shape, x.shape[0]
    _gemm_few_rows[(cdiv(outputs, tile.columns), _parts_of(width, tile))](
        x, weight, x if bias is None else bias, out, rows, outputs, x.stride(0), weight.stride(0), out.stride(-2),
        out.stride(0), WIDTH=width, BIAS=bias is not None, BLOCK_T=rows_of_block(rows, tile),
        BLOCK_N=tile.columns, BLOCK_K=tile.block, BLOCKS=_blocks_of(width, tile), num_warps=tile.warps,
        **overlap.options(),
    )  # fmt: skip


def _multiply_whole_depth(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: DenseTile) -> None:
    (outputs, width), rows = weight.shape, x.shape[0]
    _gemm_whole_depth[(cdiv(outputs, tile.columns),)](
        x, weight, x if bias is None else bias, out, rows, outputs, x.stride(0), out.stride(0), WIDTH=width,
        WEIGHT_ROW=weight.stride(0), BIAS=bias is not None, BLOCK_T=rows_of_block(rows, tile), BLOCK_N=tile.columns,
        BLOCK_K=tile.block, BLOCKS=cdiv(width, tile.warps * tile.block), WARPS=tile.warps, num_warps=tile.warps,
        **overlap.options(),
    )  # fmt: skip
