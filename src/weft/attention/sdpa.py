"""Attention over pages by torch's scaled_dot_product_attention; any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.attention.backend import HeadSplit
from weft.attention.batch import Batch, PageTables
from weft.kv.cache import KVCache


class SDPA:
    """A `weft.attention.backend.Backend` that gathers the tokens a row sees and calls torch.

    Sequences of one row are attended together, padded to the longest; the others one by one.
    """

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, batch: Batch, tables: PageTables) -> None:
        """See `Backend.plan`."""
        device, page_size = tables.slots.device, self.cache.page_size
        offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        window = self.cache.window
        self._stored = tables.slots
        self._prefills: list[tuple[int, int, Tensor, Tensor]] = []  # first row, rows, slots and mask of what they see
        self._single: Tensor | None = None  # the rows of the sequences that have one; None: all rows
        pages, lengths = tables.pages, batch.lengths
        if batch.spans is not None:
            sequences, rows, longest, first = [], [], 0, 0
            for sequence, (count, context) in enumerate(batch.spans):
                visible = context + count
                if count == 1:
                    sequences.append(sequence)
                    rows.append(first)
                    longest = max(longest, visible)
                elif count:
                    begin = 0 if window is None else max(0, context - window + 1)
                    seen = _slots(tables.pages[sequence, : -(-visible // page_size)], offsets)[begin:visible]
                    position = torch.arange(begin, visible, device=device)
                    self._prefills.append((first, count, seen, _sees(position, position[-count:, None], window)))
                first += count
            if len(rows) < first:
                self._single = torch.tensor(rows, dtype=torch.int64, device=device)
                at = torch.tensor(sequences, dtype=torch.int64, device=device)
                pages, lengths = pages[at], lengths[at]
            pages = pages[:, : -(-longest // page_size)]
        self._plan_single(pages, lengths)

    def _plan_single(self, pages: Tensor, lengths: Tensor) -> None:
        """Of the sequences of one row: their page tables `[B, W]` and lengths `[B]`."""
        offsets = torch.arange(self.cache.page_size, dtype=torch.int32, device=pages.device)
        self._write = self.cache.writable(self._stored)
        slots = _slots(pages, offsets)
        alive = lengths[:, None] > 0
        self._mask = _sees(torch.arange(slots.shape[1], device=slots.device), lengths[:, None] - 1, self.cache.window)
        self._alive = alive[:, None]
        if len(slots):
            # A masked token is multiplied too, and 0 · NaN is NaN: the row's own takes its place, which is written.
            own = slots.gather(1, (lengths[:, None] - 1).clamp(min=0).long()).where(alive, 0)
            slots = torch.where(self._mask, slots, own)
        self._slots = slots

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.__call__`."""
        self.cache.write(layer, self._write, k, v)
        return self._attend(layer, q, scale, lse)

    def project(self, layer: int, qkv: Tensor, heads: HeadSplit, scale: float) -> Tensor:
        """See `Backend.project`."""
        q, k, v = heads.split(qkv)
        return self(layer, q, k, v, scale=scale)[0]

    def _attend(self, layer: int, q: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty(*q.shape[:2], self.cache.values.shape[-1])
        sums = q.new_empty(q.shape[:2], dtype=torch.float32) if lse else None
        if not q.shape[0]:
            return out, sums
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for first, rows, slots, mask in self._prefills:
            at = slice(first, first + rows)
            seen = _rows(keys, slots[None])
            out[at] = _attend(q[None, at], seen, _rows(values, slots[None]), mask, scale)[0]
            if sums is not None:
                sums[at] = _lse(q[None, at], seen, mask, scale)[0]
        if self._single is None:
            return self._attend_single(layer, q, scale, lse) if not self._prefills else (out, sums)
        if len(self._single):
            out[self._single], total = self._attend_single(layer, q[self._single], scale, lse)
            if sums is not None and total is not None:
                sums[self._single] = total
        return out, sums

    def _attend_single(self, layer: int, q: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        """Of the sequences of one row: q `[B, heads, D]`."""
        seen, mask = _rows(self.cache.keys[layer], self._slots), self._mask[:, None, None]
        one = _attend(q[:, None], seen, _rows(self.cache.values[layer], self._slots), mask, scale)[:, 0]
        total = _lse(q[:, None], seen, mask, scale)[:, 0] if lse else None
        return one.where(self._alive, 0.0), total


def _slots(pages: Tensor, offsets: Tensor) -> Tensor:
    """The slots of page tables `[..., W]`, in the order of the tokens: `[..., W · page_size]`."""
    return (pages[..., None] * len(offsets) + offsets).flatten(-2)


def _sees(position: Tensor, row: Tensor, window: int | None) -> Tensor:
    """Whether a row at a position sees the token at another."""
    seen = position <= row
    return seen if window is None else seen & (position > row - window)


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
