"""Tiles of the routed experts' products, by the number of rows and the sizes alone: the fastest on an H200."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.kernels import hopper_experts
from weft.engine.kernels.triton.float8_linear import FEW_ROWS
from weft.kernels.triton.launch import cdiv, next_power_of_2


class ExpertsTile(NamedTuple):
    """Tile of a product: columns and depth of a block, warps, and stages of the pipeline of loads."""

    columns: int
    depth: int
    warps: int
    stages: int


def tile_rows_of(rows: int, pairs: int, experts: int, float8: bool = False) -> int:
    """Return the rows of a tile for `pairs` of `rows` and `experts`. float8: Triton's tiles have 64 rows at most, as
    sums take registers."""
    if float8:
        if hopper_experts.has_tiles(rows):
            return hopper_experts.TILE_ROWS
        return 16 if rows <= 64 else 32 if rows <= 128 else 64
    # Twice an expert's mean, which it seldom exceeds: another tile would read its weights again.
    return 128 if rows >= 1024 else min(64, max(16, next_power_of_2(2 * cdiv(pairs, experts))))


def up_tile_of(rows: int, tile_rows: int, itemsize: int, shared: bool) -> ExpertsTile:
    """Return the tile of the first product. It reads columns of gate and of up: twice the tile's columns. shared: a
    shared expert runs concurrently; then one row is faster with one program per multiprocessor instead of two."""
    if rows <= 4:
        return ExpertsTile(32, (512 if shared else 256) // itemsize if rows == 1 else 128, 4, 4)
    if tile_rows <= 32:
        return ExpertsTile(32, 512 // itemsize, 4, 3) if tile_rows == 16 else ExpertsTile(64, 256 // itemsize, 4, 3)
    return ExpertsTile(64, 128 // itemsize, 4, 3) if tile_rows == 64 else ExpertsTile(128, 128 // itemsize, 8, 4)


def down_tile_of(rows: int, tile_rows: int, itemsize: int) -> ExpertsTile:
    """Return the tile of the second product, as `up_tile_of`."""
    if rows <= 4:
        return ExpertsTile(64, 128, 4, 6 if rows == 1 else 4)
    if tile_rows <= 64:
        return ExpertsTile(256 // itemsize, 128 if tile_rows <= 32 else 128 // itemsize, 4, 3)
    return ExpertsTile(512 // itemsize, 128 // itemsize, 8, 4)


def float8_tiles_of(rows: int) -> tuple[ExpertsTile, ExpertsTile]:
    """Return the tiles of both products in FP8, before the sizes that follow from the weights' blocks. For few rows, a
    tile's depth is the depth of a split-K part."""
    if rows <= FEW_ROWS:
        return ExpertsTile(128, 0, 4, 5), ExpertsTile(128, 0, 4, 3)
    return ExpertsTile(0, 0, 8, 3), ExpertsTile(64, 0, 4, 4) if rows <= 128 else ExpertsTile(128, 0, 8, 3)


def mxfp4_tiles_of(rows: int, tile_rows: int) -> tuple[ExpertsTile, ExpertsTile]:
    """Return the tiles of both products in MXFP4. They have fewer columns, as dequantised weights are in registers.
    Tiles of 32 and 64 rows are not measured."""
    if rows == 1:
        return ExpertsTile(32, 256, 4, 4), ExpertsTile(32, 128, 4, 3)
    if tile_rows <= 64:
        return ExpertsTile(64, 64, 4, 3), ExpertsTile(64, 128 if tile_rows <= 32 else 64, 4, 3)
    return ExpertsTile(128, 64, 8, 4), ExpertsTile(64, 64, 8, 3)
