"""One token of Gated DeltaNet (arXiv 2412.06464) for each of several sequences, from projections to the gated output.

Sequences of several rows in the same step are left to `weft.engine.kernels.triton.delta_chunks`.

States are read and written in place, in slots that are found on the device. The first of two kernels convolves: each
program has a block of features. The second applies the delta rule: each program has one head of one sequence, and keeps
the head's state in registers. Arithmetic is in float32; the output is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2

SLOTS = ["starts", "before", "after"]
"""Arguments with one number per sequence: their addresses need no alignment."""


@triton.jit
def _row_of(starts, sequence, STARTS: tl.constexpr):
    """Return (True if the sequence has one row, that row)."""
    row, alone = sequence, sequence >= 0
    if STARTS:
        row = tl.load(starts + sequence)
        alone = tl.load(starts + sequence + 1) == row + 1
    return alone, row.to(tl.int64)


@kernel(do_not_specialize_on_alignment=SLOTS)
def _convolve(
    product, starts, before, after, conv, tails, mixed, product_row, tail_slot, features,
    KEPT: tl.constexpr, BLOCK_KEPT: tl.constexpr, BLOCK_F: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    sequence = tl.program_id(0)
    alone, row = _row_of(starts, sequence, STARTS)
    to = tl.load(after + sequence)
    if (to < 0) | (not alone):
        return
    at = tl.load(before + sequence)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    i = tl.arange(0, BLOCK_KEPT)[None, :]
    there = (f < features)[:, None] & (i < KEPT)
    new = tl.load(product + row * product_row + f, mask=f < features, other=0.0).to(tl.float32)
    kept = tl.load(tails + at * tail_slot + f[:, None] * KEPT + i, mask=there & (at >= 0), other=0.0)
    taps = tl.load(conv + f[:, None] * (KEPT + 1) + i, mask=there, other=0.0).to(tl.float32)
    last = tl.load(conv + f * (KEPT + 1) + KEPT, mask=f < features, other=0.0).to(tl.float32)
    total = tl.sum(kept * taps, 1) + new * last
    tl.store(mixed + sequence.to(tl.int64) * features + f, total / (1 + tl.exp(-total)), mask=f < features)
    tl.debug_barrier()  # with a state updated in place, an input is overwritten with the next one
    to_tail = tails + to * tail_slot + f[:, None] * KEPT + i
    tl.store(to_tail - 1, kept, mask=there & (i > 0))
    if KEPT > 0:
        tl.store(tails + to * tail_slot + f * KEPT + KEPT - 1, new, mask=f < features)


@kernel(do_not_specialize_on_alignment=SLOTS)
def _delta_rule(
    mixed, product, starts, before, after, decay, bias, weight, states, out, product_row, state_slot, out_row, eps,
    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    sequence, head = tl.program_id(0), tl.program_id(1)
    alone, row = _row_of(starts, sequence, STARTS)
    if not alone:
        return
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    to_out = out + row * out_row + head * V + v
    to = tl.load(after + sequence)
    if to < 0:  # a padding sequence: no state is kept, and its row is zeros
        tl.store(to_out, tl.zeros([BLOCK_V], tl.float32).to(out.dtype.element_ty), mask=v < V)
        return
    at = tl.load(before + sequence)
    features: tl.constexpr = 2 * KEYS + HEADS * V
    of_row, of_head = mixed + sequence.to(tl.int64) * features, product + row * product_row + features
    query = tl.load(of_row + head // SHARE * K + k, mask=k < K, other=0.0)
    key = tl.load(of_row + KEYS + head // SHARE * K + k, mask=k < K, other=0.0)
    value = tl.load(of_row + 2 * KEYS + head * V + v, mask=v < V, other=0.0)
    z = tl.load(of_head + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    b = tl.load(of_head + HEADS * V + head).to(tl.float32)
    a = tl.load(of_head + HEADS * V + HEADS + head).to(tl.float32) + tl.load(bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    keep = tl.exp(-tl.exp(tl.load(decay + head)) * softplus)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * tl.rsqrt(K * 1.0)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    inside = (k < K)[:, None] & (v < V)[None, :]
    place = head * K * V + k[:, None] * V + v[None, :]
    state = tl.load(states + at * state_slot + place, mask=inside & (at >= 0), other=0.0) * keep
    new = (value - tl.sum(state * key[:, None], 0)) / (1 + tl.exp(-b))
    state += key[:, None] * new[None, :]
    tl.store(states + to * state_slot + place, state, mask=inside)
    seen = tl.sum(state * query[:, None], 0)
    seen *= tl.rsqrt(tl.sum(seen * seen, 0) / V + eps) * tl.load(weight + v, mask=v < V, other=0.0).to(tl.float32)
    tl.store(to_out, (seen * z / (1 + tl.exp(-z))).to(out.dtype.element_ty), mask=v < V)


class StateSizes(NamedTuple):
    """Sizes of a layer's share on a rank. heads: value heads. keys: features of all keys. share: value heads of one
    key."""

    heads: int
    key_dim: int
    value_dim: int
    keys: int
    share: int


def check(product: Tensor, conv: Tensor, states: Tensor, tails: Tensor) -> StateSizes:
    """Return the sizes from the tensors' shapes. Raises ValueError if they do not match."""
    _, heads, key_dim, value_dim = states.shape
    features, window = conv.shape[0], conv.shape[-1]
    keys = (features - heads * value_dim) // 2
    if product.shape[1] != features + heads * value_dim + 2 * heads or tails.shape[1:] != (features, window - 1):
        raise ValueError(f"product is {list(product.shape)}, states {list(states.shape)}, tails {list(tails.shape)}")
    if keys % key_dim or heads % (keys // key_dim):
        raise ValueError(f"{keys} features of keys are no heads of {key_dim} that {heads} heads share")
    if not (conv.is_contiguous() and states[0].is_contiguous() and tails[0].is_contiguous()):
        raise ValueError("the convolution's weights and each slot's states must be contiguous")
    return StateSizes(heads, key_dim, value_dim, keys, heads * key_dim // keys)


def delta_step(
    product: Tensor,
    starts: Tensor | None,
    before: Tensor,
    after: Tensor,
    conv: Tensor,
    decay: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    states: Tensor,
    tails: Tensor,
    out: Tensor,
) -> None:
    """Compute `weft.engine.kernels.delta_rule.gated_delta` for the sequences of one row; rows and states of the others
    are not touched. Raises ValueError if shapes or dtypes do not match."""
    rows, sequences = product.shape[0], before.shape[0]
    layer, (features, _, window) = check(product, conv, states, tails), conv.shape
    heads, key_dim, value_dim = layer.heads, layer.key_dim, layer.value_dim
    if not before.is_contiguous() or not after.is_contiguous() or before.shape != after.shape:
        raise ValueError(
            f"before is {list(before.shape)}, after {list(after.shape)}; they must be alike, and contiguous"
        )
    if (rows,) != before.shape if starts is None else (sequences + 1,) != starts.shape:
        of_rows = f"{rows} rows" if starts is None else f"starts {list(starts.shape)}"
        raise ValueError(f"before is {list(before.shape)} of {of_rows}: it must have a slot for each sequence")
    if out.shape != (rows, heads * value_dim) or not product.stride(-1) == out.stride(-1) == 1:
        raise ValueError(f"product is {list(product.shape)}, out {list(out.shape)}; their rows must be contiguous")
    if not rows:
        return
    mixed = states.new_empty(sequences, features)
    block_f = min(256, next_power_of_2(features))
    where, has_starts = (before if starts is None else starts, before, after), starts is not None
    _convolve[(sequences, cdiv(features, block_f))](
        product, *where, conv, tails, mixed, product.stride(0), tails.stride(0), features, KEPT=window - 1,
        BLOCK_KEPT=next_power_of_2(max(1, window - 1)), BLOCK_F=block_f, STARTS=has_starts, num_warps=4,
        **overlap.options(),
    )  # fmt: skip
    block_k, block_v = next_power_of_2(key_dim), next_power_of_2(value_dim)
    _delta_rule[(sequences, heads)](
        mixed, product, *where, decay, bias, weight, states, out, product.stride(0), states.stride(0),
        out.stride(0), eps, K=key_dim, V=value_dim, KEYS=layer.keys, HEADS=heads, SHARE=layer.share,
        BLOCK_K=block_k, BLOCK_V=block_v, STARTS=has_starts, num_warps=4, **overlap.options(),
    )  # fmt: skip
