"""Attention over pages on GPUs, by Triton kernels that read pages in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows, PromptKernel, PromptRows
from weft.engine.attention.expansion import (
    ALIGNMENT,
    MAX_ELEMENTS,
    Copies,
    Expansion,
    pages_of_copies,
    plan_copies,
    plan_expansion,
)
from weft.engine.kernels.triton.copied_prompts import copied_prefill_attention, copies_pages
from weft.engine.kernels.triton.copy_pages import copy_pages
from weft.engine.kernels.triton.decode_attention import decode_attention, latent_decode_attention, splits_of
from weft.engine.kernels.triton.latent_prompts import expand_latents
from weft.engine.kernels.triton.prefill_attention import expanded_prefill_attention, prefill_attention
from weft.engine.kernels.triton.splits import Splits
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.kernels.float8 import plain as stored_plainly


class TritonDecode(DecodeKernel):
    """Split-K attention. A row's bits do not depend on the batch."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, rows: DecodeRows) -> tuple[Tensor, Tensor, Splits]:
        cache, (kv_heads, width) = self.cache, self.cache.values.shape[-2:]
        group = cache.spec.heads if isinstance(cache.spec, Latent) else 1
        of = rows.lengths, rows.pages.shape[1] * cache.page_size, cache.window, width, kv_heads
        splits = splits_of(*of, group=group, float8=cache.exponents is not None)
        return rows.pages, rows.lengths, splits

    def run(self, plan: tuple[Tensor, Tensor, Splits], inputs: AttentionInputs) -> Tensor | None:
        (pages, lengths, splits), cache = plan, self.cache
        where = pages, lengths, cache.page_size, inputs.scale
        more: dict[str, Any] = dict(out=inputs.out, lse=inputs.lse, splits=splits)
        if isinstance(cache.spec, Latent):
            latent_decode_attention(inputs.q, inputs.keys, cache.spec.value_width, *where, **more)
        else:
            decode_attention(inputs.q, inputs.keys, inputs.values, *where, window=cache.window, **more)
        return inputs.lse


class CopiedPages(NamedTuple):
    """Copies as pages, for kernels that require pages. pages: of ALIGNMENT tokens. skipped: int32 `[B]`, below 0 for
    sequences that attend to their copies: those with a copy that are not expanded."""

    pages: Tensor
    skipped: Tensor


class TritonPromptPlan(NamedTuple):
    """Sequences of several rows, in the form that `prefill_attention` accepts.

    Args:
        pages: int32 `[B, W]`.
        starts: int32 `[B + 1]`.
        limits: int32 `[T]`.
        page_size: tokens of a page.
        expansion: places of sequences that attend to expanded latent vectors.
        copies: places of sequences that attend to copies.
        copied_pages: copies of an FP8 cache as pages.
        copied: a layer's copies, `[kinds, places, heads, dim]`.
    """

    pages: Tensor
    starts: Tensor
    limits: Tensor
    page_size: int
    expansion: Expansion | None = None
    copies: Copies | None = None
    copied_pages: CopiedPages | None = None
    copied: Tensor | None = None


class TritonPrompts(PromptKernel):
    """Reads pages in place, copies tokens that many rows see, and expands latent vectors if that saves time."""

    captures_sharded = True

    def __init__(self, cache: KVCache):
        self.cache, spec, self.float8 = cache, cache.spec, cache.exponents is not None
        if self.float8:  # convert each vector once instead of once per block of rows
            self.copies = not isinstance(spec, Window)
        else:
            self.copies = isinstance(spec, PagedKV) and copies_pages(spec.dim, cache.keys.element_size())

    def plan(self, rows: PromptRows) -> TritonPromptPlan:
        batch, limits, spec = rows.batch, rows.limits, self.cache.spec
        assert batch.starts is not None
        expansion, copies, copied_pages = None, None, None
        longest = rows.pages.shape[1] * rows.page_size
        step = batch.starts, batch.lengths, len(limits), longest
        some = len(rows.pages) > 0
        if some and rows.may_copy and self.copies and not isinstance(spec, Window):
            copies = plan_copies(spec, *step, short=self.float8)
        if some and rows.may_expand and isinstance(spec, Latent) and spec.expanded is not None:
            expansion = plan_expansion(spec, *step, copies)
        if copies is not None and self.float8:
            bases = -1 if expansion is None else expansion.bases
            skipped = torch.where(copies.bases < 0, 0, bases).int()
            copied_pages = CopiedPages(pages_of_copies(copies, longest), skipped)
        where = rows.pages.contiguous(), batch.starts, limits, rows.page_size
        return TritonPromptPlan(*where, expansion, copies, copied_pages)

    def absorbed_rows(self, plan: TritonPromptPlan) -> Tensor | None:
        return None if plan.expansion is None else plan.expansion.absorbed

    def run(self, plan: TritonPromptPlan, inputs: AttentionInputs) -> TritonPromptPlan:
        q, keys, values, scale, out = inputs.q, inputs.keys, inputs.values, inputs.scale, inputs.out
        bases = None if plan.expansion is None else plan.expansion.bases
        if (copies := plan.copies) is not None:
            copied, bases, latent = (
                self._copied(plan, copies, inputs),
                copies.bases,
                isinstance(self.cache.spec, Latent),
            )
            plan = plan._replace(copied=copied)
            if not latent and copies_pages(q.shape[2], q.element_size()):
                copied_prefill_attention(q, copied, plan.starts, plan.limits, bases, scale, out, lse=inputs.lse)
            else:
                assert plan.copied_pages is not None
                of_copies = (plan.copied_pages.pages, plan.starts, plan.limits, ALIGNMENT, scale, out)
                k, v = copied[0], copied[-1][..., : values.shape[-1]]
                prefill_attention(q, k, v, *of_copies, lse=inputs.lse, bases=plan.copied_pages.skipped)
        where = (plan.pages, plan.starts, plan.limits, plan.page_size, scale, out)
        prefill_attention(q, keys, values, *where, window=self.cache.window, lse=inputs.lse, bases=bases)
        return plan

    def _copied(self, plan: TritonPromptPlan, copies: Copies, inputs: AttentionInputs) -> Tensor:
        """Copy a layer's tokens, in the dtype of q."""
        q, keys = inputs.q, inputs.keys
        copied = q.new_empty(1 if isinstance(self.cache.spec, Latent) else 2, copies.places, *keys.shape[1:])
        where = plan.pages, copies.bases, copies.lengths, copies.live, plan.page_size
        copy_pages(keys, inputs.values, *where, copied)
        return copied

    def expand(self, plan: TritonPromptPlan, inputs: AttentionInputs, plain: Tensor, up: Tensor, out: Tensor) -> None:
        if (expansion := plan.expansion) is None:
            return
        assert inputs.lse is None, "the log-sum-exps of expanded prompts are not computed"
        latents, pages, page_size, taken = inputs.keys, plan.pages, plan.page_size, 0
        if plan.copied is not None and plan.copied_pages is not None:
            latents, pages, page_size, taken = plan.copied[0], plan.copied_pages.pages, ALIGNMENT, plan.copied.numel()
        latents, (heads, width, rank), places = stored_plainly(latents), up.shape, expansion.places
        group = max(1, min(heads, (MAX_ELEMENTS - taken) // (places * width)))
        memory = out.new_empty(places * group * width)
        for i in range(0, heads, group):
            of = slice(i, min(heads, i + group))
            expanded = memory[: places * (of.stop - i) * width].view(places, -1, width)
            tokens = expansion.bases, expansion.lengths, expansion.live, page_size
            expand_latents(latents, pages, *tokens, up[of], expanded)
            expanded_prefill_attention(
                plain[:, of],
                inputs.q[:, of, rank:],
                expanded,
                latents[..., rank:],
                pages,
                plan.starts,
                plan.limits,
                expansion.bases,
                page_size,
                inputs.scale,
                out[:, of],
            )
