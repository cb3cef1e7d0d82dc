"""Formats in which complete rows may travel: the bytes of a row on the wire instead of the activations' dtype.

A format is a value with a name and the bytes of a row; `weft.stream.formats` has its kernels. Rows are put into a
format one by one, so doing it before a gather gives the same bits as doing it after: the planner may choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

UNIT_BYTES, SCALE_BYTES = 16, 4


class Format(Protocol):
    """The format of a row. Equal formats have equal bytes; the text is its name in plans."""

    def __hash__(self) -> int: ...

    def __str__(self) -> str: ...

    def parts(self, width: int) -> tuple[int, ...]:
        """Bytes that a row of so many elements takes in each of its tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Float8:
    """float8_e4m3fn, with a float32 scale for each `group` columns (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""

    group: int

    def __str__(self) -> str:
        return f"fp8/{self.group}"

    def parts(self, width: int) -> tuple[int, ...]:
        """Bytes of values, and of scales."""
        return width, -(-width // self.group) * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Wire:
    """A row that travels in a format, with `beside` more bytes that were computed from it before."""

    format: Format
    beside: int = 0

    def __str__(self) -> str:
        return f"{self.format}{f' + {self.beside} bytes' if self.beside else ''}"

    def row_bytes(self, width: int) -> int:
        """Bytes on the wire of a row of so many elements: both, padded to units of 16."""
        return -(-(sum(self.format.parts(width)) + self.beside) // UNIT_BYTES) * UNIT_BYTES
