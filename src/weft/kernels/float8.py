"""Tensors in FP8 with a scale for each block, and what products of them compute, in plain torch.

float8_e4m3fn, 448 at most, times a float32 scale: a weight has one for each block of rows and columns, rows of
activations one for each group of columns, found anew each time (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST, MIN_MAGNITUDE = 448.0, 1e-10
"""The greatest value of float8_e4m3fn. A group's largest magnitude counts as MIN_MAGNITUDE at least, for zeros."""


class Fp8Rows(NamedTuple):
    """Quantised rows: values float8 `[T, width]`, scales float32 `[T, ⌈width / group_size⌉]` of groups of columns."""

    values: Tensor
    scales: Tensor
    group_size: int


class Fp8Weight(NamedTuple):
    """values float8 `[…, N, K]`; scales float32 `[…, ⌈N / rows⌉, ⌈K / columns⌉]`; unit: (rows, columns) of a block."""

    values: Tensor
    scales: Tensor
    unit: tuple[int, int]

    def check(self) -> None:
        """Raises ValueError where shapes or dtypes do not fit together, or a tensor is not contiguous."""
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


def quantise(x: Tensor, group_size: int) -> Fp8Rows:
    """The rows of x `[T, width]`: in every group of columns the largest magnitude becomes 448, the others are rounded.

    NaN, or infinity, makes NaN of itself.
    """
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -width % group_size)).unflatten(-1, (-1, group_size))
    largest = blocks.abs().amax(-1).clamp(min=MIN_MAGNITUDE)
    most = torch.full_like(largest, LARGEST)  # by a number torch divides in two steps, which rounds twice
    values = (blocks * (most / largest)[..., None]).to(FLOAT8)
    return Fp8Rows(values.flatten(-2)[..., :width].contiguous(), largest / most, group_size)


def unfilled(x: Tensor, group_size: int) -> Fp8Rows:
    """Where what `quantise` makes of x `[T, width]` may be put."""
    rows, width = x.shape
    return Fp8Rows(
        x.new_empty(rows, width, dtype=FLOAT8),
        x.new_empty(rows, -(-width // group_size), dtype=torch.float32),
        group_size,
    )


def fill(rows: Fp8Rows, x: Tensor) -> None:
    """Puts there what `quantise` makes of x `[T, width]`."""
    made = quantise(x, rows.group_size)
    rows.values.copy_(made.values)
    rows.scales.copy_(made.scales)


def dequantise(x: Fp8Rows | Fp8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """What they stand for."""
    rows, columns = (1, x.group_size) if isinstance(x, Fp8Rows) else x.unit
    scales = x.scales.repeat_interleave(rows, -2)[..., : x.values.shape[-2], :]
    scales = scales.repeat_interleave(columns, -1)[..., : x.values.shape[-1]]
    return x.values.to(dtype) * scales


def linear(x: Tensor | Fp8Rows, weight: Fp8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """x Wᵀ of x `[T, K]`, whose rows are quantised first by groups of the weight's columns: dtype `[T, N]`."""
    rows = x if isinstance(x, Fp8Rows) else quantise(x, weight.unit[1])
    return dequantise(rows, dtype) @ dequantise(weight, dtype).mT
