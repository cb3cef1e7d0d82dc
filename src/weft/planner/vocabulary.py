"""Savings and costs of a decode step with embedding and head split over ranks.

A rank then reads its share of the head's weights and computes its share of the logits. In return the embedding owes a
sum, which the residual stream's plan pays, and the ranks gather each rank's best token of a row with its score. For a
row that asks for more than its best token, they gather all logits of the row.
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
"""Bytes of a token and its score, and of a logit."""
MAX_TOKENS = 1 << 24
"""Number of tokens that float32 can count: a row's best token travels next to its score."""
SMALL_KERNELS = 1
"""Extra kernel launches of a split in a decode step on a GPU: local argmax before the gather."""


@dataclass(frozen=True, slots=True)
class SplitHead:
    """Head that is split by tokens over `ranks` ranks. token_bytes: bytes of a token's weights."""

    ranks: int
    tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class SplitStep:
    """Decode step of `rows` rows in each DP group with a split vocabulary."""

    rows: int
    embedding_us: float  # extra µs of the plan for the embedding's sum
    best: BlockOp  # gather of best tokens
    best_bytes: int  # bytes that a rank receives in `best`
    kernels_us: float  # µs of SMALL_KERNELS
    head_us: float  # µs of the head's GEMM with a rank's share of the weights
    whole_head_us: float  # µs of the head's GEMM with all weights
    logits: BlockOp  # gather of the logits of rows that ask for them
    logits_bytes: int  # bytes that a rank receives in `logits`

    @property
    def saved_us(self) -> float:
        """µs saved by the split; below 0 if it takes longer."""
        return self.whole_head_us - self.head_us - self.kernels_us - self.best.us - self.embedding_us


def best_tokens(rows: int) -> Gather:
    """Return the gather of best tokens; all rows of a rank travel as one."""
    return Gather("best tokens", BEST_BYTES * rows)


def logit_rows(tokens: int, ranks: int) -> Gather:
    """Return the gather of a row's logits: each rank sends the size of the largest share."""
    return Gather("logits", -(-tokens // ranks) * LOGIT_BYTES)


def split_step(head: SplitHead, rows: int, embedding_us: float, prices: BlockPrices) -> SplitStep:
    """Return the costs of the split for `rows` rows. Raises LayoutError if no transport gathers."""
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
    """Return the step as plain values, with its savings."""
    how = {
        name: {"transport": plan.transport, "us": plan.us}
        for name, plan in (("best", step.best), ("logits", step.logits))
    }
    plain = {f.name: getattr(step, f.name) for f in fields(step) if f.name not in how}
    return plain | how | {"saved_us": step.saved_us}


def vocabulary_text(tokens: int, ranks: int, steps: Sequence[SplitStep]) -> str:
    """Return a text on `steps` with a vocabulary of `tokens` over `ranks`: cost and saving of the split in each."""
    rows = [("  rows in each DP group", "embedding", "best tokens", "by", "head", "saved")]
    full_rows = [("  logits, where a row asks for more", "by", "bytes a rank", "")]
    for s in steps:
        best, head = s.best.us + s.kernels_us, s.head_us - s.whole_head_us
        cells = (f"+{s.embedding_us:,.1f} µs", f"+{best:,.1f} µs", s.best.transport, f"−{-head:,.1f} µs")
        rows.append((f"  {s.rows:,}", *cells, f"{s.saved_us:,.1f} µs".replace("-", "−")))
        full_rows.append((f"  {s.rows:,}", s.logits.transport, size_text(s.logits_bytes), f"{s.logits.us:,.1f} µs"))
    title = f"vocabulary: {tokens:,} tokens split over attn_tp={ranks}: cost and saving per decode step"
    return "\n".join([title, *columns(rows), *columns(full_rows)])
