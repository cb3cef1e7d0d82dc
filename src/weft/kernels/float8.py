"""FP8 tensors with block scales, and matrix products of them, in plain torch.

A value is a float8_e4m3fn (at most 448) times a float32 scale. A weight has one scale for each block of rows and
columns. A row of activations has one for each group of columns, computed at each step (DeepSeek-V3, arXiv 2412.19437,
section 3.3.2).

A cached vector has one power of two, an int8 exponent. A power of two leaves the bits of a value's mantissa unchanged:
the vector is exact in bfloat16 and float16, and the order of multiplications by its scale changes nothing. As each
vector has its own, no calibration is needed, and the scale travels with its token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST, MIN_MAGNITUDE = 448.0, 1e-10
"""The greatest value of float8_e4m3fn, and the lower bound of a group's largest magnitude, for groups of zeros."""
MAX_EXPONENT = 32
"""Bound of a vector's power of two, in either direction."""


class Fp8Rows(NamedTuple):
    """Quantised rows.

    values: float8 `[T, width]`. scales: float32 `[T, ⌈width / group_size⌉]`, one for each group of columns.
    """

    values: Tensor
    scales: Tensor
    group_size: int

    def fill(self, x: Tensor) -> None:
        """Fill these rows with the result of `quantise` of x `[T, width]`."""
        made = quantise(x, self.group_size)
        self.values.copy_(made.values)
        self.scales.copy_(made.scales)

    @property
    def is_cuda(self) -> bool:
        """True if the values are on a GPU, like a tensor's attribute."""
        return self.values.is_cuda


class Fp8Weight(NamedTuple):
    """A quantised weight.

    values: float8 `[…, N, K]`. scales: float32 `[…, ⌈N / rows⌉, ⌈K / columns⌉]`. unit: (rows, columns) of a block.
    """

    values: Tensor
    scales: Tensor
    unit: tuple[int, int]

    def check(self) -> None:
        """Raise ValueError if shapes or dtypes do not match, or a tensor is not contiguous."""
        values, scales = self.values, self.scales
        sizes = zip(values.shape[-2:], self.unit, strict=True)
        blocks = (*values.shape[:-2], *(-(-size // unit) for size, unit in sizes))
        if values.dtype != FLOAT8 or scales.dtype != torch.float32 or tuple(scales.shape) != blocks:
            raise ValueError(
                f"a weight is {values.dtype} {list(values.shape)}, its scales {scales.dtype} {list(scales.shape)}; "
                f"with one for {self.unit[0]} × {self.unit[1]} they must be float8_e4m3fn and float32 {list(blocks)}"
            )
        if not (values.is_contiguous() and scales.is_contiguous()):
            raise ValueError("weights and their scales must be contiguous")


class Fp8Vectors(NamedTuple):
    """Vectors in FP8: values times 2 to the power of their exponents.

    values: float8 `[…, dim]`. exponents: int8 `[…]`.
    """

    values: Tensor
    exponents: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.values.shape


Stored = Tensor | Fp8Vectors
"""Cached vectors of tokens, `[slots, heads, dim]`: in the dtype of the activations, or in FP8."""


def plain(stored: Stored) -> Tensor:
    """Return the tensor, for callers that do not support FP8. Raises TypeError for FP8."""
    if not isinstance(stored, Tensor):
        raise TypeError("the cache is in FP8, which this attention backend does not read")
    return stored


def to_vectors(x: Tensor) -> Fp8Vectors:
    """Return x `[…, dim]` with the smallest powers of two, to ± MAX_EXPONENT, by which no magnitude exceeds 448.

    Larger magnitudes, including infinity, are clamped; NaN stays NaN, and does not affect the exponent.
    """
    wide = x.float()
    largest = wide.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)
    # 448 is 1.75 · 2⁸: a mantissa above 1.75 needs the next power.
    exponents = ((largest.view(torch.int32) + 0x1FFFFF >> 23) - (127 + 8)).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    scaled = wide * torch.ldexp(torch.ones_like(largest), -exponents)[..., None]
    return Fp8Vectors(scaled.clamp(-LARGEST, LARGEST).to(FLOAT8), exponents.to(torch.int8))


def take(stored: Stored, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored[slots] in a dtype: slots `[…]` of stored `[slots, heads, dim]`."""
    # index_select copies whole rows, unlike indexing, which runs by element on CPUs; torch has no FP8 version there.
    flat = slots.flatten()
    if isinstance(stored, Tensor):
        return stored.index_select(0, flat).unflatten(0, slots.shape)
    values = stored.values.view(torch.uint8).index_select(0, flat).view(FLOAT8).to(dtype)
    exponents = stored.exponents.index_select(0, flat)
    return torch.ldexp(values, exponents[..., None]).to(dtype).unflatten(0, slots.shape)


def quantise(x: Tensor, group_size: int) -> Fp8Rows:
    """Quantise the rows of x `[T, width]`: the largest magnitude of each group of columns becomes 448.

    A group with NaN or infinity becomes NaN.
    """
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -width % group_size)).unflatten(-1, (-1, group_size))
    largest = blocks.abs().amax(-1).clamp(min=MIN_MAGNITUDE)
    top = torch.full_like(largest, LARGEST)  # torch divides by a Python number in two steps, which rounds twice
    values = (blocks * (top / largest)[..., None]).to(FLOAT8)
    return Fp8Rows(values.flatten(-2)[..., :width].contiguous(), largest / top, group_size)


def unfilled(x: Tensor, group_size: int) -> Fp8Rows:
    """Return empty tensors for the result of `quantise` of x `[T, width]`."""
    rows, width = x.shape
    return Fp8Rows(
        x.new_empty(rows, width, dtype=FLOAT8),
        x.new_empty(rows, -(-width // group_size), dtype=torch.float32),
        group_size,
    )


def dequantise(x: Fp8Rows | Fp8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values times their scales, in the shape of `x.values`."""
    rows, columns = (1, x.group_size) if isinstance(x, Fp8Rows) else x.unit
    scales = x.scales.repeat_interleave(rows, -2)[..., : x.values.shape[-2], :]
    scales = scales.repeat_interleave(columns, -1)[..., : x.values.shape[-1]]
    return x.values.to(dtype) * scales
