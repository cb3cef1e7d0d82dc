"""Routed experts of a mixture-of-experts block, in three kernels that follow `route`.

- up: silu(x · gateᵀ) · (x · upᵀ) of every pair of a token and an expert, both products in one pass over x.
- down: the product of that with the down projection times the pair's weight, `[T, k, width]`.
- sum: over a token's pairs in the order of its experts.

There are no atomic additions, so the bits are the same every time. Products accumulate in float32; between the kernels
values have x's dtype. Gate and up rows of a weight are stored as in checkpoints, one block after the other: a program
reads a tile of each, so no weight is permuted. Two variants were slower on an H200: one kernel for down and sum, by 11
µs for one row; and reading a product's weights while the previous kernel still runs (docs/log/gpu-kernels.md).

Weights in MXFP4 (PACKED) are dequantised as they are loaded, and rows stay as they are. Each tile of rows dequantises
its weights anew, so where experts have several tiles a kernel dequantises all weights first.

FP8 weights have blocks of 32, 64 or 128 columns, and the rows of both products are quantised in groups of the same
number of columns. With few rows, programs split the depth of each product: each has a tile's depth (0: see
`float8_linear.parts_of`), and the next kernel sums the parts. With many rows a tile's depth is one group, and the first
product's columns are one group of the second: the kernel quantises its rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from weft.engine.kernels import hopper_experts
from weft.engine.kernels.model_reference import Rule
from weft.engine.kernels.mxfp4 import Mxfp4
from weft.engine.kernels.side_stream import nothing
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kernels.triton import float8_linear, fused_experts_float8, mxfp4_tiles, prompt_experts
from weft.engine.kernels.triton.experts_tiles import (
    ExpertsTile,
    down_tile_of,
    float8_tiles_of,
    mxfp4_tiles_of,
    tile_rows_of,
    up_tile_of,
)
from weft.engine.kernels.triton.route import Routing, pairs_of, route, sort_pairs
from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.kernels.triton import float8_rows, overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2
from weft.kernels.triton.rms_norm import activated

MANY_PAIRS = 256
"""Mean pairs of an expert from which weights in MXFP4 are dequantised first. That takes memory for both weights of a
layer in the rows' dtype, so batches that fit a small GPU must not reach it with many experts."""


@kernel(do_not_specialize=["pairs"])
def _up(
    x, x_scale, weight, scale, bias, order, tile_expert, out, out_scale, pairs, x_row,
    WIDTH: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    COLUMN_BLOCKS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile, first = tl.program_id(0) // COLUMN_BLOCKS, tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N
    pair, expert = pairs_of(tile, order, tile_expert, pairs, SORTED, BLOCK_M)
    if expert < 0:
        return
    real = pair < pairs
    column = first + tl.arange(0, BLOCK_N)
    wanted = column < INNER
    depth = tl.arange(0, BLOCK_K)
    token = (tl.where(real, pair, 0) // K).to(tl.int64)
    x += token[:, None] * x_row + depth[None, :]
    row = tl.where(wanted, column, 0)
    if PACKED:
        weight += expert.to(tl.int64) * (INNER * WIDTH)
        scale += expert.to(tl.int64) * (2 * INNER * WIDTH // 32)
    else:
        weight += expert.to(tl.int64) * (2 * INNER * WIDTH)
    gate_at = weight + row[None, :] * WIDTH + depth[:, None]
    up_at = gate_at + INNER * WIDTH
    if UNIT:
        GROUPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
        x_scale += token * GROUPS
        gate_scale = scale + expert * (2 * INNER // UNIT * GROUPS) + row // UNIT * GROUPS
        up_scale = gate_scale + INNER // UNIT * GROUPS
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        inside = depth < WIDTH - k
        held = real[:, None] if WIDTH % BLOCK_K == 0 else real[:, None] & inside[None, :]
        if PACKED:
            b = mxfp4_tiles.dequantised(weight, scale, row, k, WIDTH, BLOCK_K, x.dtype.element_ty)
            c = mxfp4_tiles.dequantised(weight, scale, row + INNER, k, WIDTH, BLOCK_K, x.dtype.element_ty)
        elif WIDTH % BLOCK_K == 0:
            b = tl.load(gate_at + k)
            c = tl.load(up_at + k)
        else:
            b = tl.load(gate_at + k, mask=inside[:, None], other=0.0)
            c = tl.load(up_at + k, mask=inside[:, None], other=0.0)
        a = tl.load(x + k, mask=held, other=0.0)
        if UNIT:
            group = k // BLOCK_K
            a_scale = tl.load(x_scale + group, mask=real, other=0.0)
            gate += tl.dot(a, b) * (a_scale[:, None] * tl.load(gate_scale + group)[None, :])
            up += tl.dot(a, c) * (a_scale[:, None] * tl.load(up_scale + group)[None, :])
        else:
            gate = tl.dot(a, b, gate, input_precision="ieee")
            up = tl.dot(a, c, up, input_precision="ieee")
    if BIAS:
        bias += expert.to(tl.int64) * (2 * INNER) + column
        gate += tl.load(bias, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + INNER, mask=wanted, other=0.0).to(tl.float32)[None, :]
    value = activated(gate, up, LIMIT, ALPHA)
    to = out + pair.to(tl.int64)[:, None] * INNER + column[None, :]
    if out.dtype.element_ty == tl.float8e4nv:  # a block's columns are a group of the next product
        value, found = float8_rows.to_float8(tl.where(wanted[None, :], value, 0.0))
        at = pair.to(tl.int64) * COLUMN_BLOCKS + tl.program_id(0) % COLUMN_BLOCKS
        tl.store(out_scale + at, found, mask=real)
        tl.store(to, value, mask=real[:, None] & wanted[None, :])
    else:
        tl.store(to, value.to(out.dtype.element_ty), mask=real[:, None] & wanted[None, :])


@kernel(do_not_specialize=["pairs"])
def _down(
    inner, inner_scale, weight, scale, bias, route_weight, order, tile_expert, out, pairs,
    WIDTH: tl.constexpr, INNER: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile, first = tl.program_id(0) // COLUMN_BLOCKS, tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N
    # Routing and weights were written before `_up` began, so they may be read while it runs.
    pair, expert = pairs_of(tile, order, tile_expert, pairs, SORTED, BLOCK_M, CACHE=".cg")
    real = (pair < pairs) & (expert >= 0)
    share = tl.load(route_weight + pair, mask=real, other=0.0, cache_modifier=".cg")
    overlap.begin()
    if expert < 0:
        return
    column = first + tl.arange(0, BLOCK_N)
    wanted = column < WIDTH
    depth = tl.arange(0, BLOCK_K)
    inner += tl.where(real, pair, 0).to(tl.int64)[:, None] * INNER + depth[None, :]
    row = tl.where(wanted, column, 0)
    if PACKED:
        weight += expert.to(tl.int64) * (WIDTH * INNER // 2)
        scale += expert.to(tl.int64) * (WIDTH * INNER // 32)
    else:
        weight += expert.to(tl.int64) * (WIDTH * INNER)
    at = weight + row[None, :] * INNER + depth[:, None]
    if UNIT:
        GROUPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
        inner_scale += tl.where(real, pair, 0).to(tl.int64) * GROUPS
        scale += (expert * ((WIDTH + UNIT - 1) // UNIT) + row // UNIT) * GROUPS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, INNER, BLOCK_K):
        inside = depth < INNER - k
        held = real[:, None] if INNER % BLOCK_K == 0 else real[:, None] & inside[None, :]
        if PACKED:
            b = mxfp4_tiles.dequantised(weight, scale, row, k, INNER, BLOCK_K, inner.dtype.element_ty)
        elif INNER % BLOCK_K == 0:
            b = tl.load(at + k)
        else:
            b = tl.load(at + k, mask=inside[:, None], other=0.0)
        a = tl.load(inner + k, mask=held, other=0.0)
        if UNIT:
            group = k // BLOCK_K
            a_scale = tl.load(inner_scale + group, mask=real, other=0.0)
            acc += tl.dot(a, b) * (a_scale[:, None] * tl.load(scale + group)[None, :])
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    if BIAS:
        bias += expert.to(tl.int64) * WIDTH + column
        acc += tl.load(bias, mask=wanted, other=0.0).to(tl.float32)[None, :]
    acc *= share[:, None]
    to = out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & wanted[None, :])


@kernel
def _sum_choices(
    pairs, expert, weight, bias, out, part, out_row, WIDTH: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a token's pairs. PARTS: split-K parts of each pair, without bias and weight; 0: pairs are whole and include
    both. ADD: add the sum to the values of out."""
    token = tl.program_id(0)
    experts: tl.tuple = ()
    for j in tl.static_range(K):  # written before `_down` began, so they may be read while it runs
        experts += (tl.load(expert + token * K + j, cache_modifier=".cg"),)
    overlap.begin()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = out + token.to(tl.int64) * out_row + column
    total = tl.zeros([BLOCK], tl.float32)
    if ADD:
        total += tl.load(to, mask=column < WIDTH, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        mine = experts[j]
        wanted = (column < WIDTH) & (mine >= 0)
        at = pairs + pair.to(tl.int64) * WIDTH + column
        value = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        if PARTS > 0:
            for i in tl.static_range(1, PARTS):
                value += tl.load(at + i * part, mask=wanted, other=0.0)
            if BIAS:
                value += tl.load(bias + mine.to(tl.int64) * WIDTH + column, mask=wanted, other=0.0).to(tl.float32)
            value *= tl.load(weight + pair, mask=mine >= 0, other=0.0)
        total += value
    tl.store(to, total.to(out.dtype.element_ty), mask=column < WIDTH)


def experts(
    x: Tensor | Fp8Rows,
    routing: Routing,
    gate_up: Tensor | Fp8Weight | Mxfp4,
    down: Tensor | Fp8Weight | Mxfp4,
    out: Tensor,
    up_tile: ExpertsTile | None = None,
    down_tile: ExpertsTile | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    add: bool = False,
    wait: Callable[[], None] = nothing,
) -> Tensor:
    """Fill and return out: Σ of weight · down(silu(gate(x)) · up(x)) over a token's pairs with an expert of this rank.

    Args:
        x: `[T, width]` with contiguous rows; with FP8 weights also its quantised rows.
        routing: result of `route_scored` or `route_chosen`.
        gate_up: `[E, 2 · inner, width]`, gate's rows first. down: `[E, width, inner]`. Contiguous, both in FP8, both in
            MXFP4, or neither.
        out: `[T, width]`, zero where no expert is on this rank.
        limit, alpha: as in `weft.engine.kernels.model_reference.gated`.
        gate_up_bias, down_bias: `[E, 2 · inner]`, `[E, width]`, added to the products.
        add: add the sum to the values of out, such as a shared expert's result.
        wait: called once, before out is read or written.

    Raises ValueError if shapes or dtypes do not match.
    """
    if alpha is not None and limit is None:
        raise ValueError("alpha without a limit")
    if not _check(x, routing, gate_up, down, out, gate_up_bias, down_bias):
        wait()
        return out
    biases = gate_up_bias, down_bias
    if (
        isinstance(gate_up, Mxfp4)
        and isinstance(down, Mxfp4)
        and routing.expert.numel() >= MANY_PAIRS * len(gate_up.values)
    ):
        gate_up, down = (mxfp4_tiles.dequantise(each, out.dtype) for each in (gate_up, down))
    parts, count = _products(x, routing, gate_up, down, out, up_tile, down_tile, limit, alpha, *biases, add)
    wait()
    return _sum(parts, routing, out, count, down_bias if count else None, add)


def _products(
    x: Tensor | Fp8Rows,
    routing: Routing,
    gate_up: Tensor | Fp8Weight | Mxfp4,
    down: Tensor | Fp8Weight | Mxfp4,
    out: Tensor,
    up_tile: ExpertsTile | None,
    down_tile: ExpertsTile | None,
    limit: float | None,
    alpha: float | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: bool,
) -> tuple[Tensor, int]:
    """Return the input of `_sum`, with its count. out: shape and dtype to copy. shared: see `up_tile_of`."""
    up, last = (w if isinstance(w, Tensor) else w.values for w in (gate_up, down))
    given = x.values if isinstance(x, Fp8Rows) else x
    (rows, width), k, inner = given.shape, routing.expert.shape[1], _shape(down)[2]
    pairs = rows * k
    x_scale, up_scale, hidden_scale, down_scale = given, up, last, last  # not read without FP8
    up_unit, down_unit = (0, 0), (0, 0)
    hidden, plain = None, alpha is None and gate_up_bias is None and down_bias is None and up_tile is down_tile is None
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        gate_up.check(), down.check()
        (_, up_scale, up_unit), (_, down_scale, down_unit) = gate_up, down
        if inner % up_unit[0]:
            raise ValueError(f"up begins at row {inner}, in the middle of a block of {up_unit[0]}")
        x = x if isinstance(x, Fp8Rows) else float8_rows.quantise(x, up_unit[1])
        given, x_scale, found = x
        if found != up_unit[1]:
            raise ValueError(f"x comes by groups of {found} columns, gate_up by {up_unit[1]}")
        if plain and hopper_experts.takes(x, routing, gate_up, down, out):
            return hopper_experts.pairs_outputs(x, routing, gate_up, down, out, limit)[None], 0
        shipped = float8_tiles_of(rows)
        up_tile, down_tile = up_tile or shipped[0], down_tile or shipped[1]
        if rows <= float8_linear.FEW_ROWS:
            parts = fused_experts_float8.parts_of_pairs(
                x, routing, gate_up, down, up_tile, down_tile, limit, alpha, gate_up_bias
            )
            return parts, parts.shape[0]
        hidden = out.new_empty(pairs, inner, dtype=last.dtype)
        hidden_scale = down_scale.new_empty(pairs, cdiv(inner, down_unit[1]))
        up_tile = up_tile._replace(columns=down_unit[1], depth=up_unit[1])
        down_tile = down_tile._replace(depth=down_unit[1])
    elif isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        up_scale, down_scale = gate_up.scales, down.scales
        shipped = mxfp4_tiles_of(rows, routing.tile_rows)
        up_tile, down_tile = up_tile or shipped[0], down_tile or shipped[1]
    elif plain and limit is None and prompt_experts.takes(given, routing, up, last):
        return prompt_experts.pairs_outputs(given, routing, up, last)[None], 0
    hidden = out.new_empty(pairs, inner) if hidden is None else hidden
    order, tile_expert, tiles = routing.tiles()
    cut = up_tile or up_tile_of(rows, routing.tile_rows, given.itemsize, shared)
    _up[(tiles * cdiv(inner, cut.columns),)](
        given, x_scale, up, up_scale, up if gate_up_bias is None else gate_up_bias, order, tile_expert, hidden,
        hidden_scale, pairs, given.stride(0), WIDTH=width, INNER=inner, K=k, SORTED=routing.order is not None,
        BIAS=gate_up_bias is not None, LIMIT=limit, ALPHA=alpha, UNIT=up_unit[0], PACKED=isinstance(gate_up, Mxfp4),
        BLOCK_M=routing.tile_rows, BLOCK_N=cut.columns, BLOCK_K=cut.depth, num_warps=cut.warps, num_stages=cut.stages,
        **overlap.options(),
    )  # fmt: skip
    cut = down_tile or down_tile_of(rows, routing.tile_rows, given.itemsize)
    each = out.new_empty(1, pairs, width)
    _down[(tiles * cdiv(width, cut.columns),)](
        hidden, hidden_scale, last, down_scale, last if down_bias is None else down_bias, routing.weight, order,
        tile_expert, each, pairs, WIDTH=width, INNER=inner, SORTED=routing.order is not None,
        BIAS=down_bias is not None, UNIT=down_unit[0], PACKED=isinstance(down, Mxfp4), BLOCK_M=routing.tile_rows,
        BLOCK_N=cut.columns, BLOCK_K=cut.depth, num_warps=cut.warps, num_stages=cut.stages, **overlap.options(),
    )  # fmt: skip
    return each, 0


def route_scored(
    logits: Tensor | SplitKPartials, rule: Rule, live: Tensor | None, mine: range, quantised: bool, bias: Tensor | None
) -> Routing:
    """Apply `route` to experts with the numbers `mine`, in the tiles of `experts`. quantised: weights are in FP8."""
    rows, experts = (logits.values if isinstance(logits, SplitKPartials) else logits).shape[-2:]
    tile_rows = tile_rows_of(rows, rows * rule.k, experts, quantised)
    return route(logits, rule, live, tile_rows, mine.start, len(mine), bias)


def route_chosen(weight: Tensor, expert: Tensor, live: Tensor | None, mine: range, quantised: bool) -> Routing:
    """Route tokens to chosen experts as `route_scored`, numbered over all ranks; −1: none."""
    here = (expert >= mine.start) & (expert < mine.stop)
    if live is not None:
        here &= torch.arange(len(expert), dtype=torch.int32, device=expert.device)[:, None] < live
    expert = (expert - mine.start).where(here, -1)
    tile_rows = tile_rows_of(len(expert), expert.numel(), len(mine), quantised)
    return sort_pairs(weight, expert, len(mine), tile_rows)


def _check(
    x: Tensor | Fp8Rows,
    routing: Routing,
    gate_up: Tensor | Fp8Weight | Mxfp4,
    down: Tensor | Fp8Weight | Mxfp4,
    out: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> bool:
    """Return True if there are rows. Raises ValueError if shapes, dtypes or strides do not match."""
    up, last = (w if isinstance(w, Tensor) else w.values for w in (gate_up, down))
    given, (first, second) = x.values if isinstance(x, Fp8Rows) else x, map(_shape, (gate_up, down))
    (rows, width), inner = given.shape, second[2]
    if isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        gate_up.check(), down.check()
    if first[1:] != (2 * inner, width) or second[1] != width or routing.expert.shape[0] != rows:
        raise ValueError(f"x is {list(given.shape)}, gate_up {list(first)}, down {list(second)}")
    if not (up.dtype == last.dtype and (not isinstance(gate_up, Tensor) or given.dtype == up.dtype)):
        raise ValueError(f"x is {given.dtype}, gate_up {up.dtype}, down {last.dtype}; they must be alike")
    if not (up.is_contiguous() and last.is_contiguous() and given.stride(1) == 1 and out.stride(1) == 1):
        raise ValueError("the weights and the rows of x and out must be contiguous")
    for bias, shape in ((gate_up_bias, up.shape[:2]), (down_bias, last.shape[:2])):
        if bias is not None and (bias.shape != shape or not bias.is_contiguous()):
            raise ValueError(f"a bias is {list(bias.shape)}; it must be contiguous {list(shape)}")
    return rows > 0


def _shape(weight: Tensor | Fp8Weight | Mxfp4) -> torch.Size:
    return weight.values.shape if isinstance(weight, Fp8Weight) else weight.shape


def _sum(parts: Tensor, routing: Routing, out: Tensor, count: int, bias: Tensor | None, add: bool) -> Tensor:
    """Fill and return out. count: PARTS of `_sum_choices`."""
    rows, width = out.shape
    block = min(1024, next_power_of_2(width))
    _sum_choices[(rows, cdiv(width, block))](
        parts, routing.expert, routing.weight, parts if bias is None else bias, out,
        parts.stride(0) if count > 1 else 0, out.stride(0), WIDTH=width, K=routing.expert.shape[1], PARTS=count,
        BIAS=bias is not None, ADD=add, BLOCK=block, num_warps=4, **overlap.options(),
    )  # fmt: skip
    return out
