"""Inputs of a decode step that runs without the host, and the tables that they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ENTRIES = 1024
"""Entries of a row's table that one program copies."""


class StepInputs(NamedTuple):
    """Inputs of a step of `capacity` rows.

    Args:
        tokens, positions: int64 `[capacity]`.
        lengths: int32 `[capacity]`, including the new token.
        entries: int32 `[capacity, width]`, the rows' tables. For a group of pages, only entries of pages that hold
            tokens of the row are written.
        slots: int64 `[groups, 2, capacity]`: for pages, the new token's slot (the second is unused); for states, the
            slots before and after the step.

    A row that is not live has token 0, position 0, length 0, slots −1 and no entries. A row without a last token (−1)
    gets token 0, so that the embedding reads valid memory; `step_out` reports it.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    entries: Tensor
    slots: Tensor


class TablePieces(NamedTuple):
    """Pieces of a row's tables, one per program of `step_in`.

    Args:
        groups: number of groups of caches.
        each: int32 `[pieces, 5]`: the group, 1 if it has states, the first entry of its table, its width, and the first
            entry that the program copies.
    """

    groups: int
    each: Tensor


def table_pieces(widths: Sequence[int], states: Sequence[bool], device: torch.device) -> TablePieces:
    """Return the pieces of adjacent tables. widths, states: per group, the table's width, and True if it has states."""
    found, begin = [], 0
    for group, (width, state) in enumerate(zip(widths, states, strict=True)):
        for first in range(0, width, width if state else ENTRIES):
            found.append((group, int(state), begin, width, first))
        begin += width
    return TablePieces(len(widths), torch.tensor(found, dtype=torch.int32, device=device))


def unfilled_inputs(rows: Sequence[Tensor], tables: Sequence[Tensor], pieces: TablePieces) -> StepInputs:
    """Return inputs for `step_in` to fill, which has these `rows` (and places, drafts), `tables` (last_token, length,
    entries) and `pieces`.

    Raises ValueError if they do not match.
    """
    if not rows[0].shape == rows[1].shape == rows[2].shape:
        raise ValueError(f"rows, places and drafts are {[list(x.shape) for x in rows]}: they must have the same rows")
    last_token, length, entries = tables
    if not last_token.shape == length.shape == entries.shape[:1]:
        shapes = f"{list(length.shape)}, last_token {list(last_token.shape)}, entries {list(entries.shape)}"
        raise ValueError(f"length is {shapes}: they must have the same rows")
    if entries.dtype != torch.int32 or entries.stride(1) != 1:
        raise ValueError(f"entries are {entries.dtype} with strides {entries.stride()}, not rows of int32")
    capacity, like = rows[0].shape[0], length.new_empty
    return StepInputs(
        tokens=like(capacity, dtype=torch.int64),
        positions=like(capacity, dtype=torch.int64),
        lengths=like(capacity),
        entries=like(capacity, entries.shape[1]),
        slots=like(pieces.groups, 2, capacity, dtype=torch.int64),
    )
