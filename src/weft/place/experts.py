"""The two forms of a mixture of experts, and what the second exchanges.

| form | reads | leaves | exchanges inside |
|---|---|---|---|
| gather | WORLD | WORLD, owes the sum over the world | nothing |
| dispatch | OWN | OWN, complete | all_to_allv of counts, of rows with their experts, of results |

By gather every rank takes all rows, and adds what its experts make of them. By dispatch a row goes once to each rank
that has one of its experts, and comes back once from it: dispatch and combine of GShard (arXiv 2006.16668), with the
rows sent to a rank deduplicated as in DeepEP. A chain with both forms is planned for whichever is cheaper, read by
read. How many ranks a row goes to only the router knows: costs take every choice of k experts for equally likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weft.place import exchange
from weft.place.edges import Edge, Load
from weft.place.exchange import Exchange
from weft.place.spec import Mesh, Rows

Form = Literal["gather", "dispatch"]
Forms = Literal["auto", "gather", "dispatch"]
"""What a model may take: auto is both, chosen by cost."""
COUNTS, SEND, RETURN = "counts", "dispatch", "combine"
"""What the exchanges of a dispatch are called, in order."""
COUNT_BYTES = 4
PACK_KERNELS = 16
"""Small kernels of torch that laying rows out takes, and reading their lists where they arrive, beside the copy."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A block that sends its rows to k of so many experts, which are dealt out evenly over `ep`."""

    experts: int
    k: int

    def share(self, mesh: Mesh) -> float:
        """The chance that a row goes to a given rank: one less that of k experts none is there."""
        elsewhere = self.experts - self.experts // mesh.ep
        return 1 - math.comb(elsewhere, self.k) / math.comb(self.experts, self.k)

    def edges(self, mesh: Mesh, row_bytes: int) -> dict[str, Edge]:
        """Its exchanges by name, in order. row_bytes: of a row of the stream.

        A rank has room for all rows of the world, and sends at most each of its own to every rank.
        """
        own, share, sent = mesh.placement(Rows.OWN), self.share(mesh), row_bytes + listed_bytes(self.k)
        permute = exchange.all_to_allv(mesh.world)

        def edge(load: Load) -> Edge:
            return Edge(permute, "world", own, own, load)

        return {
            COUNTS: edge(Load(COUNT_BYTES, 0.0, 0)),
            SEND: edge(Load(0, share * sent, sent)),
            RETURN: edge(Load(0, share * row_bytes, row_bytes)),
        }


def listed_bytes(k: int) -> int:
    """What a row takes along: for each of its k experts a number and a weight, in four bytes each."""
    return 8 * k


def expert_exchanges(mesh: Mesh) -> set[Exchange]:
    """What a dispatch takes on a mesh; nothing on a single rank."""
    return {exchange.all_to_allv(mesh.world)} if mesh.world > 1 else set()
