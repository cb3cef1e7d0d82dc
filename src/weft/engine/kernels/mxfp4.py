"""Weights in MXFP4 (OCP Microscaling Formats 1.0): four-bit floats, and a power of two for each 32 of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a four-bit float with two bits of exponent and one of mantissa; the fourth bit is the sign."""
GREATEST_SCALE = 128
"""Greatest stored scale that kernels of GPUs dequantise: for 128 they multiply by 2 to the power of 127, the greatest
power of two of a float32."""


class Mxfp4(NamedTuple):
    """A weight `[…, N, K]`, with K in whole blocks.

    values: uint8 `[…, N, K / 2]`, two values a byte, the one of the lower column in the lower four bits. scales: uint8
    `[…, N, K / 32]`, the power of two of each 32 values plus 127.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the values, not of their bytes."""
        return torch.Size((*self.values.shape[:-1], 2 * self.values.shape[-1]))

    def check(self) -> None:
        """Raise ValueError if shapes or dtypes do not match, or a tensor is not contiguous."""
        values, scales = self.values, self.scales
        blocks = (*values.shape[:-1], 2 * values.shape[-1] // BLOCK)
        if values.dtype != torch.uint8 or scales.dtype != torch.uint8 or scales.shape != blocks:
            raise ValueError(
                f"a weight is {values.dtype} {list(values.shape)}, its scales {scales.dtype} {list(scales.shape)}; "
                f"they must be uint8, and {list(blocks)}"
            )
        if 2 * values.shape[-1] % BLOCK or not (values.is_contiguous() and scales.is_contiguous()):
            raise ValueError("weights in MXFP4 must have whole blocks, and be contiguous")


def dequantise(weight: Mxfp4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values `[…, N, K]`, which bfloat16 and float32 hold exactly."""
    table = torch.tensor((*MAGNITUDES, *(-each for each in MAGNITUDES)), device=weight.values.device)
    pairs = torch.stack((weight.values & 15, weight.values >> 4), dim=-1)
    blocks = table[pairs.flatten(-2).long()].unflatten(-1, (-1, BLOCK))
    return torch.ldexp(blocks, weight.scales.int()[..., None] - 127).flatten(-2).to(dtype)


def quantise(x: Tensor, exponent: int) -> Mxfp4:
    """Return the nearest values to x `[…, N, K]`, by one power of two for all of them; of two, the smaller one."""
    table = torch.tensor(MAGNITUDES, device=x.device)
    between = (table[1:] + table[:-1]) * 2.0 ** (exponent - 1)
    code = (torch.bucketize(x.float().abs(), between) + 8 * (x < 0)).to(torch.uint8)
    scales = torch.full((*x.shape[:-1], x.shape[-1] // BLOCK), 127 + exponent, dtype=torch.uint8, device=x.device)
    return Mxfp4(code[..., ::2] | code[..., 1::2] << 4, scales)
