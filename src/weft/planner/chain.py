"""A traced model: its reads of the residual stream and the settlements inside its blocks, in order."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.row_formats import Wire
from weft.planner.settlements import Settlement
from weft.planner.spec import Placement

Counts = tuple[int, ...]
"""Tokens of each DP group."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream.

    site: the norm's name. target: the placement that the block asks for. deltas: those added since the last read.
    settles: the reading block's settlements between ranks in a decode step, in order.
    wire: products of the block take the rows in its format. plain: the block also takes them in the activations' dtype,
    so they travel in it.
    """

    site: str
    target: Placement
    deltas: tuple[Placement, ...]
    settles: tuple[Settlement, ...] = ()
    wire: Wire | None = None
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced model. width: elements of a row. element_bytes: of the activations.

    others: the same reads for each other form in which blocks take rows; blocks settle and leave other values in it. A
    read's deltas follow from the form of the read before it.
    """

    reads: tuple[Read, ...]
    width: int
    element_bytes: int
    others: tuple[tuple[Read, ...], ...] = ()

    @property
    def settlements(self) -> tuple[Settlement, ...]:
        """All settlements of the first form, in order."""
        return tuple(settlement for read in self.reads for settlement in read.settles)

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
