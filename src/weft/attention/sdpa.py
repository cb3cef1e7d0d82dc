"""Attention over pages by torch's scaled_dot_product_attention; any device, any dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.attention.backend import Absorbed, HeadSplit, LatentSplit
from weft.attention.forward_batch import Batch, PageTables
from weft.dcp.group import ContextGroup
from weft.kernels.split_k import SplitKPartials
from weft.kv.cache import KVCache
from weft.kv.cache_spec import Latent
from weft.place.recipes import Merge, Prompt


class SDPA:
    """A `weft.attention.backend.Backend` that gathers the tokens a row sees and calls torch.

    Sequences of one row are attended in one call, padded to the longest; the others one by one.

    group: where the ranks of a dcp group hold parts of the tokens. Rows of one a sequence then attend with all ranks'
    heads over the tokens here, and are merged. For the others either the tokens are gathered, or they are merged too:
    see `weft.place.recipes.Prompt`.
    """

    def __init__(self, cache: KVCache, group: ContextGroup | None = None):
        self.cache, self._group = cache, group

    def _begin_plan(self, batch: Batch, tables: PageTables) -> Tensor:
        """Gives how many tokens of each sequence lie here."""
        group = self._group
        self._stored = tables.slots if group is None else group.slots(tables.slots)
        self._prefills: list[tuple[int, int, Tensor, Tensor]] = []  # first row, rows, where what they see lies, mask
        self._write: Tensor | None = None  # where rows are stored, which only layers that do not `project` ask for
        self._single: Tensor | slice | None = None  # the rows of the sequences that have one; None: all rows
        self._singles = 0
        self._gathered: tuple[Tensor, tuple[int, ...]] | None = None  # of prompts: slots here, tokens of each rank
        self._prefill: str | None = None  # chosen by the first layer, which knows how wide queries are
        return batch.lengths if group is None else group.lengths(batch.lengths)

    def plan(self, batch: Batch, tables: PageTables) -> None:
        """See `Backend.plan`."""
        device, page_size = tables.slots.device, self.cache.page_size
        pages, lengths = tables.pages, self._begin_plan(batch, tables)
        spans = batch.spans
        if spans is None and batch.starts is not None:
            counts = batch.starts.diff().tolist()
            spans = tuple((n, length - n) for n, length in zip(counts, batch.lengths.tolist(), strict=True))
        if spans is not None:
            sequences, rows, longest, first = [], [], 0, 0
            prompts: list[tuple[int, int, int, int]] = []
            for sequence, (count, context) in enumerate(spans):
                if count == 1:
                    sequences.append(sequence)
                    rows.append(first)
                    longest = max(longest, context + 1)
                elif count:
                    prompts.append((first, count, context, sequence))
                first += count
            if prompts:
                self._prompts = pages, prompts
                if self._group is None:
                    self._plan_prompts(pages, prompts, None)
            if self._group is not None:
                longest = self._group.interleave.max_length(longest)
            if len(rows) < len(batch.tokens):
                self._singles = len(rows)
                if rows == [*range(len(rows))]:  # as the engine has them
                    self._single = slice(len(rows))
                else:
                    self._single = torch.tensor(rows, dtype=torch.int64, device=device)
                at = torch.tensor(sequences, dtype=torch.int64, device=device)
                pages, lengths = pages[at], lengths[at]
            pages = pages[:, : -(-longest // page_size)]
        self._plan_single(pages, lengths)

    def _plan_prompts(
        self, pages: Tensor, prompts: list[tuple[int, int, int, int]], group: ContextGroup | None
    ) -> None:
        """Of the sequences of several rows: (first row, rows, context, place among the page tables `pages`).

        group: whose prompts attend in the form of `self._prefill`.
        """
        window = self.cache.window
        if self._prefill == "gather" and group is not None:
            where = self._plan_gather(group, pages, prompts)
        else:
            where = [self._first_slots(pages[at], self._here(context + count)) for _, count, context, at in prompts]
        for (first, count, context, _), seen in zip(prompts, where, strict=True):
            begin = 0 if window is None else max(0, context - window + 1)
            row = torch.arange(context, context + count, device=pages.device)
            if self._prefill == "merge" and group is not None:
                row = group.lengths(row + 1) - 1
            mask = _sees(torch.arange(begin, len(seen), device=pages.device), row[:, None], window)
            self._prefills.append((first, count, seen[begin:], mask))

    def _here(self, tokens: int) -> int:
        """How many of a sequence's first tokens lie here."""
        return tokens if self._group is None else self._group.interleave.length(tokens, self._group.place)

    def _choose_prefill(self, group: ContextGroup, q: Tensor, absorbed: Absorbed | None, gathered: bool) -> None:
        """How the step's prompts attend, and what that takes. Every rank of the group comes to the same."""
        keys, values = self.cache.keys, self.cache.values
        pages, prompts = self._prompts
        heads = q.shape[1] * (1 if gathered else group.interleave.ranks)
        dim = values.shape[-1] if absorbed is None else absorbed.values.shape[1]
        token = keys[0, 0].nbytes + (0 if isinstance(self.cache.spec, Latent) else values[0, 0].nbytes)
        seen = sum(group.interleave.max_length(context + count) for _, count, context, _ in prompts)
        what = Prompt(seen, token, 0 if gathered else q[0].nbytes, Merge(heads, dim, q.element_size()))
        self._prefill = group.prefill(what, len(q))
        self._plan_prompts(pages, prompts, group)

    def _plan_gather(
        self, group: ContextGroup, pages: Tensor, prompts: list[tuple[int, int, int, int]]
    ) -> list[Tensor]:
        """Plans that prompts' tokens are gathered; gives where each prompt's then lie, in their order."""
        lengths = [context + count for _, count, context, _ in prompts]
        sizes, where = group.interleave.gathered(lengths, pages.device)
        own = [group.interleave.length(n, group.place) for n in lengths]
        here = [self._first_slots(pages[at], n) for (*_, at), n in zip(prompts, own, strict=True)]
        self._gathered = torch.cat(here), sizes
        return where

    def _first_slots(self, pages: Tensor, tokens: int) -> Tensor:
        """Where the first tokens of a sequence lie here, by its page table `[W]`."""
        page_size = self.cache.page_size
        offsets = torch.arange(page_size, dtype=torch.int32, device=pages.device)
        return _slots(pages[: -(-tokens // page_size)], offsets)[:tokens]

    def _plan_single(self, pages: Tensor, lengths: Tensor) -> None:
        """Of the sequences of one row: their page tables `[B, W]` and lengths `[B]`."""
        offsets = torch.arange(self.cache.page_size, dtype=torch.int32, device=pages.device)
        slots = _slots(pages, offsets)
        alive = lengths[:, None] > 0
        self._mask = _sees(torch.arange(slots.shape[1], device=slots.device), lengths[:, None] - 1, self.cache.window)
        self._alive = alive[:, None]
        if len(slots):
            # A masked token is multiplied too, and 0 · NaN is NaN: the row's own takes its place, which is written.
            own = slots.gather(1, (lengths[:, None] - 1).clamp(min=0).long()).where(alive, 0)
            slots = torch.where(self._mask, slots, own)
        self._slots = slots

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        scale: float,
        lse: bool = False,
        absorbed: Absorbed | None = None,
        gathered: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.__call__`."""
        if self._write is None:
            self._write = self.cache.writable(self._stored)
        self.cache.write(layer, self._write, k, v)
        return self._attend(layer, q, scale, lse, absorbed, gathered)

    def project(
        self, layer: int, qkv: Tensor | SplitKPartials, heads: HeadSplit, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.project`."""
        q, k, v = heads.split(qkv.total() if isinstance(qkv, SplitKPartials) else qkv)
        return self(layer, q, k, v, scale=scale, lse=lse, gathered=heads.gathered)

    def project_latent(
        self, layer: int, q: Tensor, kv: Tensor, parts: LatentSplit, *, scale: float, absorbed: Absorbed
    ) -> Tensor:
        """See `Backend.project_latent`."""
        q, key = parts.split(q, kv)
        return self(layer, q, key, None, scale=scale, absorbed=absorbed, gathered=parts.gathered)[0]

    def _attend(
        self, layer: int, q: Tensor, scale: float, lse: bool, absorbed: Absorbed | None, gathered: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._single is None:
            return self._merge_single(layer, q, scale, lse, absorbed, gathered)
        if self._group is not None and self._prefill is None:
            self._choose_prefill(self._group, q, absorbed, gathered)
        if self._prefill == "merge":
            return self._merge(partial(self._attend_here, layer, scale), q, lse, absorbed, gathered)
        query, own = q, absorbed
        if self._group is not None:
            place, ranks = self._group.place, self._group.interleave.ranks
            query = q.chunk(ranks, dim=1)[place] if gathered else q
            own = None if absorbed is None else absorbed.part(place, ranks)
        if own is not None:
            query = own.query(query)
        out = q.new_empty(*query.shape[:2], self.cache.values.shape[-1])
        sums = q.new_empty(query.shape[:2], dtype=torch.float32) if lse else None
        self._attend_prompts(query, *self._at_hand(layer), scale, out, sums)
        if own is not None:
            out = own.output(out)
        if self._singles:
            decode_rows = q[self._single]
            out[self._single], total = self._merge_single(layer, decode_rows, scale, lse, absorbed, gathered)
            if sums is not None and total is not None:
                sums[self._single] = total
        return out, sums

    def _attend_prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor, sums: Tensor | None
    ) -> None:
        """Of the sequences of several rows: fills their rows of out, and of the log-sum-exps where these are wanted."""
        for first, rows, slots, mask in self._prefills:
            at = slice(first, first + rows)
            if not len(slots):  # all lie on other ranks
                assert sums is not None
                sums[at] = float("-inf")
                continue
            seen = _rows(keys, slots[None])
            out[at] = _attend(q[None, at], seen, _rows(values, slots[None]), mask, scale)[0]
            if sums is not None:
                sums[at] = _lse(q[None, at], seen, mask, scale)[0]

    def _at_hand(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values that prompts look into."""
        keys, values = self.cache.of_layer(layer)
        if self._group is None or self._gathered is None:
            return keys, values
        slots, sizes = self._gathered
        (_, heads, dim), latent = keys.shape, isinstance(self.cache.spec, Latent)
        here = [_rows(kind, slots).flatten(1) for kind in ((keys,) if latent else (keys, values))]
        gathered_rows = self._group.tokens(here[0] if latent else torch.cat(here, dim=1), sizes)
        keys = gathered_rows[:, : heads * dim].unflatten(1, (heads, dim))
        values = keys[..., : values.shape[-1]] if latent else gathered_rows[:, heads * dim :].unflatten(1, (heads, dim))
        return keys, values

    def _merge_single(
        self, layer: int, q: Tensor, scale: float, lse: bool, absorbed: Absorbed | None, gathered: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of the sequences of one row, whoever holds their tokens: q `[B, heads, D]`."""
        lse_here = lse or self._group is not None

        def attend(query: Tensor) -> tuple[Tensor, Tensor | None]:
            return self._attend_single(layer, query, scale, lse_here)

        return self._merge(attend, q, lse, absorbed, gathered)

    def _merge(
        self,
        attend: Callable[[Tensor], tuple[Tensor, Tensor | None]],
        q: Tensor,
        lse: bool,
        absorbed: Absorbed | None,
        gathered: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention whoever holds the tokens. attend: over those here, with the heads of all ranks."""
        group = self._group
        if group is not None and not gathered:
            q = group.heads(q)
        if absorbed is not None:
            q = absorbed.query(q)
        out, sums = attend(q)
        if absorbed is not None:
            out = absorbed.output(out)
        if group is not None:
            assert sums is not None
            out, sums = group.merge(out, sums)
        return out, sums if lse else None

    def _attend_here(self, layer: int, scale: float, q: Tensor) -> tuple[Tensor, Tensor]:
        """Of all sequences, over the tokens that lie here."""
        keys, values = self.cache.of_layer(layer)
        out, sums = q.new_empty(*q.shape[:2], values.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._attend_prompts(q, keys, values, scale, out, sums)
        if self._singles:
            one, total = self._attend_single(layer, q[self._single], scale, True)
            assert total is not None
            out[self._single], sums[self._single] = one, total
        return out, sums

    def _attend_single(self, layer: int, q: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        """Of the same, over the tokens that lie here."""
        if not len(q):
            return q.new_empty(*q.shape[:2], self.cache.values.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)
        seen, mask = _rows(self.cache.keys[layer], self._slots), self._mask[:, None, None]
        one = _attend(q[:, None], seen, _rows(self.cache.values[layer], self._slots), mask, scale)[:, 0]
        total = _lse(q[:, None], seen, mask, scale)[:, 0] if lse else None
        return one.where(self._alive, 0.0), total


def _slots(pages: Tensor, offsets: Tensor) -> Tensor:
    """The slots of page tables `[..., W]`, in the order of the tokens: `[..., W · page_size]`."""
    return (pages[..., None] * len(offsets) + offsets).flatten(-2)


def _sees(position: Tensor, row: Tensor, window: int | None) -> Tensor:
    """Whether a row at a position sees the token at another."""
    seen = position <= row
    return seen if window is None else seen & (position > row - window)


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """cache[slots]; index_select copies whole rows where indexing goes element by element on CPUs."""
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`[B, rows, heads, D]` against `[B, tokens, kv_heads, D]`."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _lse(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """float32 `[B, rows, heads]`; torch's attention does not give it."""
    wide = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("brhd,bthd->bhrt", q.float(), wide) * scale
    return scores.masked_fill(~mask, float("-inf")).logsumexp(-1).transpose(1, 2)
