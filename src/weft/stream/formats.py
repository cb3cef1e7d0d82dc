"""Kernels of the formats of rows: they make rows in a format, pack them for the wire, and unpack them.

A format is a value of the planner's (`weft.planner.row_formats`) and a row of `FORMATS`.
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
    """The functions of a format. A value is what the format's readers take.

    make: (x `[T, width]`, format) → value.
    tensors: value → its tensors `[T, …]`; `Format.parts` says how many bytes each has.
    value: (format, these tensors as uint8) → value.
    unfilled: (x, format) → a `weft.kernels.float8.Fp8Rows` that a norm of x fills beside its result; None where norms
        cannot.
    """

    make: Callable[[Tensor, Any], Any]
    tensors: Callable[[Any], tuple[Tensor, ...]]
    value: Callable[..., Any]
    unfilled: Callable[[Tensor, Any], float8.Fp8Rows] | None = None


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
"""All formats in which rows may travel."""


def make(x: Tensor, format: Format) -> Any:
    """The rows of x `[T, width]` in a format."""
    return FORMATS[type(format)].make(x, format)


def unfilled(x: Tensor, format: Format) -> float8.Fp8Rows | None:
    """Unfilled rows in a format for the result of a norm of x `[T, width]`; None where norms cannot fill them."""
    kernels = FORMATS[type(format)]
    return kernels.unfilled and kernels.unfilled(x, format)


def pack(value: Any, beside: Tensor | None, wire: Wire, width: int) -> Tensor:
    """uint8 `[T, wire.row_bytes(width)]`: a value's rows as they travel. beside: `[T, …]`, wire.beside bytes each."""
    parts = [*FORMATS[type(wire.format)].tensors(value), *([] if beside is None else [beside])]
    flat = [part.contiguous().view(torch.uint8) for part in parts]
    unused = wire.row_bytes(width) - sum(part.shape[1] for part in flat)
    return torch.cat([*flat, flat[0].new_empty(len(flat[0]), unused)] if unused else flat, dim=1)


def unpack(x: Tensor, wire: Wire, width: int) -> tuple[Any, Tensor | None]:
    """The value of rows that `pack` made, and the rows' `beside` as int32 `[T, n]`."""
    sizes = [*wire.format.parts(width), *([wire.beside] if wire.beside else [])]
    # Even a single row is copied: its parts need not be aligned for their dtypes.
    parts = [part.clone(memory_format=torch.contiguous_format) for part in x[:, : sum(sizes)].split(sizes, dim=1)]
    beside = parts.pop().view(torch.int32) if wire.beside else None
    return FORMATS[type(wire.format)].value(wire.format, *parts), beside
