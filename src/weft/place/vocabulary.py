"""What splitting embedding and head over ranks saves a decode step, and what it costs.

A rank then reads its share of the head's weights for its share of the logits. In return the embedding owes a sum, which
the plan of the residual stream settles, and the ranks gather each one's best token of a row with its score. Where a row
asks for more than its best token, they gather whole rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from weft.place.recipes import Gather
from weft.place.settlements import Settled, Settlements
from weft.place.show import columns, size_text

BEST_BYTES, LOGIT_BYTES = 8, 4
"""Of a token and its score; of a logit."""
MAX_TOKENS = 1 << 24
"""Tokens that float32 tells apart: a row's best token travels beside its score."""
SMALL_KERNELS = 1
"""That a split adds to a decode step on a GPU: what finds the best of a rank's tokens, for the gather of all ranks'."""


@dataclass(frozen=True, slots=True)
class Head:
    """Whose tokens are split over `ranks` ranks. token_bytes: of a token's weights."""

    ranks: int
    tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A decode step of so many rows in each DP group with a split vocabulary; times in µs.

    embedding_us: that the plan takes longer for the embedding's sum. best, logits: how best tokens are gathered, and
    whole rows where one is asked for; best_bytes, logits_bytes: that a rank receives then. kernels_us: of
    SMALL_KERNELS. head_us, whole_head_us: of the head's product, by a rank's share of the weights and by all of them.
    """

    rows: int
    embedding_us: float
    best: Settled
    best_bytes: int
    kernels_us: float
    head_us: float
    whole_head_us: float
    logits: Settled
    logits_bytes: int

    @property
    def saved_us(self) -> float:
        """Below 0: the split takes longer."""
        return self.whole_head_us - self.head_us - self.kernels_us - self.best.us - self.embedding_us


def best_tokens(rows: int) -> Gather:
    """What the ranks gather of rows that take their best token: all rows of a rank travel as one."""
    return Gather("best tokens", BEST_BYTES * rows)


def logit_rows(tokens: int, ranks: int) -> Gather:
    """What they gather of a row that asks for more: a run of logits each, as long as the longest."""
    return Gather("logits", -(-tokens // ranks) * LOGIT_BYTES)


def split_step(head: Head, rows: int, embedding_us: float, settlements: Settlements) -> SplitStep:
    """Raises LayoutError where nothing gathers."""
    local_us, ranks, share = settlements.local_us, head.ranks, -(-head.tokens // head.ranks)
    return SplitStep(
        rows,
        embedding_us,
        best=settlements.cheapest(best_tokens(rows), "attn_tp", 1),
        best_bytes=rows * BEST_BYTES * (ranks - 1),
        kernels_us=SMALL_KERNELS * local_us(rows * BEST_BYTES * ranks),
        head_us=local_us(share * head.token_bytes),
        whole_head_us=local_us(head.tokens * head.token_bytes),
        logits=settlements.cheapest(logit_rows(head.tokens, ranks), "attn_tp", rows),
        logits_bytes=rows * share * LOGIT_BYTES * (ranks - 1),
    )


def vocabulary_dict(step: SplitStep) -> dict[str, Any]:
    """The step as plain values, with what it saves."""
    how = {
        name: {"transport": plan.transport, "us": plan.us}
        for name, plan in (("best", step.best), ("logits", step.logits))
    }
    plain = {f.name: getattr(step, f.name) for f in fields(step) if f.name not in how}
    return plain | how | {"saved_us": step.saved_us}


def vocabulary_text(tokens: int, ranks: int, steps: Sequence[SplitStep]) -> str:
    """The same of several steps for reading: what the split adds to a step, and what it takes away."""
    rows = [("  rows in each DP group", "embedding", "best tokens", "by", "head", "saved")]
    whole = [("  logits, where a row asks for more", "by", "bytes a rank", "")]
    for s in steps:
        best, head = s.best.us + s.kernels_us, s.head_us - s.whole_head_us
        cells = (f"+{s.embedding_us:,.1f} µs", f"+{best:,.1f} µs", s.best.transport, f"−{-head:,.1f} µs")
        rows.append((f"  {s.rows:,}", *cells, f"{s.saved_us:,.1f} µs".replace("-", "−")))
        whole.append((f"  {s.rows:,}", s.logits.transport, size_text(s.logits_bytes), f"{s.logits.us:,.1f} µs"))
    title = f"vocabulary: {tokens:,} tokens split over attn_tp={ranks}: what decode steps take by it"
    return "\n".join([title, *columns(rows), *columns(whole)])
