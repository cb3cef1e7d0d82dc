"""Rows of one step of one DP group as tensors: the input of a model and its caches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageTables:
    """Cache locations of a step's B sequences and T rows, for a group of paged caches.

    Args:
        pages: int32 `[B, W]`, page table of each sequence; undefined where no row sees the tokens.
        slots: int64 `[T]`, slot of each row's key and value (page · page_size + offset); −1: not stored.
    """

    pages: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Cache locations of a step's B sequences, for a group of recurrent states.

    Args:
        before: int64 `[B]`, slot of the state before the step's rows; −1 at the start of a sequence.
        after: int64 `[B]`, slot of the state after them; −1 for a padding sequence.
    """

    before: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Step of one DP group: T rows in B sequences, with S sampled rows. Zero rows are a legal batch.

    Args:
        tokens, positions: int64 `[T]`; the rows of a sequence are consecutive.
        starts: int32 `[B + 1]`; sequence i has rows starts[i] … starts[i + 1] − 1. None if every sequence has one row
            and `spans` is None.
        lengths: int32 `[B]`, tokens of a sequence up to its last row in this step; 0: a padding sequence, with one row
            that sees nothing and attends to zeros, or no row if `starts` is given.
        tables: one per group of the model's caches.
        sample_rows: int64 `[S]`, or a slice of the T rows.
        spans: (rows, context) of each sequence; context: its tokens before this step. None in a CUDA graph, where only
            tensors have them, padded to the graph's capacity. Then sequences of one row come first, and rows without a
            sequence are neither stored nor read.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor | None
    lengths: Tensor
    tables: tuple[PageTables | StateSlots, ...]
    sample_rows: Tensor | slice
    spans: tuple[tuple[int, int], ...] | None


class PromptSpan(NamedTuple):
    """First row, number of rows, earlier tokens, and index in the batch of a sequence of several rows."""

    first: int
    rows: int
    context: int
    sequence: int


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Sequences of a step, split into those with one row and those with several.

    Args:
        rows: rows of the sequences of one row; None: all rows.
        sequences: int64, indices of these sequences in the batch; None: all.
        longest: maximum tokens of these sequences; None: the host does not know it.
        prompts: the sequences of several rows.
    """

    rows: slice | Tensor | None = None
    sequences: Tensor | None = None
    longest: int | None = None
    prompts: tuple[PromptSpan, ...] = ()


def split_rows(batch: Batch) -> RowSplit:
    """Split the rows of a batch. Synchronizes with the device if the host does not know the sequences' rows."""
    spans = batch.spans
    if spans is None:
        if batch.starts is None:
            return RowSplit()
        counts = batch.starts.diff().tolist()
        spans = tuple((n, length - n) for n, length in zip(counts, batch.lengths.tolist(), strict=True))
    firsts = accumulate((count for count, _ in spans), initial=0)
    found = [PromptSpan(first, *span, i) for i, (first, span) in enumerate(zip(firsts, spans, strict=False))]
    single, prompts = [span for span in found if span.rows == 1], tuple(span for span in found if span.rows > 1)
    longest = max((span.context + 1 for span in single), default=0)
    if len(single) == len(batch.tokens):
        return RowSplit(longest=longest)
    numbers, rows = ([span[at] for span in single] for at in (3, 0))
    of = partial(torch.tensor, dtype=torch.int64, device=batch.tokens.device)
    first = rows == [*range(len(rows))]  # the engine puts them first
    return RowSplit(slice(len(rows)) if first else of(rows), of(numbers), longest, prompts)


def slots_of(pages: Tensor, page_size: int, tokens: int | None = None) -> Tensor:
    """Return the slots of tables pages `[…, W]` in token order: `[…, W · page_size]`, or only the first `tokens`."""
    if tokens is not None:
        pages = pages[..., : -(-tokens // page_size)]
    offsets = torch.arange(page_size, dtype=torch.int32, device=pages.device)
    return (pages[..., None] * page_size + offsets).flatten(-2)[..., :tokens]
