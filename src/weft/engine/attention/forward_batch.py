"""One step's rows of one DP group, as tensors: the input of a model and its caches."""

from __future__ import annotations

from dataclasses import dataclass

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
