"""Which experts a token goes to, and which pairs of token and expert each tile of the expert products takes.

A pair (token, choice) has the number token · k + choice. With few pairs each is a tile of its own, and nothing is
sorted. Otherwise an expert's pairs form a run, padded to whole tiles: every expert's program counts all pairs, so that
it knows where its run begins, then writes its run. Up to `FUSED_ROWS` tokens the same program also chooses, which each
does anew: that costs less than another kernel. No atomic addition decides where anything goes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSED_ROWS = 64
CHUNK = 2048
"""Pairs that an expert's program looks at together."""


class Routing(NamedTuple):
    """Where T tokens go.

    weight: float32 `[T, k]`. expert: int32 `[T, k]`, counted from the first expert that is here; −1 for one that is
    not, and for tokens that are not live: such pairs are neither computed nor read.
    tile_rows: rows of a tile. order: int32, the pairs in the order of the tiles, `tile_rows` to each, or T · k where
    a tile has no more; tile_expert: int32 `[tiles]`, the expert of each tile, or −1. Both are None where every pair
    is a tile.
    """

    weight: Tensor
    expert: Tensor
    tile_rows: int
    order: Tensor | None
    tile_expert: Tensor | None


@triton.jit
def _choose(
    logits, row, rows, live, row_stride, E: tl.constexpr, BLOCK_E: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, RENORMALISE: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """(weight, expert) `[rows, BLOCK_K]` of the rows `row`. Equal probabilities go to the lower expert."""
    e = tl.arange(0, BLOCK_E)
    j = tl.arange(0, BLOCK_K)
    here = row < tl.minimum(live, rows)
    x = tl.load(
        logits + row.to(tl.int64)[:, None] * row_stride + e[None, :],
        mask=here[:, None] & (e < E)[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    x = tl.where(here[:, None] | (e > 0)[None, :], x, 0.0)  # a row that is not live must not make a NaN
    top = tl.max(x, 1)
    total = tl.sum(tl.exp(x - top[:, None]), 1)
    weight = tl.zeros([row.shape[0], BLOCK_K], tl.float32)
    expert = tl.full([row.shape[0], BLOCK_K], -1, tl.int32)
    for i in tl.static_range(K):
        best = tl.max(x, 1)
        at = tl.min(tl.where(x == best[:, None], e[None, :], BLOCK_E), 1)
        x = tl.where(e[None, :] == at[:, None], float("-inf"), x)
        weight = tl.where(j[None, :] == i, (tl.exp(best - top) / total)[:, None], weight)
        local = at - FIRST
        local = tl.where(here & (local >= 0) & (local < HELD), local, -1)
        expert = tl.where(j[None, :] == i, local[:, None], expert)
    if RENORMALISE:
        weight = weight / tl.sum(weight, 1)[:, None]
    return weight, expert


@triton.jit
def _count(expert, BLOCK_HELD: tl.constexpr):
    """How many of the pairs each expert has, int32 `[BLOCK_HELD]`."""
    return tl.histogram(tl.where(expert >= 0, expert, 0), BLOCK_HELD, mask=expert >= 0)


@triton.jit
def _run_of(count, me, tile_expert, tiles, HELD: tl.constexpr, BLOCK_HELD: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_TILES: tl.constexpr):  # fmt: skip
    """(where expert me's run begins in `order`, where it ends). Names its tiles; the last names idle ones."""
    e = tl.arange(0, BLOCK_HELD)
    padded = (count + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    start = tl.sum(tl.where(e < me, padded, 0), 0)
    end = start + tl.sum(tl.where(e == me, padded, 0), 0)
    for first in range(0, tiles, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        mine = (tile >= start // BLOCK_M) & (tile < end // BLOCK_M)
        idle = (tile >= end // BLOCK_M) & (tile < tiles)
        tl.store(tile_expert + tile, tl.where(mine, me, -1), mask=mine | (idle & (me == HELD - 1)))
    return start, end


@triton.jit
def _fill_end(order, start, end, pairs, BLOCK_M: tl.constexpr):
    """Marks the rows of the run's last tile that no pair takes."""
    at = start + tl.arange(0, BLOCK_M)
    tl.store(order + at, tl.zeros([BLOCK_M], tl.int32) + pairs, mask=at < end)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _route(
    logits, live, weight, expert, order, tile_expert, rows, row_stride, tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, RENORMALISE: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, BLOCK_HELD: tl.constexpr, SORT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    first = 0 if SORT else me * BLOCK_T
    row = first + tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_K)
    w, chosen = _choose(logits, row, rows, tl.load(live), row_stride, E, BLOCK_E, K, BLOCK_K, RENORMALISE, FIRST, HELD)
    pair = row[:, None] * K + j[None, :]
    real = (row < rows)[:, None] & (j < K)[None, :]
    if not SORT or me == 0:
        tl.store(weight + pair, w, mask=real)
        tl.store(expert + pair, chosen, mask=real)
    if SORT:
        flat = tl.reshape(chosen, [BLOCK_T * BLOCK_K])
        start, end = _run_of(_count(flat, BLOCK_HELD), me, tile_expert, tiles, HELD, BLOCK_HELD, BLOCK_M, BLOCK_TILES)
        mine = (flat == me).to(tl.int32)
        at = start + tl.cumsum(mine, 0) - mine
        tl.store(order + at, tl.reshape(pair, [BLOCK_T * BLOCK_K]), mask=flat == me)
        _fill_end(order, start + tl.sum(mine, 0), end, rows * K, BLOCK_M)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort_pairs(
    expert, order, tile_expert, pairs, tiles, HELD: tl.constexpr, BLOCK_HELD: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    count = tl.zeros([BLOCK_HELD], tl.int32)
    for first in range(0, pairs, CHUNK):
        count += _count(tl.load(expert + first + i, mask=first + i < pairs, other=-1), BLOCK_HELD)
    at, end = _run_of(count, me, tile_expert, tiles, HELD, BLOCK_HELD, BLOCK_M, BLOCK_TILES)
    for first in range(0, pairs, CHUNK):
        mine = (tl.load(expert + first + i, mask=first + i < pairs, other=-1) == me).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - mine, first + i, mask=mine > 0)
        at += tl.sum(mine, 0)
    _fill_end(order, at, end, pairs, BLOCK_M)


def route(
    logits: Tensor, k: int, renormalise: bool, live: Tensor, tile_rows: int, first: int = 0, held: int | None = None
) -> Routing:
    """The k most probable experts of each token by the softmax over logits `[T, E]`, in float32.

    renormalise: makes a token's k weights sum to one, those of experts held elsewhere included.
    live: int32 `[1]`, the tokens that are real; those after them choose nothing, and their logits are not read.
    first, held: the experts that are here; all where held is None.
    """
    rows, experts = logits.shape
    held = experts - first if held is None else held
    pairs = rows * k
    weight = logits.new_empty(rows, k, dtype=torch.float32)
    expert = logits.new_empty(rows, k, dtype=torch.int32)
    sort = pairs * 4 > experts
    fused = sort and rows <= FUSED_ROWS
    order, tile_expert, tiles = _tiles(expert, held, tile_rows) if fused else (expert, expert, 0)
    if rows:
        block_t = triton.next_power_of_2(rows) if fused else 4
        _route[(held if fused else triton.cdiv(rows, block_t),)](
            logits, live, weight, expert, order, tile_expert, rows, logits.stride(0), tiles,
            E=experts, BLOCK_E=triton.next_power_of_2(experts), K=k, BLOCK_K=triton.next_power_of_2(k),
            RENORMALISE=renormalise, FIRST=first, HELD=held, BLOCK_HELD=triton.next_power_of_2(held), SORT=fused,
            BLOCK_T=block_t, BLOCK_M=tile_rows, BLOCK_TILES=256, num_warps=8 if block_t >= 16 else 4,
        )  # fmt: skip
    if not sort:
        return Routing(weight, expert, tile_rows, None, None)
    if not fused:
        return sort_pairs(weight, expert, held, tile_rows)
    return Routing(weight, expert, tile_rows, order, tile_expert)


def sort_pairs(weight: Tensor, expert: Tensor, held: int, tile_rows: int) -> Routing:
    """The routing of tokens whose experts are chosen already: weight float32 and expert int32 `[T, k]`.

    expert is counted from the first that is here; outside `[0, held)` it must be −1.
    """
    order, tile_expert, tiles = _tiles(expert, held, tile_rows)
    _sort_pairs[(held,)](
        expert, order, tile_expert, expert.numel(), tiles, HELD=held, BLOCK_HELD=triton.next_power_of_2(held),
        CHUNK=CHUNK, BLOCK_M=tile_rows, BLOCK_TILES=256, num_warps=8,
    )  # fmt: skip
    return Routing(weight, expert, tile_rows, order, tile_expert)


def _tiles(expert: Tensor, held: int, tile_rows: int) -> tuple[Tensor, Tensor, int]:
    """(order, tile_expert, tiles), unfilled: as many tiles as any choice of experts can need."""
    pairs = expert.numel()
    experts = min(held, pairs)
    tiles = (pairs + experts * (tile_rows - 1)) // tile_rows
    return expert.new_empty(tiles * tile_rows), expert.new_empty(tiles), tiles
