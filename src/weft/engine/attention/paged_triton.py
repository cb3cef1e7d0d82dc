"""Attention over pages on GPUs, by Triton kernels that read pages in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.backend import Absorbed, HeadSplit, LatentSplit
from weft.engine.attention.expansion import (
    ALIGNMENT,
    MAX_ELEMENTS,
    Copies,
    Expansion,
    pages_of_copies,
    plan_copies,
    plan_expansion,
)
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.attention.sdpa import SDPA, Plan, Prompt, Split
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kernels.triton.copied_prompts import copied_prefill_attention, copies_pages
from weft.engine.kernels.triton.copy_pages import copy_pages
from weft.engine.kernels.triton.decode_attention import decode_attention, latent_decode_attention, splits_of
from weft.engine.kernels.triton.latent_prompts import expand_latents, project_heads
from weft.engine.kernels.triton.multiply_heads import multiply_heads
from weft.engine.kernels.triton.norm_rope_cache import latent_rope_cache, norm_rope_cache
from weft.engine.kernels.triton.prefill_attention import expanded_prefill_attention, prefill_attention
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.kernels.float8 import Stored, plain


class CopiedPages(NamedTuple):
    """Copies as pages, for kernels that read such. pages: of ALIGNMENT tokens. skipped: int32 `[B]`, below 0 for the
    sequences that attend to copies as they are: those that have one and are not expanded.
    """

    pages: Tensor
    skipped: Tensor


class Prompts(NamedTuple):
    """Sequences of several rows, as `prefill_attention` takes them. expansion: of those that attend to keys and values
    expanded from latent vectors. copies: of those that attend to copies of their tokens. copied_pages: of an FP8 cache.
    copied: a layer's copies, `[kinds, places, heads, dim]`."""

    pages: Tensor
    starts: Tensor
    limits: Tensor
    page_size: int
    expansion: Expansion | None = None
    copies: Copies | None = None
    copied_pages: CopiedPages | None = None
    copied: Tensor | None = None


def _all(tokens: Any) -> Any:
    return tokens


class PagedTriton(SDPA):
    """A `weft.engine.attention.backend.Backend` on a GPU. CUDA graphs may capture it with one row of each sequence,
    and with prompts, too.
    """

    captures_prompts = True

    def __init__(self, cache: KVCache):
        super().__init__(cache)
        spec, self.float8 = cache.spec, cache.exponents is not None
        if self.float8:  # converts each vector once, and not for each block of rows
            self.copies = not isinstance(spec, Window)
        else:
            self.copies = isinstance(spec, PagedKV) and copies_pages(spec.dim, cache.keys.element_size())

    def split(self, batch: Batch) -> Split:
        """Without page tables of their own for decode rows, where all rows are such."""
        spans = batch.spans
        if batch.starts is None or (spans is not None and all(rows == 1 for rows, _ in spans)):
            return Split()
        return super().split(batch)

    def plan(self, batch: Batch, tables: PageTables) -> Plan:
        """See `Backend.plan`."""
        if batch.starts is None or batch.spans is not None:
            return super().plan(batch, tables)
        # Only the device knows which sequences have one row: they come first, and the others count as empty here.
        decode = self.plan_decode(tables.pages, batch.lengths.where(batch.starts.diff() == 1, 0))
        return Plan(tables.slots, slice(len(batch.lengths)), decode, self.plan_prompts(batch, tables.pages, ()))

    def storable(self, slots: Tensor) -> Tensor:
        return slots

    def plan_decode(self, pages: Tensor, lengths: Tensor) -> Any:
        tokens, (kv_heads, width) = pages.shape[1] * self.cache.page_size, self.cache.values.shape[-2:]
        group = self.cache.spec.heads if isinstance(self.cache.spec, Latent) else 1
        of = (lengths, tokens, self.cache.window, width, kv_heads)
        return pages, lengths, splits_of(*of, group=group, float8=self.float8)

    def plan_prompts(
        self,
        batch: Batch,
        pages: Tensor,
        prompts: Sequence[Prompt],
        here: Callable[[Any], Any] = _all,
        gathered: Sequence[Tensor] | None = None,
    ) -> Prompts:
        assert batch.starts is not None
        limits, spec = here(batch.positions + 1).int(), self.cache.spec
        if gathered is None:
            expansion, copies, copied_pages = None, None, None
            longest = pages.shape[1] * self.cache.page_size
            step = batch.starts, batch.lengths, len(limits), longest
            whole = here is _all and len(pages) > 0  # tokens that are sharded are neither expanded nor copied
            if whole and self.copies and not isinstance(spec, Window):
                copies = plan_copies(spec, *step, short=self.float8)
            if whole and isinstance(spec, Latent) and spec.expanded is not None:
                expansion = plan_expansion(spec, *step, copies)
            if copies is not None and self.float8:
                bases = -1 if expansion is None else expansion.bases
                skipped = torch.where(copies.bases < 0, 0, bases).int()
                copied_pages = CopiedPages(pages_of_copies(copies, longest), skipped)
            where = pages.contiguous(), batch.starts, limits, self.cache.page_size
            return Prompts(*where, expansion, copies, copied_pages)
        return Prompts(self.gathered_pages(pages, prompts, gathered), batch.starts, limits, 1)

    def gathered_pages(self, pages: Tensor, prompts: Sequence[Prompt], gathered: Sequence[Tensor]) -> Tensor:
        """Page tables of what was gathered, which has pages of one token; as for `plan_prompts`."""
        tables = pages.new_zeros(len(pages), max(map(len, gathered)))
        for prompt, slots in zip(prompts, gathered, strict=True):
            tables[prompt.sequence, : len(slots)] = slots
        return tables

    def readable(self, pages: Tensor) -> Tensor:
        """Page tables that may be read whole, also before a window, for libraries that do so."""
        return pages if self.cache.window is None else pages.clamp(min=0)

    def store(self, plan: Plan, layer: int, k: Tensor, v: Tensor | None) -> None:
        """See `Backend.store`."""
        self.cache.write(layer, self.cache.writable(plan.stored), k, v)

    def store_projected(self, plan: Plan, layer: int, qkv: Tensor | SplitKPartials, heads: HeadSplit) -> Tensor:
        """See `Backend.store_projected`."""
        q_norm, k_norm = heads.norms or (None, None)
        return norm_rope_cache(
            qkv,
            heads.sizes[0] // heads.dim,
            *heads.rotary.halves,
            plan.stored,
            *self.cache.of_layer(layer),
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            interleaved=heads.rotary.interleaved,
        )

    def store_latent(
        self, plan: Plan, layer: int, q: Tensor, kv: Tensor, parts: LatentSplit, absorbed: Absorbed
    ) -> tuple[Tensor, Absorbed]:
        """See `Backend.store_latent`."""
        q, rotary, norm = q.unflatten(-1, (-1, parts.dim)), parts.rotary, parts.norm
        table = rotary.cos[:, 0], rotary.sin[:, 0]
        cache, keys = self.cache.of_layer(layer)[0], absorbed.keys
        store = partial(latent_rope_cache, q, kv, *table, plan.stored, cache, norm.weight, norm.eps)
        if keys is None:
            store(interleaved=rotary.interleaved)
            return q, absorbed
        # Both parts of a query are written side by side; a concatenation would copy them.
        n, width = keys.shape[1:]
        whole = q.new_empty(*q.shape[:2], width + parts.dim - n)
        store(interleaved=rotary.interleaved, q_rotated=whole[..., width:])
        if isinstance(plan.prompts, Prompts) and plan.prompts.expansion is not None and absorbed.up is not None:
            project_heads(q[..., :n], keys, plan.prompts.expansion.absorbed, whole[..., :width])
            return whole, Absorbed(None, absorbed.values, absorbed.up, q[..., :n])
        multiply_heads(q[..., :n], keys, whole[..., :width])
        return whole, Absorbed(None, absorbed.values)

    def attend(
        self, plan: Plan, layer: int, q: Tensor, scale: float, lse: bool, absorbed: Absorbed | None, gathered: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.attend`."""
        if plan.rows is None:
            return super().attend(plan, layer, q, scale, lse, absorbed, gathered)
        query = q if absorbed is None else absorbed.query(q)
        out, sums = self.unfilled(query, lse)
        # In a graph any sequence may be of one row or of several: rows of the latter are zeros before they are written.
        if plan.decode is not None and isinstance(at := plan.rows, slice):
            self.decode(plan.decode, layer, query[at], scale, lse, out[at], None if sums is None else sums[at])
        elif plan.decode is not None:
            out[at], total = self.decode(plan.decode, layer, query[at], scale, lse)
            if sums is not None and total is not None:
                sums[at] = total
        prompts, tokens = plan.prompts, self.cache.of_layer(layer)
        if isinstance(prompts, Prompts) and prompts.copies is not None:
            prompts = prompts._replace(copied=self._copied(prompts, prompts.copies, query, *tokens))
        self.prompts(prompts, query, *tokens, scale, out, sums)
        if absorbed is None or absorbed.plain is None or absorbed.up is None:
            return out if absorbed is None else absorbed.output(out), sums
        assert not lse, "the log-sum-exps of expanded prompts are not computed"
        seen = out.new_empty(*out.shape[:2], absorbed.values.shape[1])
        project_heads(out, absorbed.values.transpose(1, 2), prompts.expansion.absorbed, seen)
        latents = tokens[0]
        if prompts.copied is not None:
            latents = prompts.copied[0]
            prompts = prompts._replace(pages=prompts.copied_pages.pages, page_size=ALIGNMENT)
        self.expand(prompts, plain(latents), absorbed.plain, query, absorbed.up, scale, seen)
        return seen, sums

    def _copied(self, prompts: Prompts, copies: Copies, q: Tensor, keys: Stored, values: Stored) -> Tensor:
        """A layer's copies, in q's dtype."""
        copied = q.new_empty(1 if isinstance(self.cache.spec, Latent) else 2, copies.places, *keys.shape[1:])
        where = prompts.pages, copies.bases, copies.lengths, copies.live, prompts.page_size
        copy_pages(keys, values, *where, copied)
        return copied

    def expand(
        self, prompts: Prompts, latents: Tensor, plain: Tensor, q: Tensor, up: Tensor, scale: float, out: Tensor
    ) -> None:
        """Fills the rows of prompts that attend with keys and values of heads, from latents `[slots, 1, width]`."""
        expansion, (heads, width, rank) = prompts.expansion, up.shape
        assert expansion is not None
        taken = 0 if prompts.copied is None else prompts.copied.numel()
        places, tokens = expansion.places, (expansion.lengths, expansion.live, prompts.page_size)
        group = max(1, min(heads, (MAX_ELEMENTS - taken) // (places * width)))
        memory = out.new_empty(places * group * width)
        for i in range(0, heads, group):
            of = slice(i, min(heads, i + group))
            expanded = memory[: places * (of.stop - i) * width].view(places, -1, width)
            expand_latents(latents, prompts.pages, expansion.bases, *tokens, up[of], expanded)
            expanded_prefill_attention(
                plain[:, of],
                q[:, of, rank:],
                expanded,
                latents[..., rank:],
                prompts.pages,
                prompts.starts,
                prompts.limits,
                expansion.bases,
                prompts.page_size,
                scale,
                out[:, of],
            )

    def decode(
        self,
        plan: Any,
        layer: int,
        q: Tensor,
        scale: float,
        lse: bool,
        out: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        (pages, lengths, splits), cache, (keys, values) = plan, self.cache, self.cache.of_layer(layer)
        if lse and sums is None:
            sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        where = (pages, lengths, cache.page_size, scale)
        more: dict[str, Any] = dict(out=out, lse=sums, splits=splits)
        if isinstance(cache.spec, Latent):
            return latent_decode_attention(q, keys, cache.spec.value_width, *where, **more), sums
        return decode_attention(q, keys, values, *where, window=cache.window, **more), sums

    def prompts(
        self, plan: Any, q: Tensor, keys: Stored, values: Stored, scale: float, out: Tensor, sums: Tensor | None
    ) -> None:
        pages, starts, limits, page_size, expansion, copies, copied_pages, copied = plan
        bases = None if expansion is None else expansion.bases
        if copies is not None:
            bases, latent = copies.bases, isinstance(self.cache.spec, Latent)
            if not latent and copies_pages(q.shape[2], q.element_size()):
                copied_prefill_attention(q, copied, starts, limits, bases, scale, out, lse=sums)
            else:
                of_copies = (copied_pages.pages, starts, limits, ALIGNMENT, scale, out)
                k, v = copied[0], copied[-1][..., : values.shape[-1]]
                prefill_attention(q, k, v, *of_copies, lse=sums, bases=copied_pages.skipped)
        where = (pages, starts, limits, page_size, scale, out)
        prefill_attention(q, keys, values, *where, window=self.cache.window, lse=sums, bases=bases)
