"""Drafts of a rank's draft layer or draft model, which runs after the model in each step, by plans of its own.

The first pass has the rows of the step, each with the position and the pages of a token, and fills the caches, for
prompts too. A draft layer gets the model's last hidden state there, and the token that follows, and gives a draft. A
draft model gets the same tokens as the model. Each further pass has a row for each sequence that samples: it runs the
draft of the pass before, or the sampled token, with that pass's hidden state.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.transport import Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.caches import Caches, StepCaches, cached_layers
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.kernels.staging import on_device
from weft.engine.kv.cache_spec import Window
from weft.engine.messages.rank_messages import Chunk, GroupRows, Step
from weft.engine.models.layers.decoder import Decoder
from weft.engine.models.layers.model_config import LanguageModel
from weft.engine.worker.delayed_rows import DelayedRows
from weft.engine.worker.row_table import RowTable
from weft.engine.worker.run_stats import RunStats
from weft.planner.chain import Counts
from weft.planner.plan import Planner
from weft.planner.spec import Mesh
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.stats import StepTimes
from weft.stream.step_rows import StepRows
from weft.stream.stream import Stream


class Drafts(NamedTuple):
    """Drafts of a step. tokens: int64 `[drafts, sequences]`, on the device; counts: valid drafts of each sequence."""

    tokens: Tensor
    counts: Sequence[int]


class RowsKept:
    """A model that keeps the batch of its last call, and if `follows` the rows that a draft layer reads: those after
    its last layer, `[T, width]`, or before each of `tapped_layers`, `[T, 3 · width]`."""

    def __init__(self, model: LanguageModel, follows: bool):
        self._model, self.embed, self._follows = model, model.embed, follows
        self.width = model.config.hidden_size * max(1, len(model.config.tapped_layers)) if follows else 0
        self.batch: Batch | None = None
        self.rows: Tensor | None = None

    def __call__(self, stream: Stream, batch: Batch, caches: StepCaches) -> Tensor:
        self.batch = batch
        if not self._follows:
            whole: Tensor = self._model(stream, batch, caches)
            self.rows = whole.new_empty(len(whole), 0)  # a view would keep the logits in each graph
            return whole
        assert isinstance(self._model, Decoder)
        tapped, taps = list[Tensor](), bool(self._model.config.tapped_layers)
        rows = self._model.rows(stream, batch, caches, batch.sample_rows if taps else None, tapped)
        self.rows = torch.cat(tapped, -1) if taps else rows
        logits: Tensor = self._model.head(rows if taps else rows[batch.sample_rows])
        return logits

    def taken(self) -> tuple[Batch, Tensor]:
        """Return the batch and the rows, and forget them."""
        assert self.batch is not None and self.rows is not None
        found, self.batch, self.rows = (self.batch, self.rows), None, None
        return found


class DraftChain:
    """Draft layer or draft model of a rank. All ranks run each pass, also ranks of a DP group without rows.

    Args:
        model: the model, with a source of drafts.
        planner: of the layer's chain.
        stats: statistics, which count the passes.
        max_rows: maximum rows of a DP group's pass.

    Attributes:
        kept: the model to run, which keeps what the layer reads.
        follows: as of `DraftSourceLayer`.
        delayed: rows of steps without drafts.
    """

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        rank: int,
        planner: Planner,
        transports: Mapping[str, Transport],
        exchanges: BlockExchanges,
        caches: Caches,
        stats: RunStats,
        max_rows: int,
    ):
        assert model.draft is not None
        self.model, self.follows = model, model.draft.follows
        self.kept = RowsKept(model, self.follows)
        self._layer, self._mesh, self._rank, self.planner = model.draft, mesh, rank, planner
        self._transports, self._exchanges, self._caches, self._stats = transports, exchanges, caches, stats
        self.checksum = cache(self._checksum)
        # A draft layer's keys do not follow from other keys, so what its delayed rows read does not matter.
        windows = [name for name, spec in cached_layers(model.draft).items() if isinstance(spec, Window)]
        read = set() if self.follows else {caches.paged[caches.places[name][0]][0] for name in windows}
        self.delayed = DelayedRows(max_rows, self.kept.width, model.embed.weight, read)

    def _checksum(self, passes: tuple[Counts, ...]) -> int:
        """Return the checksum of the plans of passes with these rows of each DP group."""
        return zlib.crc32(repr([self.planner.plan(counts).checksum() for counts in passes]).encode())

    def run(
        self, step: Step, rows: GroupRows, table: RowTable, tokens: Tensor, accepted: Sequence[int]
    ) -> Drafts | None:
        """Run the passes of a step without a graph. Collective. Returns its drafts; None if it asks for none.

        Args:
            rows: this DP group's part of the step.
            table: the rank's table, after the step's tokens.
            tokens: int32 `[S]`, sampled tokens of `rows.sampled_rows`.
            accepted: as in `Result`.
        """
        counts, (batch, hidden) = self.passes(step), self.kept.taken()
        if not counts:
            shown = tokens if self.follows else batch.tokens
            self.delayed.add(step.counts, rows.decode_rows, table, shown, hidden)
            return None
        last = on_device(last_rows(rows, accepted), torch.int64, batch.tokens.device)
        wanted = last if step.drafts and self.follows else last[:0]
        given = replace(batch, tokens=following(rows, batch.tokens, tokens)) if self.follows else batch
        states, logits = self._pass(counts[0], replace(given, sample_rows=wanted), hidden)
        self.count(counts)
        if not step.drafts:
            return None
        if self.follows:
            found, states = [logits.argmax(-1)], states.index_select(0, last)
        else:
            last = on_device(last_sampled(rows, accepted), torch.int64, tokens.device)
            found = [tokens[last].long().clamp(min=0)]
        sampling = rows.sampling_rows
        for ahead, of_groups in enumerate(counts[1:]):
            states, logits = self._pass(of_groups, next_rows(table, sampling, ahead, found[-1]), states)
            found.append(logits.argmax(-1))
        return self.drafts_of(found, table.tokens_left(sampling))

    def passes(self, step: Step) -> tuple[Counts, ...]:
        """Return the rows of each DP group in each pass of a step, which all ranks know; empty: it is delayed."""
        if self.delayed.delays(step, step.counts):
            return ()
        sampling = tuple(group.sampling_count for group in step.groups)
        return (step.counts, *[sampling] * (step.drafts - self.follows if any(sampling) else 0))

    def catch_up(self, step: Step, table: RowTable) -> tuple[Counts, ...]:
        """Run the delayed rows that are due before a step. Collective. Returns the counts of their pass, if there is
        one. table: the rank's table, before the step's changes."""
        if not (counts := self.delayed.due(step)):
            return ()
        self._run_delayed(counts, table)
        return (counts,)

    def _run_delayed(self, counts: Counts, table: RowTable) -> None:
        """Run all delayed rows in a pass with these counts."""
        self._pass(counts, *self.delayed.taken(table))
        self.count((counts,))

    def drafts_of(self, found: Sequence[Tensor], left: Sequence[int]) -> Drafts | None:
        """Return the drafts of passes; None if there were none.

        Args:
            found: what each pass has found, int64 `[sequences]`; first the sampled tokens, unless `follows`.
            left: `RowTable.tokens_left` of each sequence: drafts end with it, but for one of a first pass.
        """
        drafts = found if self.follows else found[1:]
        return Drafts(torch.stack([*drafts]), self.valid(len(drafts), left)) if drafts else None

    def valid(self, drafts: int, left: Sequence[int]) -> list[int]:
        """Return the number of valid ones among the `drafts` of each sequence. left: see `drafts_of`."""
        first = int(self.follows)
        return [first + max(0, min(more, drafts - first)) for more in left]

    def _pass(self, counts: Counts, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = StepRows(self._mesh, self._rank, counts)
        return self.walk(self.planner, counts, rows, batch, hidden, self._stats.times())

    def walk(
        self,
        planner: Planner,
        counts: Counts,
        rows: StepRows,
        batch: Batch,
        hidden: Tensor,
        times: StepTimes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer along a plan. Returns its rows, and the logits of the batch's sampled rows.

        times: not None if the pass is timed.
        """
        stream = Stream(planner.plan(counts), self._transports, rows, times, self._exchanges)
        with self._exchanges.planned_by(planner.blocks):
            states, logits = self._layer(stream, batch, self._caches.plan(batch), hidden)
            stream.finish()
        return states, logits

    def warm_up(self, numbers: Sequence[int], table: RowTable) -> None:
        """Run passes of these numbers of delayed rows, each at the last token of row 0 of the table. Collective."""
        for count in numbers:
            counts, zeros = (count,) * self._mesh.attn_dp, torch.zeros(count, dtype=torch.int64, device=table.device)
            hidden = self.model.embed.weight.new_zeros(count, self.kept.width)
            self.delayed.add(counts, [0] * count, table, zeros, hidden)
            self._run_delayed(counts, table)

    def rehearse(self, counts: Counts) -> None:
        """Run the first pass of a step that has just run, to measure its memory. Collective."""
        self._pass(counts, *self.kept.taken())

    def bytes(self, graph_rows: int, sampled: int) -> int:
        """Return the bytes of the rows that graphs of `graph_rows` decode rows in all, of up to `sampled` in one, and
        delayed rows keep."""
        weight = self.model.embed.weight
        of_step, own = self.kept.width * weight.element_size(), self._layer.width * weight.element_size()
        kept = graph_rows * self._mesh.attn_dp  # a group's hidden rows may be a view of all groups'
        return of_step * (kept + self.delayed.limit) + 2 * own * sampled

    def count(self, passes: Sequence[Counts]) -> None:
        """Count passes in the statistics."""
        for counts in passes:
            self._stats.ran_draft(counts)


def last_sampled(rows: GroupRows, accepted: Sequence[int]) -> list[int]:
    """Return the index in `sampled_rows` of the last accepted token of each sequence that samples."""
    kept, firsts = accepted or (1,) * len(rows.decode_rows), accumulate((n for _, n in rows.decode_each), initial=0)
    last = [first + count - 1 for first, count, _ in zip(firsts, kept, rows.decode_rows, strict=False)]
    prompts = rows.sampling_count - len(last)
    return [*last, *range(rows.decode_count, rows.decode_count + prompts)]


def last_rows(rows: GroupRows, accepted: Sequence[int]) -> list[int]:
    """Return the row of a step at which each sequence that samples ends, after its accepted drafts."""
    ends = accumulate((chunk.count for chunk in rows.chunks), initial=rows.decode_count)
    chunks = [end + chunk.count - 1 for end, chunk in zip(ends, rows.chunks, strict=False) if chunk.samples]
    return last_sampled(rows, accepted)[: len(rows.decode_rows)] + chunks


def following(rows: GroupRows, own: Tensor, tokens: Tensor, chunks: Sequence[Chunk] | None = None) -> Tensor:
    """Return the token after each row of a step, int64 `[T]`.

    The rows of rejected drafts have tokens too. What they leave in the cache lies behind the sequence's length.

    Args:
        rows: this DP group's part of the step.
        own: int64 `[T]`, the tokens of the rows.
        tokens: int32 `[S]`, sampled tokens of `rows.sampled_rows`.
        chunks: the chunks in the order of their rows; None: as in `rows`.
    """
    ends = accumulate((chunk.count for chunk in chunks or rows.chunks), initial=rows.decode_count - 1)
    last = dict(zip((chunk.row for chunk in chunks or rows.chunks), [*ends][1:], strict=True))
    sampled = [*range(rows.decode_count), *(last[chunk.row] for chunk in rows.chunks if chunk.samples)]
    known = [(last[chunk.row], chunk.following) for chunk in rows.chunks if not chunk.samples]
    shifted = own.roll(-1)
    shifted[on_device(sampled, torch.int64, own.device)] = tokens.long().clamp(min=0)
    if known:
        at, values = on_device(known, torch.int64, own.device).unbind(1)
        shifted[at] = values
    return shifted


def next_rows(table: RowTable, sampling: Sequence[int], ahead: int, drafts: Tensor) -> Batch:
    """Return the batch of a further pass, with a row for each of the table's rows `sampling`. It runs its one of
    `drafts`, found by the pass before, `ahead` tokens behind the sequence's length.

    A row behind its pages is not stored, and its own draft is not valid.
    """
    seqs, unstored = list[SeqRows](), list[int]()
    for at, row in enumerate(sampling):
        context, limit = table.rows[row].length + ahead, table.capacity(row)
        if context >= limit:
            unstored.append(at)
        seqs.append(SeqRows(1, min(context, limit - 1), table.rows[row].tables, 1))
    batch = build_batch([0] * len(seqs), seqs, table.page_size, table.rules, table.device)
    if unstored:
        places = on_device(unstored, torch.int64, table.device)
        for tables in batch.tables:
            if isinstance(tables, PageTables):
                tables.slots.index_fill_(0, places, -1)
    return replace(batch, tokens=drafts)
