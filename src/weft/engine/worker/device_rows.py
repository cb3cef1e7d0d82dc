"""The part of a rank's table of sequences that CUDA graphs read and write on the device."""

from __future__ import annotations

import itertools
import struct
from array import array

import torch
from torch import Tensor

from weft.engine.messages import GroupRows
from weft.engine.worker.row_table import RowTable

JOINED = struct.Struct("=iffq")
"""What of a join is copied beside its tables, in the order of `DeviceRows.apply`."""


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
        # Side by side, so that all that a step changes is one copy; each part begins at a multiple of 16 bytes.
        widths = (2, 1, 1, 1, sum(self.widths))
        sizes = [-(-max_rows * width // 4) * 4 for width in widths]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        seed, length, temperature, min_p, entries = self._all.split(sizes)
        self.seed, self.length = seed[: 2 * max_rows].view(torch.int64), length[:max_rows]
        self.temperature, self.min_p = (each[:max_rows].view(torch.float32) for each in (temperature, min_p))
        self.entries = entries[: max_rows * sum(self.widths)].fill_(-1).view(max_rows, -1)
        self._seeds, self._lengths, self._temperatures, self._min_ps, self._entries, _ = itertools.accumulate(
            sizes, initial=0
        )
        self._begins = [0, *itertools.accumulate(self.widths)]
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)

    def apply(self, group_rows: GroupRows) -> None:
        """As `RowTable.apply`, by one copy, which is queued on torch's current stream. ValueError for an entry beyond a
        table."""
        if not (group_rows.joins or group_rows.entries):
            return
        at, values = array("q"), array("i")
        for join in group_rows.joins:
            row, how = join.row, join.sampling
            at.extend([self._lengths + row, self._temperatures + row, self._min_ps + row])
            at.extend([self._seeds + 2 * row, self._seeds + 2 * row + 1])
            values.frombytes(JOINED.pack(join.context, how.temperature, how.min_p, how.seed))
            for group, table in enumerate(join.tables):
                first = self._place(row, group, len(table) - 1) + 1 - len(table)
                at.extend(range(first, first + len(table)))
                values.extend(table)
        for entry in group_rows.entries:
            at.append(self._place(entry.row, entry.group, entry.index))
            values.append(entry.value)
        _put(self._all, at, values)

    def _place(self, row: int, group: int, index: int) -> int:
        """Where a table's entry is among all that is here."""
        if self._begins[group] + index >= self._begins[group + 1]:
            raise ValueError(f"entry {index} of a table of {self.widths[group]} entries")
        return self._entries + row * self._begins[-1] + self._begins[group] + index

    def ran(self, table: RowTable, group_rows: GroupRows) -> None:
        """After a step without a graph: copies the new lengths of its rows to the device."""
        rows = array("q", [*group_rows.decode_rows, *(chunk.row for chunk in group_rows.chunks)])
        _put(self.length, rows, array("i", [table.rows[row].length for row in rows]))


def _put(to: Tensor, at: array[int], values: array[int]) -> None:
    """to[at] = values, of int32 on the device: one copy and one kernel. at, values: of int64 and int32."""
    both = array("i", at.tobytes())
    both.extend(values)
    host = torch.frombuffer(both, dtype=torch.int32)
    # Pinned memory that torch keeps until the copy has ended.
    put = host.pin_memory().to(to.device, non_blocking=True) if to.is_cuda else host
    to.index_copy_(0, put[: 2 * len(at)].view(torch.int64), put[2 * len(at) :])
