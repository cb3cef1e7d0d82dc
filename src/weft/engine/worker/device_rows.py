"""The part of a rank's table of sequences that CUDA graphs read and write on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.engine.device import on_device
from weft.engine.messages import GroupRows, Join
from weft.engine.worker.row_table import RowTable


class DeviceRows:
    """Lengths, page tables, sampling parameters and last tokens of a table's rows, on the device.

    Attributes:
        length: int32 `[rows]`.
        entries: int32, the tables of all cache groups side by side, each as wide as `widths` says: `[rows,
            max_pages]`, the page table, or `[rows, 2]`, the slots of the state before and after the next step. −1: no
            page, as where a window has passed.
        temperature, min_p: float32 `[rows]`.
        seed: int64 `[rows]`.
        last_token: the table's.
        steps: int32 `[1]`, how many graphs ran; each begins by counting itself.
    """

    def __init__(self, table: RowTable, max_pages: int):
        self.last_token, device = table.last_token, table.device
        max_rows, self.widths = len(self.last_token), [2 if rule.state else max_pages for rule in table.rules]
        self.length = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # Side by side, so that a step's new entries of all groups are one copy.
        self.entries = torch.full((max_rows, sum(self.widths)), -1, dtype=torch.int32, device=device)
        self._begins = [0, *itertools.accumulate(self.widths)]
        self.temperature, self.min_p = torch.zeros(2, max_rows, device=device)
        self.seed = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)

    def apply(self, group_rows: GroupRows) -> None:
        """As `RowTable.apply`; copies are queued on torch's current stream. ValueError for an entry beyond a table."""
        at: list[int] = []
        values: list[int] = []
        for join in group_rows.joins:
            self._join(join)
            for group, table in enumerate(join.tables):
                first = self._place(join.row, group, len(table) - 1) + 1 - len(table)
                at += range(first, first + len(table))
                values += table
        for entry in group_rows.entries:
            at.append(self._place(entry.row, entry.group, entry.index))
            values.append(entry.value)
        if at:
            _put(self.entries.view(-1), at, values)

    def _place(self, row: int, group: int, index: int) -> int:
        """The index of a table's entry among all entries."""
        if self._begins[group] + index >= self._begins[group + 1]:
            raise ValueError(f"entry {index} of a table of {self.widths[group]} entries")
        return row * self._begins[-1] + self._begins[group] + index

    def _join(self, join: Join) -> None:
        for tensor, value in (
            (self.length, join.context),
            (self.temperature, join.sampling.temperature),
            (self.min_p, join.sampling.min_p),
            (self.seed, join.sampling.seed),
        ):
            tensor[join.row].fill_(value)  # a launch that holds the value: no copy from the host

    def ran(self, table: RowTable, group_rows: GroupRows) -> None:
        """After a step without a graph: copies the new lengths of its rows to the device."""
        rows = [*group_rows.decode_rows, *(chunk.row for chunk in group_rows.chunks)]
        _put(self.length, rows, [table.rows[row].length for row in rows])


def _put(to: Tensor, at: Sequence[int], values: Sequence[int]) -> None:
    """to[at] = values, of int32 on the device: one copy and one kernel, as int32 are every other of int64's halves."""
    put = on_device([at, values], torch.int64, to.device)
    to.index_copy_(0, put[0], put[1].view(torch.int32)[::2])
