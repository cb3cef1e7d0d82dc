"""Delayed rows of the draft layer: their steps asked for no drafts.

They run in one pass, before a step that asks for drafts or changes a page table. So the layer's caches have all tokens
when they are read, and a pause costs one pass instead of one each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.forward_batch import Batch
from weft.engine.messages.rank_messages import Step
from weft.engine.worker.row_table import RowTable
from weft.planner.chain import Counts

MAX_ROWS = 256
"""Maximum delayed rows of a DP group: a limit of memory, and of the time of their pass."""


def is_delayed(step: Step) -> bool:
    """Tell whether the first pass of a step is delayed: each row decodes one token, on pages that ranks know."""
    changed = (group.chunks or group.joins or group.entries or group.decode_tokens for group in step.groups)
    return not step.drafts and not any(changed)


class DelayedStep(NamedTuple):
    """Rows of one step.

    Attributes:
        counts: rows of each DP group.
        places: row of the table and position of each row of this DP group.
        tokens: int64 `[T]`, tokens that the rows run.
        hidden: `[T, width]`, as of the layer.
    """

    counts: Counts
    places: Sequence[tuple[int, int]]
    tokens: Tensor
    hidden: Tensor


class DelayedRows:
    """Delayed rows of a rank. limit: maximum rows of a DP group."""

    def __init__(self, limit: int):
        self._steps, self._limit = list[DelayedStep](), min(limit, MAX_ROWS)

    def add(self, step: Step, rows: Sequence[int], table: RowTable, tokens: Tensor, hidden: Tensor) -> None:
        """Add a step that has run. rows: rows of the table; tokens, hidden: copied, see `DelayedStep`."""
        places = [(row, table.rows[row].length - 1) for row in rows]
        self._steps.append(DelayedStep(step.counts, places, tokens.long().clamp(min=0), hidden.clone()))

    def due(self, step: Step) -> Counts:
        """Return the delayed rows of each DP group that must run before a step; empty: none."""
        counts = tuple(map(sum, zip(*(each.counts for each in self._steps), strict=True)))
        if is_delayed(step) and max(map(sum, zip(counts, step.counts, strict=False)), default=0) <= self._limit:
            return ()
        return counts

    def taken(self, table: RowTable) -> tuple[Batch, Tensor]:
        """Return the batch of all rows, with their hidden rows, and forget them."""
        steps, self._steps = self._steps, []
        seqs = [SeqRows(1, position, table.rows[row].tables, 0) for each in steps for row, position in each.places]
        batch = build_batch([0] * len(seqs), seqs, table.page_size, table.rules, table.device)
        tokens = torch.cat([each.tokens for each in steps])
        return replace(batch, tokens=tokens), torch.cat([each.hidden for each in steps])
