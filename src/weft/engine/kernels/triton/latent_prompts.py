"""Expansion of latent vectors to keys and values of heads for prompts, and projections of the rows that attend
absorbed.

Latent attention (arXiv 2405.04434) takes 2 · (latent + rotary + latent) operations per query, token and head with
absorbed projections, and 2 · (n + rotary + value) with keys and values per head, which have to be expanded from every
token's vector first (`weft.engine.attention.expansion`). Only the device knows which sequences of a step are expanded.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton.copy_pages import TILE, tokens_at
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, persistent


@kernel(do_not_specialize=["sequences", "pages_row"], do_not_specialize_on_alignment=["bases", "lengths", "live"])
def _expand(
    latents, pages, bases, lengths, live, up, expanded, sequences, pages_row, latent_slot, up_row, columns, to_row,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, BLOCK_B)
    base = tl.load(bases + index, mask=index < sequences, other=-1)
    length = tl.load(lengths + index, mask=index < sequences, other=0)
    across = tl.cdiv(columns, BLOCK_C)
    blocks = tl.cdiv(tl.load(live), BLOCK_N) * across
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first = block // across * BLOCK_N
        sequence, token, there = tokens_at(first, base, length, index, BLOCK_N)
        page = tl.load(pages + sequence.to(tl.int64) * pages_row + token // PAGE, mask=there, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        column = block % across * BLOCK_C + tl.arange(0, BLOCK_C)
        total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
        for begin in range(0, WIDTH, BLOCK_W):
            w = begin + tl.arange(0, BLOCK_W)
            inside = (w < WIDTH)[None, :]
            x = tl.load(latents + slot[:, None] * latent_slot + w[None, :], mask=there[:, None] & inside, other=0.0)
            of_column = up + column[:, None].to(tl.int64) * up_row + w[None, :]
            y = tl.load(of_column, mask=(column < columns)[:, None] & inside, other=0.0)
            total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
        to = expanded + (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * to_row + column[None, :]
        tl.store(to, total.to(expanded.dtype.element_ty), mask=there[:, None] & (column < columns)[None, :])


def expand_latents(
    latents: Tensor,
    pages: Tensor,
    bases: Tensor,
    lengths: Tensor,
    live: Tensor,
    page_size: int,
    up: Tensor,
    expanded: Tensor,
) -> None:
    """Fill expanded `[N, heads, n + value_dim]` at base + t for each token t of the sequences with a base.

    Args:
        latents: `[slots, 1, width]` or wider, in pages.
        pages: int32 `[B, max_pages]`.
        bases: int32 `[B]`, multiples of `TILE` that keep sequences apart; −1: none.
        lengths: int32 `[B]`, tokens.
        live: int32 `[1]`, at least the last token's place + 1.
        up: `[heads, n + value_dim, width]`.
    """
    columns, width = up.shape[0] * up.shape[1], up.shape[2]
    if expanded.shape[1:] != up.shape[:2] or not expanded.is_contiguous() or not up.is_contiguous():
        raise ValueError(f"expanded is {list(expanded.shape)}, up {list(up.shape)}; they must be alike and contiguous")
    if latents.shape[2] < width or latents.stride(-1) != 1 or pages.stride(-1) != 1:
        raise ValueError(f"latents are {list(latents.shape)}, up {list(up.shape)}")
    wide, sequences = up.element_size() > 2, bases.shape[0]
    block_n, block_c, block_w = (32, 32, 32) if wide else (TILE, 128, 64)
    _expand[(persistent(cdiv(expanded.shape[0], block_n) * cdiv(columns, block_c)),)](
        latents, pages, bases, lengths, live, up, expanded, sequences, pages.stride(0), latents.stride(0), width,
        columns, columns, WIDTH=width, PAGE=page_size, BLOCK_B=max(16, next_power_of_2(sequences)), BLOCK_N=block_n,
        BLOCK_C=block_c, BLOCK_W=block_w, num_warps=4 if wide else 8, num_stages=1 if wide else 3,
    )  # fmt: skip


@kernel(do_not_specialize=["rows"], do_not_specialize_on_alignment=["wanted"])
def _project(
    x, weight, wanted, out, rows, x_row, x_head, weight_head, weight_in, weight_out, out_row, out_head, columns,
    DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = tl.load(wanted + row, mask=row < rows, other=0) != 0
    if tl.max(mine.to(tl.int32), 0) == 0:
        return
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for begin in range(0, DEPTH, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)
        left = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + head * x_head + d[None, :],
            mask=mine[:, None] & (d < DEPTH)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + head.to(tl.int64) * weight_head + d[:, None] * weight_in + column[None, :] * weight_out,
            mask=(d < DEPTH)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    to = out + row.to(tl.int64)[:, None] * out_row + head * out_head + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=mine[:, None] & (column < columns)[None, :])


def project_heads(x: Tensor, weight: Tensor, wanted: Tensor, out: Tensor) -> None:
    """Compute out[t, h] = x[t, h] · weight[h] for the wanted rows; the others do not change. x: `[T, heads, depth]`.
    weight: `[heads, depth, columns]`, of any strides. wanted: bool `[T]`. out: `[T, heads, columns]`. The last
    dimensions of x and out are contiguous."""
    (rows, heads, depth), columns = x.shape, weight.shape[2]
    if weight.shape[:2] != (heads, depth) or out.shape != (rows, heads, columns) or wanted.shape != (rows,):
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}, out {list(out.shape)}")
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError("the last dimensions of x and out must be contiguous")
    if not rows:
        return
    wide = x.element_size() > 2
    block_t, block_c, block_d = (16, 32, 32) if wide else (64, 128, 64)
    _project[(cdiv(rows, block_t), heads, cdiv(columns, block_c))](
        x, weight, wanted, out, rows, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1), columns,
        DEPTH=depth, BLOCK_T=block_t, BLOCK_C=block_c, BLOCK_D=block_d, num_warps=4, num_stages=1 if wide else 2,
    )  # fmt: skip
