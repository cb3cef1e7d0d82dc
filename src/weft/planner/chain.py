"""A traced model: its reads of the residual stream and the values that its blocks exchange, in order."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.op import BlockValue
from weft.planner.row_formats import Wire
from weft.planner.spec import Placement

Counts = tuple[int, ...]
"""Tokens of each DP group."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream.

    site: the norm's name. target: the placement that the block asks for. deltas: those added since the last read.
    inside: the values that the reading block exchanges between ranks in a decode step, in order.
    wire: products of the block take the rows in its format. plain: the block also takes them in the activations' dtype,
    so they travel in it.
    """

    site: str
    target: Placement
    deltas: tuple[Placement, ...]
    inside: tuple[BlockValue, ...] = ()
    wire: Wire | None = None
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced model. width: elements of a row. element_bytes: of the activations.

    others: the same reads for each other form in which blocks take rows; blocks exchange and leave other values in it.
    A read's deltas follow from the form of the read before it.
    """

    reads: tuple[Read, ...]
    width: int
    element_bytes: int
    others: tuple[tuple[Read, ...], ...] = ()

    @property
    def inside(self) -> tuple[BlockValue, ...]:
        """All values that blocks exchange in the first form, in order."""
        return tuple(value for read in self.reads for value in read.inside)

    @property
    def forms(self) -> tuple[tuple[Read, ...], ...]:
        """The reads in each form."""
        return (self.reads, *self.others)


def bucket(counts: Counts) -> Counts:
    """The counts of the plan for these counts: all groups as large as the largest, rounded up to a power of two.

    All ranks know all counts, so all get the same bucket.
    """
    largest = max(counts)
    return (1 << max(largest - 1, 0).bit_length(),) * len(counts)
