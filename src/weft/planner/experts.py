"""The two forms of a mixture of experts, gather and dispatch, and the exchanges of dispatch.

| form | reads | leaves | exchanges inside |
|---|---|---|---|
| gather | WORLD | WORLD, owes the sum over the world | nothing |
| dispatch | OWN | OWN, complete | a Dispatch: counts, rows with their experts, results |

In gather each rank reads all rows, and adds the results of its experts. In dispatch a row goes once to each rank that
has one of its experts, and comes back once from it: dispatch and combine of GShard (arXiv 2006.16668), with the rows
sent to a rank deduplicated as in DeepEP. A chain with both forms is planned for the cheaper one, read by read. Only the
router knows how many ranks a row goes to: costs assume that all choices of k experts are equally likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from weft.planner.spec import Mesh

Forms = Literal["auto", "gather", "dispatch"]
"""Values of the option: `auto` allows both forms and chooses by cost."""
COUNTS, SEND, RETURN = "counts", "dispatch", "combine"
"""Names of a dispatch's exchanges, in order."""
COUNT_BYTES = 4
PACK_KERNELS = 16
"""Number of small torch kernels that pack rows and read their lists after arrival, in addition to the copy."""


@dataclass(frozen=True, slots=True)
class Permute:
    """Rows that ranks send to each other; only the step itself knows how many."""

    what: str  # name in plans
    shared: int  # ranks that share a DP group's tokens
    fixed_bytes: int  # bytes from each rank to each other rank, for any number of rows
    row_bytes: float  # expected bytes to each other rank, per row of the sender
    sent_row_bytes: int  # bytes of a row that is sent

    def bytes(self, tokens: int, ranks: int) -> int:
        """Return the bytes of the largest tensor: all rows may go to all ranks, or to one."""
        return -(-tokens // self.shared) * ranks * self.sent_row_bytes

    def alike(self, counts: tuple[int, ...]) -> float:
        """Return the tokens per DP group, all equal, with which the busiest rank receives as much as with `counts`."""
        others = len(counts) * self.shared - 1
        return (sum(counts) * self.shared - min(counts)) / others


@dataclass(frozen=True, slots=True)
class Kernel:
    """Local work of a rank between exchanges."""

    what: str  # name in plans
    row_bytes: float  # bytes touched per row
    launches: int = 0  # small kernels launched in addition

    def bytes(self, rows: int, ranks: int) -> int:
        """Always 0: local kernels use no transport buffer."""
        return 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rows that go to k of `experts` experts, spread evenly over `ep`, and the sums of the experts' results.

    shared: ranks that share a DP group's tokens. row_bytes: bytes of a row of the stream.
    """

    experts: int
    k: int
    ep: int
    shared: int
    row_bytes: int
    what: ClassVar[str] = "dispatch"

    @staticmethod
    def on(mesh: Mesh, experts: int, k: int, row_bytes: int) -> Dispatch:
        """Return the dispatch over a mesh's world: `k` of `experts` experts per row, `row_bytes` on the wire."""
        return Dispatch(experts, k, mesh.ep, mesh.attn_tp, row_bytes)

    @property
    def share(self) -> float:
        """Probability that a row goes to a given rank: 1 minus that none of its k experts is there."""
        elsewhere = self.experts + -self.experts // self.ep  # of the largest share
        return 1 - math.comb(elsewhere, self.k) / math.comb(self.experts, self.k)

    def parts(self, ranks: int, tokens: int) -> tuple[tuple[Permute | Kernel, int], ...]:
        """Return the exchanges (all_to_allv) and kernels in order: packing writes the rows to send, adding is the
        reverse."""
        share, sent, own_tokens = self.share, self.row_bytes + listed_bytes(self.k), -(-tokens // self.shared)
        moved = self.row_bytes * (1 + ranks * share)
        return (
            (Permute(COUNTS, self.shared, COUNT_BYTES, 0.0, 0), tokens),
            (Kernel("pack rows for their experts on OWN", moved, PACK_KERNELS), own_tokens),
            (Permute(SEND, self.shared, 0, share * sent, sent), tokens),
            (Permute(RETURN, self.shared, 0, share * self.row_bytes, self.row_bytes), tokens),
            (Kernel("add results on OWN", moved, ranks), own_tokens),  # one kernel for each rank's results
        )

    def bytes(self, tokens: int, ranks: int) -> int:
        """Return the bytes of the largest tensor of all exchanges."""
        return max(part.bytes(rows, ranks) for part, rows in self.parts(ranks, tokens))


def listed_bytes(k: int) -> int:
    """Return the bytes of a row's lists: a number and a weight, of four bytes each, for each of its k experts."""
    return 8 * k
