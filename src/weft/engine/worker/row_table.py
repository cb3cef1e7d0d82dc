"""A rank's table of its DP group's sequences, one row each. A step's message carries only changes of it.

The host knows every row's length and page tables: they follow from the messages. The last sampled token of a row is on
the device alone. The next step reads it there, whether or not the host has seen it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.forward_batch import Batch
from weft.engine.kernels.staging import on_device
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import Adjust, GroupRows, Sampling
from weft.engine.worker.sampler import cuts, sample, sample_share
from weft.engine.worker.split_vocabulary import SplitVocabulary

NO_TOKEN = -1
"""The last token of a row before one is sampled for its sequence. A decode row must not run from it."""


@dataclass(slots=True)
class Row:
    """A sequence. length: its tokens in the caches, once the steps begun so far have run; the rest as in `Join`."""

    request: int
    length: int
    tables: list[list[int]]
    sampling: Sampling


class RowTable:
    """The rows of a rank. max_rows: how many; rules, page_size: of the caches."""

    def __init__(self, max_rows: int, rules: Sequence[Rule], page_size: int, device: torch.device):
        self.device, self.rules, self.page_size = device, tuple(rules), page_size
        self.rows: dict[int, Row] = {}
        self.cut: set[int] = set()
        """Rows sampled with top_k or top_p, which graphs do not see."""
        self.floored: set[int] = set()
        """Rows sampled with min_p."""
        self.last_token = torch.full((max_rows,), NO_TOKEN, dtype=torch.int32, device=device)

    def apply(self, group_rows: GroupRows) -> None:
        """Applies a message's changes, before the rows of its step, but for the last tokens on the device. Raises
        ValueError for an entry beyond a table's end, and for decode rows of several tokens."""
        if group_rows.decode_rows.tokens:  # `last_token`, `step_in`, `step_out` and the token ring hold one a row
            raise ValueError("a rank runs one token of a decode row")
        for join in group_rows.joins:
            self.rows[join.row] = Row(join.request, join.context, [list(table) for table in join.tables], join.sampling)
            (self.cut.add if cuts(join.sampling) else self.cut.discard)(join.row)
            (self.floored.add if join.sampling.min_p > 0 else self.floored.discard)(join.row)
        for entry in group_rows.entries:
            row = self.rows[entry.row]
            table = row.tables[entry.group]
            if entry.first > len(table):
                raise ValueError(f"request {row.request} gets entry {entry.first} of a table of {len(table)} entries")
            table[entry.first : entry.first + len(entry.values)] = entry.values

    def forget_tokens(self, group_rows: GroupRows) -> None:
        """Rows that a message's sequences take have no last token."""
        if group_rows.joins:  # at once: what is queued on a GPU costs the host as much for one as for many
            joined = on_device([join.row for join in group_rows.joins], torch.int64, self.device)
            self.last_token.index_fill_(0, joined, NO_TOKEN)

    def forget(self) -> None:
        """Empties every row."""
        self.rows.clear()
        self.cut.clear()
        self.floored.clear()
        self.last_token.fill_(NO_TOKEN)

    def batch(self, group_rows: GroupRows) -> Batch:
        """The batch of a step: decode rows first, then chunks."""
        n, rows = group_rows.decode_rows.count, self.rows
        tokens = token_array([0] * n)
        for chunk in group_rows.chunks:
            tokens.frombytes(chunk.tokens)
        seqs = [SeqRows(k, rows[row].length, rows[row].tables, k) for row, k in group_rows.decode_rows.each]
        for chunk in group_rows.chunks:
            wanted = chunk.count if chunk.score else int(chunk.samples)
            seqs.append(SeqRows(chunk.count, rows[chunk.row].length, rows[chunk.row].tables, wanted))
        batch = build_batch(tokens, seqs, self.page_size, self.rules, self.device)
        if n:
            batch.tokens[:n] = self.last(group_rows.decode_rows.rows).clamp(min=0)
        return batch

    def advance(self, group_rows: GroupRows, steps: int = 1) -> None:
        """Adds the rows of so many equal steps to the lengths: a row's length is then the position of the token that
        it samples."""
        for row, tokens in group_rows.decode_rows.each:
            self.rows[row].length += steps * tokens
        for chunk in group_rows.chunks:
            self.rows[chunk.row].length += steps * chunk.count

    def last(self, rows: Sequence[int]) -> Tensor:
        """The last tokens of rows, int32 on the device."""
        return self.last_token.index_select(0, on_device(rows, torch.int64, self.device))

    def needs_full_logits(self, group_rows: GroupRows) -> bool:
        """Whether a step needs full rows of logits where the vocabulary is split.

        Rows that are greedy or sampled by temperature alone need none.
        """
        cut = self.cut | self.floored
        return (
            not cut.isdisjoint(group_rows.sampled_rows)
            or bool(group_rows.adjust)
            or any(chunk.score for chunk in group_rows.chunks)
        )

    def sample(self, group_rows: GroupRows, logits: Tensor, split: SplitVocabulary | None = None) -> Tensor:
        """Samples the step's tokens, int32 `[S]`, which become the rows' last tokens.

        A row that ran without a last token gets NO_TOKEN, so that the fault is seen wherever the tokens arrive.

        Args:
            group_rows: the step.
            logits: `[S, vocabulary]` of `GroupRows.sampled_rows`, or this rank's share of them.
            split: given where the logits are a share; for steps that need no full rows.
        """
        sampled, n = group_rows.sampled_rows, group_rows.decode_rows.count
        if split is None:
            tokens = self._sample(sampled, logits, dict(group_rows.adjust))
        else:
            here = [self.rows[row] for row in sampled]
            tokens = sample_share(logits, [row.sampling for row in here], [row.length for row in here], split)
        if n:
            tokens[:n] = torch.where(self.last(group_rows.decode_rows.rows) < 0, NO_TOKEN, tokens[:n])
        self.last_token.index_copy_(0, on_device(sampled, torch.int64, self.device), tokens)
        return tokens

    def rows_to_resample(self, group_rows: GroupRows, split: bool) -> list[int]:
        """Which of a step's sampled rows need more than a graph's sampling, or logprobs; the same on every rank of a
        group.

        split: the graph samples from a split vocabulary, where min_p is such a need.
        """
        if not (self.cut or group_rows.adjust or (split and self.floored)):
            return []
        more = self.cut.union((row for row, _ in group_rows.adjust), self.floored if split else ())
        return [at for at, row in enumerate(group_rows.sampled_rows) if row in more]

    def resample(
        self,
        group_rows: GroupRows,
        again: Sequence[int],
        logits: Tensor,
        tokens: Tensor,
        full_logits: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Samples some tokens of a graph's step again, and replaces them in `tokens`.

        Args:
            group_rows: the step.
            again: which of its sampled rows.
            logits: the graph's, of all sampled rows.
            tokens: the graph's, of all sampled rows.
            full_logits: makes rows of logits float32 and of the whole vocabulary.

        Returns:
            The full logits of the rows `again`.
        """
        sampled = group_rows.sampled_rows
        rows = [sampled[at] for at in again]
        put = on_device([again, rows], torch.int64, self.device)
        logits = full_logits(logits.index_select(0, put[0]))
        resampled = self._sample(rows, logits, dict(group_rows.adjust))
        resampled = torch.where(tokens.index_select(0, put[0]) < 0, NO_TOKEN, resampled)
        tokens.index_copy_(0, put[0], resampled)
        self.last_token.index_copy_(0, put[1], resampled)
        return logits

    def _sample(self, rows: Sequence[int], logits: Tensor, asked: dict[int, Adjust]) -> Tensor:
        here = [self.rows[row] for row in rows]
        adjust = {at: asked[row] for at, row in enumerate(rows) if row in asked}
        return sample(logits, [row.sampling for row in here], [row.length for row in here], adjust).int()
