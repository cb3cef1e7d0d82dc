"""Delayed rows of the draft layer: their steps asked for no drafts.

They run in one pass, before a step that asks for drafts or changes a page table. So the layer's caches have all tokens
when they are read, and a pause costs one pass instead of one each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

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


class DelayedRows:
    """Delayed rows of a rank. limit: maximum rows of a DP group."""

    def __init__(self, limit: int):
        self._limit, self._counts = min(limit, MAX_ROWS), Counter[int]()  # rows of each DP group
        self._places, self._tokens, self._hidden = list[tuple[int, int]](), list[Tensor](), list[Tensor]()

    def add(self, step: Step, rows: Sequence[int], table: RowTable, tokens: Tensor, hidden: Tensor) -> None:
        """Add a step that has run. rows: rows of the table. tokens, hidden: of the pass, `[T]` and `[T, width]`, which
        are copied."""
        self._counts.update(dict(enumerate(step.counts)))
        self._places += [(row, table.rows[row].length - 1) for row in rows]
        self._tokens.append(tokens.long().clamp(min=0))
        self._hidden.append(hidden.clone())

    def due(self, step: Step) -> Counts:
        """Return the delayed rows of each DP group that must run before a step; empty: none."""
        waits = is_delayed(step) and all(self._counts[at] + n <= self._limit for at, n in enumerate(step.counts))
        return () if waits else tuple(self._counts[at] for at in range(len(self._counts)))

    def taken(self, table: RowTable) -> tuple[Batch, Tensor]:
        """Return the batch of all rows, with their hidden rows, and forget them."""
        seqs = [SeqRows(1, position, table.rows[row].tables, 0) for row, position in self._places]
        batch = build_batch([0] * len(seqs), seqs, table.page_size, table.rules, table.device)
        batch, hidden = replace(batch, tokens=torch.cat(self._tokens)), torch.cat(self._hidden)
        for each in (self._counts, self._places, self._tokens, self._hidden):
            each.clear()
        return batch, hidden
