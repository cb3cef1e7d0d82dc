"""Routing: the experts of each token, and the pairs of token and expert in each tile of the expert products.

Pair (token, choice) has the number token · k + choice. With few pairs each is a tile of its own, and nothing is sorted.
Otherwise pairs are sorted by expert, and each expert's pairs are padded to whole tiles: a program per expert counts all
pairs to find its offset, then writes its own. With more pairs, this is done per chunk, after another kernel has counted
each chunk; with many, one program places all pairs of a chunk. No place depends on atomic additions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.model_reference import Rule
from weft.engine.kernels.split_k import SplitKPartials, as_partials
from weft.engine.kernels.triton.dense import LANGUAGE, load_partials
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2

CHUNKS = 128, 2048
"""Minimum and maximum pairs of a chunk. The minimum is the number of threads: with fewer elements than threads Triton
3.6 counts some twice."""
BLOCK = 128
"""Pairs that `_place_pairs` places at once; a chunk has four blocks."""
MIN_PLACED = 1 << 21
"""Minimum of experts (rounded to a power of two) times pairs for `_place_pairs`. On an H200, 128 experts and 65,536
pairs take 19 µs instead of 69, 64 and 49,152 16 instead of 21; 128 experts and 1,024 pairs would take 6 instead of 2.
"""
NO_MODIFIER = tl.constexpr("")


class Routing(NamedTuple):
    """Routing of T tokens.

    Args:
        weight: float32 `[T, k]`.
        expert: int32 `[T, k]`, counted from the first expert of this rank; −1 for an expert of another rank, and for
            tokens that are not live. Such pairs are neither computed nor read.
        tile_rows: rows of a tile.
        order: int32, pairs in the order of the tiles, `tile_rows` per tile, padded with T · k. None: each pair is a
            tile.
        tile_expert: int32 `[tiles]`, expert of each tile, or −1. None: each pair is a tile.
        used: int32 `[1]`, number of tiles with an expert, which come first.
    """

    weight: Tensor
    expert: Tensor
    tile_rows: int
    order: Tensor | None
    tile_expert: Tensor | None
    used: Tensor | None = None

    def tiles(self) -> tuple[Tensor, Tensor, int]:
        """Return (order, tile_expert, tiles) for kernels, which do not read the order if each pair is a tile."""
        order = self.expert if self.order is None else self.order
        tile_expert = self.expert if self.tile_expert is None else self.tile_expert
        return order, tile_expert, tile_expert.numel()


@triton.jit
def _allow_groups(
    ranked, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Return ranked `[rows, GROUPS · SIZE]`, with −inf for the experts outside the best groups of each row."""
    by_group = tl.reshape(ranked, (ranked.shape[0], GROUPS, SIZE))
    s = tl.arange(0, SIZE)[None, None, :]
    g = tl.arange(0, GROUPS)[None, :]
    rest = by_group
    total = tl.zeros([ranked.shape[0], GROUPS], tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best = tl.max(rest, 2)
        total += best
        rest = tl.where(s == tl.min(tl.where(rest == best[:, :, None], s, SIZE), 2)[:, :, None], float("-inf"), rest)
    allowed = tl.zeros([ranked.shape[0], GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.min(tl.where(total == tl.max(total, 1)[:, None], g, GROUPS), 1)
        allowed = tl.where(g == at[:, None], 1, allowed)
        total = tl.where(g == at[:, None], float("-inf"), total)
    return tl.reshape(tl.where(allowed[:, :, None] > 0, by_group, float("-inf")), (ranked.shape[0], GROUPS * SIZE))


@triton.jit
def _ordered_bits(bits):
    """Convert a float's bits to an integer of the same order, and back. A warp finds the greatest integer in one
    instruction, the greatest float in five exchanges."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel(do_not_specialize=["rows"])
def _route(
    logits, offset, bias, live, weight, expert, rows, part, row_stride, scale,
    PARTS: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, RENORMALISE: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    SIZE: tl.constexpr = E // GROUPS
    COLUMNS: tl.constexpr = BLOCK_GROUPS * BLOCK_SIZE
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, COLUMNS)  # a group's experts have BLOCK_SIZE columns; the last columns may have no expert
    wanted = (c % BLOCK_SIZE < SIZE) & (c // BLOCK_SIZE < GROUPS)
    e = c // BLOCK_SIZE * SIZE + c % BLOCK_SIZE
    j = tl.arange(0, BLOCK_K)
    here = row < tl.minimum(tl.load(live), rows)
    known = here[:, None] & wanted[None, :]
    logits += row.to(tl.int64)[:, None] * row_stride + e[None, :]
    x = load_partials(logits, part, offset + e[None, :], known, PARTS, OFFSET, DTYPE)
    x = tl.where(known, x, float("-inf"))
    x = tl.where(here[:, None] | (c > 0)[None, :], x, 0.0)  # a row that is not live must not make a NaN
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 1)[:, None])
        score /= tl.sum(score, 1)[:, None]
    ranked = score
    if BIAS:
        ranked += tl.load(bias + e, mask=wanted, other=0.0).to(tl.float32)[None, :]
    ranked = tl.where(wanted[None, :], ranked, float("-inf"))
    if TOP_GROUPS < GROUPS:
        ranked = _allow_groups(ranked, BLOCK_GROUPS, BLOCK_SIZE, TOP_GROUPS, GROUP_BEST)
    w = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    chosen = tl.full([BLOCK_T, BLOCK_K], -1, tl.int32)
    keys = _ordered_bits(ranked.to(tl.int32, bitcast=True))
    for i in tl.static_range(K):
        top = tl.max(keys, 1)
        at = tl.min(tl.where(keys == top[:, None], c[None, :], COLUMNS), 1)  # the lower of equal ones
        mine = c[None, :] == at[:, None]
        best = _ordered_bits(top).to(tl.float32, bitcast=True)
        if BIAS:
            best = tl.sum(tl.where(mine, score, 0.0), 1)
        keys = tl.where(mine, -(1 << 31), keys)
        w = tl.where(j[None, :] == i, best[:, None], w)
        local = at // BLOCK_SIZE * SIZE + at % BLOCK_SIZE - FIRST
        local = tl.where(here & (local >= 0) & (local < HELD), local, -1)
        chosen = tl.where(j[None, :] == i, local[:, None], chosen)
    if RENORMALISE:
        w = w / (tl.sum(w, 1)[:, None] + 1e-20)  # all sigmoids may be 0
    pair = row[:, None] * K + j[None, :]
    real = (row < rows)[:, None] & (j < K)[None, :]
    tl.store(weight + pair, w * scale, mask=real)
    tl.store(expert + pair, chosen, mask=real)


@triton.jit
def _count(found, BLOCK_HELD: tl.constexpr):
    """Return the number of pairs of each expert, int32 `[BLOCK_HELD]`."""
    return tl.histogram(tl.where(found >= 0, found, 0), BLOCK_HELD, mask=found >= 0)


@kernel(do_not_specialize=["pairs"])
def _count_chunks(expert, counts, pairs, BLOCK_HELD: tl.constexpr, CHUNK: tl.constexpr):
    overlap.begin()
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    count = _count(tl.load(expert + i, mask=i < pairs, other=-1), BLOCK_HELD)
    tl.store(counts + tl.program_id(0) * BLOCK_HELD + tl.arange(0, BLOCK_HELD), count)


@kernel(do_not_specialize=["pairs", "tiles"])
def _sort_pairs(
    expert, counts, order, tile_expert, used, pairs, tiles, HELD: tl.constexpr, BLOCK_HELD: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    me, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, BLOCK_HELD)
    found = tl.load(expert + i, mask=i < pairs, other=-1)
    before = 0  # pairs of this expert in the previous chunks
    if BLOCK_CHUNKS == 1:
        count = _count(found, BLOCK_HELD)
    else:
        c = tl.arange(0, BLOCK_CHUNKS)
        all_counts = tl.load(
            counts + c[:, None] * BLOCK_HELD + e[None, :], mask=(c < tl.num_programs(1))[:, None], other=0
        )
        count = tl.sum(all_counts, 0)
        before = tl.sum(tl.sum(tl.where((c < chunk)[:, None] & (e == me)[None, :], all_counts, 0), 1), 0)
    padded = (count + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    start = tl.sum(tl.where(e < me, padded, 0), 0)
    end = start + tl.sum(tl.where(e == me, padded, 0), 0)
    mine = (found == me).to(tl.int32)
    tl.store(order + start + before + tl.cumsum(mine, 0) - mine, i, mask=mine > 0)
    if chunk == 0:
        if me == HELD - 1:
            tl.store(used, end // BLOCK_M)
        for first in range(0, tiles, BLOCK_TILES):  # its own tiles, and for the last program the idle ones
            tile = first + tl.arange(0, BLOCK_TILES)
            own = (tile >= start // BLOCK_M) & (tile < end // BLOCK_M)
            idle = (tile >= end // BLOCK_M) & (tile < tiles) & (me == HELD - 1)
            tl.store(tile_expert + tile, tl.where(own, me, -1), mask=own | idle)
        rest = start + tl.sum(tl.where(e == me, count, 0), 0) + tl.arange(0, BLOCK_M)
        tl.store(order + rest, tl.zeros([BLOCK_M], tl.int32) + pairs, mask=rest < end)


@kernel(do_not_specialize=["pairs", "tiles", "chunks"])
def _place_pairs(
    expert, counts, order, tile_expert, used, pairs, tiles, chunks, BLOCK_HELD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_COUNTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Sort pairs like `_sort_pairs`: a program places a chunk's pairs, and writes every chunks-th block of
    tile_expert."""
    overlap.begin()
    chunk = tl.program_id(0)
    e = tl.arange(0, BLOCK_HELD)
    count = tl.zeros([BLOCK_HELD], tl.int32)
    before = tl.zeros([BLOCK_HELD], tl.int32)  # pairs of each expert in the previous chunks
    for first in range(0, chunks, BLOCK_COUNTS):
        c = first + tl.arange(0, BLOCK_COUNTS)[:, None]
        counted = tl.load(counts + c * BLOCK_HELD + e[None, :], mask=c < chunks, other=0)
        count += tl.sum(counted, 0)
        before += tl.sum(tl.where(c < chunk, counted, 0), 0)
    need = (count + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(need, 0)  # the tile after the last of each expert
    start = end - need
    place = start * BLOCK_M + before
    j = tl.arange(0, BLOCK)
    for block in range(chunk * BLOCKS, (chunk + 1) * BLOCKS):
        i = block * BLOCK + j
        found = tl.load(expert + i, mask=i < pairs, other=-1)
        earlier = (found[:, None] == found[None, :]) & (j[:, None] > j[None, :])
        at = tl.gather(place, tl.maximum(found, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + at, i, mask=found >= 0)
        place += _count(found, BLOCK_HELD)
    if chunk == 0:
        tl.store(used, tl.sum(need, 0))
    for first in range(chunk * BLOCK_TILES, tiles, chunks * BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        own = (tile[:, None] >= start[None, :]) & (tile[:, None] < end[None, :])
        mine = tl.max(tl.where(own, e[None, :], -1), 1)
        rows_end = tl.sum(tl.where(own, (start * BLOCK_M + count)[None, :], 0), 1)
        tl.store(tile_expert + tile, mine, mask=tile < tiles)
        row = tile[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        padding = (mine >= 0)[:, None] & (row >= rows_end[:, None])
        tl.store(order + row, tl.zeros([BLOCK_TILES, BLOCK_M], tl.int32) + pairs, mask=padding)


@triton.jit
def pairs_of(
    tile, order, tile_expert, pairs, SORTED: tl.constexpr, BLOCK_M: tl.constexpr, CACHE: tl.constexpr = NO_MODIFIER
):
    """Return (pairs `[BLOCK_M]` of a tile, its expert or −1). Rows without a pair have the number `pairs`. An idle
    tile's pairs are undefined: its part of the order is never written. CACHE: modifier of the loads."""
    expert = tl.load(tile_expert + tile, cache_modifier=CACHE)
    row = tl.arange(0, BLOCK_M)
    pair = tl.where(row == 0, tile, pairs)
    if SORTED:
        pair = tl.load(order + tile * BLOCK_M + row, cache_modifier=CACHE)
    return pair, expert


def choose(
    logits: Tensor | SplitKPartials,
    rule: Rule,
    live: Tensor | None,
    first: int = 0,
    held: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (weight float32 `[T, k]`, expert int32 `[T, k]`). See `route` for the arguments. live: None: all rows."""
    found = as_partials(logits)
    parts, offset = found.values, found.bias
    (count, rows, experts), k = parts.shape, rule.k
    live = torch.full((1,), rows, dtype=torch.int32, device=parts.device) if live is None else live
    weight = parts.new_empty(rows, k, dtype=torch.float32)
    expert = parts.new_empty(rows, k, dtype=torch.int32)
    groups = rule.groups if rule.top_groups < rule.groups else 1
    if parts.stride(2) != 1 or experts % groups or any(b is not None and b.shape != (experts,) for b in (bias, offset)):
        raise ValueError(f"logits are {[rows, experts]}, contiguous by rows, in {groups} groups; bias {bias}")
    if rows:
        # With up to 128 experts each warp has one of four rows; warps that share rows would wait for each other.
        block_t = 4 if experts <= 128 else 1
        _route[(cdiv(rows, block_t),)](
            parts, parts if offset is None else offset, parts if bias is None else bias, live, weight, expert, rows,
            parts.stride(0) if count > 1 else 0, parts.stride(1), rule.scale, PARTS=count, OFFSET=offset is not None,
            DTYPE=LANGUAGE[found.dtype],
            E=experts, K=k, BLOCK_K=next_power_of_2(k), SIGMOID=rule.score == "sigmoid", BIAS=bias is not None,
            GROUPS=groups, TOP_GROUPS=min(groups, rule.top_groups), GROUP_BEST=rule.group_best,
            RENORMALISE=rule.renormalise, FIRST=first, HELD=experts - first if held is None else held, BLOCK_T=block_t,
            BLOCK_GROUPS=next_power_of_2(groups), BLOCK_SIZE=next_power_of_2(experts // groups),
            num_warps=block_t, **overlap.options(),
        )  # fmt: skip
    return weight, expert


def route(
    logits: Tensor | SplitKPartials,
    rule: Rule,
    live: Tensor | None,
    tile_rows: int,
    first: int = 0,
    held: int | None = None,
    bias: Tensor | None = None,
) -> Routing:
    """Choose the experts of each token by a rule over logits `[T, E]`, in float32.

    Args:
        logits: may be the router's split-K partials, which are summed here.
        rule: see `Rule`. Among equal scores the lower expert or group wins. If the rule renormalises, a token's k
            weights sum to one over the experts of all ranks.
        bias: `[E]`, bias of the rule.
        live: int32 `[1]`, number of real tokens; later ones choose no expert, and their logits are not read.
        first, held: this rank has experts first … first + held − 1; all if held is None.

    Raises ValueError if shapes do not match.
    """
    experts = (logits.values if isinstance(logits, SplitKPartials) else logits).shape[-1]
    held = experts - first if held is None else held
    weight, expert = choose(logits, rule, live, first, held, bias)
    if expert.numel() * 4 <= experts:
        return Routing(weight, expert, tile_rows, None, None)
    return sort_pairs(weight, expert, held, tile_rows)


def sort_pairs(weight: Tensor, expert: Tensor, held: int, tile_rows: int) -> Routing:
    """Return the routing of tokens with chosen experts: weight float32 and expert int32 `[T, k]`. expert is counted
    from the first expert of this rank and must be −1 outside `[0, held)`. The number of tiles covers any choice of
    experts."""
    pairs = expert.numel()
    tiles = (pairs + min(held, pairs) * (tile_rows - 1)) // tile_rows
    order, tile_expert, used = (expert.new_empty(n) for n in (tiles * tile_rows, tiles, 1))
    if pairs:
        block_held = next_power_of_2(held)
        places = pairs * block_held >= MIN_PLACED
        chunk = 4 * BLOCK if places else min(CHUNKS[1], max(CHUNKS[0], next_power_of_2(pairs)))
        chunks, warps = cdiv(pairs, chunk), max(4, chunk // 256)
        counts = expert.new_empty(chunks, block_held)
        if chunks > 1 or places:
            _count_chunks[(chunks,)](
                expert, counts, pairs, BLOCK_HELD=block_held, CHUNK=chunk, num_warps=warps, **overlap.options()
            )
        if places:
            _place_pairs[(chunks,)](
                expert, counts, order, tile_expert, used, pairs, tiles, chunks, BLOCK_HELD=block_held, BLOCK=BLOCK,
                BLOCKS=4, BLOCK_COUNTS=max(1, 4096 // block_held), BLOCK_M=tile_rows, BLOCK_TILES=16, num_warps=4,
                **overlap.options(),
            )  # fmt: skip
        else:
            _sort_pairs[(held, chunks)](
                expert, counts, order, tile_expert, used, pairs, tiles, HELD=held, BLOCK_HELD=block_held, CHUNK=chunk,
                BLOCK_CHUNKS=next_power_of_2(chunks), BLOCK_M=tile_rows, BLOCK_TILES=256, num_warps=warps,
                **overlap.options(),
            )  # fmt: skip
    return Routing(weight, expert, tile_rows, order, tile_expert, used)
