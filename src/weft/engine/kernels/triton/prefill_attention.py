"""Attention of several queries per sequence over paged keys and values: prompts, whole or in chunks.

The algorithm is FlashAttention-2's (arXiv 2307.08691): a program keeps a block of queries and walks over the tokens
that they see. The query heads that share a key head are side by side in the block. A row's tokens are processed in
blocks that begin at multiples of the block's size, so a row's bits depend neither on its neighbours nor on how a prompt
was cut into chunks. A program finds its block and its sequence on the device.

On Hopper and later, with keys and values of 128 elements of two bytes, sequences of many rows attend to a contiguous
copy of their tokens, which tensor descriptors load by whole tiles (`weft.engine.kernels.triton.copied_prompts`): on an
H200 a prompt of 8,192 tokens takes 0.74 of the time, including the copy. Other sequences, GPUs, shapes and dtypes,
windows and latent vectors attend over pages. Both process the same blocks in the same order. With an FP8 cache all
prompts except windows attend to dequantised copies (`weft.engine.attention.paged_triton`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton.decode_attention import LN2, LOG2E
from weft.engine.kernels.triton.float8_cache import dequantised, parts_of
from weft.kernels.float8 import Stored
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


class PrefillTile(NamedTuple):
    """Block of a program: queries (rows times heads), tokens of an iteration, warps, stages of the pipeline of
    loads."""

    queries: int
    tokens: int
    warps: int
    stages: int


class PromptSubset(IntEnum):
    """Sequences of several rows that a launch attends for: all, or only those with or without a base."""

    ALL = 0
    EXPANDED = 1
    OTHERS = 2


@triton.jit
def block_of(
    starts, bases, sequences, place, WHICH: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Return (index of a block of queries, below 0 if there is none; its sequence; its index in the sequence)."""
    index = tl.arange(0, BLOCK_B)
    first_row = tl.load(starts + index, mask=index < sequences, other=0)
    count = tl.load(starts + index + 1, mask=index < sequences, other=0) - first_row
    blocks = tl.where(count > 1, tl.cdiv(count, BLOCK_T), 0)
    if WHICH > 0:
        expanded = tl.load(bases + index, mask=index < sequences, other=-1) >= 0
        blocks = tl.where(expanded == (WHICH == 1), blocks, 0)
    blocks_before = tl.cumsum(blocks, 0)  # including the sequence's own
    # The last blocks of a prompt see the largest number of tokens, so they begin first.
    item = tl.sum(blocks, 0) - 1 - place
    sequence = tl.sum((blocks_before <= item).to(tl.int32), 0)
    return item, sequence, item - tl.sum(tl.where(index < sequence, blocks, 0), 0)


@triton.jit
def rows_of(
    block, sequence, starts, limits, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return (rows, key head, heads, mask, limits, lowest limit, highest limit) of a block's queries."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    start, last = tl.load(starts + sequence), tl.load(starts + sequence + 1) - 1
    m = tl.arange(0, BLOCK_M)
    row = start + block * BLOCK_T + m // BLOCK_G
    in_group = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_G + m % BLOCK_G
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    real = (row <= last) & (in_group < GROUP)
    limit = tl.load(limits + row, mask=row <= last, other=0)
    end = tl.load(limits + tl.minimum(start + block * BLOCK_T + BLOCK_T - 1, last))
    lowest = tl.load(limits + start + block * BLOCK_T)
    return row, kv_head, kv_head * GROUP + in_group, real, limit, lowest, end


@triton.jit
def store_rows(
    out, lse, row, head, real, top, total, acc, out_row, out_head, HEADS: tl.constexpr, V: tl.constexpr,
    LSE: tl.constexpr, BLOCK_V: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_V)
    saw = total > 0
    acc = tl.where(saw[:, None], acc / tl.where(saw, total, 1.0)[:, None], 0.0)
    to = out + row.to(tl.int64)[:, None] * out_row + head[:, None] * out_head + e[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (e < V)[None, :])
    if LSE:
        found = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, float("-inf"))
        tl.store(lse + row.to(tl.int64) * HEADS + head, found, mask=real)


@triton.jit
def _load(at, there, width: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of `width` elements. there: mask of the rows, if MASKED."""
    if MASKED:
        return tl.load(at, mask=there[:, None] & (tl.arange(0, BLOCK) < width)[None, :], other=0.0)
    if width < BLOCK:
        return tl.load(at, mask=(tl.arange(0, BLOCK) < width)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def fold(score, v, top, total, acc, scale, MASKED: tl.constexpr):
    """Fold a block of tokens into (greatest scores, sums, output). MASKED: some scores may be −inf."""
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top  # -inf minus -inf would be NaN
    keep = tl.exp2(top - finite)  # exactly 1 where a row sees nothing of these tokens
    p = tl.exp2(score * scale - finite[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new_top, total * keep + tl.sum(p, 1), acc


@triton.jit
def _see(
    first, top, total, acc, main, rest, limit, begin, end, row_pages, base, k_at, rest_at, v_at, k_exponents,
    v_exponents, scale, k_slot, rest_slot, v_slot, e_slot, D: tl.constexpr, V: tl.constexpr, REST: tl.constexpr,
    LATENT: tl.constexpr, FLOAT8: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, WHICH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to a block of tokens and fold it in. MASKED: some rows may not see some of the tokens."""
    token = first + tl.arange(0, BLOCK_N)
    there = (token >= begin) & (token < end)
    page = tl.load(row_pages + token // PAGE, mask=there, other=0) if MASKED else tl.load(row_pages + token // PAGE)
    slot = page.to(tl.int64) * PAGE + token % PAGE
    kept = base + token if WHICH == 1 else slot
    dtype: tl.constexpr = main.dtype
    e_at, seen = slot[:, None] * e_slot, there[:, None]
    v = _load(v_at + kept[:, None] * v_slot + tl.arange(0, BLOCK_V)[None, :], there, V, BLOCK_V, MASKED)
    v = dequantised(v, v_exponents + e_at, seen, dtype, FLOAT8)
    k = v
    if not LATENT:
        k = _load(k_at + kept[:, None] * k_slot + tl.arange(0, BLOCK_D)[None, :], there, D, BLOCK_D, MASKED)
        k = dequantised(k, k_exponents + e_at, seen, dtype, FLOAT8)
    score = tl.dot(main, tl.trans(k), input_precision="ieee")
    if REST > 0:
        more = _load(rest_at + slot[:, None] * rest_slot, there, REST, BLOCK_REST, MASKED)
        more = dequantised(more, k_exponents + e_at, seen, dtype, FLOAT8)
        score = tl.dot(rest, tl.trans(more), score, input_precision="ieee")
    if MASKED:
        seen = token[None, :] < limit[:, None]
        if WINDOW > 0:
            seen = seen & (token[None, :] >= limit[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    return fold(score, v, top, total, acc, scale, MASKED)


@kernel(do_not_specialize=["sequences", "pages_row"])
def _attend(
    q, q_rest, keys, k_rest, values, k_exponents, v_exponents, pages, starts, limits, bases, out, lse, sequences,
    scale_log2, q_row, q_head, q_rest_row, q_rest_head, k_slot, k_head, rest_slot, rest_head, v_slot, v_head, e_slot,
    pages_row, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, REST: tl.constexpr,
    LATENT: tl.constexpr, LSE: tl.constexpr, FLOAT8: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    WHICH: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    item, sequence, block = block_of(starts, bases, sequences, tl.program_id(1), WHICH, BLOCK_B, BLOCK_T)
    if item < 0:
        return
    row, kv_head, head, real, limit, lowest, end = rows_of(block, sequence, starts, limits, GROUP, BLOCK_G, BLOCK_M)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW, 0)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_REST)
    q_at = q + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head
    main = tl.load(q_at + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    rest = main
    if REST > 0:
        q_at = q_rest + row.to(tl.int64)[:, None] * q_rest_row + head[:, None] * q_rest_head
        rest = tl.load(q_at + r[None, :], mask=real[:, None] & (r < REST)[None, :], other=0.0)
    base = 0
    if WHICH == 1:
        base = tl.load(bases + sequence).to(tl.int64)
    row_pages = pages + sequence.to(tl.int64) * pages_row
    k_at, v_at = keys + kv_head * k_head, values + kv_head * v_head
    rest_at = k_rest + kv_head * rest_head + r[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Blocks that every row sees whole need no mask. (Wide values leave no registers for a second loop.)
    whole = 0
    if WINDOW == 0 and not LATENT:
        whole = lowest // BLOCK_N * BLOCK_N
        for first in range(0, whole, BLOCK_N):
            top, total, acc = _see(
                first, top, total, acc, main, rest, limit, begin, end, row_pages, base, k_at, rest_at, v_at,
                k_exponents + kv_head, v_exponents + kv_head, scale_log2, k_slot, rest_slot, v_slot, e_slot, D, V, REST,
                LATENT, FLOAT8, PAGE, WINDOW, WHICH, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_REST, False,
            )  # fmt: skip
    for first in range(tl.maximum(whole, begin // BLOCK_N * BLOCK_N), end, BLOCK_N):
        top, total, acc = _see(
            first, top, total, acc, main, rest, limit, begin, end, row_pages, base, k_at, rest_at, v_at,
            k_exponents + kv_head, v_exponents + kv_head, scale_log2, k_slot, rest_slot, v_slot, e_slot, D, V, REST,
            LATENT, FLOAT8, PAGE, WINDOW, WHICH, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_REST, True,
        )  # fmt: skip
    store_rows(out, lse, row, head, real, top, total, acc, out_row, out_head, HEADS, V, LSE, BLOCK_V, LN2)


def tile_of(head_dim: int, element_size: int, float8: bool = False) -> PrefillTile:
    """Return a tile by `head_dim`, `element_size` and `float8` alone: a row has the same bits in every step."""
    if element_size > 2:
        return PrefillTile(32, 16, 4, 1)
    if head_dim <= 128:
        return PrefillTile(128, 128, 8, 2)
    if head_dim <= 256:
        return PrefillTile(64, 64, 8, 2)
    return PrefillTile(32, 16, 8, 2) if float8 else PrefillTile(64, 16, 8, 2)  # more spill registers


def prefill_attention(
    q: Tensor,
    keys: Stored,
    values: Stored,
    pages: Tensor,
    starts: Tensor,
    limits: Tensor,
    page_size: int,
    scale: float,
    out: Tensor,
    *,
    window: int | None = None,
    lse: Tensor | None = None,
    bases: Tensor | None = None,
    tile: PrefillTile | None = None,
) -> None:
    """Compute softmax(scale · q Kᵀ) V for rows of sequences with two rows or more. Other rows of out do not change.

    Args:
        q: `[T, heads, head_dim]`, with consecutive rows of a sequence.
        keys: `[slots, kv_heads, head_dim]`.
        values: `[slots, kv_heads, value_dim]`. They may be the first elements of keys (multi-head latent attention),
            else both have one head dimension. Keys and values are of q's dtype or in FP8. Token t of a sequence has
            slot `pages[sequence, t // page_size] · page_size + t % page_size`.
        pages: int32 `[B, max_pages]`. starts: int32 `[B + 1]`: sequence i has rows starts[i] … starts[i + 1] − 1.
        limits: int32 `[T]`: a row sees the first `limit` tokens of its sequence. Limits do not fall within a sequence.
        window: a row sees only the last `window` of these tokens.
        bases: int32 `[B]`: sequences with a base of 0 or more are left to `expanded_prefill_attention` or
            `copied_prefill_attention`.
        out: `[T, heads, value_dim]`.
        lse: float32 `[T, heads]`, filled with the natural log-sum-exp of the scaled scores.

    Last dimensions are contiguous. A row of limit 0 gets output 0 and lse −inf. Raises ValueError if shapes or dtypes
    do not match.
    """
    (rows, heads, dim), cache = q.shape, parts_of(keys, values)
    keys, values = cache.keys, cache.values
    kv_heads, d = values.shape[1:]
    latent = d < dim or values.data_ptr() == keys.data_ptr()
    if keys.shape[2] != dim or heads % kv_heads or limits.shape[0] != rows or out.shape != (rows, heads, d):
        raise ValueError(f"q is {list(q.shape)}, keys {list(keys.shape)}, out {list(out.shape)}, limits {len(limits)}")
    if not cache.in_float8 and not q.dtype == keys.dtype == values.dtype:
        raise ValueError(f"q is {q.dtype}, keys {keys.dtype}, values {values.dtype}; they must be alike")
    tile = tile_of(d, q.element_size(), cache.in_float8) if tile is None else tile
    exponents = (cache.k_exponents, cache.v_exponents) if cache.in_float8 else None
    queries, where = (q[..., :d], q[..., d:]), (pages, starts, limits)
    which, places = (PromptSubset.ALL, starts) if bases is None else (PromptSubset.OTHERS, bases)
    both = keys[..., :d], keys[..., d:]
    _launch(queries, *both, values, where, places, page_size, scale, out, which, tile, latent, window, lse, exponents)


def expanded_prefill_attention(
    q: Tensor,
    q_rotated: Tensor,
    expanded: Tensor,
    rotated: Tensor,
    pages: Tensor,
    starts: Tensor,
    limits: Tensor,
    bases: Tensor,
    page_size: int,
    scale: float,
    out: Tensor,
    *,
    tile: PrefillTile | None = None,
) -> None:
    """Compute `prefill_attention` with keys and values per head, expanded from latent vectors, for the sequences of two
    rows or more that have a base.

    Args:
        q: `[T, heads, n]`.
        q_rotated: `[T, heads, rotary_dim]`; its product with the rotated key adds to the score.
        expanded: `[N, heads, n + value_dim]`, key and value of each token side by side, from `expand_latents`: token t
            of a sequence is at base + t.
        rotated: `[slots, 1, rotary_dim]`, the keys that all heads share, in pages.
        bases: int32 `[B]`; −1: none. See `prefill_attention` for the other arguments.
    """
    (rows, heads, n), d, rest = q.shape, out.shape[2], rotated.shape[2]
    if expanded.shape[1:] != (heads, n + d) or q_rotated.shape != (rows, heads, rest) or out.shape[:2] != (rows, heads):
        shapes = ", ".join(str(list(t.shape)) for t in (q, q_rotated, expanded, rotated, out))
        raise ValueError(f"q, q_rotated, expanded, rotated, out are {shapes}")
    if len({t.dtype for t in (q, q_rotated, expanded, rotated)}) > 1 or bases.shape[0] != starts.shape[0] - 1:
        raise ValueError("queries, keys and values must be of one dtype, and each sequence must have a base, or −1")
    if tile is None:  # wider than in `tile_of`: GPUs with less shared memory hold one stage of this
        tile = PrefillTile(64, 64, 4, 3) if q.element_size() == 2 else tile_of(max(n, d), q.element_size())
    keys, values = expanded[..., :n], expanded[..., n:]
    queries, where = (q, q_rotated), (pages, starts, limits)
    _launch(queries, keys, rotated, values, where, bases, page_size, scale, out, PromptSubset.EXPANDED, tile)


def _launch(
    queries: tuple[Tensor, Tensor],
    keys: Tensor,
    k_rest: Tensor,
    values: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    bases: Tensor,
    page_size: int,
    scale: float,
    out: Tensor,
    which: PromptSubset,
    tile: PrefillTile,
    latent: bool = False,
    window: int | None = None,
    lse: Tensor | None = None,
    exponents: tuple[Tensor, Tensor] | None = None,
) -> None:
    """queries, keys: their first elements, and the rest. where: pages, starts and limits. exponents: of FP8 keys and
    values."""
    of_keys, of_values = exponents or (keys, values)
    (q, q_rest), (pages, starts, limits) = queries, where
    if not all(t.stride(-1) == 1 for t in (q, keys, values, q_rest, k_rest, pages, out)):
        raise ValueError("the last dimensions of queries, keys, values, pages and out must be contiguous")
    (rows, heads, dim), (_, kv_heads, d), rest = q.shape, values.shape, k_rest.shape[2]
    sequences = starts.shape[0] - 1
    if not rows:
        return
    group = heads // kv_heads
    block_g = min(tile.queries, next_power_of_2(group))
    blocks = cdiv(rows, tile.queries // block_g) + sequences
    _attend[(kv_heads * cdiv(group, block_g), blocks)](
        q, q_rest, keys, k_rest, values, of_keys, of_values, pages, starts, limits, bases, out,
        limits if lse is None else lse, sequences, scale * LOG2E, q.stride(0), q.stride(1), q_rest.stride(0),
        q_rest.stride(1), keys.stride(0), keys.stride(1), k_rest.stride(0),
        k_rest.stride(1) if k_rest.shape[1] > 1 else 0, values.stride(0), values.stride(1), of_keys.stride(0),
        pages.stride(0), out.stride(0), out.stride(1),
        HEADS=heads, GROUP=group, D=dim, V=d, REST=rest, LATENT=latent, LSE=lse is not None,
        FLOAT8=exponents is not None, PAGE=page_size, WINDOW=window or 0, WHICH=int(which),
        BLOCK_B=max(16, next_power_of_2(sequences)), BLOCK_G=block_g, BLOCK_M=tile.queries, BLOCK_N=tile.tokens,
        BLOCK_D=max(16, next_power_of_2(dim)), BLOCK_V=max(16, next_power_of_2(d)),
        BLOCK_REST=max(16, next_power_of_2(rest)), LN2=LN2, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
