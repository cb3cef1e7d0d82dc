"""Decode context parallelism around an attention backend: the ranks of a dcp group hold parts of the tokens.

In sequences of one row, all ranks' heads attend over each rank's tokens, and the outputs are merged. For the other
sequences either the tokens are gathered, or outputs are merged, too (`weft.place.recipes.Prompt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.attention.backend import Absorbed, HeadSplit, LatentSplit
from weft.attention.forward_batch import Batch, PageTables
from weft.attention.sdpa import SDPA, Plan, Prompt
from weft.dcp.group import ContextGroup
from weft.kernels.float8 import FLOAT8, Fp8Vectors, Stored
from weft.kernels.split_k import SplitKPartials
from weft.kv.cache import KVCache, token_bytes
from weft.kv.cache_spec import Latent, PagedKV, Window
from weft.place.recipes import UNIT_BYTES, Merge
from weft.place.recipes import Prompt as PromptValue


@dataclass(frozen=True, slots=True)
class Gathered:
    """Prompts with gathered tokens: the slots of those on this rank, how many each rank has, the plan over all."""

    slots: Tensor
    sizes: tuple[int, ...]
    plan: Any


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """The shared values of a step's layers. here: the plan over the tokens of this rank, without prompts. form: how
    prompts attend, chosen by the first layer, since it knows the width of queries: a plan over the tokens of this rank,
    or `Gathered`.
    """

    batch: Batch
    pages: Tensor
    prompts: tuple[Prompt, ...]
    here: Plan
    form: list[Plan | Gathered] = field(default_factory=list)


class ContextParallel:
    """A `weft.attention.backend.Backend` on one rank of a group, with another one for the tokens of this rank."""

    def __init__(self, local: SDPA, group: ContextGroup):
        self.local, self._group = local, group

    @property
    def cache(self) -> KVCache:
        """The cache of the tokens of this rank."""
        return self.local.cache

    def plan(self, batch: Batch, tables: PageTables) -> ShardedPlan:
        """See `Backend.plan`."""
        group, split = self._group, self.local.split(batch)
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
        if plan.form:
            return plan.form[0]
        group, local = self._group, self.local
        heads = q.shape[1] * (1 if gathered else group.interleave.ranks)
        dim = self.cache.values.shape[-1] if absorbed is None else absorbed.values.shape[1]
        assert not isinstance(self.cache.spec, Window), "its tokens are not sharded"
        token = gathered_bytes(self.cache.spec, self.cache.keys.dtype)
        lengths = [prompt.context + prompt.rows for prompt in plan.prompts]
        merge = Merge(heads, dim, q.element_size())
        what = PromptValue(sum(map(group.interleave.max_length, lengths)), token, 0 if gathered else q[0].nbytes, merge)
        if group.prefill(what, len(q)) == "merge":
            prompts = local.plan_prompts(plan.batch, plan.pages, plan.prompts, group.lengths)
            plan.form.append(replace(plan.here, prompts=prompts))
        else:
            sizes, where = group.interleave.gathered(lengths, plan.pages.device)
            slots = [
                local.slots(plan.pages[prompt.sequence], group.interleave.length(length, group.place))
                for prompt, length in zip(plan.prompts, lengths, strict=True)
            ]
            prompts = local.plan_prompts(plan.batch, plan.pages, plan.prompts, gathered=where)
            plan.form.append(Gathered(torch.cat(slots), sizes, prompts))
        return plan.form[0]

    def _tokens(self, form: Gathered, layer: int) -> tuple[Stored, Stored]:
        """The keys and values of prompts' tokens on all ranks."""
        cache, (heads, dim) = self.cache, self.cache.keys.shape[2:]
        here = [kept[layer].index_select(0, form.slots).flatten(1) for kept in cache.tensors]
        widths = [x.shape[1] for x in here]
        if cache.exponents is not None:
            here = [x.view(torch.uint8) for x in here]
            here.append(here[0].new_empty(len(form.slots), -sum(widths) % UNIT_BYTES))
        rows = self._group.tokens(here[0] if len(here) == 1 else torch.cat(here, dim=1), form.sizes)
        parts = rows[:, : sum(widths)].split(widths, dim=1)
        latent = isinstance(cache.spec, Latent)
        vectors = [x.view(cache.keys.dtype).unflatten(1, (heads, dim)) for x in parts[: 2 - latent]]
        keys, values = vectors[0], vectors[-1][..., : cache.values.shape[-1]]
        if cache.exponents is None:
            return keys, values
        return Fp8Vectors(keys, parts[2 - latent].view(torch.int8)), Fp8Vectors(values, parts[-1].view(torch.int8))


def gathered_bytes(spec: PagedKV | Latent, dtype: torch.dtype) -> int:
    """Bytes of a cached token as ranks gather it. In FP8 exponents follow the values, to whole units of 16 bytes."""
    size = token_bytes(spec, dtype)
    return size if dtype != FLOAT8 else -(-size // UNIT_BYTES) * UNIT_BYTES
