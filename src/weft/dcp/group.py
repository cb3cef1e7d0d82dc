"""A rank's end of its dcp group: which tokens it holds, and what passes between the group's ranks around attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.comm.settler import Settling
from weft.dcp.interleave import Interleave
from weft.place.recipes import QUERIES, TOKENS, Gather, Prompt


@dataclass(frozen=True)
class ContextGroup:
    """What attention needs where its tokens are sharded over ranks. place: this rank's in the group.

    Without rows neither gather nor merge communicates.
    """

    deal: Interleave
    place: int
    settle: Settling

    def lengths(self, lengths: Tensor) -> Tensor:
        """How many tokens of sequences of these lengths lie here."""
        return self.deal.length(lengths, self.place)

    def slots(self, slots: Tensor) -> Tensor:
        """Where rows are stored here, −1 for another rank's: see `Interleave.slots`."""
        return self.deal.slots(slots, self.place)

    def prefill(self, what: Prompt, rows: int) -> str:
        """The recipe by which the prompts of a step of so many rows attend, the same on every rank."""
        return self.settle.recipe(what, "dcp", rows)

    def heads(self, q: Tensor) -> Tensor:
        """Every rank's heads, in rank order: `[T, heads, D]` → `[T, ranks · heads, D]`."""
        ranks, (rows, heads, dim) = self.deal.ranks, q.shape
        what = Gather(QUERIES, heads * dim * q.element_size(), relaid=True)
        every = self.settle.gather(what, "dcp", q.reshape(rows, heads * dim), (rows,) * ranks)
        return every.view(ranks, rows, heads, dim).transpose(0, 1).reshape(rows, ranks * heads, dim)

    def tokens(self, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Cached tokens of every rank `[sum(sizes), width]`, in rank order; rows: this rank's."""
        return self.settle.gather(Gather(TOKENS, rows.shape[1] * rows.element_size()), "dcp", rows, sizes)

    def merge(self, out: Tensor, lse: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out `[T, H, D]`, lse `[T, H]`: of all heads over this rank's tokens. Gives its own heads' over all."""
        return self.settle.merge("dcp", out, lse, live)


def context_group(deal: Interleave, settle: Settling) -> ContextGroup | None:
    """This rank's; None where no tokens are sharded."""
    if settle.mesh.dcp == 1:
        return None
    return ContextGroup(deal, settle.mesh.peers("dcp", settle.rank).index(settle.rank), settle)
