"""Decode context parallelism around an attention backend: each rank of a dcp group holds a part of the tokens.

For sequences of one row, all ranks' heads attend over each rank's tokens, and the outputs are merged. For prompts,
either the tokens are gathered or the outputs are merged too (`weft.planner.recipes.Prompt`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.backend import PromptRows, Queries
from weft.engine.attention.expansion import MAX_TOKENS
from weft.engine.attention.forward_batch import Batch, PageTables, PromptSpan, slots_of, split_rows
from weft.engine.attention.gathered_tokens import gathered_bytes, row_widths, rows_of, vectors_of
from weft.engine.attention.paged import AttentionPlan, PagedAttention
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Window
from weft.kernels.float8 import Stored
from weft.planner.recipes import QUERIES, TOKENS, Gather, Merge
from weft.planner.recipes import Prompt as PromptValue
from weft.stream.group import ContextGroup

if TYPE_CHECKING:
    from weft.engine.attention.captured_prompts import CapturedPrompts


class Gathered(NamedTuple):
    """Prompts with gathered tokens: slots of this rank's tokens, tokens of each rank, and the plan over all tokens."""

    slots: Tensor
    sizes: tuple[int, ...]
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class ShardedTokens:
    """Data of a plan that covers only this rank's tokens, without prompts.

    Args:
        batch: the step.
        pages: page tables of its sequences.
        prompts: sequences of several rows; None: the host does not know them, as in a CUDA graph.
        form: attention of the prompts, chosen by the first layer because it knows the width of queries: a plan over
            this rank's tokens, or `Gathered`; in a graph `CapturedPrompts`, as the device chooses.
    """

    batch: Batch
    pages: Tensor
    prompts: tuple[PromptSpan, ...] | None
    form: list[Any] = field(default_factory=list)


class ContextParallel:
    """`PagedAttention` on one rank of a group. local: attention over the tokens of this rank."""

    def __init__(self, local: PagedAttention, group: ContextGroup):
        self.local, self._group = local, group

    @property
    def cache(self) -> KVCache:
        """Cache of this rank's tokens."""
        return self.local.cache

    def plan(self, batch: Batch, tables: PageTables) -> AttentionPlan:
        """See `PagedAttention.plan`."""
        group, pages = self._group, tables.pages
        if self.local.prompts.captures_sharded and batch.starts is not None and batch.spans is None:
            sharded, rows = ShardedTokens(batch, pages, None), slice(len(batch.lengths))
            return AttentionPlan(group.slots(tables.slots), rows, None, sharded=sharded)
        split = split_rows(batch)
        if split.longest is not None:
            split = replace(split, longest=group.interleave.max_length(split.longest))
        stored, lengths = group.slots(tables.slots), group.lengths(batch.lengths)
        sharded, decode = ShardedTokens(batch, pages, split.prompts), self.local.plan_decode(split, pages, lengths)
        return AttentionPlan(stored, split.rows, decode, sharded=sharded)

    def attend(self, plan: AttentionPlan, layer: int, queries: Queries) -> tuple[Tensor, Tensor | None]:
        """See `PagedAttention.attend`."""
        if plan.rows is None:
            return self._merge(plan, layer, queries)
        if plan.sharded.prompts is None:
            return self._captured(plan, queries).attend(layer, queries)
        form = self._form_of_prompts(plan, queries)
        if isinstance(form, AttentionPlan):
            return self._merge(form, layer, queries)
        own_queries = queries.of_rank(self._group.place, self._group.interleave.ranks)
        out, lse = self.local.attend_to(form.plan, *self._tokens(form, layer), own_queries)
        if plan.decode is not None:
            one_row = replace(queries, q=queries.q[plan.rows])
            out[plan.rows], total = self._merge(replace(plan, rows=None), layer, one_row)
            if lse is not None and total is not None:
                lse[plan.rows] = total
        return out, lse

    def _merge(self, plan: AttentionPlan, layer: int, queries: Queries) -> tuple[Tensor, Tensor | None]:
        """Attend over the tokens of all ranks. plan: attention of all ranks' heads over this rank's tokens."""
        q = queries.q if queries.gathered else self._group.heads(queries.q)
        out, lse = self.local.attend(plan, layer, replace(queries, q=q, lse=True))
        assert lse is not None
        out, lse = self._group.merge(out, lse)
        return out, lse if queries.lse else None

    def _form_of_prompts(self, plan: AttentionPlan, queries: Queries) -> AttentionPlan | Gathered:
        """Choose the attention of the step's prompts and build its data. All ranks of the group choose the same."""
        step: ShardedTokens = plan.sharded
        if step.form:
            return step.form[0]
        group, kernel, pages, known = self._group, self.local.prompts, step.pages, step.prompts or ()
        page_size, lengths = self.cache.page_size, [prompt.context + prompt.rows for prompt in known]
        seen = sum(map(group.interleave.max_length, lengths))
        if group.prefill(self._seen(seen, queries), len(queries.q)) == "merge":
            rows = PromptRows(step.batch, pages, page_size, known, group.lengths, False, False)
            step.form.append(replace(plan, prompts=kernel.plan(rows)))
        else:
            sizes, where = group.interleave.gathered(lengths, pages.device)
            slots = [
                slots_of(pages[prompt.sequence], page_size, group.interleave.length(length, group.place))
                for prompt, length in zip(known, lengths, strict=True)
            ]
            pages = one_token_pages(pages, known, where)
            rows = PromptRows(step.batch, pages, 1, known, may_copy=False, may_expand=False)
            over_all = replace(plan, decode=None, prompts=kernel.plan(rows))
            step.form.append(Gathered(torch.cat(slots), sizes, over_all))
        return step.form[0]

    def _captured(self, plan: AttentionPlan, queries: Queries) -> CapturedPrompts:
        """Build the attention of prompts in a captured step, for any prompts that fit its tensors. All ranks agree."""
        from weft.engine.attention.captured_prompts import CapturedPrompts, TokenLimits  # a CPU need not have Triton

        step: ShardedTokens = plan.sharded
        if step.form:
            return step.form[0]
        group, rows = self._group, len(queries.q)
        tokens = min(step.pages.numel() * self.cache.page_size, MAX_TOKENS // group.interleave.ranks)
        what = self._seen(tokens, queries)
        rows_a_call = group.rows_of_call(Gather(TOKENS, what.token_bytes, live=True), tokens)

        def merges(seen: int) -> bool:
            return group.prefill(replace(what, seen=seen), rows) == "merge"

        limit = bisect.bisect_left(range(1, tokens + 1), True, key=merges) if rows_a_call else 0
        limits, calls = TokenLimits(limit, tokens, rows_a_call, what.merge.heads // group.interleave.ranks), 0
        if not queries.gathered:
            calls = group.rows_of_call(Gather(QUERIES, what.query_bytes, relaid=True, live=True), rows)
        form = CapturedPrompts(self.local, group, step.batch, step.pages, plan.stored, limits, calls)
        step.form.append(form)
        return form

    def _seen(self, seen: int, queries: Queries) -> PromptValue:
        """Describe an exchange of prompts with rows that see `seen` tokens per rank."""
        q, absorbed = queries.q, queries.absorbed
        heads = q.shape[1] * (1 if queries.gathered else self._group.interleave.ranks)
        dim = self.cache.values.shape[-1] if absorbed is None else absorbed.values.shape[1]
        assert not isinstance(self.cache.spec, Window), "its tokens are not sharded"
        token = gathered_bytes(self.cache.spec, self.cache.keys.dtype)
        return PromptValue(seen, token, 0 if queries.gathered else q[0].nbytes, Merge(heads, dim, q.element_size()))

    def _tokens(self, form: Gathered, layer: int) -> tuple[Stored, Stored]:
        """Gather the keys and values of prompts' tokens from all ranks."""
        local = [x.index_select(0, form.slots) for x in rows_of(self.cache, layer)]
        padding = row_widths(self.cache)[len(local) :]
        local += [local[0].new_empty(len(form.slots), width) for width in padding]
        rows = self._group.tokens(local[0] if len(local) == 1 else torch.cat(local, dim=1), form.sizes)
        return vectors_of(self.cache, rows)


def one_token_pages(pages: Tensor, prompts: Sequence[PromptSpan], slots: Sequence[Tensor]) -> Tensor:
    """Return tables shaped like `pages`, of one-token pages at the `slots` of the `prompts`' tokens."""
    tables = pages.new_zeros(len(pages), max(map(len, slots)))
    for prompt, where in zip(prompts, slots, strict=True):
        tables[prompt.sequence, : len(where)] = where
    return tables
