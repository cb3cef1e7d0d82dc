"""Products of the routed experts for prompts in FP8 on Hopper GPUs, by Weft's own kernels (`csrc/hopper`).

The rows are copied in the order of their experts. The results have the same bits as
`weft.engine.kernels.triton.fused_experts`, which supports other sizes and GPUs, and biases.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from weft.kernels.build import HOPPER_KERNELS, can_load, hopper_kernels
from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.kernels.triton.launch import arch

TILE_ROWS, GROUP, MIN_ROWS = 128, 128, 1024
"""Rows of a tile, rows and columns of a weight's block, and minimum rows of a step."""
HOPPER = 90


class SortedPairs(Protocol):
    """Fields of `weft.engine.kernels.triton.route.Routing` that are read here."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def used(self) -> Tensor | None: ...
    def tiles(self) -> tuple[Tensor, Tensor, int]: ...


@cache
def _run_here() -> bool:
    """Return True if this process's GPU runs these kernels, and nvcc or a wheel provides them."""
    return torch.cuda.is_available() and arch() == HOPPER and can_load(HOPPER_KERNELS[0])


def has_tiles(rows: int) -> bool:
    """Return True if a step of `rows` has this module's tiles on this GPU."""
    return rows >= MIN_ROWS and _run_here()


def takes(x: Fp8Rows, routing: SortedPairs, gate_up: Fp8Weight, down: Fp8Weight, out: Tensor) -> bool:
    """Return True if these kernels compute the products of `x`, `gate_up` and `down` for `out`: by GPU, sizes, blocks,
    the tiles of `routing`, and out's dtype."""
    tiles = routing.used is not None and routing.tile_rows == TILE_ROWS and has_tiles(len(x.values))
    width, inner = down.values.shape[1:]
    blocks = gate_up.unit == down.unit == (GROUP, GROUP) and width % (2 * GROUP) == 0 and inner % GROUP == 0
    aligned = all(t.data_ptr() % 16 == 0 for t in (x.values, gate_up.values, down.values))
    return tiles and blocks and aligned and x.values.stride(0) % 16 == 0 and out.element_size() == 2


def pairs_outputs(
    x: Fp8Rows, routing: SortedPairs, gate_up: Fp8Weight, down: Fp8Weight, out: Tensor, limit: float | None
) -> Tensor:
    """Return `[pairs, width]` in out's dtype: each pair's second product, with its weight; undefined for pairs without
    an expert here. See `fused_experts.experts` for the arguments, for which `takes` is true."""
    (_, width, inner), (rows, k) = down.values.shape, routing.weight.shape
    order, tile_expert, _ = routing.tiles()
    placed = order.numel()
    copied, hidden = (x.values.new_empty(placed, columns) for columns in (width, inner))
    scales = [x.scales.new_empty(columns // GROUP, placed) for columns in (width, inner)]
    found = out.new_empty(rows * k, width)
    hopper_kernels().experts(
        *(x.values, x.scales, order, tile_expert, routing.used, routing.weight),
        *(gate_up.values, gate_up.scales, down.values, down.scales),
        *(copied, scales[0], hidden, scales[1], found),
        *(k, math.inf if limit is None else limit, out.dtype == torch.bfloat16),
        torch.cuda.current_stream().cuda_stream,
    )
    return found
