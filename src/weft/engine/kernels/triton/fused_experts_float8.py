"""Products of the routed experts for few rows in FP8: programs split the depth of each. The next kernel sums their
parts: for the first product, the kernel that quantises rows for the second; for the second, the kernel that sums a
token's pairs (`fused_experts`)."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton import float8_linear
from weft.engine.kernels.triton.experts_tiles import ExpertsTile
from weft.engine.kernels.triton.route import Routing
from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.kernels.triton import float8_rows, overlap
from weft.kernels.triton.launch import cdiv, kernel, scaled
from weft.kernels.triton.rms_norm import activated

PROGRAMS = 1024
"""Approximate programs of a product of few rows in FP8: about a quarter of the tiles have an expert."""


@kernel
def _gate_parts(
    parts, bias, expert, out, out_scale, part,
    INNER: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the first product, and quantise the rows of the second."""
    overlap.begin()
    pair = tl.program_id(0).to(tl.int64)
    mine = tl.load(expert + pair).to(tl.int64)
    if mine < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < INNER
    gate = tl.zeros([GROUPS, GROUP], tl.float32)
    up = tl.zeros([GROUPS, GROUP], tl.float32)
    for i in tl.static_range(PARTS):
        at = parts + i * part + pair * (2 * INNER) + column
        gate += tl.load(at, mask=inside, other=0.0)
        up += tl.load(at + INNER, mask=inside, other=0.0)
    if BIAS:
        at = bias + mine * (2 * INNER) + column
        gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    value, scale = float8_rows.to_float8(tl.where(inside, activated(gate, up, LIMIT, ALPHA), 0.0))
    tl.store(out + pair * INNER + column, value, mask=inside)
    ALL: tl.constexpr = (INNER + GROUP - 1) // GROUP
    tl.store(out_scale + pair * ALL + group, scale, mask=group < ALL)


def parts_of_pairs(
    x: Fp8Rows,
    routing: Routing,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    up_tile: ExpertsTile,
    down_tile: ExpertsTile,
    limit: float | None,
    alpha: float | None,
    gate_up_bias: Tensor | None,
) -> Tensor:
    """Return float32 `[parts, pairs, width]`, which sums to each pair's second product, without bias and weight. x: few
    rows. See `fused_experts.experts` for the other arguments."""
    inner, group_size = down.values.shape[2], down.unit[1]
    parts = _parts(x, routing, gate_up, routing.expert.shape[1], up_tile)
    hidden = Fp8Rows(
        x.values.new_empty(parts.shape[1], inner),
        x.scales.new_empty(parts.shape[1], cdiv(inner, group_size)),
        group_size,
    )
    groups = float8_rows.groups_of_program(group_size, hidden.scales.shape[1])
    _gate_parts[(parts.shape[1], cdiv(hidden.scales.shape[1], groups))](
        parts, parts if gate_up_bias is None else gate_up_bias, routing.expert, hidden.values, hidden.scales,
        parts.stride(0), INNER=inner, PARTS=parts.shape[0], BIAS=gate_up_bias is not None, LIMIT=limit, ALPHA=alpha,
        GROUP=group_size, GROUPS=groups, num_warps=4, **overlap.options(),
    )  # fmt: skip
    return _parts(hidden, routing, down, 1, down_tile)


def _parts(x: Fp8Rows, routing: Routing, weight: Fp8Weight, k: int, cut: ExpertsTile) -> Tensor:
    """Return float32 `[parts, pairs, outputs]`: the parts of each pair's product. x has one row per k pairs."""
    (_, outputs, width), (unit, group_size) = weight.values.shape, weight.unit
    order, tile_expert, tiles = routing.tiles()
    programs, groups, pairs = tiles * cdiv(outputs, cut.columns), cdiv(width, group_size), routing.expert.numel()
    wanted = cdiv(width, cut.depth) if cut.depth else float8_linear.parts_of(programs, groups, scaled(PROGRAMS))
    depth = cdiv(groups, wanted)
    out = x.scales.new_empty(cdiv(groups, depth), pairs, outputs)
    float8_linear.multiply[(programs, out.shape[0])](
        x.values, x.scales, weight.values, weight.scales, order, tile_expert, out, pairs, outputs, depth,
        x.values.stride(0), outputs, out.stride(0), WIDTH=width, GROUP=group_size, UNIT=unit, K=k,
        SORTED=routing.order is not None, BLOCK_M=routing.tile_rows, BLOCK_N=cut.columns, num_warps=cut.warps,
        num_stages=cut.stages, **overlap.options(),
    )  # fmt: skip
    return out
