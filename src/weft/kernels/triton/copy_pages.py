"""Copies of the tokens of prompts from pages to a row, where attention loads them by whole tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, scaled

TILE = 128
"""Tokens of a program's block. Bases are multiples of it, so that a block has the tokens of one sequence."""
PROGRAMS = 264
"""On an H200: two for each multiprocessor. They take one block after another."""


@triton.jit
def tokens_at(first, base, length, index, BLOCK_N: tl.constexpr):
    """Of the block of places that begins at `first`: (the sequence, its tokens there, which of them it has).

    base, length: of the sequences `index`; a base of −1: none.
    """
    own = (base >= 0) & (base <= first) & (first < base + length)
    sequence = tl.sum(tl.where(own, index, 0), 0)
    token = first - tl.sum(tl.where(own, base, 0), 0) + tl.arange(0, BLOCK_N)
    return sequence, token, token < tl.sum(tl.where(own, length, 0), 0)


@kernel(do_not_specialize=["sequences", "pages_row"], do_not_specialize_on_alignment=["bases", "lengths", "live"])
def _copy(
    keys, values, pages, bases, lengths, live, copied_keys, copied_values, sequences, pages_row, k_slot, k_head, v_slot,
    v_head, to_row, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, BLOCK_B)
    base = tl.load(bases + index, mask=index < sequences, other=-1)
    length = tl.load(lengths + index, mask=index < sequences, other=0)
    d = tl.arange(0, BLOCK_D)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(tl.load(live), BLOCK_N) * HEADS, tl.num_programs(0)):
        first, head = block // HEADS * BLOCK_N, block % HEADS
        sequence, token, there = tokens_at(first, base, length, index, BLOCK_N)
        page = tl.load(pages + sequence.to(tl.int64) * pages_row + token // PAGE, mask=there, other=0)
        slot = (page.to(tl.int64) * PAGE + token % PAGE)[:, None]
        inside = there[:, None] & (d < D)
        k = tl.load(keys + slot * k_slot + head * k_head + d, mask=inside, other=0.0)
        v = tl.load(values + slot * v_slot + head * v_head + d, mask=inside, other=0.0)
        to = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * to_row + head * D + d
        tl.store(copied_keys + to, k, mask=d < D)
        tl.store(copied_values + to, v, mask=d < D)


def copy_pages(
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    bases: Tensor,
    lengths: Tensor,
    live: Tensor,
    page_size: int,
    copied: Tensor,
) -> None:
    """Fills copied `[2, N, heads, dim]` with key and value at base + t of each token t of the sequences with a base,
    and with zeros behind them up to the next multiple of `TILE`.

    keys, values: `[slots, heads, dim]`, in pages; last dimensions are contiguous. pages: int32 `[B, max_pages]`.
    lengths: int32 `[B]`, tokens. bases: int32 `[B]`, multiples of `TILE`, so far apart that no two sequences overlap;
    −1: none. live: int32 `[1]`, at least the last token's place + 1. N: a multiple of `TILE`.
    """
    (_, heads, dim), places = keys.shape, copied.shape[1]
    if copied.shape != (2, places, heads, dim) or values.shape != keys.shape or places % TILE:
        raise ValueError(f"keys are {list(keys.shape)}, values {list(values.shape)}, copied {list(copied.shape)}")
    if not copied.is_contiguous() or keys.stride(-1) != 1 or values.stride(-1) != 1 or pages.stride(-1) != 1:
        raise ValueError("copied must be contiguous, and the last dimensions of keys, values and pages")
    if not places:
        return
    sequences = bases.shape[0]
    _copy[(min(scaled(PROGRAMS), cdiv(places, TILE) * heads),)](
        keys, values, pages, bases, lengths, live, copied[0], copied[1], sequences, pages.stride(0), keys.stride(0),
        keys.stride(1), values.stride(0), values.stride(1), heads * dim, HEADS=heads, D=dim, PAGE=page_size,
        BLOCK_B=max(16, next_power_of_2(sequences)), BLOCK_N=TILE, BLOCK_D=next_power_of_2(dim), num_warps=8,
    )  # fmt: skip
