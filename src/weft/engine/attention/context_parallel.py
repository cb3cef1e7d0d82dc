"""Decode context parallelism around an attention backend: the ranks of a dcp group hold parts of the tokens.

In sequences of one row, all ranks' heads attend over each rank's tokens, and the outputs are merged. For the other
sequences either the tokens are gathered, or outputs are merged, too (`weft.planner.recipes.Prompt`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.engine.attention.backend import Absorbed, HeadSplit, LatentSplit
from weft.engine.attention.expansion import MAX_TOKENS
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.attention.gathered_tokens import gathered_bytes, row_widths, rows_of, vectors_of
from weft.engine.attention.sdpa import SDPA, Plan, Prompt
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Window
from weft.kernels.float8 import Stored
from weft.planner.recipes import QUERIES, TOKENS, Gather, Merge
from weft.planner.recipes import Prompt as PromptValue
from weft.stream.group import ContextGroup

if TYPE_CHECKING:
    from weft.engine.attention.captured_prompts import CapturedPrompts


@dataclass(frozen=True, slots=True)
class Gathered:
    """Prompts with gathered tokens: the slots of those on this rank, how many each rank has, the plan over all."""

    slots: Tensor
    sizes: tuple[int, ...]
    plan: Any


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """The shared values of a step's layers. here: the plan over the tokens of this rank, without prompts. captured: the
    host does not know the prompts, as in a CUDA graph. form: how prompts attend, chosen by the first layer, since it
    knows the width of queries: a plan over the tokens of this rank, or `Gathered`; where captured, the device chooses.
    """

    batch: Batch
    pages: Tensor
    prompts: tuple[Prompt, ...]
    here: Plan
    captured: bool = False
    form: list[Plan | Gathered | CapturedPrompts] = field(default_factory=list)


class ContextParallel:
    """A `weft.engine.attention.backend.Backend` on one rank of a group, with another one for the tokens of this
    rank."""

    def __init__(self, local: SDPA, group: ContextGroup):
        self.local, self._group = local, group

    @property
    def cache(self) -> KVCache:
        """The cache of the tokens of this rank."""
        return self.local.cache

    def plan(self, batch: Batch, tables: PageTables) -> ShardedPlan:
        """See `Backend.plan`."""
        group = self._group
        if self.local.captures_prompts and batch.starts is not None and batch.spans is None:
            stored = self.local.storable(group.slots(tables.slots))
            return ShardedPlan(batch, tables.pages, (), Plan(stored, slice(len(batch.lengths)), None), captured=True)
        split = self.local.split(batch)
        if split.longest is not None:
            split = replace(split, longest=group.interleave.max_length(split.longest))
        here = PageTables(tables.pages, group.slots(tables.slots))
        plan = self.local.plan_rows(split, here, group.lengths(batch.lengths))
        return ShardedPlan(batch, tables.pages, split.prompts, plan)

    def store(self, plan: ShardedPlan, layer: int, k: Tensor, v: Tensor | None) -> None:
        """See `Backend.store`."""
        self.local.store(plan.here, layer, k, v)

    def store_projected(self, plan: ShardedPlan, layer: int, qkv: Tensor | SplitKPartials, heads: HeadSplit) -> Tensor:
        """See `Backend.store_projected`."""
        return self.local.store_projected(plan.here, layer, qkv, heads)

    def store_latent(
        self, plan: ShardedPlan, layer: int, q: Tensor, kv: Tensor, parts: LatentSplit, absorbed: Absorbed
    ) -> tuple[Tensor, Absorbed]:
        """See `Backend.store_latent`. Queries are absorbed where this rank has all heads; others travel before that."""
        if plan.here.rows is None and parts.gathered:
            return self.local.store_latent(plan.here, layer, q, kv, parts, absorbed)
        return self.local.store_latent(plan.here, layer, q, kv, parts, Absorbed(None, absorbed.values))[0], absorbed

    def attend(
        self,
        plan: ShardedPlan,
        layer: int,
        q: Tensor,
        scale: float,
        lse: bool,
        absorbed: Absorbed | None,
        gathered: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.attend`."""
        local, group, here = self.local, self._group, plan.here
        more = lse, absorbed, gathered
        if here.rows is None:
            return self._merge(partial(local.decode, here.decode, layer), q, scale, *more)
        if plan.captured:
            return self._captured(plan, q, absorbed, gathered).attend(layer, q, scale, *more)
        form = self._form_of_prompts(plan, q, absorbed, gathered)
        if isinstance(form, Plan):

            def attend(query: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
                return local.attend(form, layer, query, scale, lse, None, False)

            return self._merge(attend, q, scale, *more)
        place, ranks = group.place, group.interleave.ranks
        query = q.chunk(ranks, dim=1)[place] if gathered else q
        own = None if absorbed is None else absorbed.part(place, ranks)
        query = query if own is None else own.query(query)
        out, sums = local.unfilled(query, lse)
        local.prompts(form.plan, query, *self._tokens(form, layer), scale, out, sums)
        out = out if own is None else own.output(out)
        if here.decode is not None:
            decode = partial(local.decode, here.decode, layer)
            out[here.rows], total = self._merge(decode, q[here.rows], scale, *more)
            if sums is not None and total is not None:
                sums[here.rows] = total
        return out, sums

    def _merge(
        self,
        attend: Callable[[Tensor, float, bool], tuple[Tensor, Tensor | None]],
        q: Tensor,
        scale: float,
        lse: bool,
        absorbed: Absorbed | None,
        gathered: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over the tokens of all ranks. attend: over this rank's, with the heads of all ranks."""
        q = q if gathered else self._group.heads(q)
        out, sums = attend(q if absorbed is None else absorbed.query(q), scale, True)
        assert sums is not None
        out, sums = self._group.merge(out if absorbed is None else absorbed.output(out), sums)
        return out, sums if lse else None

    def _form_of_prompts(
        self, plan: ShardedPlan, q: Tensor, absorbed: Absorbed | None, gathered: bool
    ) -> Plan | Gathered:
        """How the step's prompts attend, and the data for it. All ranks of the group choose the same."""
        form = plan.form[0] if plan.form else None
        if isinstance(form, Plan | Gathered):
            return form
        group, local = self._group, self.local
        lengths = [prompt.context + prompt.rows for prompt in plan.prompts]
        seen = sum(map(group.interleave.max_length, lengths))
        if group.prefill(self._seen(seen, q, absorbed, gathered), len(q)) == "merge":
            prompts = local.plan_prompts(plan.batch, plan.pages, plan.prompts, group.lengths)
            form = replace(plan.here, prompts=prompts)
        else:
            sizes, where = group.interleave.gathered(lengths, plan.pages.device)
            slots = [
                local.slots(plan.pages[prompt.sequence], group.interleave.length(length, group.place))
                for prompt, length in zip(plan.prompts, lengths, strict=True)
            ]
            prompts = local.plan_prompts(plan.batch, plan.pages, plan.prompts, gathered=where)
            form = Gathered(torch.cat(slots), sizes, prompts)
        plan.form.append(form)
        return form

    def _captured(self, plan: ShardedPlan, q: Tensor, absorbed: Absorbed | None, gathered: bool) -> CapturedPrompts:
        """How the prompts of a captured step attend: for any that fit its tensors, and alike on all ranks."""
        from weft.engine.attention.captured_prompts import CapturedPrompts, TokenLimits  # a CPU need not have Triton

        form = plan.form[0] if plan.form else None
        if isinstance(form, CapturedPrompts):
            return form
        group, rows = self._group, len(q)
        tokens = min(plan.pages.numel() * self.cache.page_size, MAX_TOKENS // group.interleave.ranks)
        what = self._seen(tokens, q, absorbed, gathered)
        each = group.rows_of_call(Gather(TOKENS, what.token_bytes, live=True), tokens)

        def merges(seen: int) -> bool:
            return group.prefill(replace(what, seen=seen), rows) == "merge"

        limit = bisect.bisect_left(range(1, tokens + 1), True, key=merges) if each else 0
        limits = TokenLimits(limit, tokens, each, what.merge.heads // group.interleave.ranks)
        calls = 0 if gathered else group.rows_of_call(Gather(QUERIES, what.query_bytes, relaid=True, live=True), rows)
        form = CapturedPrompts(self.local, group, plan.batch, plan.pages, plan.here.stored, limits, calls)
        plan.form.append(form)
        return form

    def _seen(self, seen: int, q: Tensor, absorbed: Absorbed | None, gathered: bool) -> PromptValue:
        """What prompts see, of so many tokens on a rank, to rows with such queries."""
        heads = q.shape[1] * (1 if gathered else self._group.interleave.ranks)
        dim = self.cache.values.shape[-1] if absorbed is None else absorbed.values.shape[1]
        assert not isinstance(self.cache.spec, Window), "its tokens are not sharded"
        token = gathered_bytes(self.cache.spec, self.cache.keys.dtype)
        return PromptValue(seen, token, 0 if gathered else q[0].nbytes, Merge(heads, dim, q.element_size()))

    def _tokens(self, form: Gathered, layer: int) -> tuple[Stored, Stored]:
        """The keys and values of prompts' tokens on all ranks."""
        here = [x.index_select(0, form.slots) for x in rows_of(self.cache, layer)]
        padding = row_widths(self.cache)[len(here) :]
        here += [here[0].new_empty(len(form.slots), width) for width in padding]
        rows = self._group.tokens(here[0] if len(here) == 1 else torch.cat(here, dim=1), form.sizes)
        return vectors_of(self.cache, rows)
