"""The two forms of a mixture of experts, and what the second settles.

| form | reads | leaves | settles inside |
|---|---|---|---|
| gather | WORLD | WORLD, owes the sum over the world | nothing |
| dispatch | OWN | OWN, complete | a Dispatch: counts, rows with their experts, results |

By gather every rank takes all rows, and adds what its experts make of them. By dispatch a row goes once to each rank
that has one of its experts, and comes back once from it: dispatch and combine of GShard (arXiv 2006.16668), with the
rows sent to a rank deduplicated as in DeepEP. A chain with both forms is planned for whichever is cheaper, read by
read. How many ranks a row goes to only the router knows: costs take every choice of k experts for equally likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from weft.place.spec import Mesh

Forms = Literal["auto", "gather", "dispatch"]
"""What a model may take: auto is both, chosen by cost."""
COUNTS, SEND, RETURN = "counts", "dispatch", "combine"
"""What the exchanges of a dispatch are called, in order."""
COUNT_BYTES = 4
PACK_KERNELS = 16
"""Small kernels of torch that laying rows out takes, and reading their lists where they arrive, beside the copy."""


@dataclass(frozen=True, slots=True)
class Permute:
    """What ranks send to each other, whose sizes follow from their rows in a way that only the step itself knows.

    what: names it in plans. shared: ranks that share a DP group's tokens. fixed_bytes: from each rank to each other,
    whatever rows it has; row_bytes: to each other for each of its rows, as is to be expected; sent_row_bytes: of a row
    that it sends.
    """

    what: str
    shared: int
    fixed_bytes: int
    row_bytes: float
    sent_row_bytes: int

    def bytes(self, tokens: int, ranks: int) -> int:
        """Of the largest tensor: every row may go to every rank, and all rows to one."""
        return -(-tokens // self.shared) * ranks * self.sent_row_bytes

    def alike(self, counts: tuple[int, ...]) -> float:
        """Tokens that every DP group would have where the busiest rank receives as much as with these counts."""
        others = len(counts) * self.shared - 1
        return (sum(counts) * self.shared - min(counts)) / others


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a rank does alone between exchanges. what: names it in plans. row_bytes: that it goes over for each of its
    rows; launches: small kernels beside.
    """

    what: str
    row_bytes: float
    launches: int = 0

    def bytes(self, rows: int, ranks: int) -> int:
        """No transport carries any."""
        return 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rows that go to k of so many experts, which are spread evenly over `ep`, and the sums of what these make of them.

    shared: ranks that share a DP group's tokens; row_bytes: of a row of the stream.
    """

    experts: int
    k: int
    ep: int
    shared: int
    row_bytes: int
    what: ClassVar[str] = "dispatch"

    @staticmethod
    def on(mesh: Mesh, experts: int, k: int, row_bytes: int) -> Dispatch:
        """Over the world of a mesh."""
        return Dispatch(experts, k, mesh.ep, mesh.attn_tp, row_bytes)

    @property
    def share(self) -> float:
        """The chance that a row goes to a given rank: one less that of k experts none is there."""
        elsewhere = self.experts - self.experts // self.ep
        return 1 - math.comb(elsewhere, self.k) / math.comb(self.experts, self.k)

    def parts(self, ranks: int, tokens: int) -> tuple[tuple[Permute | Kernel, int], ...]:
        """By all_to_allv, in order. Packing reads rows and writes those that are sent, adding reverses it."""
        share, sent, own = self.share, self.row_bytes + listed_bytes(self.k), -(-tokens // self.shared)
        moved = self.row_bytes * (1 + ranks * share)
        return (
            (Permute(COUNTS, self.shared, COUNT_BYTES, 0.0, 0), tokens),
            (Kernel("pack rows for their experts on OWN", moved, PACK_KERNELS), own),
            (Permute(SEND, self.shared, 0, share * sent, sent), tokens),
            (Permute(RETURN, self.shared, 0, share * self.row_bytes, self.row_bytes), tokens),
            (Kernel("add results on OWN", moved, ranks), own),  # a kernel for each rank's
        )

    def bytes(self, tokens: int, ranks: int) -> int:
        """Of the largest tensor of all exchanges."""
        return max(part.bytes(rows, ranks) for part, rows in self.parts(ranks, tokens))


def listed_bytes(k: int) -> int:
    """What a row takes along: for each of its k experts a number and a weight, in four bytes each."""
    return 8 * k
