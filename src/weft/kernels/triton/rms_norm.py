"""RMSNorm of rows, with or without the residual's addition, and the gated activation of dense blocks.

They run outside of the collectives and GEMMs that include them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.float8 import Fp8Rows
from weft.kernels.torch_reference import UnfilledRows
from weft.kernels.triton import overlap
from weft.kernels.triton.float8_rows import to_float8
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


@kernel
def _rms_norm(
    x, residual, weight, total, out, values, scales, x_row, residual_row, total_row, out_row, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    value = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * total_row + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    normed = value.to(out.dtype.element_ty)
    tl.store(out + row * out_row + i, normed, mask=inside)
    if GROUP:
        GROUPS: tl.constexpr = BLOCK // GROUP
        ALL: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        quantised, scale = to_float8(tl.reshape(normed.to(tl.float32), [GROUPS, GROUP]))
        tl.store(values + row * WIDTH + i, tl.reshape(quantised, [BLOCK]), mask=inside)
        group = tl.arange(0, GROUPS)
        tl.store(scales + row * ALL + group, scale, mask=group < ALL)


@triton.jit
def activated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return silu(gate) · up in float32, with the limits as `weft.engine.kernels.model_reference.gated` has them."""
    if LIMIT is not None:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if ALPHA is not None:
        gate = tl.minimum(gate, LIMIT)
        value = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        value = gate / (1.0 + tl.exp(-gate))
        if LIMIT is not None:
            value = tl.minimum(value, LIMIT)
        value *= up
    return value


@kernel
def _gated(
    x, score_x, score_weight, out, x_row, score_row, out_row,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHARE: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SCORE: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = activated(gate, up, LIMIT, ALPHA)
    if SCORE_WIDTH > 0:
        j = tl.arange(0, BLOCK_SCORE)
        read = tl.load(score_x + row // SHARE * score_row + j, mask=j < SCORE_WIDTH, other=0.0).to(tl.float32)
        score = tl.sum(read * tl.load(score_weight + j, mask=j < SCORE_WIDTH, other=0.0).to(tl.float32), 0)
        value /= 1.0 + tl.exp(-score)
    tl.store(out + row * out_row + i, value.to(out.dtype.element_ty), mask=i < WIDTH)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
    quantised: UnfilledRows | None = None,
) -> Tensor:
    """Return x · weight / √(mean(x²) + eps) over the rows of x `[…, width]`, in float32, rounded once.

    Args:
        weight: `[width]`, in x's dtype or float32.
        eps: added to the mean square.
        out: filled with the result; None: a new tensor.
        residual: `[T, width]`; the input is then residual + x, rounded to x's dtype.
        total: filled with that sum, of the same shape and dtype; None: the residual is overwritten with it.
        quantised: contiguous, filled with the result; in FP8 by the same kernel, and its group size is a power of two.
    """
    shape, x = x.shape, x.flatten(0, -2)
    rows, width = x.shape
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}: they do not match")
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("rows must be contiguous")
    out = x.new_empty(rows, width) if out is None else out
    given = x if residual is None else residual
    total = given if total is None else total
    fused = isinstance(quantised, Fp8Rows)
    values, scales, group_size = quantised if isinstance(quantised, Fp8Rows) else (out, out, 0)
    if fused and (values.shape != x.shape or scales.shape != (rows, cdiv(width, group_size))):
        raise ValueError(f"x is {list(x.shape)}, quantised {list(values.shape)} with scales {list(scales.shape)}")
    if rows:
        block = max(group_size, next_power_of_2(width))
        _rms_norm[(rows,)](
            x, given, weight, total, out, values, scales, x.stride(0), given.stride(0), total.stride(0), out.stride(0),
            eps, WIDTH=width, ADD=residual is not None, GROUP=group_size, BLOCK=block,
            num_warps=min(16, max(1, block // 512)), **overlap.options(),
        )  # fmt: skip
    if quantised is not None and not fused:
        quantised.fill(out)
    return out.view(shape)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, quantised: UnfilledRows | None = None
) -> tuple[Tensor, Tensor]:
    """Run `weft.kernels.torch_reference.add_rms_norm`."""
    total = residual.new_empty(residual.shape)
    return total, rms_norm(delta, weight, eps, residual, total=total, quantised=quantised)


def gated(
    x: Tensor, limit: float | None = None, alpha: float | None = None, score: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Run `weft.engine.kernels.model_reference.gated` in float32, rounded once.

    x: `[…, 2 · width]`, each row gate, then up. score: (rows `[S, inputs]`, weight `[1, inputs]`) of T rows in all,
    where T is a multiple of S: T / S rows share each of them.
    """
    shape, x = x.shape[:-1], x.flatten(0, -2)
    rows, width = x.shape[0], x.shape[1] // 2
    if x.stride(1) != 1 or x.shape[1] % 2 or (alpha is not None and limit is None):
        raise ValueError(f"x is {list(x.shape)}; rows must be contiguous and of even width, and alpha needs a limit")
    read, weight = (x, x) if score is None else score
    inputs = 0 if score is None else read.shape[1]
    if score is not None and (weight.shape != (1, inputs) or read.stride(1) != 1 or rows % max(1, len(read))):
        raise ValueError(f"rows are {list(read.shape)} of {rows}, their weight {list(weight.shape)}")
    out = x.new_empty(rows, width)
    if rows:
        block = min(1024, next_power_of_2(width))
        _gated[(rows, cdiv(width, block))](
            x, read, weight, out, x.stride(0), read.stride(0), out.stride(0), WIDTH=width, LIMIT=limit, ALPHA=alpha,
            SHARE=rows // len(read), SCORE_WIDTH=inputs, BLOCK=block,
            BLOCK_SCORE=next_power_of_2(max(1, inputs)), num_warps=4, **overlap.options(),
        )  # fmt: skip
    return out.view(*shape, width)
