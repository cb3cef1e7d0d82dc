"""A rank's table of its DP group's sequences, one row each. A step's message carries only changes of the table.

The host knows every row's length and page tables from the messages. The last sampled token of a row is only on the
device: the next step reads it there, whether or not the host has seen it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.forward_batch import Batch
from weft.engine.kernels.staging import on_device
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import GRAPH_PARAMETERS, SHARE_PARAMETERS, GroupRows, Sampling

NO_TOKEN = -1
"""Last token of a row before any token is sampled for its sequence. A decode row must not run from it."""


@dataclass(slots=True)
class Row:
    """A sequence. length: tokens in the caches after all steps begun so far; other fields are as in `Join`."""

    request: int
    length: int
    tables: list[list[int]]
    sampling: Sampling


class Accepted(NamedTuple):
    """Accepted tokens of a step with drafts.

    Attributes:
        counts: `Result.accepted`.
        last: last accepted token of each decode row.
    """

    counts: tuple[int, ...] = ()
    last: Sequence[int] = ()


class RowTable:
    """Up to `max_rows` rows of a rank. rules, page_size: of the caches; split: the vocabulary is split over ranks."""

    def __init__(self, max_rows: int, rules: Sequence[Rule], page_size: int, device: torch.device, split: bool = False):
        self.device, self.rules, self.page_size = device, tuple(rules), page_size
        self.rows, self._captured = dict[int, Row](), SHARE_PARAMETERS if split else GRAPH_PARAMETERS
        self.shaped: set[int] = set()
        """Rows with sampling parameters not supported in graphs, or not on a share of a vocabulary."""
        self.random: set[int] = set()
        """Rows with a temperature."""
        self.last_token = torch.full((max_rows,), NO_TOKEN, dtype=torch.int32, device=device)

    def apply(self, group_rows: GroupRows) -> None:
        """Apply a message's changes on the host, before the rows of its step. Raises ValueError for an entry beyond a
        table's end."""
        for join in group_rows.joins:
            self.rows[join.row] = Row(join.request, join.context, [list(table) for table in join.tables], join.sampling)
            (self.shaped.add if join.sampling.beyond(self._captured) else self.shaped.discard)(join.row)
            (self.random.add if join.sampling.temperature > 0 else self.random.discard)(join.row)
        for entry in group_rows.entries:
            row = self.rows[entry.row]
            table = row.tables[entry.group]
            if entry.first > len(table):
                raise ValueError(f"request {row.request} gets entry {entry.first} of a table of {len(table)} entries")
            table[entry.first : entry.first + len(entry.values)] = entry.values

    def forget_tokens(self, group_rows: GroupRows) -> None:
        """Clear the last tokens of the rows of a message's new sequences."""
        if group_rows.joins:  # all in one operation: a launch costs the host the same for one row as for many
            joined = on_device([join.row for join in group_rows.joins], torch.int64, self.device)
            self.last_token.index_fill_(0, joined, NO_TOKEN)

    def capacity(self, row: int) -> int:
        """Return the number of tokens that a row's pages hold."""
        tables = zip(self.rows[row].tables, self.rules, strict=True)
        return min(len(table) * self.page_size for table, rule in tables if not rule.state)

    def tokens_left(self, rows: Sequence[int]) -> list[int]:
        """Return the number of further tokens that the pages of each row hold."""
        return [self.capacity(row) - self.rows[row].length for row in rows]

    def forget(self) -> None:
        """Empty every row."""
        self.rows.clear()
        self.shaped.clear()
        self.random.clear()
        self.last_token.fill_(NO_TOKEN)

    def batch(self, group_rows: GroupRows) -> Batch:
        """Return the batch of a step: decode rows first, then chunks."""
        n, table = group_rows.decode_count, self.rows
        tokens = token_array([0] * n)
        for chunk in group_rows.chunks:
            tokens.frombytes(chunk.tokens)
        # Each token of a row counts as a sequence of one row over the row's pages: all keys are stored before any is
        # read, and a token sees those up to its own position.
        seqs = [
            SeqRows(1, table[row].length + at, table[row].tables, 1)
            for row, count in group_rows.decode_each
            for at in range(count)
        ]
        firsts = [*accumulate(group_rows.decode_tokens[:-1], initial=0)] if group_rows.decode_tokens else []
        for first, drafts in zip(firsts, group_rows.drafts_each, strict=True):
            tokens[first + 1 : first + 1 + len(drafts)] = drafts
        for chunk in group_rows.chunks:
            count = chunk.count if chunk.score else int(chunk.samples)
            seqs.append(SeqRows(chunk.count, table[chunk.row].length, table[chunk.row].tables, count))
        batch = build_batch(tokens, seqs, self.page_size, self.rules, self.device)
        if n:
            rows = on_device(group_rows.decode_rows, torch.int64, self.device)
            last = self.last_token.index_select(0, rows).clamp(min=0)
            if firsts:
                batch.tokens.index_copy_(0, on_device(firsts, torch.int64, self.device), last.long())
            else:
                batch.tokens[:n] = last
        return batch

    def accept(self, group_rows: GroupRows, tokens: Sequence[int]) -> Accepted:
        """Return the accepted tokens of a step with drafts, after `advance`, and move lengths back to them.

        A draft is accepted if it equals the token that is sampled at its position, and all drafts before it are
        accepted. The keys of other drafts stay in the caches behind the row's length, where the next step overwrites
        them. tokens: of `sampled_rows`.
        """
        first, counts, last = 0, list[int](), list[int]()
        for row, drafts in zip(group_rows.decode_rows, group_rows.drafts_each, strict=True):
            own = tokens[first : first + len(drafts) + 1]
            accepted = next((at for at, draft in enumerate(drafts) if draft != own[at]), len(drafts))
            self.rows[row].length -= len(drafts) - accepted
            counts.append(accepted + 1)
            last.append(own[accepted])
            first += len(own)
        return Accepted((*counts, *(1 for chunk in group_rows.chunks if chunk.samples)), last)

    def advance(self, group_rows: GroupRows, steps: int = 1) -> None:
        """Add the rows of `steps` equal steps to the lengths: a row's length is then the position of its sampled
        token."""
        for row, tokens in group_rows.decode_each:
            self.rows[row].length += steps * tokens
        for chunk in group_rows.chunks:
            self.rows[chunk.row].length += steps * chunk.count
