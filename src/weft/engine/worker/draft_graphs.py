"""Graphs of a draft layer's passes, behind the graphs of steps: the first pass of each shape of a step, and further
passes for numbers of sequences.

The first pass reads tensors of its step's graph, so it is captured right after it, and replayed before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.engine.kernels.staging import on_device
from weft.engine.kv.cache_spec import Rule
from weft.engine.messages.rank_messages import GroupRows, Step
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.draft_chain import DraftChain, Drafts, following, last_sampled
from weft.engine.worker.graph_inputs import DecodeInputs, SampledRows, Shape, in_graph_order
from weft.engine.worker.row_table import RowTable
from weft.planner.chain import Counts
from weft.planner.plan import Planner
from weft.stream.step_rows import CapturedRows


class CapturedStep(Protocol):
    """Captured step, or pass of a draft layer, by a CUDA graph or by recorded calls."""

    def replay(self) -> None: ...


Pass = Callable[[CapturedRows], tuple[Tensor, ...]]
"""Function that runs a pass, and returns the tensors that it makes."""


class CapturedPass(NamedTuple):
    """Captured pass. rows: its counts; made: tensors that a replay fills."""

    step: CapturedStep
    rows: CapturedRows
    made: tuple[Tensor, ...]


CapturePass = Callable[[CapturedRows, Pass], CapturedPass]


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


class DraftInputs(DecodeInputs):
    """Inputs of further passes: a row for each sequence. Rows from number `live` on are padding."""

    def __init__(self, rows: DeviceRows, rules: Sequence[Rule], page_size: int):
        self.rows = DraftRows(rows)
        super().__init__(self.rows, rules, page_size)  # type: ignore[arg-type]  # it has no changes to write
        self.live = torch.zeros(1, dtype=torch.int32, device=rows.length.device)

    def begin(self, table: RowTable, rows: Sequence[int], drafts: Tensor) -> None:
        """Begin with the first draft of each of these rows of the table."""
        at, device = on_device(rows, torch.int64, table.device), table.device
        self._decode_rows[: len(rows)].copy_(at)
        self.rows.last_token.index_copy_(0, at, drafts.int())
        self.rows.length.index_copy_(0, at, on_device([table.rows[row].length for row in rows], torch.int32, device))


class DraftGraphs:
    """Graphs of a rank's draft layer.

    Args:
        chain: the layer.
        planner: plans its graphs.
        rules, page_size: of the caches.
        max_rows: maximum rows of a step.
    """

    inputs_type = DraftInputs

    def __init__(
        self,
        chain: DraftChain,
        planner: Planner,
        rows: DeviceRows,
        rules: Sequence[Rule],
        page_size: int,
        max_rows: int,
    ):
        self._chain, self._planner, self._inputs = chain, planner, self.inputs_type(rows, rules, page_size)
        assert chain.model.draft is not None
        weight, sequences = chain.model.embed.weight, len(rows.length)
        self._ends = weight.new_zeros(rows.max_sampled, chain.model.draft.width)  # rows that sample, of a first pass
        self._following = torch.zeros(max(max_rows, rows.max_sampled), dtype=torch.int64, device=weight.device)
        self._states = weight.new_zeros(sequences, chain.model.draft.width)
        self._found = torch.zeros(sequences, dtype=torch.int32, device=weight.device)
        self._ring = torch.zeros(1, sequences, dtype=torch.int32, device=weight.device)
        self._first, self._next = dict[Shape, CapturedPass](), dict[int, CapturedPass]()

    @property
    def further(self) -> Sequence[int]:
        """Numbers of sequences for which further passes are captured at the start."""
        return [shape.rows for shape in self._inputs.shapes]

    def first_pass(self, shape: Shape) -> Pass:
        """Return the first pass behind a step of this shape, which has just run or been captured."""
        chain, follows = self._chain, self._chain.follows

        def run(counts: CapturedRows) -> tuple[Tensor, ...]:
            batch, hidden = chain.kept.taken()
            own, wanted = batch.tokens, batch.sample_rows if follows else slice(0)
            batch = replace(batch, tokens=self._following[: shape.rows] if follows else own, sample_rows=wanted)
            planned = self._planner, (shape.rows,) * len(counts.capacity)
            states, logits = chain.walk(*planned, counts, batch, hidden)
            # Only steps of decode rows are delayed. Each graph would keep the hidden rows of prompts, as would a view.
            made = own, hidden.new_empty(0, hidden.shape[1]) if shape.prompts else hidden
            if not follows:
                return made
            self._ends[: shape.sampled].copy_(states[wanted])
            return *made, self._best(logits)

        return run

    def next_pass(self, count: int) -> Pass:
        """Return a further pass of up to `count` sequences. Without live rows it leaves no trace."""
        chain, hidden = self._chain, self._states[:count]

        def run(counts: CapturedRows) -> tuple[Tensor, ...]:
            batch, sampled = self._inputs.batch(Shape(count, count, False), self._inputs.live)
            planned = self._planner, (count,) * len(counts.capacity)
            states, logits = chain.walk(*planned, counts, batch, hidden)
            self._sample(logits, sampled)
            if chain.follows:
                hidden.copy_(states)
            return ()

        return run

    def capture_first(self, shape: Shape, counts: CapturedRows, capture: CapturePass) -> None:
        """Capture, by `capture`, the first pass behind a step of this shape, just captured with these counts."""
        self._first[shape] = capture(counts, self.first_pass(shape))

    def capture_next(self, count: int, counts: CapturedRows, capture: CapturePass) -> None:
        """Capture, by `capture`, a further pass of up to `count` sequences. counts: counts of no rows, with this
        capacity."""
        self._inputs.live.zero_()
        self._next[count] = capture(counts, self.next_pass(count))

    def run(
        self, step: Step, rows: GroupRows, table: RowTable, tokens: Tensor, accepted: Sequence[int], shape: Shape
    ) -> Drafts | None:
        """Run the passes of a step of this shape that was replayed: see `DraftChain.run`."""
        chain, counts, first = self._chain, self._chain.passes(step), self._first[shape]
        if not counts:
            self.delay(step.counts, rows, table, tokens, shape)
            return None
        if chain.follows and not shape.prompts:
            self._following[: len(tokens)].copy_(tokens).clamp_(min=0)
        elif chain.follows:
            known = following(rows, first.made[0][: rows.count], tokens, in_graph_order(rows.chunks))
            self._following[: rows.count].copy_(known)
        first.step.replay()
        chain.count(counts)
        if not step.drafts:
            return None
        sampling, left = rows.sampling_rows, table.tokens_left(rows.sampling_rows)
        last = on_device(last_sampled(rows, accepted), torch.int64, tokens.device)
        found = [first.made[2][last, 1].long() if chain.follows else tokens[last].long().clamp(min=0)]
        if counts[1:]:
            order = sorted(range(len(sampling)), key=lambda at: -left[at])  # rows without pages are padding
            ordered = on_device(order, torch.int64, tokens.device)
            if chain.follows:
                torch.index_select(self._ends, 0, last[ordered], out=self._states[: len(last)])
            self._inputs.begin(table, [sampling[at] for at in order], found[0][ordered])
        for ahead, of_groups in enumerate(counts[1:]):
            again = self._next_of(max(of_groups))
            self._inputs.live.fill_(sum(more > ahead for more in left))
            again.rows.fill(of_groups)
            again.step.replay()
            found.append(torch.empty_like(found[0]).index_copy_(0, ordered, self._found[: len(last)].long()))
        return chain.drafts_of(found, left)

    def delay(
        self, counts: Counts, rows: GroupRows, table: RowTable, tokens: Tensor, shape: Shape, behind: int = 0
    ) -> None:
        """Delay the first pass of a step of this shape that was replayed. behind: as of `DelayedRows.add`."""
        own, hidden = self._first[shape].made[:2]
        shown = tokens if self._chain.follows else own
        self._chain.delayed.add(counts, rows.decode_rows, table, shown, hidden, behind)

    def _next_of(self, sequences: int) -> CapturedPass:
        return self._next[next(count for count in self.further if count >= sequences)]

    def _best(self, logits: Tensor) -> Tensor:
        """Return float32 `[S, 2]`: the greatest logit of each row, and its token."""
        value, token = logits.max(-1)
        return torch.stack((value.float(), token.float()), -1)

    def _sample(self, logits: Tensor, sampled: SampledRows) -> None:
        from weft.engine.kernels.triton.decode_step import step_out  # a CPU need not have Triton

        rows, best = self._inputs.rows, self._best(logits)[None, :, None]
        state = rows.last_token, rows.length, self._found, rows.steps, self._ring
        step_out(sampled.rows, sampled.live, sampled.decode_count, best, sampled.lengths, *state)
