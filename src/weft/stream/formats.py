"""Rows in a format: quantised, packed for the wire, and unpacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.kernels import float8
from weft.kernels import stream_ops as ops
from weft.planner.row_formats import Format, Wire


@dataclass(frozen=True, slots=True)
class Float8(Format):
    """float8_e4m3fn, with a float32 scale for each `group` columns (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""

    group: int

    def __str__(self) -> str:
        return f"fp8/{self.group}"

    def parts(self, width: int) -> tuple[int, ...]:
        return width, -(-width // self.group) * torch.float32.itemsize

    def make(self, x: Tensor) -> float8.Fp8Rows:
        return ops.quantise(x, self.group)

    def tensors(self, rows: float8.Fp8Rows) -> tuple[Tensor, ...]:
        return rows.values, rows.scales

    def rows(self, *tensors: Tensor) -> float8.Fp8Rows:
        return float8.Fp8Rows(tensors[0].view(float8.FLOAT8), tensors[1].view(torch.float32), self.group)

    def unfilled(self, x: Tensor) -> float8.Fp8Rows:
        return float8.unfilled(x, self.group)

    def dequantise(self, rows: float8.Fp8Rows, dtype: torch.dtype) -> Tensor:
        return float8.dequantise(rows, dtype)


class QuantisedWeight(Protocol):
    """Weight in a format of its own, `[…, outputs, inputs]`. format: of the rows that its products take; None: in the
    activations' dtype."""

    @property
    def format(self) -> Format | None: ...

    @property
    def shape(self) -> torch.Size: ...

    def dequantise(self, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """Return its values. expert: only this index of the first dimension."""


def pack(value: Any, extra: Tensor | None, wire: Wire, width: int) -> Tensor:
    """Return `value`, rows of `width`, as uint8 `[T, wire.row_bytes(width)]`. extra: wire.extra bytes per row."""
    parts = [*wire.format.tensors(value), *([] if extra is None else [extra])]
    flat = [part.contiguous().view(torch.uint8) for part in parts]
    unused = wire.row_bytes(width) - sum(part.shape[1] for part in flat)
    return torch.cat([*flat, flat[0].new_empty(len(flat[0]), unused)] if unused else flat, dim=1)


def unpack(x: Tensor, wire: Wire, width: int) -> tuple[Any, Tensor | None]:
    """Return the value of rows that `pack` made, and the rows' `extra` as int32 `[T, n]`."""
    sizes = [*wire.format.parts(width), *([wire.extra] if wire.extra else [])]
    # Even a single row is copied: its parts need not be aligned for their dtypes.
    parts = [part.clone(memory_format=torch.contiguous_format) for part in x[:, : sum(sizes)].split(sizes, dim=1)]
    extra = parts.pop().view(torch.int32) if wire.extra else None
    return wire.format.rows(*parts), extra
