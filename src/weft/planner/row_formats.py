"""Wire formats of complete rows: fewer bytes than the activations' dtype.

Each row is quantised on its own, so quantising before a gather gives the same bits as after it: the planner may choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

UNIT_BYTES = 16


class Format(Protocol):
    """Format of rows. Equal formats have equal bytes; `str` gives the name in plans. The planner asks for bytes alone;
    streams call the other methods, on tensors and on rows in the format, which have the type that readers need."""

    def parts(self, width: int) -> tuple[int, ...]:
        """Return the bytes of a row of `width` elements in each of its tensors."""
        ...

    def make(self, x: Any) -> Any:
        """Return the rows of a tensor `[T, width]` in the format."""

    def tensors(self, rows: Any) -> tuple[Any, ...]:
        """Return the tensors `[T, …]` of rows, of the bytes in `parts`."""
        ...

    def rows(self, *tensors: Any) -> Any:
        """Return the rows of these tensors as uint8."""

    def unfilled(self, x: Any) -> Any:
        """Return rows for a norm of a tensor `[T, width]` to `fill`; None if they are made from its result."""
        return None

    def dequantise(self, rows: Any, dtype: Any) -> Any:
        """Return rows as a tensor `[T, width]`."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Row that travels in a format, followed by `extra` bytes that were computed from it before."""

    format: Format
    extra: int = 0

    def __str__(self) -> str:
        return f"{self.format}{f' + {self.extra} bytes' if self.extra else ''}"

    def row_bytes(self, width: int) -> int:
        """Return the bytes on the wire of a row of `width` elements, padded to units of 16."""
        return -(-(sum(self.format.parts(width)) + self.extra) // UNIT_BYTES) * UNIT_BYTES
