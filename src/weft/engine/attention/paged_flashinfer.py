"""Attention over pages by FlashInfer's paged wrappers (arXiv 2501.01005), which plan each step on the host.

Rows are stored by Weft's own kernels. Nothing else of the package is used, and of its collectives nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.engine.attention.forward_batch import Batch
from weft.engine.attention.paged_triton import PagedTriton
from weft.engine.attention.sdpa import Prompt
from weft.engine.kernels.triton.decode_attention import LN2
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import Stored, plain

WORKSPACE_BYTES = 384 << 20
"""For the parts of long rows, of all wrappers of a rank: they run one after another."""


@cache
def workspace(device: torch.device) -> Tensor:
    """uint8, zeros."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Some sequences of a step as FlashInfer plans them; all but `pages` is on the host.

    at: their rows among those that attend. starts: int32 `[S + 1]`, of their rows, one behind the other. pages: int32,
    the pages of all of them. begins: int32 `[S + 1]`, of each in `pages`. lengths: int32 `[S]`, their tokens, 1 or
    more. empty: bool `[S, 1]`, on the device, which of them have none in truth; None: no one. planned: the wrapper that
    has planned these, for a number of heads and a scale.
    """

    at: slice | Tensor
    starts: Tensor
    pages: Tensor
    begins: Tensor
    lengths: Tensor
    page_size: int
    causal: bool
    empty: Tensor | None = None
    planned: dict[tuple[int, float], Any] = field(default_factory=dict)


class FlashInfer(PagedTriton):
    """A `weft.engine.attention.backend.Backend` on a GPU, for eager steps alone: planning reads lengths on the host.
    Wrappers are compiled when they are first used, once for each head dimension.
    """

    def __init__(self, cache: KVCache):
        super().__init__(cache)
        self.copies = False
        self._wrappers: dict[tuple[bool, int, float], Any] = {}

    def plan_decode(self, pages: Tensor, lengths: Tensor) -> Any:
        # The plan below waits for what the GPU was given before: FlashInfer stages each plan in the same memory.
        known, page_size = lengths.tolist(), self.cache.page_size
        pages, empty = self.readable(pages), None
        if 0 in known:  # an empty sequence sees some token, and its output is replaced
            empty = lengths[:, None] == 0
            pages = pages.masked_fill(empty, 0)
        return self._sequences(
            slice(len(known)),
            [1] * len(known),
            [row[: -(-max(1, n) // page_size)] for row, n in zip(pages, known, strict=True)],
            [max(1, n) for n in known],
            page_size,
            causal=False,
            empty=empty,
        )

    def plan_prompts(
        self,
        batch: Batch,
        pages: Tensor,
        prompts: Sequence[Prompt],
        here: Callable[[Any], Any] = lambda tokens: tokens,
        gathered: Sequence[Tensor] | None = None,
    ) -> Any:
        # The table refuses merged prompts over dcp, for which `here` counts a rank's tokens.
        if not prompts:
            return None
        torch.cuda.current_stream(pages.device).synchronize() if pages.is_cuda else None
        lengths, page_size = [p.context + p.rows for p in prompts], self.cache.page_size
        if gathered is None:
            readable = self.readable(pages)
            tables = [readable[p.sequence, : -(-n // page_size)] for p, n in zip(prompts, lengths, strict=True)]
        else:
            tables, page_size = [slots.int() for slots in gathered], 1
        first, last = prompts[0].first, prompts[-1].first + prompts[-1].rows
        at: slice | Tensor = slice(first, last)
        if last - first != sum(p.rows for p in prompts):
            rows = [row for p in prompts for row in range(p.first, p.first + p.rows)]
            at = torch.tensor(rows, device=pages.device)
        return self._sequences(at, [p.rows for p in prompts], tables, lengths, page_size, causal=True)

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
        if out is None:
            out, _ = self.unfilled(q, False)
        if not len(q):
            return out, q.new_empty(q.shape[:2], dtype=torch.float32) if lse else None
        found = self._attend(plan, q, *self.cache.of_layer(layer), scale, out, lse)
        if plan.empty is not None:
            out.masked_fill_(plan.empty[..., None], 0.0)
            found = None if found is None else found.masked_fill_(plan.empty, float("-inf"))
        return out, found if sums is None or found is None else sums.copy_(found)

    def prompts(
        self, plan: Any, q: Tensor, keys: Stored, values: Stored, scale: float, out: Tensor, sums: Tensor | None
    ) -> None:
        if plan is None:
            return
        part = out[plan.at]  # a view of out, or a copy
        found = self._attend(plan, q[plan.at], keys, values, scale, part, sums is not None)
        if not isinstance(plan.at, slice):
            out[plan.at] = part
        if sums is not None and found is not None:
            sums[plan.at] = found

    def _sequences(
        self,
        at: slice | Tensor,
        rows: list[int],
        tables: Sequence[Tensor],
        lengths: list[int],
        page_size: int,
        causal: bool,
        empty: Tensor | None = None,
    ) -> Sequences:
        def on_host(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        def begins(counts: Sequence[int]) -> Tensor:
            return on_host([0, *accumulate(counts)])

        pages = torch.cat([*tables]) if tables else on_host([])
        ends = begins([len(table) for table in tables])
        return Sequences(at, begins(rows), pages, ends, on_host(lengths), page_size, causal, empty)

    def _attend(
        self, plan: Sequences, q: Tensor, keys: Stored, values: Stored, scale: float, out: Tensor, lse: bool
    ) -> Tensor | None:
        """Fills out, and gives the natural log-sum-exps where requested."""
        k, v = (plain(x).unflatten(0, (-1, plan.page_size)) for x in (keys, values))
        wrapper = self._planned(plan, q, keys.shape[1], scale)
        if isinstance(self.cache.spec, Latent):
            width = values.shape[-1]
            parts = q[..., :width], q[..., width:], v[:, :, 0], k[:, :, 0, width:]
            found = wrapper.run(*parts, out=out, return_lse=lse, return_lse_base_on_e=True)
            return found[1] if lse else None
        found = wrapper.run(q, (k, v), out=out, return_lse=lse)
        return found[1].mul_(LN2) if lse else None

    def _planned(self, plan: Sequences, q: Tensor, kv_heads: int, scale: float) -> Any:
        """The wrapper that has planned these sequences: by the first layer of a step, since it knows its heads."""
        heads, dim = q.shape[1:]
        if (key := (heads, scale)) in plan.planned:
            return plan.planned[key]
        latent, width = isinstance(self.cache.spec, Latent), self.cache.values.shape[-1]
        wrapper = self._wrapper(plan.causal, *key, q.device)
        if latent:
            more = heads, width, dim - width, plan.page_size, plan.causal, scale, q.dtype, q.dtype
            wrapper.plan(plan.starts, plan.begins, plan.pages, plan.lengths, *more)
        else:
            last = (plan.lengths - 1) % plan.page_size + 1
            window = -1 if self.cache.window is None else self.cache.window - 1
            where = plan.begins, plan.pages, last, heads, kv_heads, dim, plan.page_size
            how = dict(window_left=window, q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=scale)
            if plan.causal:
                wrapper.plan(plan.starts, *where, causal=True, **how)
            else:
                wrapper.plan(*where, **how)
        plan.planned[key] = wrapper
        return wrapper

    def _wrapper(self, causal: bool, heads: int, scale: float, device: torch.device) -> Any:
        """Of decode rows, or of prompts: each has memory of its own in which a step is planned."""
        import flashinfer  # an extra that takes seconds

        if (key := (causal, heads, scale)) not in self._wrappers:
            space = workspace(device)
            if isinstance(self.cache.spec, Latent):
                self._wrappers[key] = flashinfer.mla.BatchMLAPagedAttentionWrapper(space)
            elif causal:
                self._wrappers[key] = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(space)
            else:
                self._wrappers[key] = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(space, use_tensor_cores=True)
        return self._wrappers[key]
