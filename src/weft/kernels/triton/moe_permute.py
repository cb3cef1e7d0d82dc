"""Dispatch of rows to ranks on GPUs, for `weft.stream.dispatch`: rows ordered by rank, and the sums of returned rows.

Counts stay in device memory. Each row has a place among the rows that go to a rank. They lie rank after rank, so a
rank's rows begin after the counts of the ranks before it. No place depends on atomic additions.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


@kernel(do_not_specialize=["rows"])
def _places(
    expert, place, counts, rows, K: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0)
    parts = RANKS // SPAN
    first = (rank // SPAN * EXPERTS + parts - 1) // parts
    behind = ((rank // SPAN + 1) * EXPERTS + parts - 1) // parts
    count = 0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        goes = tl.zeros([BLOCK], tl.int32)
        for j in tl.static_range(K):
            e = tl.load(expert + row.to(tl.int64) * K + j, mask=row < rows, other=-1)
            goes = tl.where((e >= first) & (e < behind), 1, goes)
        at = tl.where(goes > 0, count + tl.cumsum(goes, 0) - 1, -1)
        tl.store(place + row.to(tl.int64) * RANKS + rank, at, mask=row < rows)
        count += tl.sum(goes, 0)
    tl.store(counts + rank, count)


@kernel
def _pack(
    x, weight, expert, place, counts, packed, numbers, weights, x_row, packed_row, list_row, width, list_at,
    K: tl.constexpr, BLOCK_K: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_K)
    value = tl.load(x + row * x_row + column, mask=column < width)
    number = tl.load(expert + row * K + j, mask=j < K)
    weighs = tl.load(weight + row * K + j, mask=j < K)
    begin = 0
    for rank in tl.static_range(RANKS):
        at = tl.load(place + row * RANKS + rank)
        to = (begin + at).to(tl.int64)
        goes = at >= 0
        tl.store(packed + to * packed_row + column, value, mask=goes & (column < width))
        listed = goes & (tl.program_id(1) == 0) & (j < K)
        tl.store(numbers + to * list_row + list_at + j, number, mask=listed)
        tl.store(weights + to * list_row + list_at + K + j, weighs, mask=listed)
        begin += tl.load(counts + rank)


@kernel(do_not_specialize=["pairs"])
def _lists(
    numbers, weights, received, weight, expert, pairs, list_row, list_at, K: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, j = (pair // K).to(tl.int64), pair % K
    came = 0
    for rank in tl.static_range(RANKS):
        came += tl.load(received + rank)
    live = (pair < pairs) & (row < came)
    at = row * list_row + list_at + j
    tl.store(expert + pair, tl.load(numbers + at, mask=live, other=-1), mask=pair < pairs)
    tl.store(weight + pair, tl.load(weights + at + K, mask=live, other=0.0), mask=pair < pairs)


@kernel
def _add(back, place, counts, out, width, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    begin = 0
    for rank in tl.static_range(RANKS):
        at = tl.load(place + row * RANKS + rank)
        term = tl.load(back + (begin + at).to(tl.int64) * width + column, mask=(at >= 0) & (column < width), other=0.0)
        total += term.to(tl.float32)
        begin += tl.load(counts + rank)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def places(expert: Tensor, ranks: int, experts: int, span: int) -> tuple[Tensor, Tensor]:
    """Return (place int32 `[T, ranks]`, counts int32 `[ranks]`): a row's place among a rank's rows, and their numbers.

    −1: the row does not go to the rank. expert: int32 `[T, k]`, contiguous, −1 for none. A share of
    `experts` (`weft.planner.shards.shard`) is on each `span` consecutive ranks of `ranks`.
    """
    (rows, k), counts = expert.shape, expert.new_empty(ranks)
    place = expert.new_empty(rows, ranks)
    _places[(ranks,)](expert, place, counts, rows, K=k, RANKS=ranks, EXPERTS=experts, SPAN=span, BLOCK=256, num_warps=4)
    return place, counts


def pack(x: Tensor, weight: Tensor, expert: Tensor, place: Tensor, counts: Tensor, packed: Tensor) -> None:
    """Fill packed `[capacity, width + listed]` with the rows of x `[T, width]`, rank after rank, each with its lists.

    weight, expert: float32 and int32 `[T, k]`, contiguous. A row's lists are its k experts and its k weights, in four
    bytes each. place, counts: of `places`.
    """
    (rows, width), k, size = x.shape, expert.shape[1], x.element_size()
    if not rows:
        return
    if width * size % 4 or packed.stride(0) * size % 4 or x.stride(1) != 1:
        raise ValueError(
            f"rows of {width} elements of {size} bytes are no whole units of four bytes, or not contiguous"
        )
    numbers, weights, grid = packed.view(torch.int32), packed.view(torch.float32), _grid(rows, width)
    _pack[grid[0]](
        x, weight, expert, place, counts, packed, numbers, weights, x.stride(0), packed.stride(0), numbers.stride(0),
        width, width * size // 4, K=k, BLOCK_K=next_power_of_2(k), RANKS=len(counts), BLOCK=grid[1], num_warps=4,
    )  # fmt: skip


def lists(came: Tensor, width: int, k: int, received: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weight float32 `[R, k]`, expert int32 `[R, k]`) of packed rows; expert −1 from row `received.sum()` on.

    came: `[R, width + listed]`, packed rows of `width` elements with `k` experts. received: int32, rows of each rank.
    """
    rows = came.shape[0]
    numbers, weights = came.view(torch.int32), came.view(torch.float32)
    weight, expert = numbers.new_empty(rows, k, dtype=torch.float32), numbers.new_empty(rows, k)
    if rows:
        _lists[(cdiv(rows * k, 256),)](
            numbers, weights, received, weight, expert, rows * k, numbers.stride(0), width * came.element_size() // 4,
            K=k, RANKS=len(received), BLOCK=256, num_warps=4,
        )  # fmt: skip
    return weight, expert


def add(back: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    """Return `[T, width]`: for each row the sum of its returned rows, in rank order and float32; zero if none.

    back: packed rows in the order of `pack`. place, counts: of `places`.
    """
    (rows, ranks), width = place.shape, back.shape[1]
    out = back.new_empty(rows, width)
    if rows:
        grid = _grid(rows, width)
        _add[grid[0]](back, place, counts, out, width, RANKS=ranks, BLOCK=grid[1], num_warps=4)
    return out


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(1024, next_power_of_2(width))
    return (rows, cdiv(width, block)), block
