"""Device part of a rank's table of sequences, read and written by CUDA graphs."""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.engine.messages.rank_messages import NEUTRAL, PARAMETERS, SHARE_PARAMETERS, GroupRows
from weft.engine.worker.row_table import NO_TOKEN, RowTable
from weft.engine.worker.staged_writes import PinnedWrites, StagedWrites

FORMATS = {float: ("f", torch.float32), int: ("i", torch.int32)}
"""Formats of a sampling parameter in `struct` and on the device, by its Python type."""


class DeviceRows:
    """Lengths, page tables, sampling parameters and last tokens of a table's rows, on the device.

    Attributes:
        length: int32 `[rows]`.
        entries: int32, the tables of all cache groups side by side, with `widths` columns: a page table `[rows,
            max_pages]`, or `[rows, 2]`, the slots of the state before and after the next step. −1: no page, such as
            behind a window.
        parameters: float32 or int32 `[rows]`, by the names of `PARAMETERS`.
        seed: int64 `[rows]`.
        last_token: the table's `last_token`.
        steps: int32 `[1]`, number of graphs replayed; each graph first increments it.
        max_sampled: maximum sampled tokens of a step.
        writes: pending changes of these tensors and of other inputs of graphs, before the next replay.
    """

    def __init__(self, table: RowTable, max_pages: int, max_drafts: int = 0):
        self.last_token, device = table.last_token, table.device
        self.max_sampled = len(self.last_token) + max_drafts
        max_rows, self.widths = len(self.last_token), [2 if rule.state else max_pages for rule in table.rules]
        # One tensor, so that all changes of a step are one copy; each part begins at a multiple of 16 bytes.
        formats = {name: FORMATS[type(getattr(NEUTRAL, name))] for name in PARAMETERS}
        widths = (2, 1, *[1] * len(formats), sum(self.widths))
        sizes = [-(-max_rows * width // 4) * 4 for width in widths]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        seed, length, *parameters, entries = self._all.split(sizes)
        self.seed, self.length = seed[: 2 * max_rows].view(torch.int64), length[:max_rows]
        named = zip(parameters, formats.items(), strict=True)
        self.parameters = {name: values[:max_rows].view(dtype) for values, (name, (_, dtype)) in named}
        self.entries = entries[: max_rows * sum(self.widths)].fill_(-1).view(max_rows, -1)
        self._seeds, *self._columns, self._entries, _ = itertools.accumulate(sizes, initial=0)
        self._joined = struct.Struct("".join(["=i", *(code for code, _ in formats.values()), "q"]))
        self._begins = [0, *itertools.accumulate(self.widths)]
        self.steps = torch.zeros(1, dtype=torch.int32, device=device)
        self.writes = PinnedWrites(self._all) if device.type == "cuda" else StagedWrites()

    def apply(self, group_rows: GroupRows) -> None:
        """Apply a message's changes, with cleared last tokens. Raises ValueError for an entry beyond a table."""
        self.stage(group_rows)
        self.writes.flush()

    def stage(self, group_rows: GroupRows) -> None:
        """Stage the changes of `apply` for the next flush of `writes`."""
        if not (group_rows.joins or group_rows.entries):
            return
        at, values = array("q"), array("i")
        for join in group_rows.joins:
            row, how = join.row, join.sampling
            at.extend([*(column + row for column in self._columns), self._seeds + 2 * row, self._seeds + 2 * row + 1])
            parameters = (getattr(how, name) for name in self.parameters)
            values.frombytes(self._joined.pack(join.context, *parameters, how.seed))
            for group, table in enumerate(join.tables):
                first = self._place(row, group, len(table) - 1) + 1 - len(table)
                at.extend(range(first, first + len(table)))
                values.extend(table)
        for entry in group_rows.entries:
            end = self._place(entry.row, entry.group, entry.first + len(entry.values) - 1) + 1
            at.extend(range(end - len(entry.values), end))
            values.extend(entry.values)
        self.writes.write(self._all, at, values)
        joined = array("q", [join.row for join in group_rows.joins])
        self.writes.write(self.last_token, joined, array("i", [NO_TOKEN]) * len(joined))

    def _place(self, row: int, group: int, index: int) -> int:
        """Return the index of a table's entry in the tensor of all parts."""
        if self._begins[group] + index >= self._begins[group + 1]:
            raise ValueError(f"entry {index} of a table of {self.widths[group]} entries")
        return self._entries + row * self._begins[-1] + self._begins[group] + index

    def ran(self, table: RowTable, group_rows: GroupRows, last: Sequence[int] = ()) -> None:
        """Write the new lengths of a step's rows, after a step without a graph or with drafts. last: last tokens of its
        decode rows, if they have drafts."""
        rows = array("q", [*group_rows.decode_rows, *(chunk.row for chunk in group_rows.chunks)])
        self.writes.write(self.length, rows, array("i", [table.rows[row].length for row in rows]))
        self.writes.write(self.last_token, rows[: len(last)], array("i", last))
        self.writes.flush()

    def sample(self, logits: Tensor, rows: Tensor, position: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Sample next tokens by the kernels of graphs. Returns (score float32 `[S]`, token int32 `[S]`).

        Args:
            logits: float32 `[S, vocabulary]`, or this rank's share `[S, own]`.
            rows: int64 `[S]`, of the table.
            position: int64 `[S]`, of the sampled tokens in their sequences.
            first: first token of the share; then only `SHARE_PARAMETERS` apply.
        """
        from weft.engine.kernels.triton.sample import sample  # a CPU need not have Triton

        table = rows.int()
        how = {name: self.parameters[name] for name in (PARAMETERS if first is None else SHARE_PARAMETERS)}
        places = dict(position=position.int(), live=table.new_full((1,), len(rows)), table=table)
        return sample(logits.contiguous(), seed=self.seed, first=first or 0, **how, **places)
