"""Draws a token for each row, greedily or by the Gumbel-max trick, in two kernels.

The noise of a token depends on the request's seed, the position and the token's number, and on nothing else: not on
the row, nor on how many rows or ranks there are. So what is drawn is the same in every batch and layout, and with the
vocabulary cut over ranks each draws among its own tokens: the best of the ranks' bests is what one rank would have
drawn. Philox as Triton has it (Salmon et al., SC 2011), four tokens a call; the exponential's small values, which win,
are resolved to 2⁻³¹.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Tokens that one program looks at."""


@triton.jit
def _gumbel(seed, position, first, BLOCK: tl.constexpr):
    """Gumbel noise of the tokens first … first + BLOCK − 1, where first is a multiple of four."""
    key = tl.randint(seed, position).to(tl.uint32).to(tl.int64)
    a, b, c, d = tl.rand4x(key, first // 4 + tl.arange(0, BLOCK // 4))
    u = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    u = tl.maximum(u, 4.66e-10)
    # log1p(-u), by what rounding 1 - u takes away (Kahan): log alone would lose small u, which are those that win.
    w = 1.0 - u
    exponential = tl.where(w == 1.0, u, -tl.log(w) * (u / tl.where(w == 1.0, 1.0, 1.0 - w)))
    return -tl.log(exponential)


@triton.jit
def _best(value, token):
    """(greatest value, its token), the lower token where several are equal; NaN counts as −inf."""
    value = tl.where(value == value, value, float("-inf"))
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, 2147483647), 0)


@triton.jit
def _row_top(logits, min_p, live, tops, row_stride, vocabulary, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(live):
        return
    if tl.load(min_p + row) <= 0:
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
    tl.store(tops + row * blocks + tl.program_id(1), tl.max(x, 0))


@triton.jit
def _best_of_block(
    logits, temperature, seed, position, min_p, tops, live, part, part_token, row_stride, vocabulary, first, blocks,
    MIN_P: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(live):
        return
    start = tl.program_id(1) * BLOCK - first % 4  # noise is made for four tokens at a time, from a multiple of four on
    i = start + tl.arange(0, BLOCK)
    inside = (i >= 0) & (i < vocabulary)
    x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=inside, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row)
    if heat > 0:
        x = x / tl.maximum(heat, 1e-5)
        if MIN_P:
            least = tl.load(min_p + row)
            if least > 0:
                b = tl.arange(0, BLOCKS)
                top = tl.max(tl.load(tops + row * blocks + b, mask=b < blocks, other=float("-inf")), 0)
                x = tl.where(x >= top / tl.maximum(heat, 1e-5) + tl.log(least), x, float("-inf"))
        x += _gumbel(tl.load(seed + row), tl.load(position + row), first + start, BLOCK)
    best, token = _best(x, tl.where(inside, first + i, 2147483647))
    tl.store(part + row * blocks + tl.program_id(1), best)
    tl.store(part_token + row * blocks + tl.program_id(1), token)


@triton.jit
def _best_of_row(part, part_token, live, value, token, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(live):
        tl.store(value + row, float("-inf"))
        tl.store(token + row, -1)
        return
    b = tl.arange(0, BLOCKS)
    best, found = _best(
        tl.load(part + row * blocks + b, mask=b < blocks, other=float("-inf")),
        tl.load(part_token + row * blocks + b, mask=b < blocks, other=2147483647),
    )
    tl.store(value + row, best)
    tl.store(token + row, found)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    live: Tensor,
    *,
    min_p: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """(value float32 `[rows]`, token int32 `[rows]`): the greatest of logits / temperature + noise, and whose it is.

    logits: `[rows, vocabulary]` of any float dtype with contiguous rows, −inf for what may not be drawn. temperature
    float32 `[rows]`: 0 takes the greatest logit, the lower token where several are equal. seed int64 `[rows]`;
    position int32 or int64 `[rows]`: a number that a request never draws with twice. live: int32 `[1]`; rows from
    there on get (−inf, −1), and nothing of them is read. min_p: float32 `[rows]`; tokens less than min_p times as
    probable as the row's best are not drawn (arXiv 2407.01082); it needs the whole vocabulary.
    first: the number of the first token, where the vocabulary is cut over ranks.
    Raises ValueError where these do not fit together.
    """
    rows, vocabulary = logits.shape
    if min_p is not None and first:
        raise ValueError(f"first is {first}: with min_p it must be 0")
    if logits.stride(1) != 1:
        raise ValueError("rows of logits must be contiguous")
    blocks = triton.cdiv(vocabulary + first % 4, BLOCK)
    part = temperature.new_empty(rows, blocks)
    part_token = live.new_empty(rows, blocks)
    value, token = temperature.new_empty(rows), live.new_empty(rows)
    if not rows:
        return value, token
    tops = part if min_p is None else temperature.new_empty(rows, blocks)
    if min_p is not None:
        _row_top[(rows, blocks)](logits, min_p, live, tops, logits.stride(0), vocabulary, blocks, BLOCK=BLOCK)
    padded = triton.next_power_of_2(blocks)
    _best_of_block[(rows, blocks)](
        logits, temperature, seed, position, temperature if min_p is None else min_p, tops, live, part, part_token,
        logits.stride(0), vocabulary, first, blocks, MIN_P=min_p is not None, BLOCK=BLOCK, BLOCKS=padded,
    )  # fmt: skip
    _best_of_row[(rows,)](part, part_token, live, value, token, blocks, BLOCKS=padded)
    return value, token
