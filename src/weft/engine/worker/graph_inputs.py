"""Inputs of CUDA graphs: for steps of decode rows only, and for steps with prompts.

The last token, length, page tables and state slots of a row are on the device already
(`weft.engine.worker.device_rows.DeviceRows`). So the host copies only the numbers of a step's rows and prompt tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.engine.attention.caches import Caches
from weft.engine.attention.context_parallel import ContextParallel
from weft.engine.attention.forward_batch import Batch, PageTables, StateSlots
from weft.engine.kernels import cpu_ops
from weft.engine.kernels.staging import fill
from weft.engine.kernels.step_inputs import StepInputs, TablePieces, table_pieces
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.worker.device_rows import DeviceRows
from weft.planner.prices import Recipes
from weft.planner.recipes import Prompt


class Shape(NamedTuple):
    """Capacity of a graph per DP group.

    Attributes:
        rows: rows of a step.
        sampled: sampled tokens of a step.
        prompts: sequences may have several rows; otherwise each has one and samples a token.
    """

    rows: int
    sampled: int
    prompts: bool


class SampledRows(NamedTuple):
    """Sequences of a step that sample a token. Tensors have the graph's capacity.

    Attributes:
        rows: int32 `[sampled]`, rows of the table.
        live: int32 `[1]`, number of valid `rows`.
        decode_count: int32 `[1]`, number of decode rows, which come first.
        lengths: int32 `[sampled]`, tokens of each sequence, including this step's.
    """

    rows: Tensor
    live: Tensor
    decode_count: Tensor
    lengths: Tensor


class Inputs(Protocol):
    """Inputs of one kind of steps. shapes: shapes of their graphs, ascending."""

    shapes: Sequence[Shape]

    def put(self, group_rows: GroupRows) -> int:
        """Stage or queue the inputs of a replay. Returns the number of sampled rows."""
        ...

    def batch(self, shape: Shape, live: Tensor) -> tuple[Batch, SampledRows]:
        """Return the batch and sampled rows of a graph; a capture runs this once. live: int32 `[1]`, rows of the
        step."""
        ...


def decode_capacities(max_rows: int) -> list[int]:
    """Return capacities of graphs of decode rows: powers of two to 64, then every 64 to 256, then two per doubling; the
    last is `max_rows`. Each graph keeps logits of its rows, and all cost the same time to capture.
    """
    capacities = [*(1 << i for i in range(7)), 128, 192, 256]
    while capacities[-1] < max_rows:
        capacities += [capacities[-1] * 3 // 2, capacities[-1] * 2]
    return sorted({min(c, max_rows) for c in capacities})


def prompt_capacities(max_rows: int) -> list[int]:
    """Return capacities of graphs with prompts. With few rows, the weights' reads dominate and padding costs little;
    from 512 on less than a quarter of a graph's rows is padding.
    """
    capacities = [64, 128, 256, 384]
    while capacities[-1] < max_rows:
        octave = 512 << (len(capacities) - 4) // 4
        capacities += [octave * quarters // 4 for quarters in (4, 5, 6, 7)]
    return sorted({min(c, max_rows) for c in capacities})


def captures_prompts(caches: Caches, recipes: Recipes) -> bool:
    """Tell whether steps with prompts have graphs. recipes: the configured ones.

    They have none if the host loops over prompts, for layers with recurrent states (`Recurrent.by_starts`). If tokens
    are sharded over dcp, they have none if all prompts gather tokens, since their number is unlimited, or if the
    attention backend does not merge prompts.
    """
    by_starts = all(states.spec.by_starts for _, states in caches.states)
    sharded = [backend.local for _, backend in caches.paged if isinstance(backend, ContextParallel)]
    gathers = recipes.get(Prompt) == "gather"
    return by_starts and all(local.prompts.captures_sharded and not gathers for local in sharded)


class DecodeInputs:
    """Inputs of decode steps: one row per sequence, which runs its last token. rules, page_size: of the caches.

    Only the row numbers are copied, and only if they have changed.
    """

    def __init__(self, rows: DeviceRows, rules: Sequence[Rule], page_size: int):
        max_sequences = len(rows.length)
        self.shapes: Sequence[Shape] = [Shape(n, n, False) for n in decode_capacities(max_sequences)]
        self._rows, self._rules, self._page_size = rows, rules, page_size
        self._decode_rows = torch.zeros_like(rows.length)
        self._pieces = table_pieces(rows.widths, [rule.state for rule in rules], rows.length.device)
        self._copied: tuple[int, ...] = ()  # the current content of `_decode_rows`

    def put(self, group_rows: GroupRows) -> int:
        """See `Inputs.put`."""
        decode_rows = group_rows.decode_rows
        if self._copied[: len(decode_rows)] != decode_rows:
            self._rows.writes.fill(self._decode_rows, decode_rows)
            self._copied = decode_rows
        return len(decode_rows)

    def batch(self, shape: Shape, live: Tensor) -> tuple[Batch, SampledRows]:
        """See `Inputs.batch`. Padding rows have length 0, and their keys and values are not stored."""
        rows, decode_rows = self._rows, self._decode_rows[: shape.rows]
        state = decode_rows, live, rows.last_token, rows.length, rows.entries, rows.steps
        inputs = self._step_in(state, self._pieces, self._page_size)
        tables: list[PageTables | StateSlots] = []
        for rule, pages, slots in zip(self._rules, inputs.entries.split(rows.widths, 1), inputs.slots, strict=True):
            tables.append(StateSlots(*slots) if rule.state else PageTables(pages, slots[0]))
        batch = Batch(inputs.tokens, inputs.positions, None, inputs.lengths, tuple(tables), slice(None), None)
        return batch, SampledRows(decode_rows, live, live, inputs.lengths)

    def _step_in(self, state: Sequence[Tensor], pieces: TablePieces, page_size: int) -> StepInputs:
        from weft.engine.kernels.triton.decode_step import step_in  # a CPU need not have Triton

        rows, live, last_token, length, entries, steps = state
        return step_in(rows, live, last_token, length, entries, steps, pieces, page_size)


class RecordedInputs(DecodeInputs):
    """`DecodeInputs` of steps that are recorded on CPUs. Each number of rows has a shape: padding costs time there.

    A draft is a row of its own, one of the table's last, with the pages of the row that it follows.
    """

    _step_in = staticmethod(cpu_ops.step_in)

    def put(self, group_rows: GroupRows) -> int:
        """See `Inputs.put`."""
        if not group_rows.decode_tokens:
            return super().put(group_rows)
        table, first = self._rows, len(self._rows.length) - self._rows.draft_rows
        free = itertools.count(first)
        table.writes.flush()  # tables and lengths of the rows are copied below
        rows, followed, behind = list[int](), list[int](), list[int]()
        for row, count in group_rows.decode_each:
            rows += [row, *itertools.islice(free, count - 1)]
            followed += [row] * (count - 1)
            behind += range(1, count)
        drafts, parents = slice(first, first + len(behind)), torch.tensor(followed)
        table.last_token[drafts] = torch.frombuffer(bytearray(group_rows.drafts), dtype=torch.int32)
        table.length[drafts] = table.length[parents] + torch.tensor(behind, dtype=torch.int32)
        table.entries[drafts] = table.entries[parents]
        table.writes.fill(self._decode_rows, rows)
        self._copied = tuple(rows)
        return len(rows)

    def limit(self, max_rows: int) -> RecordedInputs:
        """Have shapes of up to `max_rows` rows."""
        self.shapes = [Shape(n, n, False) for n in range(1, min(max_rows, len(self._decode_rows)) + 1)]
        return self


class PromptInputs:
    """Inputs of steps with prompts, of up to `max_rows` rows in all. rules, page_size: of the caches.

    Torch's operators compute positions and slots of rows on the device, from lengths and tables: a microsecond or two
    each, small compared with a step of milliseconds. Sequences of one row come first: sequence i has row i.
    """

    def __init__(self, rows: DeviceRows, rules: Sequence[Rule], page_size: int, max_rows: int):
        max_sequences, device = len(rows.length), rows.length.device
        self.shapes: Sequence[Shape] = [Shape(n, min(n, max_sequences), True) for n in prompt_capacities(max_rows)]
        self._rows, self._rules, self._page_size = rows, rules, page_size
        # Use whole units of 16 bytes, since Triton compiles other kernels for unaligned tensors.
        self._capacity = -(-(max_sequences + 1) // 4) * 4
        # One tensor, so that a step has one copy: rows of the table, starts, sampling sequences, number of decode rows,
        # number of sampling sequences, tokens.
        sizes = [self._capacity] * 3 + [4, 4, max_rows]
        self._copied = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = self._copied.split(sizes)
        self._sequences, self._starts, self._sampled, decode_rows, sampled_count, self._tokens = parts
        self._decode_rows, self._sampled_count = decode_rows[:1], sampled_count[:1]
        self._places = torch.arange(max_rows, dtype=torch.int32, device=device)

    def put(self, group_rows: GroupRows) -> int:
        """See `Inputs.put`."""
        decode_rows, chunks = len(group_rows.decode_rows), sorted(group_rows.chunks, key=lambda chunk: chunk.count > 1)
        rows = [*group_rows.decode_rows, *(chunk.row for chunk in chunks)]
        starts = [*range(decode_rows), *itertools.accumulate((c.count for c in chunks), initial=decode_rows)]
        place = {row: at for at, row in enumerate(rows)}
        sampled = [place[row] for row in group_rows.sampled_rows]
        filled = token_array([*rows, *[0] * (self._capacity - len(rows))])
        filled.extend([*starts, *[starts[-1]] * (self._capacity - len(starts))])
        filled.extend([*sampled, *[0] * (self._capacity - len(sampled))])
        filled.extend([decode_rows, 0, 0, 0, len(sampled), 0, 0, 0, *[0] * decode_rows])
        for chunk in chunks:
            filled.frombytes(chunk.tokens)
        fill(self._copied, filled)
        return len(sampled)

    def batch(self, shape: Shape, live: Tensor) -> tuple[Batch, SampledRows]:
        """See `Inputs.batch`. Padding sequences have no rows, and padding rows no sequence, so they are not stored."""
        state, limit, page_size = self._rows, shape.sampled, self._page_size
        rows, starts, sampled = self._sequences[:limit], self._starts[: limit + 1], self._sampled[:limit]
        count, before = starts.diff(), state.length.index_select(0, rows)
        lengths = (before + count).where(count > 0, 0)
        at = self._places[: shape.rows]
        real = at < live
        sequence = torch.searchsorted(starts[1:], at, right=True).clamp(max=limit - 1)
        row = rows.index_select(0, sequence)
        positions = (at + (before - starts[:-1]).index_select(0, sequence)).where(real, 0)
        last = state.last_token.index_select(0, row).clamp(min=0)
        tokens = self._tokens[: shape.rows].where(sequence >= self._decode_rows, last).where(real, 0)
        tables, width, begin = list[PageTables | StateSlots](), state.entries.shape[1], 0
        for rule, each in zip(self._rules, state.widths, strict=True):
            table = state.entries[:, begin : begin + each].index_select(0, rows)
            if rule.state:
                before_slot, after_slot = table.long().t().contiguous().unbind()
                tables.append(StateSlots(before_slot, after_slot.where(count > 0, -1)))
                begin += each
                continue
            entry = row.long() * width + begin + positions // page_size
            page = state.entries.view(-1).index_select(0, entry).long()
            slots = (page * page_size + positions % page_size).where(real & (page >= 0), -1)
            tables.append(PageTables(table, slots))
            begin += each
        state.length.index_add_(0, rows, count)  # including sequences that do not sample yet
        state.steps.add_(1)
        last_rows = (starts[1:].index_select(0, sampled).long() - 1).clamp(min=0)
        batch = Batch(tokens.long(), positions.long(), starts, lengths, tuple(tables), last_rows, None)
        rows, lengths = rows.index_select(0, sampled), lengths.index_select(0, sampled)
        return batch, SampledRows(rows, self._sampled_count, self._decode_rows, lengths)
