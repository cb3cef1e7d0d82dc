"""Sampling of a token per row, greedily or by the Gumbel-max trick, in two kernels. min_p adds a third, and top_k and
top_p two more (`weft.engine.kernels.triton.top_k_top_p`).

Programs share each row's vocabulary. Each finds the best token of its share, a candidate; the best candidate is the
sampled token.

A token's noise depends only on the request's seed, the position and the token: not on the row, nor on the number of
rows or ranks. So samples are equal in every batch and layout. If the vocabulary is split over ranks, each rank samples
among its own tokens, and the best of these is the sample of the whole vocabulary. Random bits are Triton's Philox
(Salmon et al., SC 2011), four tokens per call. Small values of the exponential, which win, are resolved to 2⁻³¹.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton.top_k_top_p import ALL, GROUPS, LOWEST, cutoffs, cuts, heated, index_of, keeps, key_of
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2, scaled
from weft.planner.vocabulary import MAX_TOKENS

BLOCK, PROGRAMS = 2048, 1056
"""(Tokens that a program reads at once; approximate number of programs on an H200, eight per multiprocessor.) Fewer
programs would leave multiprocessors idle. Many more would take longer to start than to find no work."""

MIN_SHARES = 64
"""Minimum number of shares, to which they are padded, so that few kernels are compiled for all numbers of rows."""
OF_ROWS = ["temperature", "seed", "position", "min_p", "top_k", "top_p", "keys", "tokens"]
"""Arguments with one number per row: their addresses need no alignment."""


@triton.jit
def _gumbel(seed, position, first, BLOCK: tl.constexpr):
    """Return Gumbel noise of the tokens first … first + BLOCK − 1. first is a multiple of four."""
    key = tl.randint(seed, position).to(tl.uint32).to(tl.int64)
    a, b, c, d = tl.rand4x(key, first // 4 + tl.arange(0, BLOCK // 4))
    u = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    u = tl.maximum(u, 4.66e-10)
    # Compute log1p(-u) from the rounding error of 1 - u (Kahan): log alone would lose small u, which win.
    w = 1.0 - u
    exponential = tl.where(w == 1.0, u, -tl.log(w) * (u / tl.where(w == 1.0, 1.0, 1.0 - w)))
    return -tl.log(exponential)


@triton.jit
def better(value, token):
    """Return (greatest value, its token), the lower token among equal ones; NaN counts as −inf."""
    value = tl.where(value == value, value, float("-inf"))
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, 2147483647), 0)


@kernel(do_not_specialize_on_alignment=OF_ROWS)
def _row_top(
    logits, temperature, min_p, top_k, top_p, table, live, tops, maxima, counts, row_stride, vocabulary, blocks,
    MIN_P: tl.constexpr, CUT: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0)
    if row >= tl.load(live):
        return
    at = index_of(row, table, TABLE)
    wanted, cut = False, False
    if MIN_P:
        wanted = tl.load(min_p + at) > 0
    if CUT:
        cut = cuts(tl.load(temperature + at), tl.load(top_k + at), tl.load(top_p + at), vocabulary)
    if not (wanted | cut):
        return
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=i < vocabulary, other=float("-inf"))
        top = tl.maximum(top, x.to(tl.float32))
    share = row * tl.num_programs(1) + tl.program_id(1)
    if MIN_P:
        tl.store(tops + share, tl.max(top, 0))
    if CUT:
        each = tl.max(tl.reshape(top, [GROUPS, BLOCK // GROUPS]), 1)
        if tl.program_id(1) == 0:
            tl.store(counts + row, 0)
        tl.store(maxima + share.to(tl.int64) * GROUPS + tl.arange(0, GROUPS), each, mask=cut)


@kernel(do_not_specialize_on_alignment=OF_ROWS)
def _candidates(
    logits, temperature, seed, position, min_p, table, tops, keys, tokens, live, found, row_stride, vocabulary, first,
    blocks, MIN_P: tl.constexpr, CUT: tl.constexpr, TABLE: tl.constexpr, SKEW: tl.constexpr, BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0)
    if row >= tl.load(live):
        return
    at = index_of(row, table, TABLE)
    shares = tl.num_programs(1)
    heat = tl.load(temperature + at)
    key, place = tl.load(seed + at), tl.load(position + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    if MIN_P:
        share = tl.load(min_p + at)
        if (heat > 0) & (share > 0):
            s = tl.arange(0, SHARES)
            top = tl.max(tl.load(tops + row * shares + s, mask=s < shares, other=float("-inf")), 0)
            threshold = top / tl.maximum(heat, 1e-5) + tl.log(share)
    cut_key, cut_token = tl.full([], LOWEST, tl.int32), tl.full([], ALL, tl.int32)
    if CUT:
        cut_key, cut_token = tl.load(keys + row), tl.load(tokens + row)
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 2147483647, tl.int32)
    for block in range(tl.program_id(1), blocks, shares):
        start = block * BLOCK - SKEW  # noise is generated for four tokens at a time, aligned to four
        i = start + tl.arange(0, BLOCK)
        inside = (i >= 0) & (i < vocabulary)
        x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=inside, other=float("-inf")).to(tl.float32)
        if heat > 0:
            if cut_key > LOWEST:
                x = tl.where(keeps(key_of(heated(x, heat)), i, cut_key, cut_token), x, float("-inf"))
            x = x / tl.maximum(heat, 1e-5)
            x = tl.where(x >= threshold, x, float("-inf"))
            x += _gumbel(key, place, first + start, BLOCK)
        x = tl.where(inside & (x == x), x, float("-inf"))
        # Keep the first of equal values; if all are −inf, any token that exists.
        new = (x > value) | ((token == 2147483647) & inside)
        value, token = tl.where(new, x, value), tl.where(new, first + i, token)
    best, which = better(value, token)
    to = found + (row * shares + tl.program_id(1)) * 2
    tl.store(to, best)
    tl.store(to + 1, which.to(tl.float32))


@kernel(do_not_specialize=["shares"])
def _best(found, live, best, shares, SHARES: tl.constexpr):
    overlap.begin()
    row = tl.program_id(0)
    if row >= tl.load(live):
        tl.store(best + 2 * row, float("-inf"))
        tl.store(best + 2 * row + 1, -1.0)
        return
    s = tl.arange(0, SHARES)
    at = found + (row * shares + s) * 2
    token = tl.load(at + 1, mask=s < shares, other=0.0).to(tl.int32)
    value, which = better(tl.load(at, mask=s < shares, other=float("-inf")), tl.where(s < shares, token, 2147483647))
    tl.store(best + 2 * row, value)
    tl.store(best + 2 * row + 1, which.to(tl.float32))


def candidates(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    live: Tensor,
    *,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    first: int = 0,
    table: Tensor | None = None,
) -> Tensor:
    """Return float32 `[rows, shares, 2]`: per share of a row's tokens, the greatest logits / temperature + noise and
    its token. `weft.engine.kernels.triton.decode_step.step_out` accepts these candidates, concatenated over ranks.

    Args:
        logits: `[rows, vocabulary]` of any float dtype with contiguous rows; −inf excludes a token.
        temperature: float32 `[R]`; 0 selects the greatest logit, the lower token among equal ones.
        seed: int64 `[R]`.
        position: int32 or int64 `[rows]`, a number with which a request never samples twice.
        live: int32 `[1]`; rows from there on are neither read nor written.
        min_p: float32 `[R]`; tokens less than min_p times as probable as the row's best are excluded (arXiv
            2407.01082). Requires the whole vocabulary.
        top_k, top_p: int32 and float32 `[R]`, both or neither. Keeps the top_k most probable tokens (0: all), and of
            these the fewest most probable that reach top_p (nucleus; arXiv 1904.09751), the lower among equal ones.
            Requires the whole vocabulary.
        table: int32 `[rows]`, index of each row in `[R]`; None: its own index.
        first: number of the first token, if the vocabulary is split over ranks.

    Raises ValueError if these do not match.
    """
    rows, vocabulary = logits.shape
    if first and not (min_p is None and top_k is None):
        raise ValueError(f"first is {first}: with min_p, top_k and top_p it must be 0")
    if (top_k is None) != (top_p is None):
        raise ValueError("top_k and top_p are given together")
    if logits.stride(1) != 1:
        raise ValueError("rows of logits must be contiguous")
    if first + vocabulary > MAX_TOKENS:
        raise ValueError(f"tokens up to {first + vocabulary} are not all whole in float32")
    blocks = cdiv(vocabulary + first % 4, BLOCK)
    shares = min(blocks, max(1, scaled(PROGRAMS) // max(1, rows)))
    found = temperature.new_empty(rows, shares, 2)
    if not rows:
        return found
    at, padded = live if table is None else table, max(MIN_SHARES, next_power_of_2(shares))
    options = dict(TABLE=table is not None, BLOCK=BLOCK, num_warps=4, **overlap.options())
    sizes, tops, keys, tokens = (logits.stride(0), vocabulary), found, live, live
    given = temperature if min_p is None else min_p
    how: dict[str, Any] = dict(MIN_P=min_p is not None, CUT=top_k is not None)
    if any(how.values()):
        tops = temperature.new_empty(rows, shares)
        each = min(BLOCK, GROUPS // next_power_of_2(shares))
        k, p = (temperature, temperature) if top_k is None or top_p is None else (top_k, top_p)
        maxima = tops if top_k is None else temperature.new_empty(rows, shares * each)
        counts = live.new_empty(rows)
        _row_top[(rows, shares)](
            logits, temperature, given, k, p, at, live, tops, maxima, counts, *sizes, blocks, GROUPS=each, **how,
            **options,
        )  # fmt: skip
        if top_k is not None and top_p is not None:
            keys, tokens = cutoffs(logits, maxima, counts, temperature, top_k, top_p, live, table)
    _candidates[(rows, shares)](
        logits, temperature, seed, position, given, at, tops, keys, tokens, live, found, *sizes, first, blocks,
        SKEW=first % 4, SHARES=padded, **how, **options,
    )  # fmt: skip
    return found


def best(found: Tensor, live: Tensor) -> Tensor:
    """Return float32 `[rows, 2]`: the best of each row's `candidates`; (−inf, −1) for rows from `live` on."""
    rows, shares, _ = found.shape
    sampled = found.new_empty(rows, 2)
    if rows:
        padded = max(MIN_SHARES, next_power_of_2(shares))
        _best[(rows,)](found, live, sampled, shares, SHARES=padded, num_warps=1, **overlap.options())
    return sampled


def sample(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, live: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """Return the samples: (score float32 `[rows]`, token int32 `[rows]`). See `candidates` for the arguments."""
    sampled = best(candidates(logits, temperature, seed, position, live, **more), live)
    return sampled[:, 0], sampled[:, 1].int()
