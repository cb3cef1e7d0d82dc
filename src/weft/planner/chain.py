"""Traced models: their reads of the residual stream and the values that their blocks exchange, in order."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.op import BlockValue
from weft.planner.row_formats import Wire
from weft.planner.spec import Placement

Counts = tuple[int, ...]
"""Tokens of each DP group."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream."""

    site: str  # name of the norm
    target: Placement  # placement that the block asks for
    deltas: tuple[Placement, ...]  # placements of the deltas added since the last read
    inside: tuple[BlockValue, ...] = ()  # exchanged between ranks by the reading block in a decode step, in order
    wire: Wire | None = None  # format that the block's GEMMs require, if any
    plain: bool = True  # some reader needs the unquantised rows, so they are sent unquantised
    normed: bool = True  # False: the block gets the residual itself


@dataclass(frozen=True, slots=True)
class Chain:
    """Traced model. width: elements of a row. element_bytes: bytes of one in the activations' dtype.

    others: the same reads in each other form of the blocks, which then exchange and leave other values. A read's deltas
    follow from the form of the read before it.
    """

    reads: tuple[Read, ...]
    width: int
    element_bytes: int
    others: tuple[tuple[Read, ...], ...] = ()

    @property
    def inside(self) -> tuple[BlockValue, ...]:
        """Values that blocks exchange in the first form, in order."""
        return tuple(value for read in self.reads for value in read.inside)

    @property
    def forms(self) -> tuple[tuple[Read, ...], ...]:
        """Reads in each form."""
        return (self.reads, *self.others)


def bucket(counts: Counts) -> Counts:
    """Return the counts of the plan to use: all groups as large as the largest, rounded up to a power of two.

    All ranks know all counts, so all get the same bucket.
    """
    largest = max(counts)
    return (1 << max(largest - 1, 0).bit_length(),) * len(counts)
