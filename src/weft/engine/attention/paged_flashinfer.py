"""Attention over pages by FlashInfer's paged wrappers (arXiv 2501.01005), which plan each step on the host.

Weft's own kernels store the rows. Nothing else of the package is used, and none of its collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows, PromptKernel, PromptRows
from weft.engine.kernels.triton.decode_attention import LN2
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import plain

WORKSPACE_BYTES = 384 << 20
"""Memory for the partial outputs of long rows, shared by all wrappers of a rank, which run one after another."""


@cache
def workspace(device: torch.device) -> Tensor:
    """Return a zeroed uint8 workspace."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of a step in the form that FlashInfer plans; everything but `pages` is on the host.

    Args:
        at: their rows among the inputs.
        starts: int32 `[S + 1]`, start of each sequence's rows.
        pages: int32, the pages of all sequences, on the device.
        begins: int32 `[S + 1]`, start of each sequence in `pages`.
        lengths: int32 `[S]`, tokens of each, 1 or more.
        empty: bool `[S, 1]`, on the device, sequences that have no tokens in truth; None: no sequence.
        planned: the wrapper that has planned these sequences, by number of heads and scale.
    """

    at: slice | Tensor
    starts: Tensor
    pages: Tensor
    begins: Tensor
    lengths: Tensor
    page_size: int
    empty: Tensor | None = None
    planned: dict[tuple[int, float], Any] = field(default_factory=dict)


class FlashInferDecode(DecodeKernel):
    """Decode rows on a GPU, for eager steps alone: planning reads lengths on the host."""

    def __init__(self, cache: KVCache):
        self._cache, self._wrappers = cache, Wrappers(cache, causal=False)

    def plan(self, rows: DecodeRows) -> Sequences:
        # The plan below waits for earlier work of the GPU: FlashInfer stages each plan in the same memory.
        known, page_size = rows.lengths.tolist(), self._cache.page_size
        pages, empty = self._cache.readable(rows.pages), None
        if 0 in known:  # an empty sequence sees some token, and its output is replaced
            empty = rows.lengths[:, None] == 0
            pages = pages.masked_fill(empty, 0)
        tables = [row[: -(-max(1, n) // page_size)] for row, n in zip(pages, known, strict=True)]
        return sequences(slice(len(known)), [1] * len(known), tables, [max(1, n) for n in known], page_size, empty)

    def run(self, plan: Sequences, inputs: AttentionInputs) -> Tensor | None:
        if not len(inputs.q):
            return inputs.lse
        output = self._wrappers.run(plan, inputs)
        if plan.empty is not None:
            inputs.out.masked_fill_(plan.empty[..., None], 0.0)
            output = None if output is None else output.masked_fill_(plan.empty, float("-inf"))
        return output


class FlashInferPrompts(PromptKernel):
    """Prompts on a GPU, for eager steps alone."""

    def __init__(self, cache: KVCache):
        self._cache, self._wrappers = cache, Wrappers(cache, causal=True)

    def plan(self, rows: PromptRows) -> Sequences | None:
        # The table refuses merged prompts over dcp, for which `held` counts a rank's tokens.
        if not (known := rows.known):
            return None
        torch.cuda.current_stream(rows.pages.device).synchronize() if rows.pages.is_cuda else None
        lengths, pages = [span.context + span.rows for span in known], self._cache.readable(rows.pages)
        tables = [pages[span.sequence, : -(-n // rows.page_size)] for span, n in zip(known, lengths, strict=True)]
        first, last = known[0].first, known[-1].first + known[-1].rows
        at: slice | Tensor = slice(first, last)
        if last - first != sum(span.rows for span in known):
            numbers = [row for span in known for row in range(span.first, span.first + span.rows)]
            at = torch.tensor(numbers, device=pages.device)
        return sequences(at, [span.rows for span in known], tables, lengths, rows.page_size)

    def run(self, plan: Sequences | None, inputs: AttentionInputs) -> None:
        if plan is None:
            return
        q, part = inputs.q[plan.at], inputs.out[plan.at]  # a view of out, or a copy
        output = self._wrappers.run(plan, replace(inputs, q=q, out=part))
        if not isinstance(plan.at, slice):
            inputs.out[plan.at] = part
        if inputs.lse is not None and output is not None:
            inputs.lse[plan.at] = output


def sequences(
    at: slice | Tensor,
    rows: list[int],
    tables: Sequence[Tensor],
    lengths: list[int],
    page_size: int,
    empty: Tensor | None = None,
) -> Sequences:
    """Build `Sequences` from each sequence's `rows`, page table of `tables` and tokens, its `lengths`."""

    def on_host(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def begins(counts: Sequence[int]) -> Tensor:
        return on_host([0, *accumulate(counts)])

    pages = torch.cat([*tables]) if tables else on_host([])
    return Sequences(
        at, begins(rows), pages, begins([len(table) for table in tables]), on_host(lengths), page_size, empty
    )


class Wrappers:
    """Wrappers of decode rows or (causal) of prompts. Each has its own memory for the plan of a step. They are compiled
    at their first use, once per head dimension."""

    def __init__(self, cache: KVCache, causal: bool):
        self._cache, self._causal = cache, causal
        self._made: dict[tuple[int, float], Any] = {}

    def run(self, plan: Sequences, inputs: AttentionInputs) -> Tensor | None:
        """Fill out, and return the natural log-sum-exps if requested."""
        k, v = (plain(x).unflatten(0, (-1, plan.page_size)) for x in (inputs.keys, inputs.values))
        q, out, lse = inputs.q, inputs.out, inputs.lse is not None
        wrapper = self._planned(plan, q, inputs.keys.shape[1], inputs.scale)
        if isinstance(self._cache.spec, Latent):
            width = inputs.values.shape[-1]
            parts = q[..., :width], q[..., width:], v[:, :, 0], k[:, :, 0, width:]
            output = wrapper.run(*parts, out=out, return_lse=lse, return_lse_base_on_e=True)
            return output[1] if lse else None
        output = wrapper.run(q, (k, v), out=out, return_lse=lse)
        return output[1].mul_(LN2) if lse else None

    def _planned(self, plan: Sequences, q: Tensor, kv_heads: int, scale: float) -> Any:
        """Return the wrapper that planned these sequences. The first layer of a step plans, since it knows its
        heads."""
        heads, dim = q.shape[1:]
        if (key := (heads, scale)) in plan.planned:
            return plan.planned[key]
        cache, causal, width = self._cache, self._causal, self._cache.values.shape[-1]
        wrapper = self._wrapper(key, q.device)
        if isinstance(cache.spec, Latent):
            more = heads, width, dim - width, plan.page_size, causal, scale, q.dtype, q.dtype
            wrapper.plan(plan.starts, plan.begins, plan.pages, plan.lengths, *more)
        else:
            last = (plan.lengths - 1) % plan.page_size + 1
            window = -1 if cache.window is None else cache.window - 1
            where = plan.begins, plan.pages, last, heads, kv_heads, dim, plan.page_size
            how = dict(window_left=window, q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=scale)
            if causal:
                wrapper.plan(plan.starts, *where, causal=True, **how)
            else:
                wrapper.plan(*where, **how)
        plan.planned[key] = wrapper
        return wrapper

    def _wrapper(self, key: tuple[int, float], device: torch.device) -> Any:
        import flashinfer  # an optional package that takes seconds to import

        if key not in self._made:
            space = workspace(device)
            if isinstance(self._cache.spec, Latent):
                self._made[key] = flashinfer.mla.BatchMLAPagedAttentionWrapper(space)
            elif self._causal:
                self._made[key] = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(space)
            else:
                self._made[key] = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(space, use_tensor_cores=True)
        return self._made[key]
