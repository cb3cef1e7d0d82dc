"""One step's rows of one DP group, as tensors: the input of a model and its caches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageTables:
    """Where a group of paged caches keeps a step's B sequences and T rows.

    pages: int32 `[B, W]`, the page table of each sequence; undefined where no row sees the tokens.
    slots: int64 `[T]`, where each row's key and value are stored (page · page_size + offset); −1: not stored.
    """

    pages: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Where a group of recurrent states keeps a step's B sequences: int64 `[B]` each.

    before: the slot of the state before the step's rows, −1 where a sequence begins. after: the slot of the state after
    them, −1 for a padding sequence.
    """

    before: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A step of one DP group: T rows in B sequences, S of which are sampled. Zero rows are a legal batch.

    tokens, positions: int64 `[T]`; the rows of a sequence follow one another.
    starts: int32 `[B + 1]`; the rows of sequence i are starts[i] … starts[i + 1] − 1. None where every sequence has one
    row, and spans is None.
    lengths: int32 `[B]`, the tokens of a sequence up to its last row in this step. 0: a padding sequence. Without
    starts it has one row, which sees nothing and attends to zeros; with them it has none.
    tables: of each group of the model's caches.
    sample_rows: int64 `[S]`, or a slice of the T rows.
    spans: (rows, context) of each sequence; context is its tokens before this step. None where only the tensors have
    them, as inside a CUDA graph: its tensors have the shape of its capacity. Then sequences of one row come first, and
    rows of no sequence are neither stored nor read.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor | None
    lengths: Tensor
    tables: tuple[PageTables | StateSlots, ...]
    sample_rows: Tensor | slice
    spans: tuple[tuple[int, int], ...] | None


class PromptSpan(NamedTuple):
    """A sequence of several rows: its first row, their number, its tokens before them, its place in the batch."""

    first: int
    rows: int
    context: int
    sequence: int


@dataclass(frozen=True, slots=True)
class RowSplit:
    """A step's sequences of one row, and of several.

    Args:
        rows: rows of sequences of one row; None: all rows.
        sequences: int64, the places of these sequences in the batch, where there are others.
        longest: tokens of the longest of these, where the host knows it.
        prompts: the other sequences.
    """

    rows: slice | Tensor | None = None
    sequences: Tensor | None = None
    longest: int | None = None
    prompts: tuple[PromptSpan, ...] = ()


def split_rows(batch: Batch) -> RowSplit:
    """Reads the device where the host does not know the sequences' rows."""
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
    first = rows == [*range(len(rows))]  # the engine has them first
    return RowSplit(slice(len(rows)) if first else of(rows), of(numbers), longest, prompts)


def slots_of(pages: Tensor, page_size: int, tokens: int | None = None) -> Tensor:
    """The slots of page tables `[…, W]` in the order of the tokens, `[…, W · page_size]`, or of the first `tokens`."""
    if tokens is not None:
        pages = pages[..., : -(-tokens // page_size)]
    offsets = torch.arange(page_size, dtype=torch.int32, device=pages.device)
    return (pages[..., None] * page_size + offsets).flatten(-2)[..., :tokens]
