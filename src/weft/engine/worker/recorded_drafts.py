"""Passes of a draft layer behind recorded steps on CPUs. They are recorded too: the first pass for each number of rows
of a step, further passes for each number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.kernels import cpu_ops
from weft.engine.kv.cache_spec import Rule
from weft.engine.messages.rank_messages import GroupRows, Step
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.draft_chain import DraftChain, Drafts, last_rows
from weft.engine.worker.graph_inputs import RecordedInputs, SampledRows, Shape
from weft.engine.worker.row_table import RowTable
from weft.engine.worker.step_graphs import CapturedStep
from weft.planner.chain import Counts
from weft.stream.step_rows import CapturedRows

RecordPass = Callable[[int, Callable[[CapturedRows], tuple[Tensor, ...]]], "RecordedPass"]
"""Function that records a pass of a number of rows, and returns it with the tensors that it makes."""


class RecordedPass(NamedTuple):
    """Recording of a pass. rows: its counts; made: tensors that a replay fills."""

    step: CapturedStep
    rows: CapturedRows
    made: tuple[Tensor, ...]


class DraftRows:
    """Rows of the table as further passes read and advance them, in the form of `DeviceRows`.

    Attributes:
        last_token: int32 `[rows]`, the last draft.
        length: int32 `[rows]`, tokens before it.
    """

    def __init__(self, rows: DeviceRows):
        self.last_token, self.length = torch.zeros_like(rows.last_token), torch.zeros_like(rows.length)
        self.entries, self.widths, self.steps = rows.entries, rows.widths, torch.zeros_like(rows.steps)
        self.max_sampled = len(rows.length)


class DraftInputs(RecordedInputs):
    """Inputs of further passes: a row for each sequence. Rows from number `live` on are padding."""

    def __init__(self, rows: DeviceRows, rules: Sequence[Rule], page_size: int):
        self.rows = DraftRows(rows)
        super().__init__(self.rows, rules, page_size)  # type: ignore[arg-type]  # it has no changes to write
        self.live = torch.zeros(1, dtype=torch.int32)

    def begin(self, table: RowTable, rows: Sequence[int], drafts: Tensor) -> None:
        """Begin with the first draft of each of these rows of the table."""
        at = torch.tensor(rows, dtype=torch.int64)
        self._decode_rows[: len(rows)] = at
        self.rows.last_token[at] = drafts.int()
        self.rows.length[at] = torch.tensor([table.rows[row].length for row in rows], dtype=torch.int32)


class RecordedDrafts:
    """Recorded passes of a rank's draft layer.

    Args:
        chain: the layer.
        rows: the table on the device.
        rules, page_size: of the caches.
    """

    def __init__(self, chain: DraftChain, rows: DeviceRows, rules: Sequence[Rule], page_size: int):
        self._chain, self._inputs = chain, DraftInputs(rows, rules, page_size)
        assert chain.model.draft is not None
        max_rows, width = rows.max_sampled, chain.model.draft.width
        self._following = torch.zeros(max_rows, dtype=torch.int64)
        self._states = chain.model.embed.weight.new_zeros(max_rows, width)
        self._found, self._ring = torch.zeros(max_rows, dtype=torch.int32), torch.zeros(1, max_rows, dtype=torch.int32)
        self._first, self._next = dict[int, RecordedPass](), dict[int, RecordedPass]()

    def record_first(self, rows: int, record: RecordPass) -> None:
        """Record the first pass behind a step of these rows, which has just been recorded. Raises NotRecordable."""
        batch, hidden = self._chain.kept.taken()  # they keep their part of the recorder's memory until then
        follows = self._chain.follows
        own, tokens = batch.tokens, self._following[:rows] if follows else batch.tokens
        batch = replace(batch, tokens=tokens, sample_rows=batch.sample_rows if follows else slice(0))

        def run(counts: CapturedRows) -> tuple[Tensor, ...]:
            states, logits = self._chain.walk(counts, (rows,) * len(counts.capacity), batch, hidden)
            return own, hidden, *((states, cpu_ops.best(logits)) if follows else ())

        self._first[rows] = record(rows, run)

    def run(
        self, step: Step, rows: GroupRows, table: RowTable, tokens: Tensor, accepted: Sequence[int], shape: Shape
    ) -> Drafts | None:
        """Run the passes of a step of this shape that was replayed: see `DraftChain.run`. They overwrite its logits."""
        counts, sampling, first = self._chain.passes(step), list(rows.decode_rows), self._first[shape.rows]
        if not counts:
            self.delay(step.counts, rows, table, tokens, shape)
            return None
        sampled = self._following[: len(tokens)].copy_(tokens.clamp(min=0))
        first.rows.fill(counts[0])
        first.step.replay()
        self._chain.count(counts)
        if not step.drafts:
            return None
        left = table.tokens_left(sampling)
        order = sorted(range(len(sampling)), key=lambda at: -left[at])  # rows without pages are padding
        last = torch.tensor(last_rows(rows, accepted), dtype=torch.int64)
        found = [first.made[3][last, 1].long() if self._chain.follows else sampled[last]]
        if counts[1:]:
            ordered = torch.tensor(order, dtype=torch.int64)
            if self._chain.follows:
                torch.index_select(first.made[2], 0, last[ordered], out=self._states[: len(last)])
            self._inputs.begin(table, [sampling[at] for at in order], found[0][ordered])
        for ahead, of_groups in enumerate(counts[1:]):
            again = self._next[max(of_groups)]
            self._inputs.live.fill_(sum(more > ahead for more in left))
            again.rows.fill(of_groups)
            again.step.replay()
            found.append(torch.empty_like(found[0]).index_copy_(0, ordered, self._found[: len(last)].long()))
        return self._chain.drafts_of(found, left)

    def delay(
        self, counts: Counts, rows: GroupRows, table: RowTable, tokens: Tensor, shape: Shape, behind: int = 0
    ) -> None:
        """Delay the first pass of a step of this shape that was replayed. behind: as of `DelayedRows.add`."""
        own, hidden = self._first[shape.rows].made[:2]
        shown = tokens if self._chain.follows else own
        self._chain.delayed.add(counts, rows.decode_rows, table, shown, hidden, behind)

    def prepare(self, groups: Sequence[GroupRows], record: RecordPass) -> None:
        """Record further passes behind a step of these rows, unless they are. It overwrites the recorder's memory and
        the states, so it comes before the step."""
        count = max(group.sampling_count for group in groups)
        if count in self._next:
            return

        def run(counts: CapturedRows) -> tuple[Tensor, ...]:
            batch, sampled = self._inputs.batch(Shape(count, count, False), self._inputs.live)
            of_groups = (count,) * len(counts.capacity)
            states, logits = self._chain.walk(counts, of_groups, batch, self._states[:count])
            self._sample(logits, sampled)
            if self._chain.follows:
                self._states[:count].copy_(states)
            return ()

        self._inputs.live.zero_()
        self._next[count] = record(count, run)

    def _sample(self, logits: Tensor, sampled: SampledRows) -> None:
        rows, best = self._inputs.rows, cpu_ops.best(logits)[None]
        state = rows.last_token, rows.length, self._found, rows.steps, self._ring
        cpu_ops.step_out(sampled.rows, sampled.live, best, sampled.lengths, *state)
