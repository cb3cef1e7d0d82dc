"""Scaling of attention's output before its last product: sinks, and gates of heads or of elements."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


@kernel
def _gate_heads(
    x, gate, lse, sinks, out, x_row, x_head, gate_row, lse_row, lse_head, features,
    D: tl.constexpr, GATE: tl.constexpr, SINKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < features
    head = i // D
    value = tl.load(x + row * x_row + head * x_head + i % D, mask=inside, other=0.0).to(tl.float32)
    if SINKS:
        seen = tl.load(lse + row * lse_row + head * lse_head, mask=inside, other=0.0)
        value /= 1.0 + tl.exp(tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) - seen)
    if GATE:
        at = i if GATE == 2 else head
        value /= 1.0 + tl.exp(-tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + row * features + i, value.to(out.dtype.element_ty), mask=inside)


def gate_heads(
    out: Tensor, gate: Tensor | None = None, lse: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute `weft.engine.kernels.model_reference.gate_heads` in float32, rounded once. A row with lse −inf gets
    output 0. Raises ValueError if shapes do not match."""
    rows, heads, dim = out.shape
    fits = gate is None or (gate.shape in ((rows, heads), (rows, heads * dim)) and gate.stride(1) == 1)
    if not fits or (sinks is not None and (lse is None or lse.shape != (rows, heads) or sinks.shape != (heads,))):
        shapes = [None if x is None else list(x.shape) for x in (gate, lse, sinks)]
        raise ValueError(f"out is {list(out.shape)}, gate, lse and sinks {shapes}")
    if out.stride(2) != 1:
        raise ValueError("the last dimension must be contiguous")
    found = out.new_empty(rows, heads, dim)
    if rows:
        gate_at = out if gate is None else gate
        lse_at = out if sinks is None or lse is None else lse
        block = min(1024, next_power_of_2(heads * dim))
        _gate_heads[(rows, cdiv(heads * dim, block))](
            out, gate_at, lse_at, out if sinks is None else sinks, found, out.stride(0), out.stride(1),
            gate_at.stride(0), lse_at.stride(0), lse_at.stride(1), heads * dim, D=dim,
            GATE=0 if gate is None else 1 if gate.shape[1] == heads else 2, SINKS=sinks is not None, BLOCK=block,
            num_warps=4, **overlap.options(),
        )  # fmt: skip
    return found
