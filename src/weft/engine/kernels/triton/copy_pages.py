"""Contiguous copies of prompts' tokens from pages, which attention loads by whole tiles; dequantised from FP8
caches."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton.float8_cache import dequantised, parts_of
from weft.kernels.float8 import Stored
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, persistent

TILE = 128
"""Tokens of a program's block. Bases are multiples of it, so that a block has the tokens of one sequence."""


@triton.jit
def tokens_at(first, base, length, index, BLOCK_N: tl.constexpr):
    """Return (sequence, its tokens, mask) of the block of places that begins at `first`. base, length: of the sequences
    `index`; a base of −1: none."""
    own = (base >= 0) & (base <= first) & (first < base + length)
    sequence = tl.sum(tl.where(own, index, 0), 0)
    token = first - tl.sum(tl.where(own, base, 0), 0) + tl.arange(0, BLOCK_N)
    return sequence, token, token < tl.sum(tl.where(own, length, 0), 0)


@kernel(do_not_specialize=["sequences", "pages_row"], do_not_specialize_on_alignment=["bases", "lengths", "live"])
def _copy(
    keys, values, k_exponents, v_exponents, pages, bases, lengths, live, copied_keys, copied_values, sequences,
    pages_row, k_slot, k_head, v_slot, v_head, e_slot, to_row, HEADS: tl.constexpr, D: tl.constexpr,
    LATENT: tl.constexpr, FLOAT8: tl.constexpr, PAGE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = copied_keys.dtype.element_ty
    index = tl.arange(0, BLOCK_B)
    base = tl.load(bases + index, mask=index < sequences, other=-1)
    length = tl.load(lengths + index, mask=index < sequences, other=0)
    for block in range(tl.program_id(0), tl.cdiv(tl.load(live), BLOCK_N) * HEADS, tl.num_programs(0)):
        first, head = block // HEADS * BLOCK_N, block % HEADS
        sequence, token, there = tokens_at(first, base, length, index, BLOCK_N)
        page = tl.load(pages + sequence.to(tl.int64) * pages_row + token // PAGE, mask=there, other=0)
        slot = (page.to(tl.int64) * PAGE + token % PAGE)[:, None]
        to = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * to_row + head * D
        for begin in tl.static_range(0, D, BLOCK_D):
            d = begin + tl.arange(0, BLOCK_D)[None, :]
            inside = there[:, None] & (d < D)
            k = tl.load(keys + slot * k_slot + head * k_head + d, mask=inside, other=0.0)
            k = dequantised(k, k_exponents + slot * e_slot + head, there[:, None], DTYPE, FLOAT8)
            tl.store(copied_keys + to + d, k, mask=d < D)
            if not LATENT:
                v = tl.load(values + slot * v_slot + head * v_head + d, mask=inside, other=0.0)
                v = dequantised(v, v_exponents + slot * e_slot + head, there[:, None], DTYPE, FLOAT8)
                tl.store(copied_values + to + d, v, mask=d < D)


def copy_pages(
    keys: Stored,
    values: Stored,
    pages: Tensor,
    bases: Tensor,
    lengths: Tensor,
    live: Tensor,
    page_size: int,
    copied: Tensor,
) -> None:
    """Fill copied `[2, N, heads, dim]` with key and value at base + t of each token t of the sequences with a base, and
    with zeros after them up to the next multiple of `TILE`.

    Args:
        keys, values: `[slots, heads, dim]`, in pages, of copied's dtype or in FP8; last dimensions are contiguous. For
            latent vectors, which hold their values, copied is `[1, N, 1, dim]`, keys only.
        pages: int32 `[B, max_pages]`.
        bases: int32 `[B]`, multiples of `TILE` that keep sequences apart; −1: none. N: a multiple of `TILE`.
        lengths: int32 `[B]`, tokens.
        live: int32 `[1]`, at least the last token's place + 1.
    """
    cache = parts_of(keys, values)
    (kinds, places, heads, dim), latent, k, v = copied.shape, len(copied) == 1, cache.keys, cache.values
    if k.shape[1:] != (heads, dim) or places % TILE or kinds > 2 or not (latent or v.shape == k.shape):
        raise ValueError(f"keys are {list(k.shape)}, values {list(v.shape)}, copied {list(copied.shape)}")
    if not cache.in_float8 and not k.dtype == v.dtype == copied.dtype:
        raise ValueError(f"keys are {k.dtype}, values {v.dtype}, copied {copied.dtype}; they must be alike")
    if not copied.is_contiguous() or not all(x.stride(-1) == 1 for x in (k, v, pages)):
        raise ValueError("copied must be contiguous, and the last dimensions of keys, values and pages")
    if not places:
        return
    sequences = bases.shape[0]
    _copy[(persistent(cdiv(places, TILE) * heads),)](
        k, v, cache.k_exponents, cache.v_exponents, pages, bases, lengths, live, copied[0], copied[-1], sequences,
        pages.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.row, heads * dim,
        HEADS=heads, D=dim, LATENT=latent, FLOAT8=cache.in_float8, PAGE=page_size,
        BLOCK_B=max(16, next_power_of_2(sequences)), BLOCK_N=TILE, BLOCK_D=min(128, next_power_of_2(dim)), num_warps=8,
    )  # fmt: skip
