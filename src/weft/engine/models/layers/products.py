"""Products with weights, including weights that stay in FP8.

A rank's slice may cut the checkpoint's blocks. Then scales are repeated for smaller blocks, with sides that divide the
block and the offsets of the slice, so that no value changes. Activations are quantised in groups of the same number of
columns. Fewer than MIN_COLUMNS raise LayoutError, which names the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from torch import Tensor

from weft.engine.kernels import ops
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.models.weights.source import Source
from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.planner.spec import LayoutError

BLOCK, MIN_COLUMNS = 128, 32


def unit_of(path: str, dims: int, sources: Sequence[Source]) -> tuple[int, int]:
    """Return the (rows, columns) of a weight that share a scale. dims: dimensions of the weight. Raises LayoutError."""
    rows = columns = BLOCK
    for source in sources:
        at = source.at[dims - 2] if len(source.at) > dims - 2 else slice(0)
        begin = (at.start or 0) if isinstance(at, slice) else at
        rows = gcd(rows, begin, source.used[-2].start, *(view.unit for view in source.views))
        columns = gcd(columns, source.used[-1].start)
    if columns < MIN_COLUMNS:
        raise LayoutError(
            f"{path}: a rank's features begin {columns} columns into a block, and products in FP8 take {MIN_COLUMNS} "
            "or more; choose a smaller split (attn_tp, moe_tp), or --float8 off"
        )
    return rows, columns


def product(
    x: Tensor | Fp8Rows, weight: Tensor | Fp8Weight, like: Tensor, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + bias in out, or in a new tensor of like's dtype. x: `[rows, inputs]`, in FP8 only if the weight is.
    weight: `[outputs, inputs]`. bias: `[outputs]`."""
    if not isinstance(weight, Fp8Weight):
        assert isinstance(x, Tensor), "rows in FP8 are for products with weights in FP8"
        return ops.linear(x, weight, out, bias)
    out = like.new_empty(like.shape[0], weight.values.shape[0]) if out is None else out
    ops.linear_float8(x, weight, out)
    return out if bias is None else out.add_(bias)


def product_or_partials(
    x: Tensor | Fp8Rows, weight: Tensor | Fp8Weight, like: Tensor, bias: Tensor | None = None
) -> Tensor | SplitKPartials:
    """Return `product`, or its split-K partials if the next kernel is to sum them."""
    if isinstance(x, Tensor) and not isinstance(weight, Fp8Weight):
        return ops.linear_or_partials(x, weight, bias)
    return product(x, weight, like, None, bias)
