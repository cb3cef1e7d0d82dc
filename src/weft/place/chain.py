"""A traced model: what it reads of its residual stream and settles inside its blocks, in order."""

from __future__ import annotations

from dataclasses import dataclass

from weft.place.experts import Dispatch
from weft.place.settle import Settlement
from weft.place.spec import Placement

Counts = tuple[int, ...]
"""Tokens of each DP group."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream. site: the norm's name; target: what the block asked for; deltas: what was added since.

    dispatch: what the block sends to experts on other ranks, of OWN rows. run: its products in FP8 take rows quantised
    by runs of so many columns; 0: it has none.
    """

    site: str
    target: Placement
    deltas: tuple[Placement, ...]
    dispatch: Dispatch | None = None
    run: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced model. width: elements a row; element_bytes: of the activations. settlements: what its blocks settle
    between ranks in a decode step, in order.

    others: the same reads once more, as far as blocks take rows in other forms, in which they leave other deltas too.
    What a read's deltas are follows from the form in which the read before it was served.
    """

    reads: tuple[Read, ...]
    width: int
    element_bytes: int
    others: tuple[tuple[Read, ...], ...] = ()
    settlements: tuple[Settlement, ...] = ()

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
