"""Forms of the models' ops by kernels on CPUs. Each returns None for arguments that it does not cover
(`weft.kernels.cpu_rows`), and otherwise computes the definition of the same name in `model_reference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.engine.kernels.model_reference import Chosen, Rule
from weft.engine.kernels.side_stream import nothing
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kernels.step_inputs import StepInputs, TablePieces, unfilled_inputs
from weft.kernels.cpu_rows import BLOCK, DTYPES, MAX_COLUMNS, MAX_ROWS, covers, isa, multiplies, run
from weft.kernels.float8 import Fp8Rows, Fp8Weight, Stored
from weft.stream.formats import QuantisedWeight

EXPERT_ROWS = 1024
"""Rows of a call of `experts`, which needs memory for each of a row's experts."""
MAX_DIM = 1024
"""Maximum elements of a head that is rotated."""


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor | None:
    if x.dim() != 2 or not covers(x, weight, out, bias) or not multiplies(x):
        return None
    out = torch.empty((len(x), len(weight)), dtype=x.dtype) if out is None else out
    run("linear", x, weight, bias, out)
    return out


def linear_quantised(x: Any, weight: QuantisedWeight, out: Tensor) -> Tensor | None:
    if len(out) > MAX_ROWS or not covers(out) or not isinstance(weight, Fp8Weight) or not _multiplies(x, weight, out):
        return None
    values, scales = (x, None) if isinstance(x, Tensor) else x[:2]
    run("linear_float8", values, scales, weight.values, weight.scales, *weight.unit, out)
    return out


def _multiplies(x: Any, weight: Fp8Weight, out: Tensor) -> bool:
    """Check if kernels multiply rows in out's dtype or in FP8 with a weight."""
    if weight.unit[1] % 32 or weight.unit[1] > MAX_COLUMNS:
        return False
    return covers(x, out) if isinstance(x, Tensor) else isinstance(x, Fp8Rows) and x.group_size == weight.unit[1]


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> Tensor | None:
    if len(x) > MAX_ROWS or weight.dtype != x.dtype or not covers(x, out):
        return None
    if weight.stride(1) != 1 and (weight.stride(2) != 1 or x.shape[2] > MAX_DIM):
        return None
    for i in range(0, len(x), BLOCK):
        run("multiply_heads", x[i : i + BLOCK], weight, out[i : i + BLOCK])
    return out


def linear_or_partials(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor | SplitKPartials | None:
    if dtype is None or dtype == x.dtype:
        return linear(x, weight, None, bias)
    return None


def gated(
    x: Tensor, limit: float | None = None, alpha: float | None = None, score: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    if not covers(x):
        return None
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty((len(rows), rows.shape[1] // 2), dtype=x.dtype)
    factor = None if score is None else linear(*score)
    if score is not None and factor is None:
        factor = F.linear(*score)
    run("gated", rows, out, _or_nan(limit), _or_nan(alpha), factor)
    return out.view(*x.shape[:-1], -1)


def embed(tokens: Tensor, weight: Tensor, first: int | None = None) -> Tensor | None:
    if tokens.dim() != 1 or not covers(weight):
        return None
    out = weight.new_empty(len(tokens), weight.shape[1])
    run("embed", tokens, weight, out, -1 if first is None else first)
    return out


def cos_sin(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor] | None:
    if dtype not in DTYPES or inverse.dtype != torch.float32 or not covers(inverse):
        return None
    cos, sin = (torch.empty((len(positions), 1, 2 * len(inverse)), dtype=dtype) for _ in range(2))
    run("cos_sin", positions, inverse, cos, sin, factor, interleaved)
    return cos, sin


def join(left: Tensor, right: Tensor) -> Tensor | None:
    if left.dim() != 2 or not covers(left, right):
        return None
    out = left.new_empty(len(left), left.shape[1] + right.shape[1])
    run("join", left, right, out)
    return out


def choose(
    logits: Tensor | SplitKPartials, rule: Rule, live: Tensor | None = None, *, bias: Tensor | None = None
) -> Chosen | None:
    return _choose(logits, rule, 0, bias)


def route(
    logits: Tensor | SplitKPartials, rule: Rule, live: Tensor | None, mine: range, quantised: bool, bias: Tensor | None
) -> Chosen | None:
    return _choose(logits, rule, mine.start, bias)


def _choose(logits: Tensor | SplitKPartials, rule: Rule, first: int, bias: Tensor | None) -> Chosen | None:
    """Choose experts, counted from `first`."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not covers(logits) or not (bias is None or covers(bias)):
        return None
    weight, expert = (torch.empty((len(logits), rule.k), dtype=dtype) for dtype in (torch.float32, torch.int32))
    by_groups = rule.groups, rule.top_groups, rule.group_best
    how = rule.score == "softmax", *by_groups, rule.renormalise, rule.scale
    run("choose", logits, bias, weight, expert, *how, first)
    return weight, expert


def experts(
    x: Any,
    chosen: Chosen,
    gate_up: Any,
    down: Any,
    out: Tensor,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    add: bool = False,
    wait: Callable[[], None] = nothing,
) -> Tensor | None:
    if not covers(out) or not (len(out) <= MAX_ROWS or (isinstance(gate_up, Tensor) and multiplies(out))):
        return None
    scales: tuple[Any, ...] = None, None, None, 0, 0, 0, 0
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        if gate_up_bias is not None or not _multiplies(x, gate_up, out) or not _multiplies(out, down, out):
            return None
        x, rows = (x, None) if isinstance(x, Tensor) else x[:2]
        scales = rows, gate_up.scales, down.scales, *gate_up.unit, *down.unit
        gate_up, down = gate_up.values, down.values
    elif not isinstance(gate_up, Tensor) or not covers(x, gate_up, down, out, gate_up_bias, down_bias):
        return None
    wait()
    options, weights = (_or_nan(limit), _or_nan(alpha), add), (gate_up, down, gate_up_bias, down_bias)
    for i in range(0, len(out), EXPERT_ROWS):
        at = slice(i, i + EXPERT_ROWS)
        run("experts", x[at], *(each[at] for each in chosen), *weights, out[at], *options, *scales)
    return out


def _or_nan(value: float | None) -> float:
    return nan if value is None else value


def norm_rope_cache(
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    *,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
    unused: int,
) -> Tensor | None:
    """Split rows into queries, keys and values, normalise and rotate heads of the first two, and store the last two.

    Args:
        qkv: `[T, features]`.
        heads: number of query heads.
        cos, sin: `[T, dim / 2]` or less, one entry per rotated pair.
        slots: int64 `[T]`; −1: stored in slot `unused`.
        keys, values: `[slots, kv_heads, dim]` of a layer's cache.
        q_weight, k_weight: `[dim]`, norms of heads with `eps`; None: no norm.
        interleaved: rotate neighbouring elements, instead of pairs across halves.

    Returns queries `[T, heads, dim]`, or None.
    """
    (k, k_exponents), (v, v_exponents) = _parts(keys), _parts(values)
    if qkv.dim() != 2 or slots.dtype != torch.int64 or k.shape[-1] > MAX_DIM or not covers(qkv, cos, sin):
        return None
    if k_exponents is None and not covers(qkv, k, v):
        return None
    q = torch.empty((len(qkv), heads, k.shape[-1]), dtype=qkv.dtype)
    norms = q_weight, k_weight, eps
    run("rope", qkv, cos, sin, slots, q, k, v, *norms, interleaved, unused, k_exponents, v_exponents)
    return q


def _parts(stored: Stored) -> tuple[Tensor, Tensor | None]:
    """Return cached vectors and their exponents, if they are in FP8."""
    return (stored, None) if isinstance(stored, Tensor) else stored


def attend(
    q: Tensor,
    keys: Stored,
    values: Stored,
    pages: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    window: int | None,
    page_size: int,
) -> None:
    """Fill out and lse: see `weft.engine.attention.backend.AttentionInputs` and `DecodeRows`. window: tokens that a row
    sees, including its own; None: all."""
    to = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    (k, k_exponents), (v, v_exponents) = _parts(keys), _parts(values)
    run("decode", q, k, v, pages, lengths, to, lse, scale, window or 0, page_size, k_exponents, v_exponents)
    if to is not out:
        out.copy_(to)


def attend_prompt(
    q: Tensor,
    keys: Stored,
    values: Stored,
    slots: Tensor | None,
    limits: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    window: int | None,
    begin: int,
) -> bool:
    """Fill out and lse with attention of a prompt's rows: see `weft.engine.attention.sdpa.SeenTokens`, which has the
    same `limits`, `window` and `begin`. slots: of tokens in keys and values; None: these are the tokens'. False: not
    covered."""
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and covers(q, keys, values, out)):
        return False
    if q.dtype != torch.bfloat16 or isa() != "amx":
        return False
    run("prompt", q, keys, values, slots, limits, out, lse, scale, window or 0, begin)
    return True


def step_in(state: Sequence[Tensor], pieces: TablePieces, page_size: int) -> StepInputs:
    """Return a decode step's inputs: see `weft.engine.kernels.triton.decode_step.step_in`, which begins with `state`,
    and has the same `pieces` and `page_size`."""
    out = unfilled_inputs(state[:3], state[4:7], pieces)
    run("step_in", *state, pieces.each, *out, page_size)
    return out


def best(logits: Tensor, first: int = 0) -> Tensor:
    """Return float32 `[rows, 2]`: the greatest of each row of logits `[rows, n]`, and its place, counted from `first`.
    Of equals it is the first one, and NaN is greatest, as for `torch.argmax`."""
    out = logits.new_empty(len(logits), 2, dtype=torch.float32)
    run("best", logits, first, out)
    return out


def step_out(rows: Tensor, live: Tensor, candidates: Tensor, *state: Tensor) -> None:
    """Sample the best of `candidates`, float32 `[ranks, rows, 2]`, each rank's `best`, and update the state: see
    `weft.engine.kernels.triton.decode_step.step_out`, which has the same `rows` and `live`, and ends with `state`."""
    run("step_out", rows, live, live, candidates, *state)
