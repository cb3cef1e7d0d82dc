"""Steps with prompts over sharded tokens inside a CUDA graph: what eager steps ask the host is decided on the device.

A graph has both recipes of `weft.planner.recipes.Prompt`. Sequences of one row are always merged, and come first. The
prompts of a step either gather their tokens, or are merged with them: the device compares the tokens that they see with
the number up to which the plan gathers for as many rows as the graph has. Latent vectors that are gathered can be
expanded, so more are gathered where that saves enough operations. The exchanges of the other recipe carry no rows then,
and its kernels find none. All ranks of a dcp group know the same lengths, so all decide alike.
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
"""Of the gathered tokens: each sequence begins at a multiple of it."""
BYTE_OPERATIONS = 350
"""Operations of absorbed attention that take as long as a gathered byte: on an H200 120 TFLOP/s against 340 GB/s."""


class TokenLimits(NamedTuple):
    """How many tokens of a rank prompts gather.

    gathered: up to so many always. expanded: up to so many where expansion saves enough. each: of a call. heads: of
    queries on a rank.
    """

    gathered: int
    expanded: int
    each: int
    heads: int


class QueryCall(NamedTuple):
    """One of the calls that gather queries: of the rows from `begin` to `end`.

    live: int32 `[ranks]`, how many of them each rank sends. heads: int32 `[1]`, how many rows of `order` count. order:
    int32 `[rows · ranks]`, for each row and rank the place of the rank's heads among those received.
    """

    begin: int
    end: int
    live: Tensor
    heads: Tensor
    order: Tensor


class TokenCall(NamedTuple):
    """One of the calls that gather tokens: those of each rank from number `begin` to `end`.

    live: int32 `[ranks]`, how many of them each rank sends. order: int32 `[places]`, the received row of each place;
    −1: none.
    """

    begin: int
    end: int
    live: Tensor
    order: Tensor


class GatheredTokens(NamedTuple):
    """The tokens that prompts gather, on the device; none are live where prompts are merged.

    slots: int32, of this rank's tokens, one sequence after the other. own: int32 `[1]`, how many of these are live.
    places: int32 `[1]`, how many places all ranks' tokens take, in the order of each sequence. plan: over these; its
    absorbed rows are the rows that attend so, without rows of prompts that are expanded.
    """

    slots: Tensor
    own: Tensor
    calls: tuple[TokenCall, ...]
    places: Tensor
    plan: AttentionPlan


class CapturedPrompts:
    """How all sequences of a captured step attend, for the step's layers.

    local: attention over the tokens of this rank. pages: tables of the sequences. stored: where this rank stores rows.
    query_rows: of a call that gathers queries; 0: no transport reads their number on the device, and each call has as
    many as the graph.
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
        here = PromptRows(batch, pages, page_size, None, group.lengths, False, False)
        self._plan = AttentionPlan(stored, slice(len(lengths)), decode, local.prompts.plan(here), first)
        self._queries = self._query_calls(at, query_rows) if query_rows else None

    def _gathers(self, limits: TokenLimits, counts: Tensor, seen: Tensor, tokens: Tensor) -> tuple[int, Tensor]:
        """How many tokens of a rank may be gathered at all, and whether these are, bool `[]`.

        counts, seen: rows and tokens of each sequence; tokens: of all prompts on the rank that has the largest number.
        """
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
        """limit, each: tokens of a rank, and of a call. seen, held: tokens of each sequence that are gathered, int64
        `[B]`, and those of each rank, `[ranks, B]`."""
        interleave, device, page_size = self._group.interleave, pages.device, self._local.cache.page_size
        (ranks, sequences), mine = held.shape, held[self._group.place]
        # This rank's tokens, one sequence after the other.
        until = mine.cumsum(0)
        token = torch.arange(limit, device=device)
        sequence = torch.searchsorted(until, token, right=True).clamp(max=sequences - 1)
        token = (token - (until - mine)[sequence]).clamp(max=pages.shape[1] * page_size - 1)
        slots = pages[sequence, token // page_size] * page_size + token % page_size
        # The places of all ranks' tokens in the order of each sequence, and the received rows that they take.
        aligned = (seen + PAGE - 1) // PAGE * PAGE
        until = aligned.cumsum(0)
        bases = until - aligned
        capacity = limit * ranks + PAGE * min(sequences, len(rows) // 2)  # as a prompt has two rows or more
        place = torch.arange(-(-capacity // PAGE) * PAGE, device=device)
        sequence = torch.searchsorted(until, place, right=True).clamp(max=sequences - 1)
        token = place - bases[sequence]
        owner, totals = interleave.owner(token), held.sum(1)
        number = (held.cumsum(1) - held)[owner, sequence] + interleave.local(token)  # among those of its rank
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
        """at: int32 `[T]`, the numbers of rows. each: rows of a call."""
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
        """As `ContextGroup.heads`, of live rows alone where transports take their number."""
        if self._queries is None:
            return self._group.heads(q)
        ranks, (rows, heads, dim) = self._group.interleave.ranks, q.shape
        what, found = Gather(QUERIES, q[0].nbytes, relaid=True, live=True), q.new_empty(rows, ranks * heads, dim)
        own, all_ = q.reshape(rows, heads * dim), found.view(rows * ranks, heads * dim)
        for call in self._queries:
            came = self._group.gather_live(what, own[call.begin : call.end], call.live)
            copy_rows(came, call.order, call.heads, all_[call.begin * ranks : call.end * ranks])
        return found

    def _gather(self, tokens: GatheredTokens, layer: int) -> tuple[Stored, Stored]:
        """The keys and values of all ranks' tokens, `[places, …]`, in the order of each sequence."""
        rows, widths = rows_of(self._local.cache, layer), row_widths(self._local.cache)
        own = rows[0].new_empty(len(tokens.slots), sum(widths))
        for kept, to in zip(rows, own.split(widths, dim=1), strict=False):  # behind them there may be padding
            copy_rows(kept, tokens.slots, tokens.own, to)
        what = Gather(TOKENS, own.shape[1] * own.element_size(), live=True)
        found = own.new_empty(len(tokens.calls[0].order), own.shape[1])
        for call in tokens.calls:
            came = self._group.gather_live(what, own[call.begin : call.end], call.live)
            copy_rows(came, call.order, tokens.places, found)
        return vectors_of(self._local.cache, found)
