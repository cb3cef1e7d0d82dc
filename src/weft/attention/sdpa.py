"""Attention over pages by torch's scaled_dot_product_attention; any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.attention.batch import Batch
from weft.attention.cache import KVCache


class SDPA:
    """A `weft.attention.backend.Backend` that gathers the tokens a row sees and calls torch.

    Sequences of one row are attended together, padded to the longest; the others one by one.
    """

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, batch: Batch) -> None:
        """See `Backend.plan`."""
        device = batch.slots.device
        offsets = torch.arange(self.cache.page_size, dtype=torch.int32, device=device)
        self._write = self.cache.writable(batch.slots)
        self._prefills: list[tuple[int, int, Tensor, Tensor]] = []  # first row, rows, slots and mask of what they see
        self._single: Tensor | None = None  # the rows of the sequences that have one; None: all rows
        pages, lengths = batch.pages, batch.lengths
        if batch.spans is not None:
            sequences, rows, longest, first = [], [], 0, 0
            for sequence, (count, context) in enumerate(batch.spans):
                visible = context + count
                if count == 1:
                    sequences.append(sequence)
                    rows.append(first)
                    longest = max(longest, visible)
                elif count:
                    seen = _slots(batch.pages[sequence], offsets)[:visible]
                    position = torch.arange(visible, device=device)
                    self._prefills.append((first, count, seen, position <= position[context:, None]))
                first += count
            if len(rows) < first:
                self._single = torch.tensor(rows, dtype=torch.int64, device=device)
                at = torch.tensor(sequences, dtype=torch.int64, device=device)
                pages, lengths = pages[at], lengths[at]
            pages = pages[:, : -(-longest // self.cache.page_size)]
        slots = _slots(pages, offsets)
        self._mask = torch.arange(slots.shape[1], device=device) < lengths[:, None]
        self._alive = lengths[:, None, None] > 0
        # A masked token is multiplied too, and 0 · NaN is NaN: its place is taken by the first, which was written.
        self._slots = torch.where(self._mask, slots, slots[:, :1].clamp(min=0))

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.__call__`."""
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        sums = q.new_empty(q.shape[:2], dtype=torch.float32) if lse else None
        if not q.shape[0]:
            return out, sums
        self.cache.write(layer, self._write, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for first, rows, slots, mask in self._prefills:
            at = slice(first, first + rows)
            k, v = _rows(keys, slots[None]), _rows(values, slots[None])
            out[at] = _attend(q[None, at], k, v, mask, scale)[0]
            if sums is not None:
                sums[at] = _lse(q[None, at], k, mask, scale)[0]
        if self._slots.shape[0]:
            k, v, mask = _rows(keys, self._slots), _rows(values, self._slots), self._mask[:, None, None]
            single = q if self._single is None else q[self._single]
            one = _attend(single[:, None], k, v, mask, scale)[:, 0].where(self._alive, 0.0)
            total = _lse(single[:, None], k, mask, scale)[:, 0] if lse else None
            if self._single is None:
                return one, total
            out[self._single] = one
            if sums is not None and total is not None:
                sums[self._single] = total
        return out, sums


def _slots(pages: Tensor, offsets: Tensor) -> Tensor:
    """The slots of page tables `[..., W]`, in the order of the tokens: `[..., W · page_size]`."""
    return (pages[..., None] * len(offsets) + offsets).flatten(-2)


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """cache[slots]; index_select copies whole rows where indexing goes element by element on CPUs."""
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`[B, rows, heads, D]` against `[B, tokens, kv_heads, D]`."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _lse(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """float32 `[B, rows, heads]`; torch's attention does not give it."""
    wide = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("brhd,bthd->bhrt", q.float(), wide) * scale
    return scores.masked_fill(~mask, float("-inf")).logsumexp(-1).transpose(1, 2)
