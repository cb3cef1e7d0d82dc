"""Attention over pages by FlashAttention 3 (arXiv 2407.08608), from an installed vLLM or sglang-kernel.

Weft's own kernels store the rows. Only the package's library is loaded, since its Python would import the whole engine.
Operators are called by the argument names of their schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows, PromptKernel, PromptRows
from weft.engine.attention.backend_registry import fa3_library
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import plain
from weft.kernels.triton.launch import cdiv, scaled

MAX_SPLITS = 128
"""Upper bound on the splits of a decode row's tokens, as in the library's own choice."""
SPLIT_BYTES = 256 << 20
"""Upper bound on the float32 outputs of all splits of all decode rows, which one call allocates."""
BLOCK_HEADS = 64
"""Minimum query heads of a key-value head in a block of the kernel."""
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
"""Arguments that Weft does not use and that are neither optional nor have a default."""


class Operators(NamedTuple):
    """Operators of the library, called by keyword. metadata: plans a step for all its layers; None if there is none."""

    forward: Callable[..., Any]
    metadata: Callable[..., Any] | None


def by_keyword(operator: Any) -> Callable[..., Any]:
    """Wrap an operator to accept keywords. Omitted arguments are as in NEUTRAL, their default, or None."""
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
    """Load and return the operators of the installed package, once."""
    library = fa3_library()
    assert library is not None, "the table refuses the backend where there is none"
    namespace, path = library
    torch.ops.load_library(str(path))
    ops = getattr(torch.ops, namespace)
    metadata = getattr(ops, "get_scheduler_metadata", None)
    return Operators(by_keyword(ops.fwd), None if metadata is None else by_keyword(metadata))


class Fa3DecodePlan(NamedTuple):
    """Sequences of one row: page tables `[B, W]`, lengths `[B]`, and the metadata of a step by number of heads."""

    pages: Tensor
    lengths: Tensor
    metadata: dict[int, Tensor]


class Fa3Decode(DecodeKernel):
    """Decode rows on a Hopper GPU, in bfloat16. CUDA graphs may capture it: lengths stay on the device, and the number
    of splits follows from shapes. The length of a row's splits, and so its last bits, may depend on other rows."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, rows: DecodeRows) -> Fa3DecodePlan:
        return Fa3DecodePlan(self.cache.readable(rows.pages), rows.lengths.contiguous(), {})

    def run(self, plan: Fa3DecodePlan, inputs: AttentionInputs) -> Tensor | None:
        (rows, heads, dim), keys, cache = inputs.q.shape, inputs.keys, self.cache
        if not rows:
            return inputs.lse
        width, kv_heads = inputs.values.shape[-1], keys.shape[1]
        tokens = plan.pages.shape[1] * cache.page_size
        blocks = kv_heads * cdiv(heads // kv_heads, BLOCK_HEADS)
        splits = min(MAX_SPLITS, cdiv(scaled(132), blocks), max(1, SPLIT_BYTES // (4 * rows * heads * width)))
        shape = dict(max_seqlen_q=1, max_seqlen_k=tokens, num_splits=splits, **_mask(cache))
        if heads not in plan.metadata and (metadata := operators().metadata) is not None:
            plan.metadata[heads] = metadata(
                batch_size=rows,
                num_heads=heads,
                num_heads_k=kv_heads,
                headdim=dim - width if isinstance(cache.spec, Latent) else dim,
                headdim_v=width,
                qkv_dtype=inputs.q.dtype,
                seqused_k=plan.lengths,
                page_size=cache.page_size,
                **shape,
            )
        output: Tensor = operators().forward(
            **_tensors(cache, inputs.q[:, None], inputs, cache.page_size),
            out=inputs.out[:, None],
            seqused_k=plan.lengths,
            page_table=plan.pages,
            softmax_scale=inputs.scale,
            scheduler_metadata=plan.metadata.get(heads),
            **shape,
        )[1]  # `[B, heads, 1]`
        return None if inputs.lse is None else output.squeeze(-1)


class Fa3PromptPlan(NamedTuple):
    """Sequences of several rows. used: rows of each sequence, 0 for a sequence of one row. longest: maximum rows of a
    sequence. rows: bool `[T, 1]`, their rows."""

    pages: Tensor
    starts: Tensor
    used: Tensor
    lengths: Tensor
    longest: int
    page_size: int
    rows: Tensor


class Fa3Prompts(PromptKernel):
    """Prompts on a Hopper GPU, in bfloat16. CUDA graphs may capture it, like `Fa3Decode`."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, rows: PromptRows) -> Fa3PromptPlan:
        # The table refuses merged prompts over dcp, for which `held` counts a rank's tokens.
        starts, total = rows.batch.starts, len(rows.batch.tokens)
        assert starts is not None
        count = starts.diff()
        used = count.where(count > 1, 0)
        at = torch.arange(total, dtype=starts.dtype, device=starts.device)
        sequence = torch.searchsorted(starts[1:], at, right=True).clamp(max=len(count) - 1)
        longest = max((span.rows for span in rows.known or ()), default=total)
        used_rows = ((used[sequence] > 0) & (at < starts[-1]))[:, None]
        pages, lengths = self.cache.readable(rows.pages), rows.batch.lengths
        return Fa3PromptPlan(pages, starts, used, lengths, longest, rows.page_size, used_rows)

    def run(self, plan: Fa3PromptPlan, inputs: AttentionInputs) -> None:
        if not len(inputs.q):
            return
        output = operators().forward(
            **_tensors(self.cache, inputs.q, inputs, plan.page_size),
            out=inputs.out,
            cu_seqlens_q=plan.starts,
            seqused_q=plan.used,
            seqused_k=plan.lengths,
            max_seqlen_q=plan.longest,
            max_seqlen_k=plan.pages.shape[1] * plan.page_size,
            page_table=plan.pages,
            softmax_scale=inputs.scale,
            num_splits=0,
            **_mask(self.cache),
        )[1]  # `[heads, T]`; undefined in rows of other sequences
        if inputs.lse is not None:
            torch.where(plan.rows, output.T, inputs.lse, out=inputs.lse)


def _mask(cache: KVCache) -> dict[str, Any]:
    return dict(is_causal=True, window_size_left=-1 if cache.window is None else cache.window - 1, window_size_right=0)


def _tensors(cache: KVCache, q: Tensor, inputs: AttentionInputs, page_size: int) -> dict[str, Tensor]:
    """Return q, keys and values as the library expects them: latent attention has a second product of queries and
    values."""
    k, v = (plain(x).unflatten(0, (-1, page_size)) for x in (inputs.keys, inputs.values))
    if not isinstance(cache.spec, Latent):
        return dict(q=q, k=k, v=v)
    width = inputs.values.shape[-1]
    return dict(q=q[..., width:], q_v=q[..., :width], k=k[..., width:], v=v)
