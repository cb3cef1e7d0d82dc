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
from weft.engine.messages.rank_messages import Chunk, GroupRows
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


def in_graph_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks of a step as graphs have their rows: chunks of one row first."""
    return sorted(chunks, key=lambda chunk: chunk.count > 1)


class DecodeTokens(NamedTuple):
    """Tokens of a step's decode rows. Each runs like a sequence of one row, over the pages of its own.

    Attributes:
        rows: row of the table of each token.
        places: 0 for a row's last token, n for its n-th draft; empty: there are no drafts.
        drafts: tokens of drafts; empty: there are none.
    """

    rows: tuple[int, ...]
    places: list[int]
    drafts: list[int]


def decode_tokens(group_rows: GroupRows) -> DecodeTokens:
    """Return the tokens of a step's decode rows."""
    tokens = DecodeTokens(group_rows.decode_rows, [], [])
    if not group_rows.decode_tokens:
        return tokens
    for drafts in group_rows.drafts_each:
        tokens.places.extend(range(len(drafts) + 1))
        tokens.drafts.extend([0, *drafts])
    return tokens._replace(rows=tuple(group_rows.sampled_rows[: group_rows.decode_count]))


class DecodeInputs:
    """Inputs of decode steps: one row per sequence, which runs its last token, and one per draft. rules, page_size: of
    the caches.

    Only the row numbers are copied, and only if they have changed; and drafts.
    """

    def __init__(self, rows: DeviceRows, rules: Sequence[Rule], page_size: int):
        self.shapes: Sequence[Shape] = [Shape(n, n, False) for n in decode_capacities(rows.max_sampled)]
        self._rows, self._rules, self._page_size = rows, rules, page_size
        self._decode_rows, self._places, self._drafts = rows.length.new_zeros(3, rows.max_sampled)
        self._pieces = table_pieces(rows.widths, [rule.state for rule in rules], rows.length.device)
        self._copied: tuple[int, ...] = ()  # the current content of `_decode_rows`
        self._placed = 0  # rows that may have a place other than 0

    def put(self, group_rows: GroupRows) -> int:
        """See `Inputs.put`."""
        (rows, places, drafts), fill = decode_tokens(group_rows), self._rows.writes.fill
        if self._copied[: len(rows)] != rows:
            fill(self._decode_rows, rows)
            self._copied = rows
        if places or self._placed:
            fill(self._places, places + [0] * (self._placed - len(places)))
            fill(self._drafts, drafts)
            self._placed = len(places)
        return len(rows)

    def batch(self, shape: Shape, live: Tensor) -> tuple[Batch, SampledRows]:
        """See `Inputs.batch`. Padding rows have length 0, and their keys and values are not stored."""
        rows, own = self._rows, [x[: shape.rows] for x in (self._decode_rows, self._places, self._drafts)]
        state = *own, live, rows.last_token, rows.length, rows.entries, rows.steps
        inputs = self._step_in(state, self._pieces, self._page_size)
        tables: list[PageTables | StateSlots] = []
        for rule, pages, slots in zip(self._rules, inputs.entries.split(rows.widths, 1), inputs.slots, strict=True):
            tables.append(StateSlots(*slots) if rule.state else PageTables(pages, slots[0]))
        batch = Batch(inputs.tokens, inputs.positions, None, inputs.lengths, tuple(tables), slice(None), None)
        return batch, SampledRows(own[0], live, live, inputs.lengths)

    def _step_in(self, state: Sequence[Tensor], pieces: TablePieces, page_size: int) -> StepInputs:
        from weft.engine.kernels.triton.decode_step import step_in  # a CPU need not have Triton

        rows, places, drafts, live, last_token, length, entries, steps = state
        return step_in(rows, places, drafts, live, last_token, length, entries, steps, pieces, page_size)


class RecordedInputs(DecodeInputs):
    """`DecodeInputs` of steps that are recorded on CPUs. Each number of rows has a shape: padding costs time there."""

    _step_in = staticmethod(cpu_ops.step_in)

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
        max_sequences, device = rows.max_sampled, rows.length.device  # a draft is a sequence of one row
        self.shapes: Sequence[Shape] = [Shape(n, min(n, max_sequences), True) for n in prompt_capacities(max_rows)]
        self._rows, self._rules, self._page_size = rows, rules, page_size
        # Use whole units of 16 bytes, since Triton compiles other kernels for unaligned tensors.
        self._capacity = -(-(max_sequences + 1) // 4) * 4
        # One tensor, so that a step has one copy: rows of the table, places, starts, sampling sequences, number of
        # decode rows, number of sampling sequences, tokens.
        sizes = [self._capacity] * 4 + [4, 4, max_rows]
        self._copied = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = self._copied.split(sizes)
        self._sequences, self._behind, self._starts, self._sampled, decode_rows, sampled_count, self._tokens = parts
        self._decode_rows, self._sampled_count = decode_rows[:1], sampled_count[:1]
        self._places = torch.arange(max_rows, dtype=torch.int32, device=device)

    def put(self, group_rows: GroupRows) -> int:
        """See `Inputs.put`."""
        own, chunks = decode_tokens(group_rows), in_graph_order(group_rows.chunks)
        count, rows = len(own.rows), [*own.rows, *(chunk.row for chunk in chunks)]
        starts = [*range(count), *itertools.accumulate((c.count for c in chunks), initial=count)]
        at = {chunk.row: i for i, chunk in enumerate(chunks, count)}
        sampled = [*range(count), *(at[chunk.row] for chunk in group_rows.chunks if chunk.samples)]
        filled = token_array([*rows, *[0] * (self._capacity - len(rows))])
        filled.extend([*own.places, *[0] * (self._capacity - len(own.places))])
        filled.extend([*starts, *[starts[-1]] * (self._capacity - len(starts))])
        filled.extend([*sampled, *[0] * (self._capacity - len(sampled))])
        filled.extend([count, 0, 0, 0, len(sampled), 0, 0, 0, *(own.drafts or [0] * count)])
        for chunk in chunks:
            filled.frombytes(chunk.tokens)
        fill(self._copied, filled)
        return len(sampled)

    def batch(self, shape: Shape, live: Tensor) -> tuple[Batch, SampledRows]:
        """See `Inputs.batch`. Padding sequences have no rows, and padding rows no sequence, so they are not stored."""
        state, limit, page_size = self._rows, shape.sampled, self._page_size
        rows, starts, sampled = self._sequences[:limit], self._starts[: limit + 1], self._sampled[:limit]
        behind = self._behind[:limit]
        count, before = starts.diff(), state.length.index_select(0, rows) + behind
        lengths = (before + count).where(count > 0, 0)
        at = self._places[: shape.rows]
        real = at < live
        sequence = torch.searchsorted(starts[1:], at, right=True).clamp(max=limit - 1)
        row = rows.index_select(0, sequence)
        positions = (at + (before - starts[:-1]).index_select(0, sequence)).where(real, 0)
        last = state.last_token.index_select(0, row).clamp(min=0)
        given = (sequence >= self._decode_rows) | (behind.index_select(0, sequence) > 0)
        tokens = self._tokens[: shape.rows].where(given, last).where(real, 0)
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
