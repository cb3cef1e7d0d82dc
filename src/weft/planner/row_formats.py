"""Wire formats of complete rows: fewer bytes than the activations' dtype.

A format is a value with a name and the bytes of a row; its kernels are in `weft.stream.formats`. Each row is quantised
on its own, so quantising before a gather gives the same bits as after it: the planner may choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

UNIT_BYTES, SCALE_BYTES = 16, 4


class Format(Protocol):
    """Format of a row. Equal formats have equal bytes; `str` gives the name in plans."""

    def __hash__(self) -> int: ...

    def __str__(self) -> str: ...

    def parts(self, width: int) -> tuple[int, ...]:
        """Return the bytes of a row of `width` elements in each of its tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn, with a float32 scale for each `group` columns (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""

    group: int

    def __str__(self) -> str:
        return f"fp8/{self.group}"

    def parts(self, width: int) -> tuple[int, ...]:
        """Return the bytes of the values and of the scales."""
        return width, -(-width // self.group) * SCALE_BYTES


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
