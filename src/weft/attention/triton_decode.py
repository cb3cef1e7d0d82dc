"""Attention that reads pages in place where every sequence has one row, in Triton; needs the extra `gpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.attention.batch import Batch, PageTables
from weft.attention.sdpa import SDPA
from weft.kernels.triton.decode_attention import decode_attention, latent_decode_attention
from weft.kv.cache import KVCache
from weft.kv.spec import Latent


class TritonDecode:
    """A `weft.attention.backend.Backend`. Steps in which a sequence has several rows are torch's: see `SDPA`."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._torch = SDPA(cache)

    def plan(self, batch: Batch, tables: PageTables) -> None:
        """See `Backend.plan`."""
        self._decode = batch.spans is None or all(rows == 1 for rows, _ in batch.spans)
        if self._decode:
            self._pages, self._lengths = tables.pages, batch.lengths
            self._write = self.cache.writable(tables.slots)
        else:
            self._torch.plan(batch, tables)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.__call__`."""
        if not self._decode:
            return self._torch(layer, q, k, v, scale=scale, lse=lse)
        cache = self.cache
        sums = q.new_empty(q.shape[:2], dtype=torch.float32) if lse else None
        if q.shape[0]:
            cache.write(layer, self._write, k, v)
        keys, values = cache.keys[layer], cache.values[layer]
        where = (self._pages, self._lengths, cache.page_size, scale)
        if isinstance(cache.spec, Latent):
            return latent_decode_attention(q, keys, cache.spec.value_width, *where, lse=sums), sums
        return decode_attention(q, keys, values, *where, window=cache.window, lse=sums), sums
