"""Attention over a paged cache by a pair of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows, PromptKernel, PromptRows, Queries
from weft.engine.attention.forward_batch import Batch, PageTables, RowSplit, split_rows
from weft.engine.kv.cache import KVCache
from weft.kernels.float8 import Stored


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Values that the layers of a step share.

    Args:
        stored: slots of the rows `[T]`, −1 for rows that are not stored.
        rows: as in `RowSplit`.
        decode: plan of the decode kernel for these rows; None: there are none.
        prompts: plan of the prompt kernel for the other rows.
        absorbed_rows: result of `PromptKernel.absorbed_rows`.
        sharded: tokens of other ranks, under dcp.
    """

    stored: Tensor
    rows: slice | Tensor | None
    decode: Any
    prompts: Any = None
    absorbed_rows: Tensor | None = None
    sharded: Any = None


class PagedAttention:
    """Attention of a step's rows over a paged cache. CUDA graphs may capture it if they may capture the kernels."""

    def __init__(self, cache: KVCache, decode: DecodeKernel, prompts: PromptKernel):
        self.cache, self.decode, self.prompts = cache, decode, prompts

    def plan(self, batch: Batch, tables: PageTables) -> AttentionPlan:
        """Return the shared, immutable values of all layers of a step. tables: page tables of the cache's group."""
        pages, slots, page_size = tables.pages, tables.slots, self.cache.page_size
        if batch.starts is not None and batch.spans is None:
            # Only the device knows the sequences of one row: they come first, and the others count as empty here.
            decode = self.decode.plan(DecodeRows(pages, batch.lengths.where(batch.starts.diff() == 1, 0)))
            prompts = self.prompts.plan(PromptRows(batch, pages, page_size, None))
            absorbed_rows = self.prompts.absorbed_rows(prompts)
            return AttentionPlan(slots, slice(len(batch.lengths)), decode, prompts, absorbed_rows)
        split = split_rows(batch)
        if split.rows is None:
            return AttentionPlan(slots, None, self.plan_decode(split, pages, batch.lengths))
        prompts = self.prompts.plan(PromptRows(batch, pages, page_size, split.prompts))
        decode, absorbed_rows = self.plan_decode(split, pages, batch.lengths), self.prompts.absorbed_rows(prompts)
        return AttentionPlan(slots, split.rows, decode, prompts, absorbed_rows)

    def plan_decode(self, split: RowSplit, pages: Tensor, lengths: Tensor) -> Any:
        """Plan the sequences of one row. pages, lengths: int32 `[B, W]` and `[B]`, of all sequences on this rank."""
        if split.sequences is not None:
            pages, lengths = pages[split.sequences], lengths[split.sequences]
            if not len(lengths):
                return None
            if split.longest is not None:
                pages = pages[:, : -(-split.longest // self.cache.page_size)]
        return self.decode.plan(DecodeRows(pages, lengths, split.longest))

    def attend(self, plan: AttentionPlan, layer: int, queries: Queries) -> tuple[Tensor, Tensor | None]:
        """Attend after the layer's rows have been stored. Return the output `[T, heads, value dim]` and, if requested,
        the log-sum-exps (see `AttentionInputs`). layer: index in the cache."""
        return self.attend_to(plan, *self.cache.of_layer(layer), queries)

    def attend_to(
        self,
        plan: AttentionPlan,
        keys: Stored,
        values: Stored,
        queries: Queries,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to keys, values: both `[slots, …]`. out, lse: filled in the planned rows and returned."""
        absorbed, rows = queries.absorbed, plan.absorbed_rows
        q = queries.q if absorbed is None else absorbed.query(queries.q, rows)
        if queries.lse and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        output = out if absorbed is None else None
        output = q.new_empty(*q.shape[:2], values.shape[-1]) if output is None else output
        inputs = AttentionInputs(q, keys, values, queries.scale, output, lse)
        if plan.rows is None:
            found_lse = self.decode.run(plan.decode, inputs)
            lse = found_lse if queries.lse else None
        else:
            # Any sequence of a graph may have one row or several: rows of the latter are zeros before prompts run.
            if plan.decode is not None:
                self._decode_some(plan, plan.rows, inputs)
            ran = self.prompts.run(plan.prompts, inputs)
        if absorbed is None:
            return output, lse
        out = absorbed.output(output, rows, out)
        if rows is not None and absorbed.up is not None:
            self.prompts.expand(ran, inputs, absorbed.first(queries.q), absorbed.up, out)
        return out, lse

    def _decode_some(self, plan: AttentionPlan, rows: slice | Tensor, inputs: AttentionInputs) -> None:
        part, copied = inputs.part(rows), isinstance(rows, Tensor)
        lse = self.decode.run(plan.decode, part)
        if copied:
            inputs.out[rows] = part.out
        if inputs.lse is not None and lse is not None and (copied or lse is not part.lse):
            inputs.lse[rows] = lse
