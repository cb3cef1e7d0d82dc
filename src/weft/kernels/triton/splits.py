"""Which splits decode attention cuts a step's rows into, and in which order programs take them.

The tokens that a row sees are cut into splits, which are attended to side by side (flash-decoding,
https://pytorch.org/blog/flash-decoding). How many and how long they are follows from the row's own length alone, so a
row's bits do not depend on its neighbours. The order does: longest first (Graham, "Bounds on multiprocessing timing
anomalies", 1969), since programs take them in turns and none should end long after the others. All layers of a step
whose caches are cut alike share one order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2

FIELDS = tl.constexpr(8)
"""Of an item: row, first token, the token behind the last one, number of its first split in the row, splits of the
item, tokens of a split.
"""


class Cut(NamedTuple):
    """How rows are cut into splits.

    tokens: of a split at least, a power of two. splits: of a row at most, a power of two; a longer row has longer ones.
    spare: in quarters of a split, how much longer a row's last one may be before what is left becomes one of its own.
    """

    tokens: int
    splits: int
    spare: int


class Splits(NamedTuple):
    """What programs take in turns: some splits of a row each.

    items int32 `[capacity, FIELDS]`, of which the first `total` (int32 `[1]`) are there; room: splits of a row at most;
    window: how many of a row's last tokens it sees, 0 for all; runs: whether an item may be of several splits.
    """

    items: Tensor
    total: Tensor
    room: int
    window: int
    runs: bool
    cut: Cut


@triton.jit
def row_splits(length, WINDOW: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr, SPARE: tl.constexpr):
    """(tokens that a row sees, tokens of each of its splits but the last, splits); one split where it sees none."""
    seen = length
    if WINDOW > 0:
        seen = tl.minimum(length, WINDOW)
    span = tl.maximum(tl.cdiv(seen, MOST), 1) - 1  # rounded up to a power of two
    span |= span >> 1
    span |= span >> 2
    span |= span >> 4
    span |= span >> 8
    span |= span >> 16
    span = tl.maximum(span + 1, TOKENS)
    spare = span // 4 * SPARE
    splits = tl.maximum(tl.cdiv(tl.maximum(seen - spare, 0), span), 1)
    return seen, span, splits


@kernel(do_not_specialize=["rows", "at_once"])
def _order_splits(
    lengths, items, total, rows, at_once, WINDOW: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
    SPARE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A program finds the places of one row's items: all but the last are alike and follow one another."""
    overlap.begin()
    row, every = tl.program_id(0), tl.arange(0, BLOCK_R)
    length = tl.load(lengths + row)
    every_length = tl.load(lengths + every, mask=every < rows, other=0)
    every_seen, every_span, every_splits = row_splits(every_length, WINDOW, TOKENS, MOST, SPARE)
    run = tl.maximum(tl.cdiv(tl.sum(tl.where(every < rows, every_splits, 0), 0), at_once), 1)  # splits of an item
    every_others = tl.cdiv(every_splits, run) - 1
    every_last = every_seen - every_others * every_span * run
    if row == 0:
        tl.store(total, tl.sum(tl.where(every < rows, every_others + 1, 0), 0))
    seen, span, splits = row_splits(length, WINDOW, TOKENS, MOST, SPARE)
    others = tl.cdiv(splits, run) - 1
    last = seen - others * span * run
    longer = (every_span > span) | ((every_span == span) & (every < row))
    others_at = tl.sum(tl.where(longer, every_others, 0), 0) + tl.sum((every_last > span * run).to(tl.int32), 0)
    longer = (every_last > last) | ((every_last == last) & (every < row))
    last_at = tl.sum(tl.where(every_span * run >= last, every_others, 0), 0) + tl.sum(longer.to(tl.int32), 0)
    item = tl.arange(0, MOST)
    is_last = item == others
    start = length - seen + item * span * run
    to = items + tl.where(is_last, last_at, others_at + item) * FIELDS
    real = item <= others
    tl.store(to, row, mask=real)
    tl.store(to + 1, start, mask=real)
    tl.store(to + 2, tl.where(is_last, length, start + span * run), mask=real)
    tl.store(to + 3, item * run, mask=real)
    tl.store(to + 4, tl.where(is_last, splits - others * run, run), mask=real)
    tl.store(to + 5, span, mask=real)


def order_splits(lengths: Tensor, tokens: int, window: int | None, at_once: int | None, cut: Cut) -> Splits:
    """The splits of a step's rows, longest items first; those of equal length by row and split.

    at_once: how many items programs take in one turn. Where there are more splits, an item is of several that follow
    one another, which a program reads without a pause. None: each split is an item.

    lengths int32 `[rows]`, the tokens of each row, `tokens` of them at most; window: a row sees its last `window` only.
    """
    rows = lengths.shape[0]
    room = min(cut.splits, max(1, cdiv(min(tokens, window or tokens), cut.tokens)))
    items, total = lengths.new_empty(rows * room, FIELDS.value), lengths.new_empty(1)
    if rows:
        _order_splits[(rows,)](
            lengths, items, total, rows, at_once or rows * room, WINDOW=window or 0, TOKENS=cut.tokens, MOST=cut.splits,
            SPARE=cut.spare, BLOCK_R=max(32, next_power_of_2(rows)),
            num_warps=1 if rows <= 256 else 4, **overlap.options(),
        )  # fmt: skip
    return Splits(items, total, room, window or 0, at_once is not None, cut)
