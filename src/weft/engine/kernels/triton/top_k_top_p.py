"""Cut of a row of logits by top_k and top_p, found by bisection instead of a sort.

A row's tokens have an order: by logits / temperature, the most probable first, the lower token among equal ones. top_k
keeps a prefix of this order: tokens after fewer than k others. top_p keeps a prefix of that: tokens after less than the
share p of its probability. So a cut is a number and a token: tokens above the number stay, and among tokens equal to
it, those up to that token. `weft.engine.kernels.triton.sample` reads it.

Both are one search, for the shortest prefix with a sufficient sum of weights. A weight is 1 for top_k; for top_p it is
the probability relative to the best token's, as an integer of 2⁻³⁸. Integers have the same sum in every order: a cut
depends neither on the batch nor on the tiles. Programs that share a row gather the tokens of a range of numbers, which
usually includes the cut; one program bisects among these, in registers. The range is from the maxima of groups of
tokens: at least k tokens are not below the k-th greatest maximum, and hardly more than k. If the range does not include
the cut, as for flat rows with top_p, or has too many tokens, that program narrows it by passes over the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, scaled

BLOCK, CAPACITY, WARPS = 2048, 4096, 16
"""(Tokens of a row that are read at once, maximum gathered tokens, warps) of the program that cuts a row."""
SHARE_BLOCK, PROGRAMS, MIN_SHARES = 2048, 1056, 64
"""(Tokens that are read at once, programs, minimum shares) of the programs that gather; see `triton.sample`."""
GROUPS = 2048
"""Maximum groups of a row's tokens with a maximum each; a power of two."""
FIRST = 1024
"""Tokens that are searched first for the cut of top_p alone, if there are twice that number of groups."""

LOWEST = tl.constexpr(-2139095041)
"""Key of −inf, the lowest of all."""
OUTSIDE = tl.constexpr(-2147483648)
"""Key of no token."""
ALL = tl.constexpr(2147483647)
"""Token after all others."""
UNIT = tl.constexpr(float(1 << 38))
"""Weight of the best token: 2²⁴ of them, the maximum number of tokens, still have a sum in int64."""


@triton.jit
def index_of(row, table, TABLE: tl.constexpr):
    """Return the index of a row's sampling parameters."""
    if TABLE:
        return tl.load(table + row)
    else:
        return row


@triton.jit
def heated(x, heat):
    """Return float32 logits / temperature, rounded per IEEE 754; −inf for NaN."""
    x = tl.div_rn(x, tl.maximum(heat, 1e-5))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def key_of(x):
    """Return int32 keys in the order of float32 numbers other than NaN."""
    x = tl.where(x == 0, 0.0, x)  # −0 is 0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def cuts(heat, top_k, top_p, vocabulary):
    """Return True if a row is cut."""
    return (heat > 0) & (((top_k > 0) & (top_k < vocabulary)) | (top_p < 1))


@triton.jit
def keeps(key, token, cut_key, cut_token):
    """Return the mask of tokens that a cut keeps."""
    return (key > cut_key) | ((key == cut_key) & (token <= cut_token))


@triton.jit
def _number_of(key):
    """Return the float32 number of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, top):
    """Return int64 weights for top_p. top: the greatest of the row."""
    return (tl.where(x == top, 1.0, tl.exp(x - top)) * UNIT).to(tl.int64)


@triton.jit
def _read(logits, token, there, heat, top, cut_key, cut_token, COUNT: tl.constexpr):
    """Return (keys, weights) of tokens: 1 for COUNT, else the mass, and 0 for tokens that the current cut excludes."""
    x = heated(tl.load(logits + token, mask=there, other=float("-inf")).to(tl.float32), heat)
    key = tl.where(there, key_of(x), OUTSIDE)
    kept = keeps(key, token, cut_key, cut_token)
    if COUNT:
        return key, kept.to(tl.int64)
    else:
        return key, tl.where(kept, _mass(x, top), 0)


@triton.jit
def _gather(
    logits, gathered, vocabulary, heat, top, low, high, cut_key, cut_token,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store the tokens of positive weight with low ≤ key < high in ascending order. Return (their number, total
    weight)."""
    tl.debug_barrier()  # earlier gathered tokens have been read
    count, total = tl.full([], 0, tl.int32), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        key, weight = _read(logits, token, token < vocabulary, heat, top, cut_key, cut_token, COUNT)
        total += weight
        inside = ((key >= low) & (key < high) & (weight > 0)).to(tl.int32)
        found = tl.sum(inside, 0)
        if found > 0:
            at = count + tl.cumsum(inside, 0) - 1
            tl.store(gathered + at, token, mask=(inside > 0) & (at < CAPACITY))
        count += found
    tl.debug_barrier()
    return count, tl.sum(total, 0)


@triton.jit
def _narrow(
    logits, vocabulary, heat, top, low, high, above, reached, needed, by_number, cut_key, cut_token,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a quarter of a range: (low, high, above, reached), with the cut's key in low ≤ key < high, the weight
    `above` from high on, less than needed, and the weight `reached` from low on. by_number: quarters of numbers instead
    of keys."""
    a, b = _number_of(low.to(tl.int32)), _number_of(high.to(tl.int32))
    numbers = by_number & (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))
    step, width = (b - a) * 0.25, high - low
    first = tl.where(numbers, key_of(a + step).to(tl.int64), low + width // 4)
    second = tl.where(numbers, key_of(a + 2 * step).to(tl.int64), low + width // 2)
    third = tl.where(numbers, key_of(b - step).to(tl.int64), high - width // 4)
    first = tl.minimum(tl.maximum(first, low + 1), high - 1)
    second = tl.minimum(tl.maximum(second, low + 1), high - 1)
    third = tl.minimum(tl.maximum(third, low + 1), high - 1)
    s1, s2, s3 = tl.full([BLOCK], 0, tl.int64), tl.full([BLOCK], 0, tl.int64), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        key, weight = _read(logits, token, token < vocabulary, heat, top, cut_key, cut_token, COUNT)
        s1 += tl.where(key >= first.to(tl.int32), weight, 0)
        s2 += tl.where(key >= second.to(tl.int32), weight, 0)
        s3 += tl.where(key >= third.to(tl.int32), weight, 0)
    at1, at2, at3 = tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0)
    above = tl.where(at3 < needed, tl.where(at2 < needed, tl.where(at1 < needed, at1, at2), at3), above)
    high = tl.where(at3 < needed, tl.where(at2 < needed, tl.where(at1 < needed, first, second), third), high)
    reached = tl.where(at1 >= needed, tl.where(at2 >= needed, tl.where(at3 >= needed, at3, at2), at1), reached)
    low = tl.where(at1 >= needed, tl.where(at2 >= needed, tl.where(at3 >= needed, third, second), first), low)
    return low, high, above, reached


@triton.jit
def _last(own, token, ahead, needed):
    """Return the last token that is kept among equal keys. own: their weights, 0 for others. ahead: that of greater
    keys."""
    last = tl.max(tl.where(own > 0, token, -1), 0)
    first = tl.min(tl.where(own > 0, token, ALL), 0) - 1
    while last - first > 1:
        middle = first + (last - first) // 2
        enough = ahead + tl.sum(tl.where(token <= middle, own, 0), 0) >= needed
        first, last = tl.where(enough, first, middle), tl.where(enough, middle, last)
    return last


@triton.jit
def _cut(
    logits, gathered, vocabulary, heat, top, count, total, low, lowest, need, cut_key, cut_token,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Cut a row. Return (key, token of the cut, True if all tokens that it keeps are gathered).

    Args:
        count: number of gathered tokens: those from low on, or of these all with a weight. Otherwise the cut is among
            the keys from lowest on.
        total: weight of all tokens; −1: of the gathered ones.
        need: top_k, or top_p.
    """
    low, high = low.to(tl.int64), key_of(top).to(tl.int64) + 1
    above = tl.full([], 0, tl.int64)
    c = tl.arange(0, CAPACITY)
    token = tl.load(gathered + c, mask=c < count, other=0)
    key, weight = _read(logits, token, c < count, heat, top, cut_key, cut_token, COUNT)
    held = tl.sum(weight, 0)
    total = tl.where(total < 0, held, total)
    if COUNT:
        needed = need.to(tl.int64)
    else:
        share = need.to(tl.float64) * total.to(tl.float64)
        needed = share.to(tl.int64)
        needed += (needed.to(tl.float64) < share).to(tl.int64)
        needed = tl.maximum(needed, 1)
    passes = tl.full([], 0, tl.int32)
    if (count > CAPACITY) | (held < needed):
        if count <= CAPACITY:
            high, above, low = low, held, lowest.to(tl.int64)
        elif not COUNT:
            low = lowest.to(tl.int64)
        reached, some = total, tl.full([], float("inf"), tl.float32)
        while (high - low > 1) & (some > CAPACITY):
            low, high, above, reached = _narrow(
                logits, vocabulary, heat, top, low, high, above, reached, needed, (passes < 6) | (passes % 2 == 0),
                cut_key, cut_token, COUNT, BLOCK,
            )  # fmt: skip
            passes += 1
            some = (reached - above).to(tl.float32)
            if not COUNT:  # no token from low on weighs less than low, but for the rounding of exp
                some = some / tl.maximum(_mass(_number_of(low.to(tl.int32)), top), 1).to(tl.float32) * 1.01
        count, _ = _gather(
            logits, gathered, vocabulary, heat, top, low, high, cut_key, cut_token, COUNT, BLOCK, CAPACITY
        )
        token = tl.load(gathered + c, mask=c < count, other=0)
        key, weight = _read(logits, token, c < count, heat, top, cut_key, cut_token, COUNT)
    whole, last = (above == 0) & (count <= CAPACITY), tl.full([], -1, tl.int32)
    if count <= CAPACITY:
        ahead = above
        while high - low > 1:
            middle = low + (high - low) // 2
            reached = above + tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0), 0)
            low, high, ahead = (
                tl.where(reached >= needed, middle, low),
                tl.where(reached >= needed, high, middle),
                tl.where(reached >= needed, ahead, reached),
            )
        last = _last(tl.where(key == low.to(tl.int32), weight, 0), token, ahead, needed)
    else:  # a large number of equal values
        for start in range(0, vocabulary, BLOCK):
            if above < needed:
                i = start + tl.arange(0, BLOCK)
                keys, weights = _read(logits, i, i < vocabulary, heat, top, cut_key, cut_token, COUNT)
                own = tl.where(keys == low.to(tl.int32), weights, 0)
                more = tl.sum(own, 0)
                if more > 0:
                    last = _last(own, i, above, needed)
                above += more
    return low.to(tl.int32), last, whole


@triton.jit
def _bound(maxima, groups, heat, wanted, GROUPS: tl.constexpr):
    """Return (the greatest number of a row, a key that at least `wanted` tokens have or exceed)."""
    g = tl.arange(0, GROUPS)
    x = heated(tl.load(maxima + g, mask=g < groups, other=float("-inf")), heat)
    key, top = key_of(x), tl.max(x, 0)
    low, high = tl.full([], LOWEST, tl.int64), key_of(top).to(tl.int64) + 1
    while high - low > 1 << 15:  # of the 2²³ numbers between powers of two
        middle = low + (high - low) // 2
        enough = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return top, low.to(tl.int32)


@kernel(do_not_specialize=["groups"], do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def _gather_first(
    logits, maxima, temperature, top_k, top_p, table, live, gathered, counts, totals, minima, bounds, row_stride,
    vocabulary, groups, blocks, TABLE: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row, share = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(live):
        return
    at = index_of(row, table, TABLE)
    heat, k, p = tl.load(temperature + at), tl.load(top_k + at), tl.load(top_p + at)
    if not cuts(heat, k, p, vocabulary):
        return
    logits += row.to(tl.int64) * row_stride
    by_count = (k > 0) & (k < vocabulary)
    wanted = tl.where(by_count, k, tl.minimum(FIRST, (groups + 1) // 2))
    top, low = _bound(maxima + row.to(tl.int64) * groups, groups, heat, wanted, GROUPS)
    total, finite = tl.full([BLOCK], 0, tl.int64), tl.full([BLOCK], float("inf"), tl.float32)
    for block in range(share, blocks, tl.num_programs(1)):
        token = block * BLOCK + tl.arange(0, BLOCK)
        there = token < vocabulary
        x = heated(tl.load(logits + token, mask=there, other=float("-inf")).to(tl.float32), heat)
        inside = (there & (key_of(x) >= low)).to(tl.int32)
        if not by_count:
            total += tl.where(there, _mass(x, top), 0)
            finite = tl.minimum(finite, tl.where(x > float("-inf"), x, float("inf")))
        found = tl.sum(inside, 0)
        if found > 0:
            place = tl.atomic_add(counts + row, found, sem="relaxed") + tl.cumsum(inside, 0) - 1
            tl.store(gathered + row * CAPACITY + place, token, mask=(inside > 0) & (place < CAPACITY))
    tl.store(totals + row * tl.num_programs(1) + share, tl.sum(total, 0))
    tl.store(minima + row * tl.num_programs(1) + share, tl.min(finite, 0))
    if share == 0:
        tl.store(bounds + 2 * row, low)
        tl.store(bounds + 2 * row + 1, key_of(top))


@kernel(do_not_specialize=["shares"], do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "tokens"])
def _cutoff(
    logits, temperature, top_k, top_p, table, live, gathered, counts, totals, minima, bounds, keys, tokens,
    row_stride, vocabulary, shares,
    TABLE: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0)
    if row >= tl.load(live):
        return
    at = index_of(row, table, TABLE)
    heat, k, p = tl.load(temperature + at), tl.load(top_k + at), tl.load(top_p + at)
    if not cuts(heat, k, p, vocabulary):
        tl.store(keys + row, LOWEST)
        tl.store(tokens + row, ALL)
        return
    logits += row.to(tl.int64) * row_stride
    gathered += row * CAPACITY
    count, low, top = tl.load(counts + row), tl.load(bounds + 2 * row), _number_of(tl.load(bounds + 2 * row + 1))
    key, token = tl.full([], LOWEST, tl.int32), tl.full([], ALL, tl.int32)
    s = tl.arange(0, SHARES)
    total = tl.sum(tl.load(totals + row * shares + s, mask=s < shares, other=0), 0)
    lowest = key_of(tl.min(tl.load(minima + row * shares + s, mask=s < shares, other=float("inf")), 0))
    if (k > 0) & (k < vocabulary):
        total = vocabulary.to(tl.int64)
        key, token, whole = _cut(
            logits, gathered, vocabulary, heat, top, count, total, low, key, k, key, token, True, BLOCK, CAPACITY
        )
        low, lowest, total = key, key, tl.full([], -1, tl.int64)
        if (p < 1) & (not whole):
            high = key_of(top).to(tl.int64) + 1
            count, total = _gather(
                logits, gathered, vocabulary, heat, top, low, high, key, token, False, BLOCK, CAPACITY
            )
    if p < 1:
        # Tokens less probable than (1 − p) / vocabulary times the best have less than 1 − p in total.
        lowest = tl.maximum(key_of(top - tl.log(vocabulary / (1 - p)) - 1), lowest)
        key, token, _ = _cut(
            logits, gathered, vocabulary, heat, top, count, total, low, lowest, p, key, token, False, BLOCK, CAPACITY
        )
    tl.store(keys + row, key)
    tl.store(tokens + row, token)


def cutoffs(
    logits: Tensor,
    maxima: Tensor,
    counts: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    live: Tensor,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (key, token), int32 `[rows]` each: each row's cut, for `keeps`. A row that is not cut keeps all.

    Args:
        maxima: float32 `[rows, groups]`: the greatest logits of disjoint groups that cover a row's tokens, used for
            rows that are cut; at most GROUPS.
        counts: int32 `[rows]`, 0 for rows that are cut; overwritten.

    See `weft.engine.kernels.triton.sample.candidates` for the rest.
    """
    rows, vocabulary = logits.shape
    keys, tokens = live.new_empty(2, rows)
    if not rows:
        return keys, tokens
    at, blocks = live if table is None else table, cdiv(vocabulary, SHARE_BLOCK)
    shares = min(blocks, max(1, scaled(PROGRAMS) // rows))
    gathered, bounds = live.new_empty(rows, CAPACITY), live.new_empty(rows, 2)
    totals, minima = live.new_empty(rows, shares, dtype=torch.int64), temperature.new_empty(rows, shares)
    how = dict(TABLE=table is not None, CAPACITY=CAPACITY, **overlap.options())
    _gather_first[(rows, shares)](
        logits, maxima, temperature, top_k, top_p, at, live, gathered, counts, totals, minima, bounds, logits.stride(0),
        vocabulary, maxima.shape[1], blocks, BLOCK=SHARE_BLOCK, GROUPS=GROUPS, FIRST=FIRST, num_warps=4, **how,
    )  # fmt: skip
    _cutoff[(rows,)](
        logits, temperature, top_k, top_p, at, live, gathered, counts, totals, minima, bounds, keys, tokens,
        logits.stride(0), vocabulary, shares,
        BLOCK=BLOCK, SHARES=max(MIN_SHARES, next_power_of_2(shares)), num_warps=WARPS, **how,
    )  # fmt: skip
    return keys, tokens
