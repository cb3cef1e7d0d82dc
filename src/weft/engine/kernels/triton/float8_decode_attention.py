"""Decode attention over keys and values in FP8, for heads of up to 128 elements, in two kernels.

FP8 conversions, and not memory, bound the form of `decode_attention.py`. Here tokens are the rows of both products and
heads their columns, in units of eight for tensor cores: with eight heads a program is one warp, which waits for no
other. Programs read consecutive splits of a row without a pause.

A split writes the sum of its values, weighted relative to its largest score, with that score to base 2 and the sum of
the weights. With eight heads per key head such sums are up to a quarter of the tokens' bytes, and are read again. So
the splits of a run are summed, one after another, before the merge adds runs: by the first kernel if a program has all
of a run, else by the merge, to the same bits. A run's sum is stored in the place of its first split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.engine.kernels.triton.float8_cache import (
    fit_queries,
    halves,
    joined,
    load_exponents,
    product_dtype,
    scale_scores,
    unscaled,
)
from weft.engine.kernels.triton.splits import FIELDS, place_in_round, rounds_of_program, row_splits
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import kernel

RUN = tl.constexpr(4)
"""Splits of a run, which begins at a multiple of RUN in its row. Runs of 8 take 16 % more for 64 rows of 1,024 tokens
(H200), and 4 % less for 8,192."""
FEW_RUNS, MERGED_COLUMNS = 4, 64
"""(Maximum runs of a short row, some 1,000 tokens; columns of a program) of the merge."""


@triton.jit
def _page_of(pages, token, end, real, PAGE: tl.constexpr):
    """Look up the pages of a row's tokens; from `end` on the last token's, which is read again and counts nothing.
    real: mask."""
    return tl.load(pages + tl.minimum(token, end - 1) // PAGE, mask=real, other=0)


@triton.jit
def _slot_of(page, token, end, PAGE: tl.constexpr):
    """Return the slots of a row's tokens in their pages (see `_page_of`): unsigned, to be widened without
    instructions."""
    return (page.to(tl.uint32) * PAGE + tl.minimum(token, end - 1).to(tl.uint32) % PAGE).to(tl.uint64)


@triton.jit
def _weigh(score, scale, top, of_keys, of_values, seen):
    """Return (weights of values, their shares of the sum of weights, factor of the sums so far, largest score
    so far)."""
    of_values = tl.trans(of_values)
    score = scale_scores(score, scale, tl.trans(of_keys), of_values, True)
    score = tl.where(seen[:, None], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 0))
    p = tl.exp2(score - new_top[None, :])
    return p, unscaled(p, of_values, True), tl.exp2(top - new_top)[None, :], new_top


@triton.jit
def _fold(top, total, next_top, next_total):
    """Return (top, total, factor of the sum so far, factor of the next one) of a sum and the next, which may be
    empty."""
    both = tl.maximum(top, next_top)
    safe = tl.where(both == float("-inf"), 0.0, both)
    kept, added = tl.exp2(top - safe), tl.exp2(next_top - safe)
    return both, tl.fma(total, kept, next_total * added), kept, added


@triton.jit
def _add(acc, kept, next_acc, added):
    """Add a sum of values to the next one, by the factors of `_fold`. Spelled out, so that both kernels round alike."""
    return tl.fma(acc, tl.broadcast_to(kept, acc.shape), next_acc * added)


@triton.jit
def _store_sum(part, part_sums, at, d, real, top, total, even, odd, D: tl.constexpr):
    """Store a sum of values, separately for even and odd elements, with its largest score and its weights' sum."""
    x = joined(tl.trans(even), tl.trans(odd), True)
    tl.store(part + at[:, None] * D + d[None, :], x, mask=real[:, None] & (d < D)[None, :])
    tl.store(part_sums + at * 2, top, mask=real)
    tl.store(part_sums + at * 2 + 1, total, mask=real)


@kernel(do_not_specialize=["max_splits", "pages_row"])
def _attend_runs(
    q, keys, values, k_exponents, v_exponents, pages, items, count, part, part_sums,
    max_splits, scale_log2, q_row, q_head, k_slot, k_head, v_slot, v_head, e_slot, pages_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = (HEADS // GROUP) * HEAD_BLOCKS
    DTYPE: tl.constexpr = product_dtype(q.dtype.element_ty, True)
    PAIRS: tl.constexpr = D // 2
    BLOCK_PAIRS: tl.constexpr = BLOCK_D // 2
    overlap.begin()
    d, c, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_PAIRS), tl.arange(0, BLOCK_N)
    k_row, v_row = tl.cast(k_slot, tl.uint32).to(tl.uint64), tl.cast(v_slot, tl.uint32).to(tl.uint64)
    e_row = tl.cast(e_slot, tl.uint32).to(tl.uint64)
    for round in range(rounds_of_program(tl.load(count) * BLOCKS)):
        place = place_in_round(round)
        block = place % BLOCKS
        item = items + place // BLOCKS * FIELDS
        row, start, end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        split, own, span, splits = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        begin, last, split_end = split, split + own - 1, tl.where(own > 1, start + span, end)
        kv_head = block // HEAD_BLOCKS
        in_group = (block % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        head, real = kv_head * GROUP + in_group, in_group < GROUP
        at = (row.to(tl.int64) * HEADS + head) * max_splits
        q_at = q + row.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :]
        x = tl.load(q_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
        main, main_odd, _, _, scale = fit_queries(x, x, scale_log2, 0, DTYPE, True)
        main, main_odd, scale = tl.trans(main), tl.trans(main_odd), tl.trans(scale)
        row_pages = pages + row.to(tl.int64) * pages_row
        k_at, v_at = keys + kv_head * k_head, values + kv_head * v_head
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)  # summed over tokens where a split ends
        even = tl.zeros([BLOCK_PAIRS, BLOCK_H], tl.float32)
        odd = even
        run_top, run_total, run_even, run_odd = top, tl.zeros([BLOCK_H], tl.float32), even, odd
        # Exponents are read a block ahead, so their pages are looked up two blocks ahead. Empty rows have no pages.
        there = (n >= 0) & (start < end)
        page = _page_of(row_pages, start + n, end, there, PAGE)
        slot = _slot_of(page, start + n, end, PAGE)
        of_keys, of_values = load_exponents(k_exponents, v_exponents, slot * e_row + kv_head, there, True)
        page_ahead = _page_of(row_pages, start + BLOCK_N + n, end, there, PAGE)
        for first in range(start, end, BLOCK_N):
            slot = _slot_of(page, first + n, end, PAGE)
            token = first + BLOCK_N + n
            page = _page_of(row_pages, token, end, n >= 0, PAGE)
            e_at = _slot_of(page_ahead, token, end, PAGE) * e_row + kv_head
            next_keys, next_values = load_exponents(k_exponents, v_exponents, e_at, n >= 0, True)
            page_ahead = _page_of(row_pages, token + BLOCK_N, end, n >= 0, PAGE)
            k_to, v_to = k_at + (slot[:, None] * k_row + c[None, :]), v_at + (slot[None, :] * v_row + c[:, None])
            k = tl.load(k_to) if PAIRS == BLOCK_PAIRS else tl.load(k_to, mask=(c < PAIRS)[None, :], other=0)
            v = tl.load(v_to) if PAIRS == BLOCK_PAIRS else tl.load(v_to, mask=(c < PAIRS)[:, None], other=0)
            k, k_odd = halves(k, DTYPE)
            score = tl.dot(k_odd, main_odd, tl.dot(k, main, input_precision="ieee"), input_precision="ieee")
            p, share, keep, top = _weigh(score, scale, top, of_keys, of_values, first + n < end)
            weight = weight * keep + share
            v, v_odd = halves(v, DTYPE)
            odd = tl.dot(v_odd, p.to(DTYPE), odd * keep, input_precision="ieee")
            even = tl.dot(v, p.to(DTYPE), even * keep, input_precision="ieee")
            of_keys, of_values = next_keys, next_values
            if first + BLOCK_N >= split_end:
                run_begin = split // RUN * RUN
                run_last = tl.minimum(run_begin + RUN, splits) - 1
                apart = (run_begin < begin) | (run_last > last)
                run_top, run_total, kept, added = _fold(run_top, run_total, top, tl.sum(weight, 0))
                run_even = _add(run_even, kept[None, :], even, added[None, :])
                run_odd = _add(run_odd, kept[None, :], odd, added[None, :])
                if apart | (split == run_last):
                    to = at + tl.where(apart, split, run_begin)
                    _store_sum(part, part_sums, to, d, real, run_top, run_total, run_even, run_odd, D)
                    run_top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # the sum so far counts 0 from here on
                split += 1
                split_end = tl.where(split == last, end, split_end + span)
                top = tl.full([BLOCK_H], float("-inf"), tl.float32)


@triton.jit
def _sum_of_runs(part, part_sums, at, d, splits, per_item, D: tl.constexpr, RUNS: tl.constexpr):
    """Return (largest score, sum of weights, sum of values) of a head's splits, which are at most RUNS runs."""
    begin = tl.arange(0, RUNS) * RUN
    apart = begin // per_item != (tl.minimum(begin + RUN, splits) - 1) // per_item  # no program had the whole run
    top = tl.full([RUNS], float("-inf"), tl.float32)
    total = tl.zeros([RUNS], tl.float32)
    acc = tl.zeros([RUNS, d.shape[0]], tl.float32)
    for i in tl.static_range(RUN):
        there = (begin + i < splits) & (apart | (i == 0))
        to = at + begin + i
        next_top = tl.load(part_sums + to * 2, mask=there, other=float("-inf"))
        next_total = tl.load(part_sums + to * 2 + 1, mask=there, other=0.0)
        x = tl.load(part + to[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        top, total, kept, added = _fold(top, total, next_top, next_total)
        acc = _add(acc, kept[:, None], x, added[:, None])
    best = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))  # -inf minus -inf would be NaN
    return best, tl.sum(total * weight, 0), tl.sum(acc * weight[:, None], 0)


@kernel(do_not_specialize=["max_splits"])
def _merge_runs(
    part, part_sums, lengths, count, out, lse, max_splits, out_row, out_head,
    HEADS: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPARE: tl.constexpr, SHORT: tl.constexpr, BLOCK_D: tl.constexpr, LN2: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    # Lengths and order are older than the kernel that attended to the splits.
    length = tl.load(lengths + row, cache_modifier=".cg")
    per_item = tl.load(count + 1, cache_modifier=".cg")
    seen, _, splits = row_splits(length, WINDOW, TOKENS, MAX_SPLITS, SPARE, SHORT)
    splits = tl.where(seen > 0, splits, 0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * HEADS + head) * max_splits
    overlap.begin()
    if splits <= FEW * RUN:
        best, total, x = _sum_of_runs(part, part_sums, at, d, splits, per_item, D, FEW)
    else:
        best, total, x = _sum_of_runs(part, part_sums, at, d, splits, per_item, D, MAX_SPLITS // RUN)
    to = out + row.to(tl.int64) * out_row + head * out_head + d
    tl.store(to, (x / tl.where(splits > 0, total, 1.0)).to(out.dtype.element_ty), mask=d < D)
    if LSE and tl.program_id(1) == 0:
        tl.store(lse + row * HEADS + head, tl.where(splits > 0, (best + tl.log2(total)) * LN2, float("-inf")))
