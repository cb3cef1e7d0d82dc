"""An attention backend that Weft does not know, as a plugin: two kernels and a row, from the definition of attention.

It reads nothing back from the device, so CUDA graphs could capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows, PromptKernel, PromptRows
from weft.engine.attention.backend_registry import BackendEntry, Needs
from weft.engine.attention.forward_batch import slots_of
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent

MADE: list[ToyDecode | ToyPrompts] = []


def attend(inputs: AttentionInputs, slots: Tensor, limits: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps of rows that see the first `limits` `[T]` of the tokens at slots `[T, tokens]`."""
    position = torch.arange(slots.shape[1], device=slots.device)
    seen = (position < limits[:, None]) & (position >= limits[:, None] - (window or len(position)))
    groups = inputs.q.shape[1] // inputs.keys.shape[1]
    keys, values = (
        x[slots.where(seen, 0)].where(seen[..., None, None], 0.0).repeat_interleave(groups, 2)
        for x in (inputs.keys, inputs.values)
    )
    scores = torch.einsum("rhd,rthd->rht", inputs.q, keys) * inputs.scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return torch.einsum("rht,rthd->rhd", scores.softmax(-1).nan_to_num(0.0), values), scores.logsumexp(-1)


class ToyDecode(DecodeKernel):
    def __init__(self, cache: KVCache):
        self.cache = cache
        MADE.append(self)

    def plan(self, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        return slots_of(rows.pages, self.cache.page_size), rows.lengths

    def run(self, plan: tuple[Tensor, Tensor], inputs: AttentionInputs) -> Tensor:
        out, lse = attend(inputs, *plan, self.cache.window)
        inputs.out.copy_(out)
        return lse


class ToyPrompts(PromptKernel):
    captures_sharded = True

    def __init__(self, cache: KVCache):
        self.cache = cache
        MADE.append(self)

    def plan(self, rows: PromptRows) -> tuple[Tensor, Tensor, Tensor]:
        starts, at = rows.batch.starts, torch.arange(len(rows.batch.tokens), device=rows.pages.device)
        assert starts is not None
        sequence = (torch.searchsorted(starts, at, right=True) - 1).clamp(max=len(rows.pages) - 1)
        theirs = (starts.diff()[sequence] > 1) & (at < starts[-1])
        return slots_of(rows.pages, rows.page_size)[sequence], rows.limits.where(theirs, 0), theirs

    def run(self, plan: tuple[Tensor, Tensor, Tensor], inputs: AttentionInputs) -> None:
        *where, theirs = plan
        for found, to in zip(attend(inputs, *where, self.cache.window), (inputs.out, inputs.lse), strict=True):
            if to is not None:
                to.copy_(found.where(theirs.view(-1, *[1] * (to.dim() - 1)), to))


def lacks(needs: Needs) -> str | None:
    latent = any(isinstance(spec, Latent) for spec in needs.caches())
    return "has no latent caches: take another" if latent else None


ATTENTION_BACKENDS = (BackendEntry("toy", "any", ToyDecode, ToyPrompts, lacks),)
