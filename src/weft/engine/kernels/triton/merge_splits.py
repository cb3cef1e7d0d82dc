"""Merge of decode attention's splits, in their order."""

from __future__ import annotations

import triton.language as tl

from weft.engine.kernels.triton.splits import row_splits
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import kernel


@kernel(do_not_specialize=["max_splits"])
def _merge_splits(
    part, part_lse, lengths, out, lse, max_splits, out_row, out_head,
    HEADS: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPARE: tl.constexpr, SHORT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    LN2: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    seen, _, splits = row_splits(tl.load(lengths + row), WINDOW, TOKENS, MAX_SPLITS, SPARE, SHORT)
    splits = tl.where(seen > 0, splits, 0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * HEADS + head) * max_splits
    split = tl.arange(0, MAX_SPLITS)
    each = tl.load(part_lse + at + split, mask=split < splits, other=float("-inf"))
    top = tl.max(each, 0)
    empty = top == float("-inf")
    top = tl.where(empty, 0.0, top)  # an empty row has no weights: -inf minus -inf would be NaN
    total = tl.where(empty, 1.0, tl.sum(tl.exp2(each - top), 0))
    merged = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        weight = tl.exp2(tl.load(part_lse + at + s, mask=s < splits, other=float("-inf")) - top)
        x = tl.load(part + (at + s)[:, None] * D + d[None, :], mask=(s < splits)[:, None] & (d < D)[None, :], other=0.0)
        merged += tl.sum(x * weight[:, None], 0)
    to = out + row.to(tl.int64) * out_row + head * out_head + d
    tl.store(to, (merged / total).to(out.dtype.element_ty), mask=d < D)
    if LSE and tl.program_id(1) == 0:
        found = tl.where(~empty, (top + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse + row * HEADS + head, found)
