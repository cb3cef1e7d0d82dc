"""Attention over pages by FlashAttention 3 (arXiv 2407.08608), as built into an installed vLLM or sglang-kernel.

Rows are stored by Weft's own kernels. The package's Python is not imported, which would load the whole engine: only its
library is, and its operators are called by the names that their schemas give to arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.backend_registry import fa3_library
from weft.engine.attention.forward_batch import Batch
from weft.engine.attention.paged_triton import PagedTriton
from weft.engine.attention.sdpa import Prompt
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import Stored, plain
from weft.kernels.triton.launch import cdiv, scaled

MAX_SPLITS = 128
"""Of a decode row's tokens: as many as the library's own choice has at the most."""
SPLIT_BYTES = 256 << 20
"""Of the float32 outputs of all splits of all decode rows at the most, which one call allocates."""
BLOCK_HEADS = 64
"""Query heads of a key-value head that a block of the kernel takes at the least."""
NEUTRAL = {
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "has_softcap": False,
    "max_seqlen_k_new": 0,
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Arguments of what Weft does not use. Those that may be None, or have a default, are left so."""


class Operators(NamedTuple):
    """The library's operators, called by keyword. metadata: of a step, for all its layers; None where there is none."""

    forward: Callable[..., Any]
    metadata: Callable[..., Any] | None


def by_keyword(operator: Any) -> Callable[..., Any]:
    """An operator with arguments by keyword; those that are not given are as in NEUTRAL, None or their default."""
    operator = operator.default
    arguments = operator._schema.arguments
    neutral = {a.name: NEUTRAL.get(a.name, a.default_value) for a in arguments}
    keyword = {a.name for a in arguments if a.kwarg_only}

    def call(**given: Any) -> Any:
        values = neutral | {name: value for name, value in given.items() if name in neutral or value is not None}
        more = {name: values.pop(name) for name in keyword}
        return operator(*values.values(), **more)

    return call


@cache
def operators() -> Operators:
    """Those of the installed package, which is loaded once."""
    found = fa3_library()
    assert found is not None, "the table refuses the backend where there is none"
    namespace, path = found
    torch.ops.load_library(str(path))
    ops = getattr(torch.ops, namespace)
    metadata = getattr(ops, "get_scheduler_metadata", None)
    return Operators(by_keyword(ops.fwd), None if metadata is None else by_keyword(metadata))


class DecodeRows(NamedTuple):
    """Sequences of one row: page tables `[B, W]`, lengths `[B]`, and the metadata of a step by the number of heads."""

    pages: Tensor
    lengths: Tensor
    metadata: dict[int, Tensor]


class PromptRows(NamedTuple):
    """Sequences of several rows; `used` rows of each, 0 where a sequence has one row. longest: rows of one at the most.
    rows: bool `[T, 1]`, which rows are theirs.
    """

    pages: Tensor
    starts: Tensor
    used: Tensor
    lengths: Tensor
    longest: int
    page_size: int
    rows: Tensor


class FlashAttention3(PagedTriton):
    """A `weft.engine.attention.backend.Backend` on a Hopper GPU, in bfloat16. CUDA graphs may capture it as they may
    PagedTriton: lengths stay on the device, and the number of splits follows from shapes. The length of a row's splits
    depends on its neighbours, and so may its last bits.
    """

    captures_prompts = False  # graphs merge some, which the table refuses

    def __init__(self, cache: KVCache):
        super().__init__(cache)
        self.copies = False

    def plan_decode(self, pages: Tensor, lengths: Tensor) -> Any:
        return DecodeRows(self.readable(pages), lengths.contiguous(), {})

    def plan_prompts(
        self,
        batch: Batch,
        pages: Tensor,
        prompts: Sequence[Prompt],
        here: Callable[[Any], Any] = lambda tokens: tokens,
        gathered: Sequence[Tensor] | None = None,
    ) -> Any:
        # The table refuses merged prompts over dcp, for which `here` counts a rank's tokens.
        starts, rows = batch.starts, len(batch.tokens)
        assert starts is not None
        page_size = self.cache.page_size if gathered is None else 1
        pages = pages if gathered is None else self.gathered_pages(pages, prompts, gathered)
        count = starts.diff()
        used = count.where(count > 1, 0)
        at = torch.arange(rows, dtype=starts.dtype, device=starts.device)
        sequence = torch.searchsorted(starts[1:], at, right=True).clamp(max=len(count) - 1)
        longest = max((p.rows for p in prompts), default=rows)
        theirs = ((used[sequence] > 0) & (at < starts[-1]))[:, None]
        return PromptRows(self.readable(pages), starts, used, batch.lengths, longest, page_size, theirs)

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
        rows, heads, dim = q.shape
        keys, values = self.cache.of_layer(layer)
        width, kv_heads = values.shape[-1], keys.shape[1]
        out = q.new_empty(rows, heads, width) if out is None else out
        if not rows:
            return out, q.new_empty(rows, heads, dtype=torch.float32) if lse and sums is None else sums
        tokens = plan.pages.shape[1] * self.cache.page_size
        blocks = kv_heads * cdiv(heads // kv_heads, BLOCK_HEADS)
        splits = min(MAX_SPLITS, cdiv(scaled(132), blocks), max(1, SPLIT_BYTES // (4 * rows * heads * width)))
        shape = dict(max_seqlen_q=1, max_seqlen_k=tokens, num_splits=splits, **self._mask())
        if heads not in plan.metadata and (metadata := operators().metadata) is not None:
            plan.metadata[heads] = metadata(
                batch_size=rows,
                num_heads=heads,
                num_heads_k=kv_heads,
                headdim=dim - width if isinstance(self.cache.spec, Latent) else dim,
                headdim_v=width,
                qkv_dtype=q.dtype,
                seqused_k=plan.lengths,
                page_size=self.cache.page_size,
                **shape,
            )
        found = (
            operators()
            .forward(
                **self._tensors(q[:, None], keys, values, self.cache.page_size),
                out=out[:, None],
                seqused_k=plan.lengths,
                page_table=plan.pages,
                softmax_scale=scale,
                scheduler_metadata=plan.metadata.get(heads),
                **shape,
            )[1]
            .squeeze(-1)
        )  # `[B, heads, 1]`
        if sums is not None:
            sums.copy_(found)
        return out, (found if sums is None else sums) if lse else None

    def prompts(
        self, plan: Any, q: Tensor, keys: Stored, values: Stored, scale: float, out: Tensor, sums: Tensor | None
    ) -> None:
        if not len(q):
            return
        found = operators().forward(
            **self._tensors(q, keys, values, plan.page_size),
            out=out,
            cu_seqlens_q=plan.starts,
            seqused_q=plan.used,
            seqused_k=plan.lengths,
            max_seqlen_q=plan.longest,
            max_seqlen_k=plan.pages.shape[1] * plan.page_size,
            page_table=plan.pages,
            softmax_scale=scale,
            num_splits=0,
            **self._mask(),
        )[1]  # `[heads, T]`; undefined in rows of other sequences
        if sums is not None:
            torch.where(plan.rows, found.T, sums, out=sums)

    def _mask(self) -> dict[str, Any]:
        window = self.cache.window
        return dict(is_causal=True, window_size_left=-1 if window is None else window - 1, window_size_right=0)

    def _tensors(self, q: Tensor, keys: Stored, values: Stored, page_size: int) -> dict[str, Tensor]:
        """q, keys and values as the library takes them: latent attention has a second product of queries and values."""
        k, v = (plain(x).unflatten(0, (-1, page_size)) for x in (keys, values))
        if not isinstance(self.cache.spec, Latent):
            return dict(q=q, k=k, v=v)
        width = values.shape[-1]
        return dict(q=q[..., width:], q_v=q[..., :width], k=k[..., width:], v=v)


class TheQuickerOfEach(FlashAttention3):
    """A `weft.engine.attention.backend.Backend` as FlashAttention3. Its kernels take prompts over keys and values, and
    decode rows over latents; those of PagedTriton take the others, as they are quicker.
    """

    def __init__(self, cache: KVCache):
        super().__init__(cache)
        self.captures_prompts = isinstance(cache.spec, Latent)

    def plan_decode(self, pages: Tensor, lengths: Tensor) -> Any:
        return self._decodes.plan_decode(self, pages, lengths)

    def plan_prompts(self, *step: Any, **more: Any) -> Any:
        return self._prompts.plan_prompts(self, *step, **more)

    def decode(self, *rows: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        return self._decodes.decode(self, *rows, **more)

    def prompts(self, *rows: Any, **more: Any) -> None:
        self._prompts.prompts(self, *rows, **more)

    @property
    def _decodes(self) -> type[PagedTriton]:
        return FlashAttention3 if isinstance(self.cache.spec, Latent) else PagedTriton

    @property
    def _prompts(self) -> type[PagedTriton]:
        return PagedTriton if isinstance(self.cache.spec, Latent) else FlashAttention3
