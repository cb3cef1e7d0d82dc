"""Delayed rows of the draft layer: their steps asked for no drafts.

They run in one pass, before a step that asks for drafts or brings a sequence. So the layer's caches have all tokens
when they are read, and a pause costs one pass instead of one each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.kernels.staging import on_device
from weft.engine.messages.rank_messages import GroupRows, Step
from weft.engine.worker.row_table import RowTable
from weft.planner.chain import Counts

MAX_ROWS = {"cpu": 256, "cuda": 1024}
"""Maximum delayed rows of a DP group, by device: a limit of memory, and of the time of their pass."""


class DelayedRows:
    """Delayed rows of a rank.

    limit: maximum rows of a DP group, and an attribute, at most MAX_ROWS. width: elements of a hidden row. like: tensor
    of their dtype and device. windows: cache groups with pages that the rows read, and that others may get once a
    window has passed them.
    """

    def __init__(self, limit: int, width: int, like: Tensor, windows: Collection[int] = ()):
        self._windows = windows
        self.limit = min(limit, MAX_ROWS[like.device.type])
        self._counts, self._places = Counter[int](), list[tuple[int, int]]()  # rows of each DP group; row, position
        self._pages = set[tuple[int, int]]()  # (cache group, page) of each place
        self._lost = set[tuple[int, int]]()  # (cache group, index of a place): its page is another row's
        self._tokens = torch.zeros(self.limit, dtype=torch.int64, device=like.device)
        self._hidden = like.new_empty(self.limit, width)

    def add(
        self, counts: Counts, rows: Sequence[int], table: RowTable, tokens: Tensor, hidden: Tensor, behind: int = 0
    ) -> None:
        """Add a step that has run.

        Args:
            counts: rows of each DP group.
            rows: rows of the table, one token each.
            tokens, hidden: of the pass, `[≥ T]` and `[≥ T, width]`, which are copied.
            behind: steps that the table does not count yet.
        """
        first, size = len(self._places), table.page_size
        for group, count in enumerate(counts):
            self._counts[group] += count
        for row in rows:
            position = table.rows[row].length - 1 + behind
            self._places.append((row, position))
            for group, pages in enumerate(table.rows[row].tables):
                self._pages.add((group, pages[position // size]))
        new = slice(first, len(self._places))
        self._tokens[new].copy_(tokens[: len(rows)])
        self._hidden[new].copy_(hidden[: len(rows)])

    def delays(self, step: Step, counts: Counts) -> bool:
        """Tell whether the first pass of a step with these counts is delayed: each row decodes one token, they are not
        too many, and no row gets a page that delayed rows may read."""
        changed = (group.chunks or group.joins or group.decode_tokens for group in step.groups)
        if step.drafts or max(counts) > self.limit or any(changed):
            return False
        return not any(entry.group in self._windows for group in step.groups for entry in group.entries)

    def takes(self, step: Step, counts: Counts) -> bool:
        """Tell whether a step with these counts of rows can be added to the rows that are here."""
        return self.delays(step, counts) and all(self._counts[at] + n <= self.limit for at, n in enumerate(counts))

    def due(self, step: Step) -> Counts:
        """Return the delayed rows of each DP group that must run before a step; empty: none."""
        waits = not self._counts or self.takes(step, step.counts)
        return () if waits else tuple(self._counts[at] for at in range(len(self._counts)))

    def give_away(self, rows: GroupRows, table: RowTable) -> None:
        """Note, before a step's changes of the table, which pages of ended sequences it gives to others."""
        if not (rows.entries and self._places):
            return
        given = {(entry.group, page) for entry in rows.entries for page in entry.values}
        if given.isdisjoint(self._pages):
            return
        for index, (row, position) in enumerate(self._places):
            for group, pages in enumerate(table.rows[row].tables):
                if (group, pages[position // table.page_size]) in given:
                    self._lost.add((group, index))

    def taken(self, table: RowTable) -> tuple[Batch, Tensor]:
        """Return the batch of all rows, with their hidden rows, and forget them."""
        seqs, count = (
            [SeqRows(1, position, table.rows[row].tables, 0) for row, position in self._places],
            len(self._places),
        )
        batch = build_batch([0] * count, seqs, table.page_size, table.rules, table.device)
        for group, tables in enumerate(batch.tables):
            if (lost := [at for of, at in self._lost if of == group]) and isinstance(tables, PageTables):
                tables.slots.index_fill_(0, on_device(lost, torch.int64, table.device), -1)
        batch = replace(batch, tokens=self._tokens[:count].clamp(min=0))
        for each in (self._counts, self._places, self._pages, self._lost):
            each.clear()
        return batch, self._hidden[:count]
