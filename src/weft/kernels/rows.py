"""What is done to rows between products, by the kernels of where they lie: Triton's on GPUs, plain torch elsewhere.

On GPUs arithmetic is in float32 and rounded once, where a result is stored.
"""

from __future__ import annotations

from torch import Tensor

from weft.kernels import plain


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weft.kernels.plain.rms_norm` of x `[…, width]`."""
    if not x.is_cuda:
        return plain.rms_norm(x, weight, eps)
    from weft.kernels.triton import rms_norm as kernels  # GPUs only: a CPU need not have Triton

    return kernels.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual + delta, its `rms_norm`), `[rows, width]` each; both are new."""
    if not residual.is_cuda:
        total = residual + delta
        return total, plain.rms_norm(total, weight, eps)
    from weft.kernels.triton import rms_norm as kernels

    total = residual.new_empty(residual.shape)
    return total, kernels.rms_norm(delta, weight, eps, residual, total=total)


def gated(
    x: Tensor, limit: float | None = None, alpha: float | None = None, score: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`weft.kernels.plain.gated` of x `[T, …, 2 · inner]`.

    score: (rows `[T, width]`, weight `[1, width]`), whose product's sigmoid scales all of a row.
    """
    if not x.is_cuda:
        return plain.gated(x, limit, alpha, score)
    from weft.kernels.triton import rms_norm as kernels

    flat = kernels.gated(x.reshape(-1, x.shape[-1]), limit, alpha, score)
    return flat.view(*x.shape[:-1], x.shape[-1] // 2)


def gate_heads(
    out: Tensor, gate: Tensor | None = None, lse: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """`weft.kernels.plain.gate_heads`."""
    if not out.is_cuda:
        return plain.gate_heads(out, gate, lse, sinks)
    from weft.kernels.triton.gate_heads import gate_heads as kernel

    return kernel(out, gate, lse, sinks)
