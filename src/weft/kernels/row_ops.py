"""Operations on rows before and between products: Triton's kernels for rows on GPUs, else plain torch.

On GPUs arithmetic is in float32, and a result is rounded once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.kernels import float8, torch_reference


def embed(tokens: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """`weft.kernels.torch_reference.embed`."""
    if not weight.is_cuda:
        return torch_reference.embed(tokens, weight, first)
    from weft.kernels.triton import embed as kernels  # GPUs only: a CPU need not have Triton

    return kernels.embed(tokens, weight, first)


def cos_sin(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """`weft.kernels.torch_reference.cos_sin`."""
    if not positions.is_cuda:
        return torch_reference.cos_sin(positions, inverse, factor, dtype, interleaved)
    from weft.kernels.triton import embed as kernels

    return kernels.cos_sin(positions, inverse, factor, dtype, interleaved)


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantised: float8.Fp8Rows | None = None) -> Tensor:
    """`weft.kernels.torch_reference.rms_norm` of x `[…, width]`.

    quantised: of the shape of x `[rows, width]`; it is filled with the result in FP8.
    """
    if not x.is_cuda:
        normed = torch_reference.rms_norm(x, weight, eps)
        if quantised is not None:
            float8.fill(quantised, normed)
        return normed
    from weft.kernels.triton import rms_norm as kernels

    return kernels.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, quantised=quantised).view(x.shape)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, quantised: float8.Fp8Rows | None = None
) -> tuple[Tensor, Tensor]:
    """(residual + delta, its `rms_norm`), `[rows, width]` each; both are new."""
    if not residual.is_cuda:
        total = residual + delta
        return total, rms_norm(total, weight, eps, quantised)
    from weft.kernels.triton import rms_norm as kernels

    total = residual.new_empty(residual.shape)
    return total, kernels.rms_norm(delta, weight, eps, residual, total=total, quantised=quantised)


def gated(
    x: Tensor, limit: float | None = None, alpha: float | None = None, score: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`weft.kernels.torch_reference.gated` of x `[T, …, 2 · inner]`.

    score: (rows `[T, width]`, weight `[1, width]`): the sigmoid of their product scales all elements of a row.
    """
    if not x.is_cuda:
        return torch_reference.gated(x, limit, alpha, score)
    from weft.kernels.triton import rms_norm as kernels

    flat = kernels.gated(x.reshape(-1, x.shape[-1]), limit, alpha, score)
    return flat.view(*x.shape[:-1], x.shape[-1] // 2)


def gate_heads(
    out: Tensor, gate: Tensor | None = None, lse: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """`weft.kernels.torch_reference.gate_heads`."""
    if not out.is_cuda:
        return torch_reference.gate_heads(out, gate, lse, sinks)
    from weft.kernels.triton.gate_heads import gate_heads as kernel

    return kernel(out, gate, lse, sinks)


def quantise(x: Tensor, group_size: int) -> float8.Fp8Rows:
    """`weft.kernels.float8.quantise` of x `[T, width]`."""
    if not x.is_cuda:
        return float8.quantise(x, group_size)
    from weft.kernels.triton import float8_linear as kernels

    return kernels.quantise(x, group_size)


def quantising(x: Tensor, made: float8.Fp8Rows | None = None) -> Callable[[int], float8.Fp8Rows]:
    """A function that gives x quantised by groups of so many columns. It quantises once for each size; made: one result
    that is known."""
    known = {} if made is None else {made.group_size: made}

    def quantised(group_size: int) -> float8.Fp8Rows:
        if group_size not in known:
            known[group_size] = quantise(x, group_size)
        return known[group_size]

    return quantised
