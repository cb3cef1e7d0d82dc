"""Attention over pages by torch's scaled_dot_product_attention; any device, any dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.attention.batch import Batch
from weft.attention.cache import KVCache


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Causal grouped-query attention of a batch over the cache."""

    batch: Batch
    cache: KVCache

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Stores k and v `[T, kv_heads, D]`, then attends with q `[T, heads, D]`; gives `[T, heads, D]`.

        A row sees its sequence's tokens up to itself.
        """
        out = torch.empty_like(q)
        if not q.shape[0]:
            return out
        batch, cache = self.batch, self.cache
        cache.write(layer, batch.slots, k, v)
        keys, values = cache.keys[layer], cache.values[layer]
        for first, rows, context, slots in batch.prefills:
            at = slice(first, first + rows)
            position = torch.arange(context + rows, device=q.device)
            mask = position <= position[context:, None]
            out[at] = _attend(q[None, at], _rows(keys, slots[None]), _rows(values, slots[None]), mask, scale)[0]
        if batch.decodes is not None:
            single, slots, mask = batch.decodes
            out[single] = _attend(
                q[single, None], _rows(keys, slots), _rows(values, slots), mask[:, None, None], scale
            )[:, 0]
        return out


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """cache[slots]; index_select copies whole rows where indexing goes element by element on CPUs."""
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`[B, rows, heads, D]` against `[B, tokens, kv_heads, D]`."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)
