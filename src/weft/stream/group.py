"""A rank's end of its dcp group: its tokens, and the group's exchanges around attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.comm.transport import LiveSizes
from weft.planner.recipes import QUERIES, TOKENS, Gather, Prompt
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.interleave import Interleave


@dataclass(frozen=True)
class ContextGroup:
    """Attention over tokens that are sharded over ranks. place: index of this rank in the group.

    Without rows neither gather nor merge communicates.
    """

    interleave: Interleave
    place: int
    exchanges: BlockExchanges

    def lengths(self, lengths: Tensor) -> Tensor:
        """Return the number of tokens on this rank of sequences of these lengths."""
        return self.interleave.length(lengths, self.place)

    def slots(self, slots: Tensor) -> Tensor:
        """Return this rank's slots of rows, −1 for rows of other ranks: see `Interleave.slots`."""
        return self.interleave.slots(slots, self.place)

    def prefill(self, what: Prompt, rows: int) -> str:
        """Return the recipe for attention of a step's prompts, with `rows` rows; the same on all ranks."""
        return self.exchanges.recipe(what, "dcp", rows)

    def heads(self, q: Tensor) -> Tensor:
        """Return all ranks' heads, in rank order: `[T, heads, D]` → `[T, ranks · heads, D]`."""
        ranks, (rows, heads, dim) = self.interleave.ranks, q.shape
        what = Gather(QUERIES, heads * dim * q.element_size(), relaid=True)
        gathered = self.exchanges.gather(what, "dcp", q.reshape(rows, heads * dim), (rows,) * ranks)
        return gathered.view(ranks, rows, heads, dim).transpose(0, 1).reshape(rows, ranks * heads, dim)

    def tokens(self, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the cached tokens of all ranks `[sum(sizes), width]`, in rank order; rows: this rank's."""
        return self.exchanges.gather(Gather(TOKENS, rows.shape[1] * rows.element_size()), "dcp", rows, sizes)

    def rows_of_call(self, what: Gather, rows: int) -> int:
        """Return the maximum rows of each rank per call for `rows` rows; 0 if no transport has the capacity."""
        return self.exchanges.rows_of_call(what, "dcp", rows)

    def gather_live(self, what: Gather, rows: Tensor, live: Tensor) -> Tensor:
        """Return all ranks' rows, rank after rank, `[ranks · N, width]`; only the device knows their numbers.

        rows: `[N, width]`, this rank's, N at most `rows_of_call` of `what`. live: int32 `[ranks]`, rows of each rank.
        """
        return self.exchanges.gather(what, "dcp", rows, LiveSizes((len(rows),) * self.interleave.ranks, live))

    def merge(self, out: Tensor, lse: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Merge out `[T, H, D]`, lse `[T, H]` of all heads over this rank's tokens; return own heads over all tokens.
        live: int32 `[1]`, rows to merge; None: all."""
        return self.exchanges.merge("dcp", out, lse, live)


def context_group(interleave: Interleave, exchanges: BlockExchanges) -> ContextGroup | None:
    """Return this rank's group; None if tokens are not sharded."""
    if exchanges.mesh.dcp == 1:
        return None
    place = exchanges.mesh.peers("dcp", exchanges.rank).index(exchanges.rank)
    return ContextGroup(interleave, place, exchanges)
