"""FP8 vectors of a cache (`weft.kernels.float8.Fp8Vectors`), inside the kernels that write and read them.

Decode attention multiplies in float16 if activations have 16 bits: an e4m3 is exact in it and one instruction converts
two, while bfloat16 needs one more rounding and four more instructions. A power of two per head scales queries to the
range of float16. The exponents of keys scale scores. The exponents of values are added to the scores' logarithm, so
that weights are at most 1 as in other dtypes. Prompts multiply the dequantised vectors: a copy has them, or each block
converts its tokens.

Decode attention loads elements in pairs, as int16: shared memory transposes elements of 16 bits for the tensor cores,
but 8-bit elements only one by one. A product with the lower bytes and one with the upper bytes replace one product.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import FLOAT8, MAX_EXPONENT, Fp8Vectors, Stored
from weft.kernels.triton.overlap import INTERPRETED

MAX = tl.constexpr(MAX_EXPONENT)
PAIR = 2
"""Elements of an int16."""


@triton.jit
def power_of_two(exponent):
    """Return float32 2 ** exponent, for an integer from −126 to 127."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """Return |x|, or 0 for NaN."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def exponent_of(largest):
    """Return the exponent of vectors with this largest magnitude, like `weft.kernels.float8.to_vectors`."""
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - (127 + 8)
    return tl.minimum(tl.maximum(exponent, -MAX), MAX)


@triton.jit
def to_float8(x, exponent):
    """Return x · 2 ** −exponent as e4m3, clamped to the largest magnitude; NaN stays NaN."""
    x = x * power_of_two(-exponent)
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)).to(tl.float8e4nv)


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """Return the two e4m3 of each int16 as `DTYPE`: (lower bytes, upper bytes)."""
    if INTERPRETED:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # the lower bytes of two pairs convert in one instruction, and so do the upper ones
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 sorted; .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high; }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _columns_of(x, FLOAT8: tl.constexpr):
    """Return x `[M, D]` in the form that `dot_right` accepts: in FP8 its even and its odd columns."""
    odd = x
    if FLOAT8:
        x, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return x, odd


@triton.jit
def joined(even, odd, FLOAT8: tl.constexpr):
    """Join the results of `_columns_of`."""
    if FLOAT8:
        even = tl.interleave(even, odd)
    return even


@triton.jit
def dot_right(left, left_high, right, acc, DTYPE: tl.constexpr, FLOAT8: tl.constexpr):
    """Return acc + left · right. In FP8 right `[K, N]` has pairs along K, and left, left_high are from
    `_columns_of`."""
    if FLOAT8:
        right, high = halves(right, DTYPE)
        acc = tl.dot(left_high, high, acc, input_precision="ieee")
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def dot_wide(left, right, acc, acc_high, FLOAT8: tl.constexpr):
    """Return acc + left · right. In FP8 right `[K, N]` has pairs along N, and acc_high has the odd columns of
    the sum."""
    if FLOAT8:
        right, high = halves(right, left.dtype)
        acc_high = tl.dot(left, high, acc_high, input_precision="ieee")
    return tl.dot(left, right, acc, input_precision="ieee"), acc_high


@triton.jit
def _exponent_of_queries(q):
    """Return `[M, 1]`: exponents that scale the largest magnitude of queries `[M, D]` to [2¹⁴, 2¹⁵)."""
    largest = tl.max(magnitude(q.to(tl.float32)), 1, keep_dims=True)
    return tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - (127 + 14), -100)


@triton.jit
def fit_queries(main, rest, scale, REST: tl.constexpr, DTYPE: tl.constexpr, FLOAT8: tl.constexpr):
    """Return (main, its odd columns, rest, its odd columns, scale) of queries `[M, D]` in two parts, for products in
    `DTYPE`; see `_columns_of`. scale: scale of their scores."""
    if FLOAT8:
        exponent = _exponent_of_queries(main)
        if REST > 0:
            exponent = tl.maximum(exponent, _exponent_of_queries(rest))
            rest = (rest.to(tl.float32) * power_of_two(-exponent)).to(DTYPE)
        main = (main.to(tl.float32) * power_of_two(-exponent)).to(DTYPE)
        scale *= power_of_two(exponent)
    main, main_odd = _columns_of(main, FLOAT8)
    rest, rest_odd = _columns_of(rest, FLOAT8)
    return main, main_odd, rest, rest_odd, scale


@triton.jit
def dequantised(x, exponents, there, DTYPE: tl.constexpr, FLOAT8: tl.constexpr):
    """Return elements x as `DTYPE`, in FP8 times the powers of two at `exponents`, where `there`. Inexact only in
    float16."""
    if FLOAT8:
        x = x.to(tl.float32) * power_of_two(tl.load(exponents, mask=there, other=0))
    return x.to(DTYPE)


@triton.jit
def load_exponents(k_exponents, v_exponents, at, seen, FLOAT8: tl.constexpr):
    """Load the exponents of tokens' keys and values, `[1, N]` each; 0 in other dtypes."""
    if FLOAT8:
        of_keys = tl.load(k_exponents + at, mask=seen, other=0)[None, :]
        of_values = tl.load(v_exponents + at, mask=seen, other=0)[None, :]
    else:
        of_keys = 0
        of_values = 0
    return of_keys, of_values


@triton.jit
def scale_scores(score, scale, of_keys, of_values, FLOAT8: tl.constexpr):
    """Return scores to base 2. In FP8 the exponents of values are added; `unscaled` removes them from the weights."""
    score *= scale
    if FLOAT8:
        score = score * power_of_two(of_keys) + of_values.to(tl.float32)
    return score


@triton.jit
def unscaled(p, of_values, FLOAT8: tl.constexpr):
    """Return weights of the softmax from the factors of values."""
    if FLOAT8:
        p *= power_of_two(-of_values.to(tl.int32))
    return p


@triton.constexpr_function
def product_dtype(dtype, in_float8):
    """Return the dtype in which attention multiplies queries of a dtype with a cache that may be in FP8."""
    return tl.float16 if in_float8 and dtype.primitive_bitwidth == 16 else dtype


class Parts(NamedTuple):
    """Keys and values in the form that kernels accept, with FP8 exponents in rows of `row` elements."""

    keys: Tensor
    values: Tensor
    k_exponents: Tensor
    v_exponents: Tensor
    row: int
    in_float8: bool


def parts_of(keys: Stored, values: Stored) -> Parts:
    """Return the kernel arguments of keys and values `[slots, heads, …]`, both in FP8 or neither. Raises ValueError."""
    if isinstance(keys, Fp8Vectors) and isinstance(values, Fp8Vectors):
        of_keys, of_values = keys.exponents, values.exponents
        if keys.values.dtype != FLOAT8 or values.values.dtype != FLOAT8 or of_keys.stride() != of_values.stride():
            raise ValueError(f"keys are {keys.values.dtype}, values {values.values.dtype}; in FP8 both are e4m3 alike")
        if of_keys.stride(-1) != 1 or of_keys.shape != keys.shape[:2] or of_values.shape != values.shape[:2]:
            raise ValueError(f"exponents are {list(of_keys.shape)}, {list(of_values.shape)}; keys {list(keys.shape)}")
        return Parts(keys.values, values.values, of_keys, of_values, of_keys.stride(0), True)
    if isinstance(keys, Fp8Vectors) or isinstance(values, Fp8Vectors):
        raise ValueError("keys and values are both in FP8, or neither are")
    return Parts(keys, values, keys, values, 0, False)
