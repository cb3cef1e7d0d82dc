"""Products of the routed experts for prompts: 16-bit weights and tiles of 128 rows, on GPUs from sm_90 on.

The results have the same bits as `weft.engine.kernels.triton.fused_experts`, which supports other sizes and GPUs.
Experts with biases or limits are left to those kernels: their last bits differed on an H200. Differences:

- Tensor descriptors (TMA) load the weights. A block of the first product has columns of gate and of up, in one product.
  A tile with pairs in at most half its rows computes half the rows.
- The rows between the products are in the order of the tiles, so the second product loads them by a descriptor too.
  Rows of a tile without a pair hold any values, which no other row reads.
- The second product's programs are persistent: each computes block after block, and loads the next while it stores.

A copy of the first product's rows in that order could be loaded by a descriptor as well. That gains 5 to 12 %, which
the copy costs (docs/log/gpu-kernels.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.engine.kernels.triton.experts_tiles import ExpertsTile
from weft.engine.kernels.triton.route import Routing
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import arch, cdiv, kernel, scaled
from weft.kernels.triton.rms_norm import activated

TILE_ROWS = 128
UP_TILE, DOWN_TILE = ExpertsTile(128, 64, 8, 4), ExpertsTile(256, 64, 8, 4)
PROGRAMS = 132
"""Programs of the second product: one per multiprocessor of an H200."""


@triton.jit
def _halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _up_rows(
    x, order, out, weight, pairs, x_row, begin, first, expert, WIDTH: tl.constexpr, INNER: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the columns from `first` on of BLOCK_M rows from `begin` on."""
    row = begin + tl.arange(0, BLOCK_M)
    pair = tl.load(order + row)
    depth = tl.arange(0, BLOCK_K)
    x += (tl.where(pair < pairs, pair, 0) // K).to(tl.int64)[:, None] * x_row + depth[None, :]
    acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            a = tl.load(x + k)
        else:
            inside = depth < WIDTH - k
            a = tl.load(x + k, mask=inside[None, :], other=0.0)
        b = tl.reshape(weight.load([2 * expert, first, k]), (2 * BLOCK_N, BLOCK_K))
        acc = tl.dot(a, tl.trans(b), acc)
    gate, up = _halves(acc, BLOCK_M, 2 * BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    value = activated(gate, up, None, None).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * INNER + column[None, :], value, mask=(column < INNER)[None, :])


@kernel(do_not_specialize=["pairs"])
def _up_prompts(
    x, order, tile_expert, out, weight, pairs, x_row, WIDTH: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    COLUMN_BLOCKS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile, first = tl.program_id(0) // COLUMN_BLOCKS, tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    begin = tile * BLOCK_M
    if tl.load(order + begin + BLOCK_M // 2) < pairs:
        _up_rows(
            x, order, out, weight, pairs, x_row, begin, first, expert, WIDTH, INNER, K, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    else:
        _up_rows(
            x, order, out, weight, pairs, x_row, begin, first, expert, WIDTH, INNER, K, BLOCK_M // 2, BLOCK_N, BLOCK_K
        )  # fmt: skip


@triton.jit
def _store_pairs(out, pair, real, first, value, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    column = first + tl.arange(0, COLUMNS)
    to = out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])


@kernel(do_not_specialize=["pairs"])
def _down_prompts(
    route_weight, order, tile_expert, used, out, rows, weight, pairs, WIDTH: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    for item in tl.range(tl.program_id(0), tl.load(used) * COLUMN_BLOCKS, PROGRAMS, flatten=True):
        tile, first = item // COLUMN_BLOCKS, item % COLUMN_BLOCKS * BLOCK_N
        expert = tl.load(tile_expert + tile)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, INNER, BLOCK_K):
            b = tl.reshape(weight.load([expert, first, k]), (BLOCK_N, BLOCK_K))
            acc = tl.dot(rows.load([tile * BLOCK_M, k]), tl.trans(b), acc)
        pair = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        real = pair < pairs
        acc *= tl.load(route_weight + pair, mask=real, other=0.0)[:, None]
        left, right = _halves(acc, BLOCK_M, BLOCK_N)  # one after the other: half the shared memory
        _store_pairs(out, pair, real, first, left, WIDTH, BLOCK_N // 2)
        _store_pairs(out, pair, real, first + BLOCK_N // 2, right, WIDTH, BLOCK_N // 2)


def takes(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether these kernels compute the products of `x`, `gate_up`, `down`: by GPU, dtypes, sizes, tiles."""
    tiles = routing.used is not None and routing.tile_rows == TILE_ROWS
    sizes = down.shape[1] % 8 == 0 and down.shape[2] % 8 == 0  # rows of a descriptor begin at multiples of 16 bytes
    aligned = gate_up.data_ptr() % 16 == 0 and down.data_ptr() % 16 == 0
    return tiles and x.element_size() == 2 and sizes and aligned and arch() >= 90


def pairs_outputs(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return `[pairs, width]`: each pair's second product, with its weight; undefined for pairs without an expert here.
    See `fused_experts.experts` for the arguments, for which `takes` is true."""
    (held, width, inner), (rows, k) = down.shape, routing.expert.shape
    order, tile_expert, tiles = routing.tiles()
    assert routing.used is not None
    pairs, cut = rows * k, UP_TILE
    hidden, out = x.new_empty(order.numel(), inner), x.new_empty(pairs, width)
    both = TensorDescriptor(gate_up, [2 * held, inner, width], [inner * width, width, 1], [2, cut.columns, cut.depth])
    _up_prompts[(tiles * cdiv(inner, cut.columns),)](
        x, order, tile_expert, hidden, both, pairs, x.stride(0), WIDTH=width, INNER=inner, K=k, BLOCK_M=TILE_ROWS,
        BLOCK_N=cut.columns, BLOCK_K=cut.depth, num_warps=cut.warps, num_stages=cut.stages, **overlap.options(),
    )  # fmt: skip
    cut, programs = DOWN_TILE, scaled(PROGRAMS)
    last = TensorDescriptor.from_tensor(down, [1, cut.columns, cut.depth])
    _down_prompts[(programs,)](
        routing.weight, order, tile_expert, routing.used, out,
        TensorDescriptor.from_tensor(hidden, [TILE_ROWS, cut.depth]), last, pairs, WIDTH=width, INNER=inner,
        BLOCK_M=TILE_ROWS, BLOCK_N=cut.columns, BLOCK_K=cut.depth, PROGRAMS=programs,
        num_warps=cut.warps, num_stages=cut.stages, **overlap.options(),
    )  # fmt: skip
    return out
