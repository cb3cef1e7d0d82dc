"""What a split of embedding and head over ranks saves in a decode step, and what it costs.

A rank then reads its share of the head's weights and computes its share of the logits. In return the embedding owes a
sum, which the plan of the residual stream settles, and the ranks gather each rank's best token of a row with its score.
For a row that asks for more than its best token, they gather all its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from weft.planner.op import BlockOp
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Gather
from weft.planner.show import columns, size_text

BEST_BYTES, LOGIT_BYTES = 8, 4
"""Bytes of a token and its score; of a logit."""
MAX_TOKENS = 1 << 24
"""Number of tokens that float32 can count: a row's best token travels beside its score."""
SMALL_KERNELS = 1
"""Extra kernel launches of a split in a decode step on a GPU: local argmax before the gather."""


@dataclass(frozen=True, slots=True)
class Head:
    """A head that is split by tokens over `ranks` ranks. token_bytes: of a token's weights."""

    ranks: int
    tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A decode step of so many rows in each DP group with a split vocabulary; times in µs.

    embedding_us: extra time of the plan for the embedding's sum.
    best, logits: the plans that gather best tokens, and logits where a row asks for them. best_bytes, logits_bytes:
    that a rank receives.
    kernels_us: of SMALL_KERNELS. head_us, whole_head_us: of the head's product, with a rank's share of the weights and
    with all of them.
    """

    rows: int
    embedding_us: float
    best: BlockOp
    best_bytes: int
    kernels_us: float
    head_us: float
    whole_head_us: float
    logits: BlockOp
    logits_bytes: int

    @property
    def saved_us(self) -> float:
        """Below 0: the split takes longer."""
        return self.whole_head_us - self.head_us - self.kernels_us - self.best.us - self.embedding_us


def best_tokens(rows: int) -> Gather:
    """What the ranks gather for rows that take their best token: all rows of a rank travel as one."""
    return Gather("best tokens", BEST_BYTES * rows)


def logit_rows(tokens: int, ranks: int) -> Gather:
    """What they gather for a row that asks for more: from each rank as many logits as the largest share has."""
    return Gather("logits", -(-tokens // ranks) * LOGIT_BYTES)


def split_step(head: Head, rows: int, embedding_us: float, prices: BlockPrices) -> SplitStep:
    """Raises LayoutError where no transport gathers."""
    local_us, ranks, share = prices.local_us, head.ranks, -(-head.tokens // head.ranks)
    return SplitStep(
        rows,
        embedding_us,
        best=prices.cheapest(best_tokens(rows), "attn_tp", 1),
        best_bytes=rows * BEST_BYTES * (ranks - 1),
        kernels_us=SMALL_KERNELS * local_us(rows * BEST_BYTES * ranks),
        head_us=local_us(share * head.token_bytes),
        whole_head_us=local_us(head.tokens * head.token_bytes),
        logits=prices.cheapest(logit_rows(head.tokens, ranks), "attn_tp", rows),
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
    """Several steps for people: what the split adds to a step, and what it saves."""
    rows = [("  rows in each DP group", "embedding", "best tokens", "by", "head", "saved")]
    whole = [("  logits, where a row asks for more", "by", "bytes a rank", "")]
    for s in steps:
        best, head = s.best.us + s.kernels_us, s.head_us - s.whole_head_us
        cells = (f"+{s.embedding_us:,.1f} µs", f"+{best:,.1f} µs", s.best.transport, f"−{-head:,.1f} µs")
        rows.append((f"  {s.rows:,}", *cells, f"{s.saved_us:,.1f} µs".replace("-", "−")))
        whole.append((f"  {s.rows:,}", s.logits.transport, size_text(s.logits_bytes), f"{s.logits.us:,.1f} µs"))
    title = f"vocabulary: {tokens:,} tokens split over attn_tp={ranks}: what decode steps take by it"
    return "\n".join([title, *columns(rows), *columns(whole)])
