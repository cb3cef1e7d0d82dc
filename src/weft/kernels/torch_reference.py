"""Definitions of the kernels in plain torch: tests compare kernels with them, and hosts without kernels run them."""

from __future__ import annotations

from functools import reduce
from math import inf
from typing import Protocol

import torch
from torch import Tensor


class UnfilledRows(Protocol):
    """Rows in a format, to be filled by a norm."""

    def fill(self, x: Tensor) -> None:
        """Quantise x `[T, width]` into these rows."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, quantised: UnfilledRows | None = None) -> Tensor:
    """Return x / √(mean(x²) + eps) over the last dimension, rounded to x's dtype, times weight (arXiv 1910.07467).

    The arithmetic is in float32 or float64.

    Args:
        x: `[…, width]`.
        eps: added to the mean square.
        weight: `[width]`, in x's dtype; or float32 with a narrower x: then only the product with the weight is rounded.
        quantised: filled with the result, of x `[rows, width]`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)
    if quantised is not None:
        quantised.fill(normed)
    return normed


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, quantised: UnfilledRows | None = None
) -> tuple[Tensor, Tensor]:
    """Return (residual + delta, its norm), `[rows, width]` each and new. Other parameters: as `rms_norm` has them."""
    total = residual + delta
    return total, rms_norm(total, weight, eps, quantised=quantised)


def merge_weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of each part of the keys in a softmax merge, and the log-sum-exp of all parts.

    lses: `[parts, …]`, each part's log-sum-exp to base e; −inf for an empty part, or NaN or +inf, as some kernels
    return. Returns weights `[parts, …]`, which sum to 1, or are 0 if all parts are empty, and lse `[…]`, −inf there.
    Sums are in the parts' order, so that a row's bits depend only on its own parts.
    """
    known = lses.nan_to_num(nan=-inf, posinf=-inf, neginf=-inf)
    top = known.amax(0)
    top = top.where(top > -inf, 0.0)
    terms = (known - top).exp()
    total = reduce(torch.add, terms.unbind())
    return terms / total.where(total > 0, 1.0), top + total.log()


def softmax_merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over all keys from attention over each part of them (arXiv 2205.14135, 2501.01005).

    outs: `[parts, …, D]`. lses: `[parts, …]`, as for `merge_weights`. Returns the output `[…, D]` in outs' dtype and
    its lse. Sums are in the parts' order, in float32 or float64. A part of weight 0 is not read: it may be NaN.
    """
    wide = torch.promote_types(outs.dtype, torch.float32)
    weights, lse = merge_weights(lses)
    terms = [(w[..., None] * out.to(wide)).where(w[..., None] > 0, 0.0) for w, out in zip(weights, outs, strict=True)]
    return reduce(torch.add, terms).to(outs.dtype), lse


def scale_shard(out: Tensor, lses: Tensor, place: int, by_rank: Tensor) -> Tensor:
    """Write one rank's term of a softmax merge by sum: its outputs times their weights, ordered by heads' ranks.

    Returns the merged lse `[T, H/n]` of this rank's heads.

    Args:
        out: `[T, H, D]`.
        lses: `[n, T, H]` of all ranks; `place` is this rank's index.
        by_rank: `[n, T·(H/n)·D]`, filled.
    """
    n = len(lses)
    weights, total = merge_weights(lses)
    weight = weights[place, :, :, None]
    scaled = (weight * out).where(weight > 0, 0.0)
    by_rank.view(n, len(out), -1, out.shape[2]).copy_(scaled.unflatten(1, (n, -1)).transpose(0, 1))
    return total.unflatten(1, (n, -1))[:, place]


def packed_shards(ranks: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the layout of lse and outputs `[tokens, heads, dim]` in one row for each of `ranks`: (first element of the
    outputs, elements of a row).

    lse lies first, as float32 (float64 for float64 outputs). Both parts are whole units of 16 bytes, which transports
    move fastest.
    """
    unit, rows = 16 // dtype.itemsize, tokens * heads // ranks
    begin = -(-rows * torch.promote_types(torch.float32, dtype).itemsize // 16) * unit
    return begin, begin + -(-rows * dim // unit) * unit


def _views(packed: Tensor, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return views of packed `[n, elements]`: outputs `[n, T, H/n, D]` and lse `[n, T, H/n]`."""
    n, rows = len(packed), tokens * heads // len(packed)
    begin = packed_shards(n, tokens, heads, dim, packed.dtype)[0]
    lses = packed.view(torch.promote_types(torch.float32, packed.dtype))[:, :rows]
    outs = packed[:, begin : begin + rows * dim]
    return outs.view(n, tokens, heads // n, dim), lses.view(n, tokens, heads // n)


def pack_shard(out: Tensor, lse: Tensor, packed: Tensor) -> None:
    """Fill packed `[n, elements]` with out `[T, H, D]` and lse `[T, H]`, in the layout of `packed_shards`."""
    outs, lses = _views(packed, *out.shape)
    outs.copy_(out.unflatten(1, (len(packed), -1)).transpose(0, 1))
    lses.copy_(lse.unflatten(1, (len(packed), -1)).transpose(0, 1))


def merge_packed(packed: Tensor, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return `softmax_merge` of the rows packed by the ranks for this one: `[T, H/n, D]`, and float32 `[T, H/n]`."""
    merged, lse = softmax_merge(*_views(packed, tokens, heads, dim))
    return merged, lse.float()
