"""Attention over pages on GPUs, by Triton kernels that read pages where they lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.attention.backend import Absorbed, HeadSplit, LatentSplit, RotaryTable
from weft.attention.forward_batch import Batch, PageTables
from weft.attention.sdpa import SDPA
from weft.dcp.group import ContextGroup
from weft.kernels.split_k import SplitKPartials
from weft.kernels.triton.decode_attention import decode_attention, latent_decode_attention, splits_of
from weft.kernels.triton.norm_rope_cache import latent_rope_cache, norm_rope_cache
from weft.kernels.triton.prefill_attention import prefill_attention
from weft.kv.cache_spec import Latent


class PagedTriton(SDPA):
    """A `weft.attention.backend.Backend` on a GPU, which CUDA graphs may capture: with one row a sequence, and where
    tokens are not sharded, with prompts too.
    """

    _rotary: RotaryTable | None = None

    def plan(self, batch: Batch, tables: PageTables) -> None:
        """See `Backend.plan`."""
        starts, lengths = batch.starts, batch.lengths
        if starts is None or (batch.spans is not None and all(rows == 1 for rows, _ in batch.spans)):
            return self._plan_single(tables.pages, self._begin_plan(batch, tables))
        self._starts, self._limits = starts, (batch.positions + 1).int()
        if batch.spans is not None:
            return super().plan(batch, tables)
        # Which sequences have one row, only the device knows: they come first, and the others count as empty here.
        self._begin_plan(batch, tables)
        self._single, self._singles = slice(len(lengths)), len(lengths)
        self._prompt_pages, self._prompt_page_size = tables.pages, self.cache.page_size
        self._plan_single(tables.pages, lengths.where(starts.diff() == 1, 0))

    def _plan_prompts(
        self, pages: Tensor, prompts: list[tuple[int, int, int, int]], group: ContextGroup | None
    ) -> None:
        self._prompt_pages, self._prompt_page_size = pages.contiguous(), self.cache.page_size
        if group is not None and self._prefill == "merge":
            self._limits = group.lengths(self._limits)
        elif group is not None:  # what was gathered has pages of one token
            where = self._plan_gather(group, pages, prompts)
            self._prompt_pages = pages.new_zeros(len(pages), max(map(len, where)))
            for (*_, sequence), slots in zip(prompts, where, strict=True):
                self._prompt_pages[sequence, : len(slots)] = slots
            self._prompt_page_size = 1

    def _plan_single(self, pages: Tensor, lengths: Tensor) -> None:
        self._pages, self._lengths = pages, lengths
        tokens, (kv_heads, width) = pages.shape[1] * self.cache.page_size, self.cache.values.shape[-2:]
        self._splits = splits_of(lengths, tokens, self.cache.window, width, kv_heads)

    def project(
        self, layer: int, qkv: Tensor | SplitKPartials, heads: HeadSplit, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.project`."""
        cos, sin = self._angles(heads.rotary)
        keys, values = self.cache.of_layer(layer)
        q_norm, k_norm = heads.norms or (None, None)
        q = norm_rope_cache(
            qkv,
            heads.sizes[0] // heads.dim,
            cos,
            sin,
            self._stored,
            keys,
            values,
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            interleaved=heads.rotary.interleaved,
        )
        return self._attend(layer, q, scale, lse, None, heads.gathered)

    def _angles(self, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, dim / 2]` of a table that rotates pairs of elements, once for all layers of a step."""
        if self._rotary is not rotary:
            self._rotary, half = rotary, rotary.cos.shape[-1] // 2
            at = slice(0, None, 2) if rotary.interleaved else slice(half)
            cos, sin = rotary.cos[:, 0, at], rotary.sin[:, 0, at]
            self._cos_sin = (cos.contiguous(), sin.contiguous()) if rotary.interleaved else (cos, sin)
        return self._cos_sin

    def project_latent(
        self, layer: int, q: Tensor, kv: Tensor, parts: LatentSplit, *, scale: float, absorbed: Absorbed
    ) -> Tensor:
        """See `Backend.project_latent`."""
        q, rotary, norm = q.unflatten(-1, (-1, parts.dim)), parts.rotary, parts.norm
        table = rotary.cos[:, 0], rotary.sin[:, 0]
        cache, keys = self.cache.keys[layer], absorbed.keys
        store = partial(latent_rope_cache, q, kv, *table, self._stored, cache, norm.weight, norm.eps)
        if keys is None or (self._group is not None and not (self._single is None and parts.gathered)):
            store(interleaved=rotary.interleaved)
        else:  # both parts of what attends are written side by side, where a concatenation would copy them
            n, width = keys.shape[1:]
            whole = q.new_empty(*q.shape[:2], width + parts.dim - n)
            store(interleaved=rotary.interleaved, q_rotated=whole[..., width:])
            torch.bmm(q[..., :n].transpose(0, 1), keys, out=whole[..., :width].transpose(0, 1))
            q, absorbed = whole, Absorbed(None, absorbed.values)
        return self._attend(layer, q, scale, False, absorbed, parts.gathered)[0]

    def _attend_prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor, sums: Tensor | None
    ) -> None:
        where = (self._prompt_pages, self._starts, self._limits, self._prompt_page_size)
        prefill_attention(q, keys, values, *where, scale, out, window=self.cache.window, lse=sums)

    def _attend(
        self, layer: int, q: Tensor, scale: float, lse: bool, absorbed: Absorbed | None, gathered: bool
    ) -> tuple[Tensor, Tensor | None]:
        single = self._single
        if self._group is not None or not isinstance(single, slice):
            return super()._attend(layer, q, scale, lse, absorbed, gathered)
        query = q if absorbed is None else absorbed.query(q)
        out = q.new_empty(*query.shape[:2], self.cache.values.shape[-1])
        sums = q.new_empty(query.shape[:2], dtype=torch.float32) if lse else None
        # In a graph any sequence may be of one row or of several: rows of the latter are zeros before they are written.
        if self._singles:
            self._attend_single(layer, query[single], scale, lse, out[single], None if sums is None else sums[single])
        self._attend_prompts(query, *self.cache.of_layer(layer), scale, out, sums)
        return out if absorbed is None else absorbed.output(out), sums

    def _attend_single(
        self, layer: int, q: Tensor, scale: float, lse: bool, out: Tensor | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        (keys, values), cache = self.cache.of_layer(layer), self.cache
        if lse and sums is None:
            sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        where = (self._pages, self._lengths, cache.page_size, scale)
        more: dict[str, Any] = dict(out=out, lse=sums, splits=self._splits)
        if isinstance(cache.spec, Latent):
            return latent_decode_attention(q, keys, cache.spec.value_width, *where, **more), sums
        return decode_attention(q, keys, values, *where, window=cache.window, **more), sums
