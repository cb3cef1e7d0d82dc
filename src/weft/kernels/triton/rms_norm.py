"""RMSNorm of rows, with or without the residual's addition, and the gated activation of dense blocks.

For the places where no edge and no product takes them along.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap


@triton.jit
def _rms_norm(
    x, residual, weight, out, x_row, residual_row, out_row, eps, WIDTH: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    value = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_row + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul(x, out, x_row, out_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_row + i, value.to(out.dtype.element_ty), mask=i < WIDTH)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x · weight / √(mean(x²) + eps) over the rows of x `[T, width]`, in float32, rounded once.

    residual: `[T, width]`; it becomes residual + x, rounded to its dtype, and that is what is normalised.
    """
    rows, width = x.shape
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}: they do not fit together")
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("rows must be contiguous")
    out = x.new_empty(rows, width) if out is None else out
    if rows:
        block = triton.next_power_of_2(width)
        _rms_norm[(rows,)](
            x, x if residual is None else residual, weight, out, x.stride(0),
            0 if residual is None else residual.stride(0), out.stride(0), eps, WIDTH=width, ADD=residual is not None,
            BLOCK=block, num_warps=min(16, max(1, block // 512)),
            **overlap.options(),
        )  # fmt: skip
    return out


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) · up, where each row of x `[T, 2 · width]` is gate, then up; in float32, rounded once."""
    rows, width = x.shape[0], x.shape[1] // 2
    if x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"x is {list(x.shape)}; its rows must be contiguous and even")
    out = x.new_empty(rows, width) if out is None else out
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _silu_and_mul[(rows, triton.cdiv(width, block))](
            x, out, x.stride(0), out.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **overlap.options()
        )
    return out
