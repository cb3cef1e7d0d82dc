"""Prefill under context parallelism inside a CUDA graph: gather or merge is decided on the device.

A graph holds both recipes of `weft.planner.recipes.Prompt`. Sequences of one row come first and are always merged. The
prompts of a step either gather their tokens or are merged: the device compares the number of tokens that they see with
the limit that the plan gives for the graph's rows. Gathered latent vectors can be expanded, so the limit is higher
where expansion saves enough operations. The exchanges of the other recipe carry no rows, and its kernels find none. All
ranks of a dcp group know the same lengths, so all decide alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.attention.backend import DecodeRows, PromptRows, Queries
from weft.engine.attention.expansion import saved_operations
from weft.engine.attention.forward_batch import Batch
from weft.engine.attention.gathered_tokens import gathered_bytes, row_widths, rows_of, vectors_of
from weft.engine.attention.paged import AttentionPlan, PagedAttention
from weft.engine.kernels.triton.copy_rows import copy_rows
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import Stored
from weft.planner.recipes import QUERIES, TOKENS, Gather
from weft.stream.group import ContextGroup

PAGE = 16
"""Page size of gathered tokens: each sequence begins at a multiple of it."""
BYTE_OPERATIONS = 350
"""Operations of absorbed attention that cost as much as a gathered byte: on an H200 120 TFLOP/s against 340 GB/s."""


class TokenLimits(NamedTuple):
    """Limits on the tokens of a rank that prompts gather.

    Args:
        gathered: maximum tokens that are always gathered.
        expanded: maximum tokens that are gathered if expansion saves enough.
        each: maximum tokens of a call.
        heads: query heads of a rank.
    """

    gathered: int
    expanded: int
    each: int
    heads: int


class QueryCall(NamedTuple):
    """Call that gathers queries of the rows from `begin` to `end`.

    Args:
        live: int32 `[ranks]`, rows that each rank sends.
        heads: int32 `[1]`, number of valid entries of `order`.
        order: int32 `[rows · ranks]`, per row and rank, the place of the rank's heads among the received ones.
    """

    begin: int
    end: int
    live: Tensor
    heads: Tensor
    order: Tensor


class TokenCall(NamedTuple):
    """Call that gathers the tokens of each rank from number `begin` to `end`.

    Args:
        live: int32 `[ranks]`, tokens that each rank sends.
        order: int32 `[places]`, received row of each place; −1: none.
    """

    begin: int
    end: int
    live: Tensor
    order: Tensor


class GatheredTokens(NamedTuple):
    """Tokens that prompts gather, on the device; none are live if prompts are merged.

    Args:
        slots: int32, slots of this rank's tokens, sequence by sequence.
        own: int32 `[1]`, valid entries of `slots`.
        places: int32 `[1]`, places of all ranks' tokens, in the order of each sequence.
        plan: attention over these; its absorbed rows exclude prompts that are expanded.
    """

    slots: Tensor
    own: Tensor
    calls: tuple[TokenCall, ...]
    places: Tensor
    plan: AttentionPlan


class CapturedPrompts:
    """Attention of all sequences of a captured step, shared by its layers.

    Args:
        local: attention over the tokens of this rank.
        pages: page tables of the sequences.
        stored: slots of the rows on this rank.
        query_rows: rows of a call that gathers queries; 0: no transport reads their number on the device, and each call
            has all rows of the graph.
    """

    def __init__(
        self,
        local: PagedAttention,
        group: ContextGroup,
        batch: Batch,
        pages: Tensor,
        stored: Tensor,
        limits: TokenLimits,
        query_rows: int,
    ):
        assert local.prompts.captures_sharded and batch.starts is not None
        self._local, self._group, starts, lengths = local, group, batch.starts, batch.lengths
        counts, live, merged, self._tokens = starts.diff(), starts[-1:], starts, None
        at = torch.arange(len(batch.tokens), dtype=torch.int32, device=starts.device)
        if limits.gathered:
            seen = lengths.where(counts > 1, 0).long()
            held = torch.stack([group.interleave.length(seen, place) for place in range(group.interleave.ranks)])
            capacity, gathers = self._gathers(limits, counts, seen, held.sum(1).amax())
            live = torch.where(gathers, (counts == 1).sum(), live).int()
            seen, held, gathered = seen.where(gathers, 0), held.where(gathers, 0), starts.where(gathers, 0)
            merged, rows = starts.where(~gathers, 0), (at >= live) & (at < starts[-1])
            self._tokens = self._gathered(
                replace(batch, starts=gathered), pages, capacity, limits.each, seen, held, rows
            )
        self._live, first = live.contiguous(), at < live  # the first rows are merged
        decode = local.decode.plan(DecodeRows(pages, group.lengths(lengths).where(counts == 1, 0)))
        batch, page_size = replace(batch, starts=merged), local.cache.page_size
        local_rows = PromptRows(batch, pages, page_size, None, group.lengths, False, False)
        self._plan = AttentionPlan(stored, slice(len(lengths)), decode, local.prompts.plan(local_rows), first)
        self._queries = self._query_calls(at, query_rows) if query_rows else None

    def _gathers(self, limits: TokenLimits, counts: Tensor, seen: Tensor, tokens: Tensor) -> tuple[int, Tensor]:
        """Return the maximum tokens of a rank that may be gathered, and the decision for this step, bool `[]`. counts,
        seen: rows and tokens of each sequence. tokens: prompts' tokens on the rank with most of them."""
        cache, gathers = self._local.cache, tokens <= limits.gathered
        if not self._expands:
            return limits.gathered, gathers
        assert isinstance(cache.spec, Latent)
        saved = saved_operations(cache.spec, counts.long(), seen).where(counts > 1, 0).clamp(min=0).sum() * limits.heads
        token_bytes = gathered_bytes(cache.spec, cache.keys.dtype) * (self._group.interleave.ranks - 1)
        gains = saved > (tokens - limits.gathered) * (token_bytes * BYTE_OPERATIONS)
        return limits.expanded, gathers | (gains & (tokens <= limits.expanded))

    @property
    def _expands(self) -> bool:
        spec = self._local.cache.spec
        return isinstance(spec, Latent) and spec.expanded is not None and self._local.cache.exponents is None

    def _gathered(
        self, batch: Batch, pages: Tensor, limit: int, each: int, seen: Tensor, held: Tensor, rows: Tensor
    ) -> GatheredTokens:
        """limit, each: maximum tokens of a rank, and of a call. seen: int64 `[B]`, tokens of each sequence that are
        gathered. held: `[ranks, B]`, tokens per rank."""
        interleave, device, page_size = self._group.interleave, pages.device, self._local.cache.page_size
        (ranks, sequences), own_lengths = held.shape, held[self._group.place]
        # This rank's tokens, sequence by sequence.
        until = own_lengths.cumsum(0)
        token = torch.arange(limit, device=device)
        sequence = torch.searchsorted(until, token, right=True).clamp(max=sequences - 1)
        token = (token - (until - own_lengths)[sequence]).clamp(max=pages.shape[1] * page_size - 1)
        slots = pages[sequence, token // page_size] * page_size + token % page_size
        # Places of all ranks' tokens in the order of each sequence, and the received rows for them.
        aligned = (seen + PAGE - 1) // PAGE * PAGE
        until = aligned.cumsum(0)
        bases = until - aligned
        capacity = limit * ranks + PAGE * min(sequences, len(rows) // 2)  # a prompt has two rows or more
        place = torch.arange(-(-capacity // PAGE) * PAGE, device=device)
        sequence = torch.searchsorted(until, place, right=True).clamp(max=sequences - 1)
        token = place - bases[sequence]
        owner, totals = interleave.owner(token), held.sum(1)
        number = (held.cumsum(1) - held)[owner, sequence] + interleave.local(token)  # number among its rank's tokens
        calls = []
        for begin in range(0, limit, each):
            end = min(begin + each, limit)
            live = (totals - begin).clamp(0, end - begin)
            row = (live.cumsum(0) - live)[owner] + number - begin
            comes = (token < seen[sequence]) & (number >= begin) & (number < end)
            calls.append(TokenCall(begin, end, live.int(), row.where(comes, -1).int()))
        tables = (bases[:, None] // PAGE + torch.arange(len(place) // PAGE, device=device)).int()
        kernel = self._local.prompts
        prompts = kernel.plan(PromptRows(batch, tables, PAGE, None, may_copy=False, may_expand=self._expands))
        if (absorbed := kernel.absorbed_rows(prompts)) is not None:
            rows = rows & absorbed
        own = totals[self._group.place : self._group.place + 1].int()
        plan = AttentionPlan(slots, slice(sequences), None, prompts, rows)
        return GatheredTokens(slots.int(), own, tuple(calls), until[-1:].int(), plan)

    def _query_calls(self, at: Tensor, each: int) -> tuple[QueryCall, ...]:
        """at: int32 `[T]`, numbers of rows. each: rows of a call."""
        calls, ranks = [], torch.arange(self._group.interleave.ranks, dtype=torch.int32, device=at.device)
        for begin in range(0, len(at), each):
            end = min(begin + each, len(at))
            count = (self._live - begin).clamp(0, end - begin)
            order = at[: end - begin, None] + count * ranks
            calls.append(QueryCall(begin, end, count.repeat(len(ranks)), count * len(ranks), order.flatten()))
        return tuple(calls)

    def attend(self, layer: int, queries: Queries) -> tuple[Tensor, Tensor | None]:
        """See `PagedAttention.attend`."""
        local, group = self._local, self._group
        q = queries.q if queries.gathered else self._all_heads(queries.q)
        part, lse = local.attend(self._plan, layer, replace(queries, q=q, lse=True))
        assert lse is not None
        out, lse = group.merge(part, lse, self._live)
        lse = lse if queries.lse else None
        if (tokens := self._tokens) is None:
            return out, lse
        own = queries.of_rank(group.place, group.interleave.ranks)
        return local.attend_to(tokens.plan, *self._gather(tokens, layer), own, out, lse)

    def _all_heads(self, q: Tensor) -> Tensor:
        """Gather the heads as `ContextGroup.heads`, but only of live rows if a transport reads their number on the
        device."""
        if self._queries is None:
            return self._group.heads(q)
        ranks, (rows, heads, dim) = self._group.interleave.ranks, q.shape
        what, found = Gather(QUERIES, q[0].nbytes, relaid=True, live=True), q.new_empty(rows, ranks * heads, dim)
        own, all_ = q.reshape(rows, heads * dim), found.view(rows * ranks, heads * dim)
        for call in self._queries:
            received = self._group.gather_live(what, own[call.begin : call.end], call.live)
            copy_rows(received, call.order, call.heads, all_[call.begin * ranks : call.end * ranks])
        return found

    def _gather(self, tokens: GatheredTokens, layer: int) -> tuple[Stored, Stored]:
        """Return the keys and values of all ranks' tokens, `[places, …]`, in the order of each sequence."""
        rows, widths = rows_of(self._local.cache, layer), row_widths(self._local.cache)
        own = rows[0].new_empty(len(tokens.slots), sum(widths))
        for stored, to in zip(rows, own.split(widths, dim=1), strict=False):  # padding may follow
            copy_rows(stored, tokens.slots, tokens.own, to)
        what = Gather(TOKENS, own.shape[1] * own.element_size(), live=True)
        found = own.new_empty(len(tokens.calls[0].order), own.shape[1])
        for call in tokens.calls:
            received = self._group.gather_live(what, own[call.begin : call.end], call.live)
            copy_rows(received, call.order, tokens.places, found)
        return vectors_of(self._local.cache, found)
