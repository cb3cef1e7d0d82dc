"""Splits of a step's rows in decode attention, and their order.

The tokens that a row sees are cut into splits, which run in parallel (flash-decoding,
https://pytorch.org/blog/flash-decoding). Their number and length depend only on the row's length, so a row's bits do
not depend on its neighbours. The order depends on all rows. It is longest first (Graham, "Bounds on multiprocessing
timing anomalies", 1969), since each program takes one item after another and all should end at the same time. All
layers of a step with equal rules share one order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2

FIELDS = tl.constexpr(8)
"""Fields of an item: row, first token, end of its tokens, number of its first split in the row, number of its splits,
tokens of a split, splits of the row."""


class SplitRule(NamedTuple):
    """Rule that cuts rows into splits.

    Args:
        tokens: minimum tokens of a split, a power of two.
        splits: maximum splits of a row, a power of two; longer rows have longer splits.
        spare: quarters of a split by which a row's last split may be longer than the others.
        short: rows of more tokens have splits of at least twice the minimum; None: all have the same minimum.
    """

    tokens: int
    splits: int
    spare: int
    short: int | None = None


class Splits(NamedTuple):
    """Items that programs process one after another, each with some consecutive splits of a row.

    Args:
        items: int32 `[capacity, FIELDS]`.
        total: int32 `[2]`: number of valid items, and splits of each item but a row's last.
        max_splits: maximum splits of a row.
        window: number of a row's last tokens that it sees; 0: all.
        consecutive: an item may have several splits.
        cut: rule that cuts rows.
    """

    items: Tensor
    total: Tensor
    max_splits: int
    window: int
    consecutive: bool
    cut: SplitRule


@triton.jit
def row_splits(
    length, WINDOW: tl.constexpr, TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPARE: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Return (tokens that a row sees, tokens of each of its splits but the last, splits); one split if it sees none."""
    seen = length
    if WINDOW > 0:
        seen = tl.minimum(length, WINDOW)
    span = tl.maximum(tl.cdiv(seen, MAX_SPLITS), 1) - 1  # rounded up to a power of two
    span |= span >> 1
    span |= span >> 2
    span |= span >> 4
    span |= span >> 8
    span |= span >> 16
    span = tl.maximum(span + 1, TOKENS)
    if SHORT is not None:
        span = tl.where(seen > SHORT, tl.maximum(span, 2 * TOKENS), span)
    spare = span // 4 * SPARE
    splits = tl.maximum(tl.cdiv(tl.maximum(seen - spare, 0), span), 1)
    return seen, span, splits


@kernel(do_not_specialize=["rows", "at_once"])
def _order_splits(
    lengths, items, total, rows, at_once, WINDOW: tl.constexpr, TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SPARE: tl.constexpr, SHORT: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Find the places of one row's items: all except the last have one size, and they are consecutive."""
    overlap.begin()
    row, any_row = tl.program_id(0), tl.arange(0, BLOCK_R)
    length = tl.load(lengths + row)
    any_length = tl.load(lengths + any_row, mask=any_row < rows, other=0)
    any_seen, any_span, any_splits = row_splits(any_length, WINDOW, TOKENS, MAX_SPLITS, SPARE, SHORT)
    per_item = tl.maximum(tl.cdiv(tl.sum(tl.where(any_row < rows, any_splits, 0), 0), at_once), 1)  # splits of an item
    any_others = tl.cdiv(any_splits, per_item) - 1
    any_last = any_seen - any_others * any_span * per_item
    if row == 0:
        tl.store(total, tl.sum(tl.where(any_row < rows, any_others + 1, 0), 0))
        tl.store(total + 1, per_item)
    seen, span, splits = row_splits(length, WINDOW, TOKENS, MAX_SPLITS, SPARE, SHORT)
    others = tl.cdiv(splits, per_item) - 1
    last = seen - others * span * per_item
    longer = (any_span > span) | ((any_span == span) & (any_row < row))
    others_at = tl.sum(tl.where(longer, any_others, 0), 0) + tl.sum((any_last > span * per_item).to(tl.int32), 0)
    longer = (any_last > last) | ((any_last == last) & (any_row < row))
    last_at = tl.sum(tl.where(any_span * per_item >= last, any_others, 0), 0) + tl.sum(longer.to(tl.int32), 0)
    item = tl.arange(0, MAX_SPLITS)
    is_last = item == others
    start = length - seen + item * span * per_item
    to = items + tl.where(is_last, last_at, others_at + item) * FIELDS
    real = item <= others
    tl.store(to, row, mask=real)
    tl.store(to + 1, start, mask=real)
    tl.store(to + 2, tl.where(is_last, length, start + span * per_item), mask=real)
    tl.store(to + 3, item * per_item, mask=real)
    tl.store(to + 4, tl.where(is_last, splits - others * per_item, per_item), mask=real)
    tl.store(to + 5, span, mask=real)
    tl.store(to + 6, splits, mask=real)


@triton.jit
def place_in_round(round):
    """Return the piece of work of this program in a round. Items are sorted longest first, and rounds go through the
    programs in alternating order, to even out their sums."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    return round * programs + program + round % 2 * (programs - 1 - 2 * program)


@triton.jit
def rounds_of_program(work):
    """Return the rounds in which this program has a piece of `work`."""
    rounds = work // tl.num_programs(0)
    return rounds + (place_in_round(rounds) < work).to(tl.int32)


def order_splits(lengths: Tensor, tokens: int, window: int | None, at_once: int | None, cut: SplitRule) -> Splits:
    """Return the splits of a step's rows, longest items first; items of equal length by row and split.

    Args:
        lengths: int32 `[rows]`, tokens of each row, at most `tokens`.
        window: a row sees its last `window` tokens; None: all.
        at_once: number of items that run at a time. With more splits, an item has several consecutive ones, which a
            program reads without a pause. None: each split is an item.
    """
    rows = lengths.shape[0]
    max_splits = min(cut.splits, max(1, cdiv(min(tokens, window or tokens), cut.tokens)))
    items, total = lengths.new_empty(rows * max_splits, FIELDS.value), lengths.new_empty(2)
    if rows:
        _order_splits[(rows,)](
            lengths, items, total, rows, at_once or rows * max_splits, WINDOW=window or 0, TOKENS=cut.tokens,
            MAX_SPLITS=cut.splits, SPARE=cut.spare, SHORT=cut.short, BLOCK_R=max(32, next_power_of_2(rows)),
            num_warps=1 if rows <= 256 else 4, **overlap.options(),
        )  # fmt: skip
    return Splits(items, total, max_splits, window or 0, at_once is not None, cut)
