"""Norms of queries and keys, rotary embedding, and the write to the cache, between the QKV product and attention.

A program has one head of one row, or of a few rows if there are many. In latent attention, a program has several heads
of a row's query, or the latent vector. Arithmetic is in float32 and rounded once, when a value is stored; for FP8 it is
rounded to the activations' dtype first, so that a cache holds the same as after a conversion from that dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.split_k import SplitKPartials, as_partials
from weft.engine.kernels.triton.dense import load_partials
from weft.engine.kernels.triton.float8_cache import exponent_of, magnitude, parts_of, to_float8
from weft.kernels.float8 import Stored
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2


@triton.jit
def _pair(i, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the two elements that one angle rotates: neighbours if interleaved, else one of each half."""
    if INTERLEAVED:
        left = 2 * i
        right = left + 1
    else:
        left = i
        right = i + ROTARY // 2
    return left, right


@kernel(do_not_specialize=["rows"])
def _norm_rope_cache(
    qkv, bias, q_weight, k_weight, cos, sin, slots, q_out, keys, values, k_exponents, v_exponents,
    rows, part, qkv_row, angle_row, q_row, q_head, k_slot, k_head, v_slot, v_head, e_slot, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    real = row < rows
    head = tl.program_id(1)
    at = qkv + row.to(tl.int64) * qkv_row + head * D
    bias += head * D
    dtype: tl.constexpr = q_out.dtype.element_ty
    slot = tl.load(slots + row, mask=real, other=-1).to(tl.int64)
    if head >= HEADS:
        real = slot >= 0  # keys and values of a row without a slot are not stored
    if head >= HEADS + KV_HEADS:
        d = tl.arange(0, BLOCK_D)[None, :]
        v = load_partials(at + d, part, bias + d, real & (d < D), PARTS, BIAS, dtype).to(dtype)
        v_at = head - HEADS - KV_HEADS
        if FLOAT8:
            v = v.to(tl.float32)
            exponent = exponent_of(tl.max(magnitude(v), 1, keep_dims=True))
            v = to_float8(v, exponent)
            tl.store(v_exponents + slot * e_slot + v_at, exponent.to(tl.int8), mask=real)
        tl.store(values + slot * v_slot + v_at * v_head + d, v, mask=real & (d < D))
        return
    i = tl.arange(0, BLOCK_PAIRS)[None, :]
    paired = real & (i < ROTARY // 2)
    left_at, right_at = _pair(i, ROTARY, INTERLEAVED)
    rest_at = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    left = load_partials(at + left_at, part, bias + left_at, paired, PARTS, BIAS, dtype)
    right = load_partials(at + right_at, part, bias + right_at, paired, PARTS, BIAS, dtype)
    c = tl.load(cos + row * angle_row + i, mask=paired, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_row + i, mask=paired, other=0.0).to(tl.float32)
    if ROTARY < D:
        rest = load_partials(at + rest_at, part, bias + rest_at, real & (rest_at < D), PARTS, BIAS, dtype)
    if NORM:
        square = tl.sum(left * left + right * right, 1, keep_dims=True)
        if ROTARY < D:
            square += tl.sum(rest * rest, 1, keep_dims=True)
        factor = tl.rsqrt(square / D + eps)
        weight = k_weight
        if head < HEADS:
            weight = q_weight
        inside = i < ROTARY // 2
        left *= factor * tl.load(weight + left_at, mask=inside, other=0.0).to(tl.float32)
        right *= factor * tl.load(weight + right_at, mask=inside, other=0.0).to(tl.float32)
        if ROTARY < D:
            rest *= factor * tl.load(weight + rest_at, mask=rest_at < D, other=0.0).to(tl.float32)
    new_left, new_right = (left * c - right * s).to(dtype), (right * c + left * s).to(dtype)
    if ROTARY < D:
        rest = rest.to(dtype)
    if head < HEADS:
        to = q_out + row.to(tl.int64) * q_row + head * q_head
        tl.store(to + left_at, new_left, mask=paired)
        tl.store(to + right_at, new_right, mask=paired)
        if ROTARY < D:
            tl.store(to + rest_at, rest, mask=real & (rest_at < D))
        return
    head -= HEADS
    to = keys + slot * k_slot + head * k_head
    if FLOAT8:
        new_left, new_right = new_left.to(tl.float32), new_right.to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(new_left), magnitude(new_right)), 1, keep_dims=True)
        if ROTARY < D:
            rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(magnitude(rest), 1, keep_dims=True))
        exponent = exponent_of(largest)
        new_left, new_right = to_float8(new_left, exponent), to_float8(new_right, exponent)
        if ROTARY < D:
            rest = to_float8(rest, exponent)
        tl.store(k_exponents + slot * e_slot + head, exponent.to(tl.int8), mask=real)
    tl.store(to + left_at, new_left, mask=paired)
    tl.store(to + right_at, new_right, mask=paired)
    if ROTARY < D:
        tl.store(to + rest_at, rest, mask=real & (rest_at < D))


def norm_rope_cache(
    qkv: Tensor | SplitKPartials,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Stored,
    values: Stored,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    q_out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values at the rows' slots, and return the queries `[T, heads, D]`.

    Args:
        qkv: `[T, (heads + 2 · kv_heads) · D]`: queries, keys, values side by side, one head after the other; or its
            split-K partials, which this kernel sums.
        cos, sin: `[T, rotary_dim / 2]`, for the first `rotary_dim` elements of a head: an angle rotates element i with
            element i + rotary_dim / 2, or, interleaved, element 2i with 2i + 1.
        slots: int32 or int64 `[T]`; −1: not stored.
        keys, values: `[slots, kv_heads, D]`, of qkv's dtype or in FP8.
        q_weight, k_weight: `[D]`, both or neither: each head's query and key are first divided by √(mean of squares +
            eps) and multiplied by it.

    Raises ValueError if shapes or dtypes do not match.
    """
    (parts, bias, dtype), (_, kv_heads, d), cache = as_partials(qkv), keys.shape, parts_of(keys, values)
    keys, values = cache.keys, cache.values
    count, rows, features = parts.shape
    rotary_dim = 2 * cos.shape[-1]
    if features != (heads + 2 * kv_heads) * d or rotary_dim > d or values.shape != keys.shape:
        raise ValueError(f"qkv is {[rows, features]} for {heads} heads, keys {list(keys.shape)}, cos {list(cos.shape)}")
    if cos.shape != (rows, rotary_dim // 2) or sin.shape != cos.shape or sin.stride() != cos.stride():
        raise ValueError(f"cos is {list(cos.shape)}, sin {list(sin.shape)}; they must be alike, a row for each of qkv")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys are both normalised, or neither is")
    if not cache.in_float8 and not dtype == keys.dtype == values.dtype:
        raise ValueError(f"qkv is {dtype}, keys {keys.dtype}, values {values.dtype}; they must be alike")
    if not all(t.stride(-1) == 1 for t in (parts, cos, keys, values)):
        raise ValueError("the last dimensions must be contiguous")
    out = parts.new_empty(rows, heads, d, dtype=dtype) if q_out is None else q_out
    if rows:
        block_d = next_power_of_2(d)
        # Few programs are faster for heads of 64 too, but attention after them loses more than that.
        few = 16 if block_d >= 128 else 256
        block_t = 1 if rows < few else 8 if rows < 1024 else max(8, 2048 // block_d)
        _norm_rope_cache[(cdiv(rows, block_t), heads + 2 * kv_heads)](
            parts, parts if bias is None else bias, parts if q_weight is None else q_weight,
            parts if k_weight is None else k_weight, cos, sin, slots, out, keys, values, cache.k_exponents,
            cache.v_exponents, rows, parts.stride(0), parts.stride(1), cos.stride(0), out.stride(0), out.stride(1),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), cache.row, eps,
            HEADS=heads, KV_HEADS=kv_heads, D=d, ROTARY=rotary_dim,
            NORM=q_weight is not None, INTERLEAVED=interleaved, BLOCK_T=block_t,
            BLOCK_PAIRS=max(1, next_power_of_2(rotary_dim // 2)), BLOCK_REST=max(1, next_power_of_2(d - rotary_dim)),
            BLOCK_D=block_d, PARTS=count, BIAS=bias is not None, FLOAT8=cache.in_float8,
            num_warps=1 if block_t == 1 else 4, **overlap.options(),
        )  # fmt: skip
    return out


@kernel
def _latent_rope_cache(
    q, kv, weight, cos, sin, slots, latents, exponents, q_rotated,
    q_row, kv_row, angle_row, latent_slot, e_slot, to_row, to_head, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, LATENT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_L: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_PAIRS)
    paired = i < ROTARY // 2
    left_at, right_at = _pair(i, ROTARY, INTERLEAVED)
    c = tl.load(cos + row * angle_row + left_at, mask=paired, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_row + left_at, mask=paired, other=0.0).to(tl.float32)
    dtype: tl.constexpr = kv.dtype.element_ty
    block = tl.program_id(1)
    if block > 0:
        head = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = (head < HEADS) & paired[None, :]
        at = q + row * q_row + head * DIM + DIM - ROTARY
        left = tl.load(at + left_at[None, :], mask=real, other=0.0).to(tl.float32)
        right = tl.load(at + right_at[None, :], mask=real, other=0.0).to(tl.float32)
        to = q_rotated + row * to_row + head * to_head
        tl.store(to + left_at[None, :], (left * c[None, :] - right * s[None, :]).to(dtype), mask=real)
        tl.store(to + right_at[None, :], (right * c[None, :] + left * s[None, :]).to(dtype), mask=real)
        return
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    to = latents + slot * latent_slot
    d = tl.arange(0, BLOCK_L)
    latent = tl.load(kv + row * kv_row + d, mask=d < LATENT, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
    latent *= tl.load(weight + d, mask=d < LATENT, other=0.0).to(tl.float32)
    latent = latent.to(dtype)
    left = tl.load(kv + row * kv_row + LATENT + left_at, mask=paired, other=0.0).to(tl.float32)
    right = tl.load(kv + row * kv_row + LATENT + right_at, mask=paired, other=0.0).to(tl.float32)
    new_left, new_right = (left * c - right * s).to(dtype), (right * c + left * s).to(dtype)
    if FLOAT8:
        latent, new_left, new_right = latent.to(tl.float32), new_left.to(tl.float32), new_right.to(tl.float32)
        rotated = tl.max(tl.maximum(magnitude(new_left), magnitude(new_right)), 0)
        exponent = exponent_of(tl.maximum(tl.max(magnitude(latent), 0), rotated))
        latent = to_float8(latent, exponent)
        new_left, new_right = to_float8(new_left, exponent), to_float8(new_right, exponent)
        tl.store(exponents + slot * e_slot, exponent.to(tl.int8))
    tl.store(to + d, latent, mask=d < LATENT)
    tl.store(to + LATENT + left_at, new_left, mask=paired)
    tl.store(to + LATENT + right_at, new_right, mask=paired)


def latent_rope_cache(
    q: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    latents: Stored,
    weight: Tensor,
    eps: float,
    *,
    interleaved: bool = False,
    q_rotated: Tensor | None = None,
) -> None:
    """Apply the norm and the rotary embedding of multi-head latent attention (arXiv 2405.04434): rotate the end of each
    head's query, normalise latent vectors, rotate their keys, and store vector and key at the rows' slots.

    Args:
        q: `[T, heads, D]`, with contiguous heads. The rotated elements are written in place, or into q_rotated `[T,
            heads, rotary_dim]`.
        kv: `[T, width]`: a latent vector, then a key of rotary_dim = width − latent elements.
        latents: `[slots, 1, width]`, the cache.
        weight: `[latent]`; a latent vector is divided by √(mean of squares + eps) and multiplied by it.
        cos, sin: `[T, rotary_dim]`. Only the first element of each rotated pair counts: i of i and i + rotary_dim / 2,
            or, interleaved, 2i of 2i and 2i + 1.
        slots: int32 or int64 `[T]`; −1: not stored.

    All have one dtype except slots, and latents in FP8. Raises ValueError if shapes or dtypes do not match.
    """
    (rows, heads, dim), cache = q.shape, parts_of(latents, latents)
    width, (latent,), rotary_dim, latents = kv.shape[1], weight.shape, cos.shape[1], cache.keys
    if kv.shape[0] != rows or latents.shape[1:] != (1, width) or latent + rotary_dim != width or rotary_dim > dim:
        raise ValueError(f"q is {list(q.shape)}, kv {list(kv.shape)}, latents {list(latents.shape)}, norm {latent}")
    if cos.shape[0] != rows or sin.shape != cos.shape or sin.stride() != cos.stride():
        raise ValueError(f"cos is {list(cos.shape)}, sin {list(sin.shape)}; they must be alike, a row for each of q")
    if not q.dtype == kv.dtype == (q.dtype if cache.in_float8 else latents.dtype):
        raise ValueError(f"q is {q.dtype}, kv {kv.dtype}, latents {latents.dtype}; they must be alike")
    to = q[..., dim - rotary_dim :] if q_rotated is None else q_rotated
    if to.shape != (rows, heads, rotary_dim) or to.dtype != q.dtype:
        raise ValueError(f"q_rotated is {to.dtype} {list(to.shape)} of q {q.dtype} {list(q.shape)}")
    if not (q.stride()[1:] == (dim, 1) and all(t.stride(-1) == 1 for t in (kv, cos, latents, weight, to))):
        raise ValueError("the heads of q, and the last dimensions of the others, must be contiguous")
    if rows:
        block_h = min(32, next_power_of_2(heads))
        _latent_rope_cache[(rows, 1 + cdiv(heads, block_h))](
            q, kv, weight, cos, sin, slots, latents, cache.k_exponents, to, q.stride(0), kv.stride(0), cos.stride(0),
            latents.stride(0), cache.row, to.stride(0), to.stride(1), eps,
            HEADS=heads, DIM=dim, ROTARY=rotary_dim, LATENT=latent, INTERLEAVED=interleaved, BLOCK_H=block_h,
            BLOCK_PAIRS=max(1, next_power_of_2(rotary_dim // 2)), BLOCK_L=next_power_of_2(latent),
            FLOAT8=cache.in_float8, num_warps=4, **overlap.options(),
        )  # fmt: skip
