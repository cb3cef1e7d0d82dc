"""Attention of prompts over contiguous copies of their tokens, by tensor descriptors (TMA).

Prompts over pages (`weft.engine.kernels.triton.prefill_attention`) load a block's tokens by a pointer per page. From a
copy one instruction loads a whole block. A launch has its descriptors among the kernel's parameters, so a CUDA graph
holds them: the address of its workspace is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.engine.kernels.triton.decode_attention import LN2, LOG2E
from weft.engine.kernels.triton.prefill_attention import PrefillTile, block_of, fold, rows_of, store_rows, tile_of
from weft.kernels.triton.launch import arch, cdiv, kernel, next_power_of_2


@triton.jit
def _attend_block_copied(
    first, top, total, acc, q, limit, base, keys, values, column, scale, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold in a block of contiguous tokens; see `_see`."""
    k, v = keys.load([base + first, column]), values.load([base + first, column])
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        score = tl.where((first + tl.arange(0, BLOCK_N))[None, :] < limit[:, None], score, float("-inf"))
    return fold(score, v, top, total, acc, scale, MASKED)


@kernel(do_not_specialize=["sequences"])
def _attend_copied(
    q, starts, limits, bases, out, lse, keys, values, sequences, scale_log2, q_row, q_head, out_row, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    item, sequence, block = block_of(starts, bases, sequences, tl.program_id(1), 1, BLOCK_B, BLOCK_T)
    if item < 0:
        return
    row, kv_head, head, real, limit, lowest, end = rows_of(block, sequence, starts, limits, GROUP, BLOCK_G, BLOCK_M)
    q_at = q + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head
    queries = tl.load(q_at + tl.arange(0, D)[None, :], mask=real[:, None], other=0.0)
    base, column = tl.load(bases + sequence), kv_head * D
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    whole = lowest // BLOCK_N * BLOCK_N
    for first in range(0, whole, BLOCK_N):
        top, total, acc = _attend_block_copied(
            first, top, total, acc, queries, limit, base, keys, values, column, scale_log2, BLOCK_N, False
        )
    for first in range(whole, end, BLOCK_N):
        top, total, acc = _attend_block_copied(
            first, top, total, acc, queries, limit, base, keys, values, column, scale_log2, BLOCK_N, True
        )
    store_rows(out, lse, row, head, real, top, total, acc, out_row, out_head, HEADS, D, LSE, D, LN2)


def copies_pages(dim: int, element_size: int) -> bool:
    """Decide by the model's shape and the GPU alone if sequences of many rows attend to copies of their tokens."""
    return dim == 128 and element_size == 2 and arch() >= 90


def copied_prefill_attention(
    q: Tensor,
    copied: Tensor,
    starts: Tensor,
    limits: Tensor,
    bases: Tensor,
    scale: float,
    out: Tensor,
    *,
    lse: Tensor | None = None,
    tile: PrefillTile | None = None,
) -> None:
    """Compute `prefill_attention`, with the same bits, for the sequences of two rows or more that have a base.

    Args:
        copied: `[2, N, kv_heads, head_dim]`, keys and values, contiguous, of q's dtype, from `copy_pages`: token t of a
            sequence is at base + t. After the last token there is no NaN up to the next multiple of the tile's tokens.
            head_dim is a power of two, and N below 2³¹.
        bases: int32 `[B]`; −1: none. See `prefill_attention` for the other arguments.
    """
    (rows, heads, dim), (_, places, kv_heads, _) = q.shape, copied.shape
    if copied.shape != (2, places, kv_heads, dim) or heads % kv_heads or out.shape != q.shape:
        raise ValueError(f"q is {list(q.shape)}, copied {list(copied.shape)}, out {list(out.shape)}")
    if q.dtype != copied.dtype:
        raise ValueError(f"q is {q.dtype}, copied {copied.dtype}; they must be alike")
    if not copied.is_contiguous() or q.stride(-1) != 1 or out.stride(-1) != 1 or dim != next_power_of_2(dim):
        raise ValueError("copied must be contiguous, the last dimensions of q and out too, and head_dim a power of two")
    if not rows or not places:
        return
    if tile is None:  # with the same tokens as over pages
        tile = tile_of(dim, q.element_size())._replace(stages=3)
    sequences, group = starts.shape[0] - 1, heads // kv_heads
    block_g = min(tile.queries, next_power_of_2(group))
    columns, block = kv_heads * dim, [tile.tokens, dim]
    keys, values = (TensorDescriptor(x, [places, columns], [columns, 1], block) for x in copied)
    blocks = cdiv(rows, tile.queries // block_g) + sequences
    _attend_copied[(kv_heads * cdiv(group, block_g), blocks)](
        q, starts, limits, bases, out, limits if lse is None else lse, keys, values, sequences, scale * LOG2E,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        HEADS=heads, GROUP=group, D=dim, LSE=lse is not None, BLOCK_B=max(16, next_power_of_2(sequences)),
        BLOCK_G=block_g, BLOCK_M=tile.queries, BLOCK_N=tile.tokens, LN2=LN2, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
