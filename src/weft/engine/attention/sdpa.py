"""Attention over pages by torch's scaled_dot_product_attention: any device, any dtype, FP8 caches too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows, PromptKernel, PromptRows
from weft.engine.attention.expansion import MAX_ELEMENTS, pays
from weft.engine.attention.forward_batch import slots_of, split_rows
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import take


class TorchDecode(DecodeKernel):
    """Gathers the tokens that rows see and calls torch once, padded to the longest sequence."""

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, rows: DecodeRows) -> tuple[Tensor, Tensor, Tensor]:
        pages, lengths = rows.pages, rows.lengths[:, None]
        if rows.longest is not None:
            pages = pages[:, : -(-rows.longest // self.cache.page_size)]
        slots, alive = slots_of(pages, self.cache.page_size), lengths > 0
        mask = _sees(torch.arange(slots.shape[1], device=slots.device), lengths - 1, self.cache.window)
        if len(slots):
            # A masked token is multiplied too, and 0 · NaN is NaN: read the row's own token instead, which has been
            # written.
            own = slots.gather(1, (lengths - 1).clamp(min=0).long()).where(alive, 0)
            slots = torch.where(mask, slots, own)
        return slots, mask[:, None, None], alive[:, None]

    def run(self, plan: tuple[Tensor, Tensor, Tensor], inputs: AttentionInputs) -> Tensor | None:
        if not len(inputs.q):
            return inputs.lse
        (slots, mask, alive), q, scale = plan, inputs.q[:, None], inputs.scale
        keys, values = (take(x, slots, q.dtype) for x in (inputs.keys, inputs.values))
        inputs.out.copy_(_attend(q, keys, values, mask, scale)[:, 0].where(alive, 0.0))
        return None if inputs.lse is None else _lse(q, keys, mask, scale)[:, 0]


@dataclass(frozen=True)
class SeenTokens:
    """Tokens of a sequence from `begin` on that a prompt's rows see. slots: int32 `[T]`. limits: int32 `[rows]`; a row
    sees the first `limits` of them, or the last `window` of these."""

    slots: Tensor
    limits: Tensor
    window: int | None
    begin: int

    @cached_property
    def mask(self) -> Tensor:
        """The rows' mask, bool `[rows, T]`."""
        tokens = torch.arange(len(self.slots), device=self.slots.device)
        return _sees(tokens, self.limits[:, None] - 1, self.window)


class TorchPromptPlan(NamedTuple):
    """Prompts that attend to cached or to expanded vectors: their rows and the tokens that they see."""

    cached: list[tuple[slice, SeenTokens]]
    expanded: list[tuple[slice, SeenTokens]]
    absorbed_rows: Tensor | None


class TorchPrompts(PromptKernel):
    """Gathers the tokens that a prompt sees and calls torch, prompt by prompt."""

    linear: Callable[..., Tensor] = staticmethod(F.linear)

    def __init__(self, cache: KVCache):
        self.cache = cache

    def plan(self, rows: PromptRows) -> TorchPromptPlan:
        window, spec, limits = self.cache.window, self.cache.spec, rows.limits
        latent = spec if rows.may_expand and isinstance(spec, Latent) and spec.expanded is not None else None
        plan = TorchPromptPlan([], [], None)
        for first, count, context, sequence in split_rows(rows.batch).prompts if rows.known is None else rows.known:
            at, tokens = slice(first, first + count), context + count
            tokens = tokens if rows.held is None else rows.held(tokens)
            slots = slots_of(rows.pages[sequence], rows.page_size, tokens)
            begin = 0 if window is None else max(0, context - window + 1)
            seen = SeenTokens(slots[begin:], limits[at] - begin, window, begin)
            expands = latent is not None and pays(latent, count, tokens)
            (plan.expanded if expands else plan.cached).append((at, seen))
        if not plan.expanded:
            return plan
        absorbed_rows = torch.ones(len(limits), dtype=torch.bool, device=limits.device)
        for at, *_ in plan.expanded:
            absorbed_rows[at] = False
        return plan._replace(absorbed_rows=absorbed_rows)

    def run(self, plan: TorchPromptPlan, inputs: AttentionInputs) -> TorchPromptPlan:
        lse = inputs.lse
        for at, seen in plan.cached:
            if len(seen.slots):
                self.attend(inputs.part(at), seen, seen.slots)
            else:  # all tokens are on other ranks
                assert lse is not None
                lse[at] = float("-inf")
        return plan

    def attend(self, inputs: AttentionInputs, seen: SeenTokens, slots: Tensor | None) -> None:
        """Fill the output of a prompt's rows. slots: of tokens in keys and values; None: these are the tokens'."""
        (q, keys, values), scale = (inputs.q, inputs.keys, inputs.values), inputs.scale
        if slots is not None:
            keys, values = (take(x, slots, q.dtype) for x in (keys, values))
        assert isinstance(keys, Tensor) and isinstance(values, Tensor)
        inputs.out.copy_(_attend(q[None], keys[None], values[None], seen.mask, scale)[0])
        if inputs.lse is not None:
            inputs.lse.copy_(_lse(q[None], keys[None], seen.mask, scale)[0])

    def absorbed_rows(self, plan: TorchPromptPlan) -> Tensor | None:
        return plan.absorbed_rows

    def expand(self, plan: TorchPromptPlan, inputs: AttentionInputs, plain: Tensor, up: Tensor, out: Tensor) -> None:
        width, n = up.shape[2], plain.shape[2]
        for at, seen in plan.expanded:
            latent, rotated = take(inputs.keys, seen.slots, out.dtype).tensor_split([width], dim=-1)
            q = torch.cat((plain[at], inputs.q[at, :, width:]), dim=-1)
            heads = max(1, MAX_ELEMENTS // (len(seen.slots) * up.shape[1]))
            for i in range(0, q.shape[1], heads):
                part = up[i : i + heads]
                both = self.linear(latent[:, 0], part.flatten(0, 1)).unflatten(1, part.shape[:2])
                own, values = both.tensor_split([n], dim=-1)
                keys = torch.cat((own, rotated.expand(-1, len(part), -1)), dim=-1)
                of_heads = slice(i, i + heads)
                shares = AttentionInputs(q[:, of_heads], keys, values, inputs.scale, out[at, of_heads], None)
                self.attend(shares, seen, None)


def _sees(position: Tensor, row: Tensor, window: int | None) -> Tensor:
    """Return the mask of tokens that a row sees."""
    seen = position <= row
    return seen if window is None else seen & (position > row - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with `[B, rows, heads, D]` to `[B, tokens, kv_heads, D]`."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _lse(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute the log-sum-exps, float32 `[B, rows, heads]`, which torch's attention does not return."""
    wide = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("brhd,bthd->bhrt", q.float(), wide) * scale
    return scores.masked_fill(~mask, float("-inf")).logsumexp(-1).transpose(1, 2)
