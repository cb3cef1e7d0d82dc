"""A traced model: what it reads of its residual stream and settles inside its blocks, in order."""

from __future__ import annotations

from dataclasses import dataclass

from weft.place.row_formats import Wire
from weft.place.settlements import Settlement
from weft.place.spec import Placement

Counts = tuple[int, ...]
"""Tokens of each DP group."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream. site: the norm's name; target: what the block asked for; deltas: what was added since.

    settles: what the block that reads settles between ranks then, in a decode step, in order. wire: products of the
    block take the rows in its format; plain: the block takes them in the activations' dtype too, so that they travel in
    it.
    """

    site: str
    target: Placement
    deltas: tuple[Placement, ...]
    settles: tuple[Settlement, ...] = ()
    wire: Wire | None = None
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced model. width: elements a row; element_bytes: of the activations.

    others: the same reads once more, as far as blocks take rows in other forms, in which they settle and leave other
    values too. What a read's deltas are follows from the form in which the read before it was served.
    """

    reads: tuple[Read, ...]
    width: int
    element_bytes: int
    others: tuple[tuple[Read, ...], ...] = ()

    @property
    def settlements(self) -> tuple[Settlement, ...]:
        """All of the first form, in order."""
        return tuple(settlement for read in self.reads for settlement in read.settles)

    @property
    def forms(self) -> tuple[tuple[Read, ...], ...]:
        """Every form of the reads."""
        return (self.reads, *self.others)


def bucket(counts: Counts) -> Counts:
    """The counts that a plan is made for: every group as full as the fullest, rounded up to a power of two.

    Every rank knows every count, so every rank comes to the same bucket.
    """
    most = max(counts)
    return (1 << max(most - 1, 0).bit_length(),) * len(counts)
