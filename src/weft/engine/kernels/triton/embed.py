"""Inputs of a step's layers: rows of the embedding for its tokens, and rotary angles for its positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


@kernel
def _embed(
    tokens, weight, out, first, held, weight_row, WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row) - first
    here = (token >= 0) & (token < held)
    if not SPLIT:
        tl.device_assert(here, "a token is not of the vocabulary")
    x = tl.load(weight + token * weight_row + i, mask=here & (i < WIDTH), other=0.0)
    tl.store(out + row * WIDTH + i, x, mask=i < WIDTH)


@triton.jit
def _cos_sin_of(angle):
    """Return cos and sin of float32 angles of any size, to the last digits. Multiples of a right angle are subtracted
    in float64; polynomials (from Cephes) suffice for the rest, up to π / 4. CUDA's own functions reduce large angles in
    memory of the thread, which slows all calls."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    x = (wide - quarters * 1.5707963267948966).to(tl.float32)
    z = x * x
    c = 1.0 - 0.5 * z + z * z * (4.166664568e-2 + z * (-1.388731625e-3 + z * 2.443315712e-5))
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    at = quarters.to(tl.int64)
    cos, sin = tl.where(at % 2 == 0, c, s), tl.where(at % 2 == 0, s, c)
    return tl.where((at + 1) // 2 % 2 == 0, cos, -cos), tl.where(at // 2 % 2 == 0, sin, -sin)


@kernel
def _cos_sin(
    positions, inverse, cos, sin, factor, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < PAIRS
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inverse + i, mask=inside, other=0.0)
    c, s = _cos_sin_of(angle)
    c, s = (c * factor).to(cos.dtype.element_ty), (s * factor).to(cos.dtype.element_ty)
    left = row * 2 * PAIRS + (2 * i if INTERLEAVED else i)
    right = left + (1 if INTERLEAVED else PAIRS)
    tl.store(cos + left, c, mask=inside)
    tl.store(cos + right, c, mask=inside)
    tl.store(sin + left, s, mask=inside)
    tl.store(sin + right, s, mask=inside)


def embed(tokens: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Compute `weft.engine.kernels.model_reference.embed`."""
    (held, width), (rows,) = weight.shape, tokens.shape
    if weight.stride(1) != 1 or not tokens.is_contiguous():
        raise ValueError(f"weights have strides {weight.stride()}, tokens {tokens.stride()}: rows must be contiguous")
    out = weight.new_empty(rows, width)
    if rows:
        block = min(2048, next_power_of_2(width))
        _embed[(rows, cdiv(width, block))](
            tokens, weight, out, first or 0, held, weight.stride(0), WIDTH=width, SPLIT=first is not None, BLOCK=block,
            num_warps=4, **overlap.options(),
        )  # fmt: skip
    return out


def cos_sin(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Compute `weft.engine.kernels.model_reference.cos_sin`, to within 10⁻⁶."""
    (rows,), (pairs,) = positions.shape, inverse.shape
    if inverse.dtype != torch.float32 or not (positions.is_contiguous() and inverse.is_contiguous()):
        raise ValueError(f"frequencies are {inverse.dtype}: they must be float32, and contiguous as the positions")
    cos, sin = (inverse.new_empty(rows, 1, 2 * pairs, dtype=dtype) for _ in range(2))
    if rows:
        _cos_sin[(rows,)](
            positions, inverse, cos, sin, factor, PAIRS=pairs, INTERLEAVED=interleaved,
            BLOCK=next_power_of_2(pairs), num_warps=1, **overlap.options(),
        )  # fmt: skip
    return cos, sin
