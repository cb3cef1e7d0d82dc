"""Products of the routed experts for prompts in FP8, on GPUs from sm_90 on.

The results have the same bits as `weft.engine.kernels.triton.fused_experts`, which supports other sizes and GPUs, and
biases and limits. As in `weft.engine.kernels.triton.prompt_experts`, tensor descriptors (TMA) load the weights, and the
rows between the products are in the order of the tiles. Tiles have 64 rows: with 128, sums take too many registers
(docs/log/gpu-kernels.md).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.engine.kernels.triton.experts_tiles import ExpertsTile
from weft.engine.kernels.triton.route import Routing
from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.kernels.triton import float8_rows, overlap
from weft.kernels.triton.launch import arch, cdiv, kernel, scaled
from weft.kernels.triton.rms_norm import activated

TILE_ROWS, GROUP, MIN_ROWS = 64, 128, 1024
"""Rows of a tile, rows and columns of a weight's block, and minimum rows of a step."""
UP_TILE, DOWN_TILE = ExpertsTile(GROUP, GROUP, 8, 4), ExpertsTile(GROUP, GROUP, 4, 3)
PROGRAMS = 396
"""Programs of the second product: three per multiprocessor of an H200."""


@kernel(do_not_specialize=["pairs"])
def _up_prompts(
    x, x_scale, order, tile_expert, out, out_scale, scale, weight, pairs, x_row, WIDTH: tl.constexpr,
    INNER: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    BLOCKS: tl.constexpr = INNER // GROUP
    GROUPS: tl.constexpr = WIDTH // GROUP
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    row = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    pair = tl.load(order + row)
    token = (tl.where(pair < pairs, pair, 0) // K).to(tl.int64)
    column = tl.arange(0, GROUP)
    x += token[:, None] * x_row + column[None, :]
    x_scale += token * GROUPS
    scale += (expert * 2 * BLOCKS + block) * GROUPS
    gate = tl.zeros([BLOCK_M, GROUP], tl.float32)
    up = tl.zeros([BLOCK_M, GROUP], tl.float32)
    for group in range(GROUPS):
        a = tl.load(x + group * GROUP)
        b = tl.reshape(weight.load([2 * expert, block * GROUP, group * GROUP]), (GROUP, GROUP))
        c = tl.reshape(weight.load([2 * expert + 1, block * GROUP, group * GROUP]), (GROUP, GROUP))
        a_scale = tl.load(x_scale + group)
        gate += tl.dot(a, tl.trans(b)) * (a_scale * tl.load(scale + group))[:, None]
        up += tl.dot(a, tl.trans(c)) * (a_scale * tl.load(scale + BLOCKS * GROUPS + group))[:, None]
    value, found = float8_rows.to_float8(activated(gate, up, None, None))
    tl.store(out_scale + row * BLOCKS + block, found)
    tl.store(out + row[:, None] * INNER + (block * GROUP + column)[None, :], value)


@kernel(do_not_specialize=["pairs"])
def _down_prompts(
    route_weight, order, tile_expert, used, out, row_scale, scale, rows, weight, pairs, WIDTH: tl.constexpr,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    BLOCKS: tl.constexpr = WIDTH // GROUP
    GROUPS: tl.constexpr = INNER // GROUP
    for item in tl.range(tl.program_id(0), tl.load(used) * BLOCKS, PROGRAMS):
        tile, block = item // BLOCKS, item % BLOCKS
        expert = tl.load(tile_expert + tile)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        scale_at = scale + (expert * BLOCKS + block) * GROUPS
        acc = tl.zeros([BLOCK_M, GROUP], tl.float32)
        for group in range(GROUPS):
            b = tl.reshape(weight.load([expert, block * GROUP, group * GROUP]), (GROUP, GROUP))
            each = tl.load(row_scale + row * GROUPS + group) * tl.load(scale_at + group)
            acc += tl.dot(rows.load([tile * BLOCK_M, group * GROUP]), tl.trans(b)) * each[:, None]
        pair = tl.load(order + row)
        real = pair < pairs
        acc *= tl.load(route_weight + pair, mask=real, other=0.0)[:, None]
        to = out + pair.to(tl.int64)[:, None] * WIDTH + (block * GROUP + tl.arange(0, GROUP))[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None])


def takes(x: Fp8Rows, routing: Routing, gate_up: Fp8Weight, down: Fp8Weight) -> bool:
    """Return whether these kernels compute the products of `x`, `gate_up`, `down`: by GPU, sizes, blocks, tiles."""
    tiles = routing.used is not None and routing.tile_rows == TILE_ROWS and len(x.values) >= MIN_ROWS
    blocks = gate_up.unit == down.unit == (GROUP, GROUP) and not any(n % GROUP for n in down.values.shape[1:])
    aligned = gate_up.values.data_ptr() % 16 == 0 and down.values.data_ptr() % 16 == 0
    return tiles and blocks and aligned and arch() >= 90


def pairs_outputs(x: Fp8Rows, routing: Routing, gate_up: Fp8Weight, down: Fp8Weight, out: Tensor) -> Tensor:
    """Return `[pairs, width]` in out's dtype: each pair's second product, with its weight; undefined for pairs without
    an expert here. See `fused_experts.experts` for the arguments, for which `takes` is true."""
    (held, width, inner), (rows, k) = down.values.shape, routing.expert.shape
    order, tile_expert, tiles = routing.tiles()
    assert routing.used is not None
    pairs, cut = rows * k, UP_TILE
    hidden, found = x.values.new_empty(order.numel(), inner), out.new_empty(pairs, width)
    hidden_scale = x.scales.new_empty(order.numel(), cdiv(inner, GROUP))
    both = TensorDescriptor(
        gate_up.values, [2 * held, inner, width], [inner * width, width, 1], [1, cut.columns, cut.depth]
    )
    _up_prompts[(tiles * cdiv(inner, GROUP),)](
        x.values, x.scales, order, tile_expert, hidden, hidden_scale, gate_up.scales, both, pairs, x.values.stride(0),
        WIDTH=width, INNER=inner, K=k, BLOCK_M=TILE_ROWS, GROUP=GROUP, num_warps=cut.warps, num_stages=cut.stages,
        **overlap.options(),
    )  # fmt: skip
    cut, programs = DOWN_TILE, scaled(PROGRAMS)
    last = TensorDescriptor.from_tensor(down.values, [1, cut.columns, cut.depth])
    _down_prompts[(programs,)](
        routing.weight, order, tile_expert, routing.used, found, hidden_scale, down.scales,
        TensorDescriptor.from_tensor(hidden, [TILE_ROWS, cut.depth]), last, pairs, WIDTH=width, INNER=inner,
        BLOCK_M=TILE_ROWS, GROUP=GROUP, PROGRAMS=programs, num_warps=cut.warps, num_stages=cut.stages,
        **overlap.options(),
    )  # fmt: skip
    return found
