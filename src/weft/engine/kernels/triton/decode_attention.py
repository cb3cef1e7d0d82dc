"""Attention of one query per row over paged keys and values, in two kernels.

The tokens of a row are cut into splits (`splits.py`). The first kernel writes a partial output and its log-sum-exp per
split; the second merges a row's splits in their order (the structure is that of LightLLM's kernel). The first kernel
has a fixed number of programs, which find the splits of all rows on the device: one captured graph serves all lengths,
and short rows leave no program idle. FP8 has its own kernels if `sums_runs` is true.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton.float8_cache import (
    PAIR,
    dot_right,
    dot_wide,
    fit_queries,
    joined,
    load_exponents,
    parts_of,
    product_dtype,
    scale_scores,
    unscaled,
)
from weft.engine.kernels.triton.float8_decode_attention import FEW_RUNS, MERGED_COLUMNS, _attend_runs, _merge_runs
from weft.engine.kernels.triton.merge_splits import _merge_splits
from weft.engine.kernels.triton.splits import FIELDS, SplitRule, Splits, order_splits, place_in_round, rounds_of_program
from weft.kernels.float8 import Stored
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, gpu, kernel, next_power_of_2, scaled

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


class DecodeTile(NamedTuple):
    """Tile of the first kernel.

    Args:
        heads, tokens: heads and tokens of a block.
        warps: warps of a program.
        stages: stages of the pipeline of loads.
        programs: number of programs.
        consecutive: a program reads consecutive splits of a row without a pause, which costs more shared memory.
    """

    heads: int
    tokens: int
    warps: int
    stages: int
    programs: int
    consecutive: bool


@triton.jit
def _slots(pages, token, end, PAGE: tl.constexpr):
    """Look up the slots of a row's tokens before `end` in its page table."""
    page = tl.load(pages + token // PAGE, mask=token < end, other=0)
    return page.to(tl.int64) * PAGE + token % PAGE


@triton.jit
def _load_item(item):
    """Return (row, first token, end of its tokens, first split, splits, tokens of a split)."""
    row, start = tl.load(item), tl.load(item + 1)
    end, split = tl.load(item + 2), tl.load(item + 3)
    own, span = tl.load(item + 4), tl.load(item + 5)
    return row, start, end, split, own, span


@triton.jit
def _load_keys(k_at, slot, k_slot, c, seen, BEGIN: tl.constexpr, COLUMNS: tl.constexpr, FLOAT8: tl.constexpr):
    """Load the columns BEGIN + c of keys, `[columns, tokens]`. FP8 is loaded in pairs, by the addresses of values."""
    if FLOAT8:
        mask = seen[:, None] & (c < COLUMNS)[None, :]
        k = tl.trans(tl.load(k_at + slot[:, None] * k_slot + BEGIN + c[None, :], mask=mask, other=0))
    else:
        mask = seen[None, :] & (c < COLUMNS)[:, None]
        k = tl.load(k_at + slot[None, :] * k_slot + BEGIN + c[:, None], mask=mask, other=0)
    return k


@triton.jit
def _store_split(
    part, part_lse, at, d, in_group, top, total, acc, odd, GROUP: tl.constexpr, D: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    """Store a split's output, and its log-sum-exp to base 2."""
    real, acc = in_group < GROUP, joined(acc, odd, FLOAT8)
    tl.store(part + at[:, None] * D + d[None, :], acc / total[:, None], mask=real[:, None] & (d < D)[None, :])
    tl.store(part_lse + at, top + tl.log2(total), mask=real)


@kernel(do_not_specialize=["max_splits", "pages_row"])
def _attend_splits(
    q, keys, values, k_exponents, v_exponents, pages, items, count, part, part_lse,
    max_splits, scale_log2, q_row, q_head, k_slot, k_head, v_slot, v_head, e_slot, pages_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, LATENT: tl.constexpr,
    CONSECUTIVE: tl.constexpr, FLOAT8: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = (HEADS // GROUP) * HEAD_BLOCKS
    DTYPE: tl.constexpr = product_dtype(q.dtype.element_ty, FLOAT8)
    EACH: tl.constexpr = 2 if FLOAT8 else 1  # FP8 is loaded in pairs
    COLUMNS: tl.constexpr = D // EACH
    overlap.begin()
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_REST)
    c, rest_c = tl.arange(0, BLOCK_D // EACH), tl.arange(0, BLOCK_REST // EACH)
    for round in range(rounds_of_program(tl.load(count) * BLOCKS)):
        place = place_in_round(round)
        block = place % BLOCKS
        row, start, end, split, own, span = _load_item(items + place // BLOCKS * FIELDS)
        last = split + own - 1
        split_end = tl.where(own > 1, start + span, end)
        kv_head = block // HEAD_BLOCKS
        in_group = (block % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        head = kv_head * GROUP + in_group
        real = (in_group < GROUP)[:, None] & (d < D)[None, :]
        q_at = q + row.to(tl.int64) * q_row + head[:, None] * q_head
        main = tl.load(q_at + d[None, :], mask=real, other=0.0)
        rest = main
        if REST > 0:
            rest = tl.load(q_at + D + r[None, :], mask=(in_group < GROUP)[:, None] & (r < REST)[None, :], other=0.0)
        main, main_odd, rest, rest_odd, scale = fit_queries(main, rest, scale_log2, REST, DTYPE, FLOAT8)
        row_pages = pages + row.to(tl.int64) * pages_row
        k_at, v_at = keys + kv_head * k_head, values + kv_head * v_head
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        # Weights are summed over tokens only where a split ends, if registers allow.
        weight = tl.zeros([BLOCK_H, BLOCK_N if CONSECUTIVE else 1], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D // EACH], tl.float32)
        odd = tl.zeros([BLOCK_H, BLOCK_D // EACH if FLOAT8 else 1], tl.float32)
        # Slots are looked up one block ahead, so that loads of keys do not wait for the page table.
        slot = _slots(row_pages, start + tl.arange(0, BLOCK_N), end, PAGE)
        seen = start + tl.arange(0, BLOCK_N) < end
        of_keys, of_values = load_exponents(k_exponents, v_exponents, slot * e_slot + kv_head, seen, FLOAT8)
        for first in range(start, end, BLOCK_N):
            seen = first + tl.arange(0, BLOCK_N) < end
            v_to = v_at + slot[:, None] * v_slot + c[None, :]
            v = tl.load(v_to, mask=seen[:, None] & (c < COLUMNS)[None, :], other=0)
            k = tl.trans(v) if LATENT else _load_keys(k_at, slot, k_slot, c, seen, 0, COLUMNS, FLOAT8)
            score = dot_right(main, main_odd, k, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), DTYPE, FLOAT8)
            if REST > 0:
                k_rest = _load_keys(k_at, slot, k_slot, rest_c, seen, COLUMNS, REST // EACH, FLOAT8)
                score = dot_right(rest, rest_odd, k_rest, score, DTYPE, FLOAT8)
            score = scale_scores(score, scale, of_keys, of_values, FLOAT8)
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            keep = tl.exp2(top - new_top)
            p = tl.exp2(score - new_top[:, None])
            share = unscaled(p, of_values, FLOAT8)
            weight = weight * keep[:, None] + (share if CONSECUTIVE else tl.sum(share, 1, keep_dims=True))
            slot = _slots(row_pages, first + BLOCK_N + tl.arange(0, BLOCK_N), end, PAGE)
            seen = first + BLOCK_N + tl.arange(0, BLOCK_N) < end
            of_keys, of_values = load_exponents(k_exponents, v_exponents, slot * e_slot + kv_head, seen, FLOAT8)
            acc, odd = dot_wide(p.to(DTYPE), v, acc * keep[:, None], odd * keep[:, None], FLOAT8)
            top = new_top
            if CONSECUTIVE:
                ended = first + BLOCK_N >= split_end
                if ended:
                    at = (row.to(tl.int64) * HEADS + head) * max_splits + split
                    _store_split(part, part_lse, at, d, in_group, top, tl.sum(weight, 1), acc, odd, GROUP, D, FLOAT8)
                    split += 1
                    split_end = tl.where(split == last, end, split_end + span)
                    top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # sums so far count 0 from here on
        if not CONSECUTIVE:
            at = (row.to(tl.int64) * HEADS + head) * max_splits + split
            total = tl.where(end > start, tl.sum(weight, 1), 1.0)
            _store_split(part, part_lse, at, d, in_group, top, total, acc, odd, GROUP, D, FLOAT8)


def sums_runs(head_dim: int, float8: bool, latent: bool) -> bool:
    """Choose the kernels of `float8_decode_attention.py`: for FP8 keys and values in heads of up to 128.

    On an H200 these take 0.56 to 0.91 of the time of the kernels here with 64 rows of 1,024 tokens and from 8,192 on, 1
    µs more with one row of 1,024. In bfloat16 the same form took up to 1.5 of it with 1,024 tokens, over latent vectors
    and wide heads, too.
    """
    return float8 and not latent and head_dim <= 128


def tile_of(head_dim: int, group: int, element_size: int = 2, float8: bool = False, latent: bool = False) -> DecodeTile:
    """Return the first kernel's tile, by the model's shape and the GPU, so that a row has the same bits at every
    capacity. float8: the cache is in FP8, and conversions cost registers. latent: latent vectors; head_dim is their
    values' size."""
    heads = min(64, max(16, next_power_of_2(group)))
    if sums_runs(head_dim, float8, latent):
        heads = min(64, max(8, next_power_of_2(group)))
        return DecodeTile(heads, 32, heads // 8, 3, scaled(132 * 64 // heads), True)
    if head_dim <= 128:
        return DecodeTile(heads, 32, 4, 3, scaled(132 * 4), True)
    if head_dim <= 256 and float8:
        return DecodeTile(min(heads, 32), 32, 8, 3, scaled(132), False)
    if head_dim <= 256:
        return DecodeTile(min(heads, 32), 32, 4, 3, scaled(132 * 3), False)
    if float8 and group > 16:
        return DecodeTile(32, 64, 8, 3, scaled(132), False)
    if not float8 and group > 32 and element_size == 2 and gpu().shared_bytes >= 200 << 10:
        # Each block of heads reads a row's latent vectors again, so use few large blocks, in products of 64 rows.
        return DecodeTile(64, 32, 8, 3, scaled(132), False)
    return DecodeTile(16, 32, 4, 3, scaled(132 * 2), False)


def cut_of(head_dim: int, group: int = 1) -> SplitRule:
    """Return the rule that cuts rows into splits, by the model's shape alone. group: heads that share a latent vector.

    Measured on an H200, for heads of 128: splits of 128 tokens take 5 % less with 64 rows of 1,024 tokens, and 22 %
    more with one. At most 32 per row take 5 % less with 64 rows of 8,192 tokens, but would keep half of a GPU idle with
    one.
    """
    if head_dim <= 128:
        return SplitRule(64, 64, 2)
    # With that many heads, a split's outputs are more bytes than its tokens: 64 rows of 8,192 take 26 % less with
    # splits of 256 tokens, one row the same. One row of 1,024 would take 50 % more.
    return SplitRule(128, 64, 2, 1024 if head_dim > 256 and group > 64 else None)


def splits_of(
    lengths: Tensor,
    tokens: int,
    window: int | None,
    head_dim: int,
    blocks: int,
    tile: DecodeTile | None = None,
    group: int = 1,
    float8: bool = False,
) -> Splits:
    """Return the splits of a step's rows, for all layers with the same heads.

    Args:
        lengths, tokens, window: see `order_splits`.
        blocks: number of blocks of heads, at least the key-value heads.
        group: see `cut_of`.
        float8: see `tile_of`.
    """
    tile = tile_of(head_dim, 1, float8=float8) if tile is None else tile
    at_once = max(1, tile.programs // blocks) if tile.consecutive else None
    return order_splits(lengths, tokens, window, at_once, cut_of(head_dim, group))


def decode_attention(
    q: Tensor,
    keys: Stored,
    values: Stored,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    splits: Splits | None = None,
    tile: DecodeTile | None = None,
) -> Tensor:
    """Return softmax(scale · q Kᵀ) V of each row over its own tokens: `[rows, heads, head_dim]` in q's dtype.

    Args:
        q: `[rows, heads, head_dim]`; heads is a multiple of kv_heads.
        keys, values: `[slots, kv_heads, head_dim]`, of q's dtype or in FP8. Token t of a row has slot `pages[row, t //
            page_size] · page_size + t % page_size`.
        pages: int32 `[rows, max_pages]`.
        lengths: int32 `[rows]`, including the row's own token.
        window: a row sees its last `window` tokens; the page table's entries of earlier ones are not read.
        out: filled and returned.
        lse: float32 `[rows, heads]`, filled with the natural log-sum-exp of the scaled scores.
        splits: result of `splits_of` for these lengths and this window, if several layers share it.
        tile: for tests and measurements; None: `tile_of`.

    Last dimensions are contiguous. A row of length 0 gets output 0 and lse −inf, whatever its page table and query.
    Raises ValueError if shapes or dtypes do not match.
    """
    if values.shape != keys.shape:
        raise ValueError(f"keys are {list(keys.shape)}, values {list(values.shape)}; they must be alike")
    return _launch(q, keys, values, 0, pages, lengths, page_size, scale, window, out, lse, splits, tile)


def latent_decode_attention(
    q: Tensor,
    latents: Stored,
    value_dim: int,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    splits: Splits | None = None,
    tile: DecodeTile | None = None,
) -> Tensor:
    """Compute `decode_attention` of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with absorbed
    up-projections. latents: `[slots, 1, dim]`, all heads' keys; their first `value_dim` elements are the values.
    Returns `[rows, heads, value_dim]`."""
    if latents.shape[1] != 1 or not value_dim <= latents.shape[2]:
        raise ValueError(f"latents are {list(latents.shape)}; they must be [slots, 1, {value_dim} or more]")
    rest = latents.shape[2] - value_dim
    return _launch(q, latents, latents, rest, pages, lengths, page_size, scale, window, out, lse, splits, tile)


def _launch(
    q: Tensor,
    keys: Stored,
    values: Stored,
    rest: int,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    splits: Splits | None,
    tile: DecodeTile | None,
) -> Tensor:
    (rows, heads, dim), latent, cache = q.shape, keys is values, parts_of(keys, values)
    keys, values = cache.keys, cache.values
    kv_heads, d = keys.shape[1], dim - rest
    if keys.shape[2] != dim or heads % kv_heads or lengths.shape[0] != rows:
        raise ValueError(f"q is {list(q.shape)}, keys {list(keys.shape)}, lengths {list(lengths.shape)}")
    if not cache.in_float8 and not q.dtype == keys.dtype == values.dtype:
        raise ValueError(f"q is {q.dtype}, keys {keys.dtype}, values {values.dtype}; they must be alike")
    if not all(t.stride(-1) == 1 for t in (q, keys, values, pages)):
        raise ValueError("the last dimensions of q, keys, values and pages must be contiguous")
    out = q.new_empty(rows, heads, d) if out is None else out
    if not rows:
        return out
    group = heads // kv_heads
    tile = tile_of(d, group, q.element_size(), cache.in_float8, latent) if tile is None else tile
    blocks = kv_heads * cdiv(group, tile.heads)
    if splits is None:
        splits = splits_of(lengths, pages.shape[1] * page_size, window, d, blocks, tile, group)
    if splits.window != (window or 0) or len(splits.items) != rows * splits.max_splits:
        raise ValueError(f"splits are of {len(splits.items)} items, window {splits.window}: of other rows than q's")
    min_columns = 16  # of a product; in FP8 pairs of columns count
    if cache.in_float8:
        min_columns *= PAIR
        if dim % PAIR or d % PAIR:
            raise ValueError(f"heads of {dim} elements, {d} of values: pairs of FP8 need even numbers")
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    max_splits, cut = splits.max_splits, splits.cut
    if splits.consecutive and not tile.consecutive:
        raise ValueError("the tile takes splits one by one: order them with at_once=None")
    if cut.tokens % tile.tokens:
        raise ValueError(f"a split of {cut.tokens} tokens is no whole number of blocks of {tile.tokens}")
    runs = sums_runs(d, cache.in_float8, latent)
    part = q.new_empty(rows, heads, max_splits, d, dtype=torch.float32)
    part_sums = q.new_empty(rows, heads, max_splits, 2 if runs else 1, dtype=torch.float32)
    given = (
        q, keys, values, cache.k_exponents, cache.v_exponents, pages, splits.items, splits.total, part, part_sums,
        max_splits, scale * LOG2E, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), cache.row, pages.stride(0),
    )  # fmt: skip
    shape: dict[str, Any] = dict(
        HEADS=heads, GROUP=group, D=d, PAGE=page_size, BLOCK_H=tile.heads, BLOCK_N=tile.tokens,
        BLOCK_D=max(min_columns, next_power_of_2(d)), num_warps=tile.warps, num_stages=tile.stages,
        **overlap.options(),
    )  # fmt: skip
    block_d = min(MERGED_COLUMNS if runs else 128, next_power_of_2(d))
    to = (out, part_sums if lse is None else lse, max_splits, out.stride(0), out.stride(1))
    merged: dict[str, Any] = dict(
        HEADS=heads, D=d, LSE=lse is not None, WINDOW=splits.window, TOKENS=cut.tokens, MAX_SPLITS=cut.splits,
        SPARE=cut.spare, SHORT=cut.short, BLOCK_D=block_d, LN2=LN2, **overlap.options(),
    )  # fmt: skip
    programs, merges = (min(tile.programs, rows * blocks * max_splits),), (rows * heads, cdiv(d, block_d))
    if runs:
        _attend_runs[programs](*given, **shape)
        _merge_runs[merges](part, part_sums, lengths, splits.total, *to, FEW=FEW_RUNS, num_warps=2, **merged)
    else:
        form: dict[str, Any] = dict(LATENT=latent, CONSECUTIVE=tile.consecutive, FLOAT8=cache.in_float8)
        rest_columns = max(min_columns, next_power_of_2(rest))
        _attend_splits[programs](*given, REST=rest, BLOCK_REST=rest_columns, **form, **shape)
        _merge_splits[merges](part, part_sums, lengths, *to, BLOCK_S=16, num_warps=1, **merged)
    return out
