"""The tiles of the routed experts' products, by the number of rows and the sizes alone: the fastest on an H200."""

from __future__ import annotations

from typing import NamedTuple

from weft.kernels.triton.float8_linear import FEW_ROWS


class ExpertsTile(NamedTuple):
    """How a product is cut: columns and depth of a block, warps, and stages of the pipeline of loads."""

    columns: int
    depth: int
    warps: int
    stages: int


def tile_rows_of(rows: int, float8: bool = False) -> int:
    """Rows of a tile, for tensors of `rows` tokens. At most 64 in FP8, where sums take more registers."""
    return 16 if rows <= 64 else 32 if rows <= 128 else 64 if rows < 1024 or float8 else 128


def up_tile_of(rows: int, itemsize: int) -> ExpertsTile:
    """The tile of the first product. It reads the columns of gate and of up: twice as many as the tile has."""
    if rows == 1:
        return ExpertsTile(32, 512 // itemsize, 4, 4)
    if rows <= 4:
        return ExpertsTile(32, 128, 4, 4)
    if rows <= 128:
        return ExpertsTile(32, 512 // itemsize, 4, 3)
    if rows < 1024:
        return ExpertsTile(64, 128 // itemsize, 4, 3)
    return ExpertsTile(128, 128 // itemsize, 8, 4)


def down_tile_of(rows: int, inner: int, itemsize: int) -> ExpertsTile:
    """The tile of the second product, of depth `inner`."""
    if rows <= 4:
        return ExpertsTile(64, 128, 4, 6 if rows == 1 else 4)
    if rows <= 128:  # 64 columns are quicker at a depth of 768; greater depths were measured up to 64 rows
        deep = rows <= 64 and itemsize == 2 and inner > 1024
        return ExpertsTile(128 if deep or inner * itemsize <= 1024 else 64, 128, 4, 3)
    if rows < 1024:
        return ExpertsTile(256 // itemsize, 128 // itemsize, 4, 3)
    return ExpertsTile(512 // itemsize, 128 // itemsize, 8, 4)


def float8_tiles_of(rows: int) -> tuple[ExpertsTile, ExpertsTile]:
    """The tiles of both products in FP8, before the sizes that follow from the weights' blocks. For few rows, a tile's
    depth says how much of the depth is a part.
    """
    if rows <= FEW_ROWS:
        return ExpertsTile(128, 0, 4, 5), ExpertsTile(128, 0, 4, 3)
    return ExpertsTile(0, 0, 8, 3), ExpertsTile(64, 0, 4, 4) if rows <= 128 else ExpertsTile(128, 0, 8, 3)
