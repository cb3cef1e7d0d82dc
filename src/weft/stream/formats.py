"""Kernels of the formats of rows: they quantise rows, pack them for the wire, and unpack them.

A format is a planner's value (`weft.planner.row_formats`) and a row of `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.kernels import float8
from weft.kernels import stream_ops as ops
from weft.planner.row_formats import Float8, Format, Wire


class FormatKernels(NamedTuple):
    """Functions of a format. A value has the type that the format's readers require."""

    make: Callable[[Tensor, Any], Any]  # (x `[T, width]`, format) → value
    tensors: Callable[[Any], tuple[Tensor, ...]]  # value → its tensors `[T, …]`, of the bytes in `Format.parts`
    value: Callable[..., Any]  # (format, these tensors as uint8) → value
    unfilled: Callable[[Tensor, Any], float8.Fp8Rows] | None = None  # (x, format) → rows that a norm of x fills


FORMATS: dict[type[Any], FormatKernels] = {
    Float8: FormatKernels(
        make=lambda x, format: ops.quantise(x, format.group),
        tensors=lambda value: (value.values, value.scales),
        value=lambda format, values, scales: float8.Fp8Rows(
            values.view(float8.FLOAT8), scales.view(torch.float32), format.group
        ),
        unfilled=lambda x, format: float8.unfilled(x, format.group),
    )
}
"""Wire formats of rows."""


def make(x: Tensor, format: Format) -> Any:
    """Return the rows of x `[T, width]` in a format."""
    return FORMATS[type(format)].make(x, format)


def unfilled(x: Tensor, format: Format) -> float8.Fp8Rows | None:
    """Return unfilled rows in a format for the result of a norm of x `[T, width]`; None if norms cannot fill them."""
    kernels = FORMATS[type(format)]
    return kernels.unfilled and kernels.unfilled(x, format)


def pack(value: Any, extra: Tensor | None, wire: Wire, width: int) -> Tensor:
    """Return rows of `width` elements, `value`, as they travel: uint8 `[T, wire.row_bytes(width)]`.

    extra: `[T, …]`, wire.extra bytes per row.
    """
    parts = [*FORMATS[type(wire.format)].tensors(value), *([] if extra is None else [extra])]
    flat = [part.contiguous().view(torch.uint8) for part in parts]
    unused = wire.row_bytes(width) - sum(part.shape[1] for part in flat)
    return torch.cat([*flat, flat[0].new_empty(len(flat[0]), unused)] if unused else flat, dim=1)


def unpack(x: Tensor, wire: Wire, width: int) -> tuple[Any, Tensor | None]:
    """Return the value of rows that `pack` made, and the rows' `extra` as int32 `[T, n]`."""
    sizes = [*wire.format.parts(width), *([wire.extra] if wire.extra else [])]
    # Even a single row is copied: its parts need not be aligned for their dtypes.
    parts = [part.clone(memory_format=torch.contiguous_format) for part in x[:, : sum(sizes)].split(sizes, dim=1)]
    extra = parts.pop().view(torch.int32) if wire.extra else None
    return FORMATS[type(wire.format)].value(wire.format, *parts), extra
