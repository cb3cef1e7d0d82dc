"""x Wᵀ of few rows, as decode steps have them, in 2-byte floats.

Such a product takes as long as reading its weight. As no kernel writes weights, each program loads its tile of one
before it waits for the kernel before (see `overlap`; past L1, as all that is read so early), and then only its columns
of x. There are two ways to cut a weight so that every multiprocessor has a tile:

- Tiles of 64 rows or more and a part of the depth. The parts are added in their order by what comes next, or by a
  kernel for that.
- Tiles of fewer rows and the whole depth, which is dealt out over the program's warps in slices, whose sums it adds.
  This spares that kernel, but every program reads all of x.

Nothing is added atomically, so the bits are the same at every run, and those of a row depend on no other row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.split_k import SplitKPartials
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2

MOST_ROWS = 64
"""Products of more rows are better left to a library."""
MULTIPROCESSORS = 132
"""Of an H100 or H200, for which tiles were chosen."""
SHARED_BYTES = 227 << 10
"""What the programs of a multiprocessor can have together. All programs are to be on the GPU at once."""
MOST_PARTS = 8
"""Parts of the depth, since their sum reads them all."""
FEW_OUTPUTS = 512
"""As routers have."""
FARTHEST = 1 << 24
"""Elements from one row to the next, so that 32 bits count those of a tile."""
LANGUAGE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class DenseTile(NamedTuple):
    """How a product is cut: the weight's rows of a tile, parts of the depth, depth of a block, and warps.

    block: a power of two; a program has so many blocks of it as its part of the depth needs, or each warp's slice.
    sliced: each warp multiplies a slice of the only part; there must be two warps, and a tile's columns of outputs.
    """

    columns: int
    parts: int
    block: int
    warps: int
    sliced: bool = False


@triton.jit
def load_partials(at, part, bias, mask, PARTS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of a product of so many parts (see `SplitKPartials`), in float32; those that are masked mean nothing.

    at: pointers into the first; bias: pointers, of the same shape.
    """
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
    # All programs of a part read the same rows at once, so each begins at another one.
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
    RUN: tl.constexpr, RUNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    start = tl.minimum(tl.program_id(0) * BLOCK_N, outputs - BLOCK_N)  # the last tile may have some of the one before
    # All programs read the same rows at once, so each begins at another one.
    row = (tl.arange(0, BLOCK_T) + tl.program_id(0)) & (BLOCK_T - 1)
    depth = tl.arange(0, WARPS)[:, None, None] * (RUNS * RUN) + tl.arange(0, RUN)[None, None, :]
    weight += start.to(tl.int64) * WEIGHT_ROW + n[None, :, None] * WEIGHT_ROW + depth
    x += row[None, :, None] * x_row + depth
    out += row[None, :] * out_row + start + n[:, None]
    WHOLE: tl.constexpr = WIDTH % (WARPS * RUNS * RUN) == 0
    weights = ()
    for i in tl.static_range(RUNS):
        if WHOLE:
            b = tl.load(weight + i * RUN, cache_modifier=".cg")
        else:
            inside = (depth < WIDTH - i * RUN) & (n >= 0)[None, :, None]
            b = tl.load(weight + i * RUN, mask=inside, other=0.0, cache_modifier=".cg")
        weights += (b,)  # type: ignore[assignment]
    first = 0
    # The compiler brings the weights into tensor cores' registers before this loop, so before the wait.
    while first < rows:
        overlap.begin()
        real = row < rows - first
        x_at, out_at = x + tl.cast(first, tl.int64) * x_row, out + tl.cast(first, tl.int64) * out_row
        values = ()
        for i in tl.static_range(RUNS):
            held = real[None, :, None] & (depth >= 0)
            if not WHOLE:
                held &= depth < WIDTH - i * RUN
            values += (tl.load(x_at + i * RUN, mask=held, other=0.0),)  # type: ignore[assignment]
        slices = tl.zeros([WARPS, BLOCK_N, BLOCK_T], tl.float32)
        for i in tl.static_range(RUNS):
            slices = tl.dot(weights[i], tl.permute(values[i], (0, 2, 1)), slices)
        # Two warps' sums come together in a thread, the others in its warp: a sum over warps would meet twice.
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
    """Fills and returns out `[T, N]`, whose rows are contiguous: the sum of parts float32 `[parts, T, N]`, contiguous,
    in their order, and then of bias `[N]`."""
    count, rows, outputs = parts.shape
    block = min(512, next_power_of_2(outputs))
    _add_gemm_parts[(rows, cdiv(outputs, block))](
        parts, parts if bias is None else bias, out, parts.stride(0), out.stride(0), OUTPUTS=outputs, PARTS=count,
        BIAS=bias is not None, BLOCK=block, num_warps=4, **overlap.options(),
    )  # fmt: skip
    return out


def tile_for(x: Tensor, weight: Tensor, added_next: bool = False) -> DenseTile | None:
    """The tile of x Wᵀ, or None where a library is to be preferred: in other dtypes, of many rows, of a large weight.

    added_next: what comes next adds the parts, if there are.
    """
    (rows, width), outputs = x.shape, weight.shape[0]
    like = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return tile_of(rows, outputs, width, added_next) if like and rows and _is_dense(x, weight) else None


def tile_of(rows: int, outputs: int, width: int, added_next: bool = False) -> DenseTile | None:
    """The same by sizes alone. Tiles are the quickest on an H200."""
    if rows > MOST_ROWS:
        return None
    if added_next and outputs <= FEW_OUTPUTS:  # which have few tiles: every block is a part
        block = 256 if width <= 256 * MOST_PARTS else 512
        return DenseTile(64, cdiv(width, block), block, 4)
    if not added_next and (whole := _whole_depth(rows, outputs, width)):
        return whole
    cuts = [(64, 512 if width > 1024 else 256 if width > 128 else 128, 4)]
    if rows <= 4:
        cuts.append((128, 256, 8))
    if rows > 32 and added_next:
        cuts.append((128, 512, 8))
    for columns, block, warps in cuts:
        depth = cdiv(width, block * MOST_PARTS) * block
        parts = cdiv(width, depth)
        tile = DenseTile(columns, parts, block, warps)
        held = 2 * depth * (columns + rows_of_block(rows, tile))
        if cdiv(outputs, columns) * parts <= SHARED_BYTES // held * MULTIPROCESSORS:
            return tile
    return None


def _whole_depth(rows: int, outputs: int, width: int) -> DenseTile | None:
    """The tile of as few columns as let all programs be on the GPU at once; None where registers do not hold it.

    It takes the place of parts and of the kernel that adds them, up to so many rows that reading all of x takes longer.
    """
    # Blocks of 256 stay within a warp; small ones leave registers for programs of the next kernel, beside 16 rows.
    block = min((256, 128, 64) if rows <= 8 else (64,), key=lambda size: (cdiv(width, 8 * size) * size, -size))
    depth = cdiv(width, 8 * block) * 8 * block
    for columns in (16, 32, 64):
        tile = DenseTile(columns, 1, block, 8, True)
        held = 2 * depth * (columns + rows_of_block(rows, tile))
        programs = MULTIPROCESSORS * (2 if held <= 64 << 10 else 1)
        if rows <= 16 and held <= (192 if rows <= 8 else 128) << 10 and columns <= outputs <= columns * programs:
            return tile
    return None


def rows_of_block(rows: int, tile: DenseTile) -> int:
    """How many rows a program takes at once, which are all but with slices."""
    if tile.sliced:
        return 8 if rows <= 8 else 16
    return max(16, next_power_of_2(rows))


def _is_dense(*tensors: Tensor) -> bool:
    return all(t.dim() == 2 and t.stride(1) == 1 and t.stride(0) <= FARTHEST for t in tensors)


def linear(x: Tensor, weight: Tensor, tile: DenseTile, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias, summed in float32 and rounded once; fills and returns out `[T, N]`, which is made where it is None.

    x `[T, K]`, of which there is a row; weight `[N, K]`, of the same dtype; bias `[N]`. Rows of all are contiguous.
    Raises ValueError where shapes do not fit together.
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
    """The same with its sum left to what comes next, which rounds it to dtype, x's where that is None."""
    _check(x, weight, bias)
    outputs, width = weight.shape
    values = x.new_empty(_parts_of(width, tile), x.shape[0], outputs, dtype=torch.float32)
    _multiply(x, weight, None, values, tile)
    return SplitKPartials(values, bias, dtype or x.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    fits = x.dim() == 2 and x.shape[0] and x.shape[1:] == weight.shape[1:] and x.dtype == weight.dtype
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:1] and bias.is_contiguous()
    if not fits or not _is_dense(x, weight):
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, the weight {weight.dtype} {list(weight.shape)}, the bias "
            f"{None if bias is None else list(bias.shape)}; rows must be contiguous, not far apart, and one at least"
        )


def _blocks_of(width: int, tile: DenseTile) -> int:
    """Blocks of a part of the depth."""
    return cdiv(cdiv(width, tile.parts), tile.block)


def _parts_of(width: int, tile: DenseTile) -> int:
    """Parts of whole blocks: the last ones may not be needed."""
    return cdiv(width, _blocks_of(width, tile) * tile.block)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: DenseTile) -> None:
    """Into out `[T, N]`, or `[parts, T, N]`."""
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
        RUN=tile.block, RUNS=cdiv(width, tile.warps * tile.block), WARPS=tile.warps, num_warps=tile.warps,
        **overlap.options(),
    )  # fmt: skip
