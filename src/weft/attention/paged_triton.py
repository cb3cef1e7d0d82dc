"""Attention over pages on GPUs: decoding rows by a Triton kernel that reads pages where they lie, prompts by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.attention.backend import HeadSplit
from weft.attention.batch import Batch, PageTables
from weft.attention.sdpa import SDPA
from weft.kernels.triton.decode_attention import decode_attention, latent_decode_attention
from weft.kernels.triton.norm_rope_cache import norm_rope_cache
from weft.kv.spec import Latent


class PagedTriton(SDPA):
    """A `weft.attention.backend.Backend` on a GPU; steps of one row a sequence can be captured in a CUDA graph."""

    def plan(self, batch: Batch, tables: PageTables) -> None:
        """See `Backend.plan`."""
        if batch.spans is not None and any(rows > 1 for rows, _ in batch.spans):
            return super().plan(batch, tables)
        self._plan_single(tables.pages, self._begin_plan(batch, tables))

    def _plan_single(self, pages: Tensor, lengths: Tensor) -> None:
        self._pages, self._lengths = pages.contiguous(), lengths
        self._write = self.cache.writable(self._stored)

    def project(self, layer: int, qkv: Tensor, heads: HeadSplit, scale: float) -> Tensor:
        """See `Backend.project`."""
        cos, sin = heads.turn.cos[:, 0], heads.turn.sin[:, 0]
        half = cos.shape[-1] // 2
        if heads.turn.interleaved:
            cos, sin = cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
        q_norm, k_norm = heads.norms or (None, None)
        q = norm_rope_cache(
            qkv,
            heads.sizes[0] // heads.dim,
            cos[:, :half],
            sin[:, :half],
            self._stored,
            self.cache.keys[layer],
            self.cache.values[layer],
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            interleaved=heads.turn.interleaved,
        )
        return self._attend(layer, q, scale, False)[0]

    def _attend_single(self, layer: int, q: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        cache, sums = self.cache, None
        if lse:
            sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        where = (self._pages, self._lengths, cache.page_size, scale)
        if isinstance(cache.spec, Latent):
            return latent_decode_attention(q, cache.keys[layer], cache.spec.value_width, *where, lse=sums), sums
        return decode_attention(q, cache.keys[layer], cache.values[layer], *where, window=cache.window, lse=sums), sums
