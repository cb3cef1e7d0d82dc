"""RMSNorms of two parts of a row that are split over ranks: sums of squares, and norms by the sums of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import kernel, next_power_of_2


@kernel
def _sums_of_squares(x, sums, x_row, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < tl.where(part == 0, FIRST, SECOND)
    value = tl.load(x + row * x_row + part * FIRST + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + 2 * row + part, tl.sum(value * value, 0))


@kernel(do_not_specialize=["rows"])
def _rms_norm_by_squares(
    x, squares, weight, rows, x_row, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, FIRST_WHOLE: tl.constexpr, SECOND_WHOLE: tl.constexpr,
    FIRST_SHARES: tl.constexpr, SECOND_SHARES: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    size = tl.where(part == 0, FIRST, SECOND)
    whole = tl.where(part == 0, FIRST_WHOLE, SECOND_WHOLE)
    rank = tl.arange(0, BLOCK_RANKS)
    shares = tl.where(part == 0, FIRST_SHARES, SECOND_SHARES)
    counts = (rank < RANKS) & ((RANKS - rank * shares % RANKS) % RANKS < shares)  # the first rank of each share
    square = tl.sum(tl.load(squares + 2 * (rank * rows + row) + part, mask=counts, other=0.0), 0)
    i = tl.arange(0, BLOCK)
    at = x + row * x_row + part * FIRST + i
    value = tl.load(at, mask=i < size, other=0.0).to(tl.float32) * tl.rsqrt(square / whole + eps)
    value *= tl.load(weight + part * FIRST + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(at, value.to(x.dtype.element_ty), mask=i < size)


def sums_of_squares(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute `weft.engine.kernels.model_reference.sums_of_squares` in float32. Raises ValueError if shapes do not
    match."""
    first, second = _checked(x, sizes)
    sums = torch.empty(len(x), 2, dtype=torch.float32, device=x.device)
    if len(x):
        block = next_power_of_2(max(first, second))
        _sums_of_squares[(len(x), 2)](
            x, sums, x.stride(0), FIRST=first, SECOND=second, BLOCK=block, num_warps=_warps(block), **overlap.options()
        )
    return sums


def norm_by_squares(
    x: Tensor,
    squares: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    features: Sequence[int],
    shares: Sequence[int],
    eps: float,
) -> Tensor:
    """Compute `weft.engine.kernels.model_reference.norm_by_squares` in float32, rounded once. Raises ValueError if
    shapes do not match."""
    (first, second), (rows, _), ranks = _checked(x, sizes), x.shape, len(squares)
    if squares.shape != (ranks, rows, 2) or not squares.is_contiguous() or weight.shape != (first + second,):
        raise ValueError(f"x is {list(x.shape)}, squares {list(squares.shape)}, weight {list(weight.shape)}")
    if rows:
        block = next_power_of_2(max(first, second))
        _rms_norm_by_squares[(rows, 2)](
            x, squares, weight, rows, x.stride(0), eps, FIRST=first, SECOND=second, FIRST_WHOLE=features[0],
            SECOND_WHOLE=features[1], FIRST_SHARES=shares[0], SECOND_SHARES=shares[1], RANKS=ranks, BLOCK=block,
            BLOCK_RANKS=next_power_of_2(ranks), num_warps=_warps(block), **overlap.options(),
        )  # fmt: skip
    return x


def _checked(x: Tensor, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the two sizes. Raises ValueError if x has fewer features, or they are not contiguous."""
    first, second = sizes
    if x.dim() != 2 or x.shape[1] < first + second or x.stride(1) != 1:
        raise ValueError(f"x is {list(x.shape)} with strides {list(x.stride())}, for parts of {first} and {second}")
    return first, second


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))
