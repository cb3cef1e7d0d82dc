"""Attention over pages by torch's scaled_dot_product_attention; any device, any dtype, caches in FP8 too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from weft.engine.attention.backend import Absorbed, HeadSplit, LatentSplit
from weft.engine.attention.expansion import MAX_ELEMENTS, pays
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.kernels.float8 import Stored, take


class Prompt(NamedTuple):
    """A sequence of several rows: its first row, their number, its tokens before them, its place in the batch."""

    first: int
    rows: int
    context: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Split:
    """A step's rows by how they attend.

    rows: the rows of sequences of one row, which attend in one call; None: all rows. sequences: int64, the numbers of
    these sequences, where there are others. longest: tokens of the longest of these, where the host knows it.
    prompts: the other sequences.
    """

    rows: slice | Tensor | None = None
    sequences: Tensor | None = None
    longest: int | None = None
    prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The shared values of a step's layers.

    stored: where rows are stored. rows: as in `Split`. decode, prompts: from `plan_decode` and `plan_prompts`, for
    these rows and for the others; None where there are none.
    """

    stored: Tensor
    rows: slice | Tensor | None
    decode: Any
    prompts: Any = None


class SDPA:
    """A `weft.engine.attention.backend.Backend` that gathers the tokens a row sees and calls torch.

    Sequences of one row attend in one call, padded to the longest; the others one by one. Backends with other kernels
    override the plan and the attention of either.

    copies: whether prompts attend to copies of their tokens, of MAX_ELEMENTS elements in a step at the most.
    captures_prompts: whether CUDA graphs may have prompts with tokens that are sharded over dcp.
    """

    copies = captures_prompts = False

    def __init__(self, cache: KVCache):
        self.cache = cache

    def split(self, batch: Batch) -> Split:
        """Reads the device where the host does not know the sequences' rows."""
        spans = batch.spans
        if spans is None:
            if batch.starts is None:
                return Split()
            counts = batch.starts.diff().tolist()
            spans = tuple((n, length - n) for n, length in zip(counts, batch.lengths.tolist(), strict=True))
        sequences, rows, longest, first = list[int](), list[int](), 0, 0
        prompts: list[Prompt] = []
        for sequence, (count, context) in enumerate(spans):
            if count == 1:
                sequences.append(sequence)
                rows.append(first)
                longest = max(longest, context + 1)
            elif count:
                prompts.append(Prompt(first, count, context, sequence))
            first += count
        if len(rows) == len(batch.tokens):
            return Split(longest=longest)
        device, at = batch.tokens.device, slice(len(rows))
        numbers = torch.tensor(sequences, dtype=torch.int64, device=device)
        if rows != [*range(len(rows))]:  # the engine has them first
            return Split(torch.tensor(rows, dtype=torch.int64, device=device), numbers, longest, tuple(prompts))
        return Split(at, numbers, longest, tuple(prompts))

    def plan(self, batch: Batch, tables: PageTables) -> Plan:
        """See `Backend.plan`."""
        split = self.split(batch)
        prompts = None if split.rows is None else self.plan_prompts(batch, tables.pages, split.prompts)
        return self.plan_rows(split, tables, batch.lengths, prompts)

    def plan_rows(self, split: Split, tables: PageTables, lengths: Tensor, prompts: Any = None) -> Plan:
        """The plan of a step. lengths: tokens of each sequence on this rank, int32 `[B]`. prompts: their plan."""
        pages, decode = tables.pages, None
        if split.sequences is not None:
            pages, lengths = pages[split.sequences], lengths[split.sequences]
        if split.longest is not None:
            pages = pages[:, : -(-split.longest // self.cache.page_size)]
        if split.rows is None or len(lengths):
            decode = self.plan_decode(pages, lengths)
        return Plan(self.storable(tables.slots), split.rows, decode, prompts)

    def storable(self, slots: Tensor) -> Tensor:
        """Slots `[T]`, −1 for rows that are not stored, as the store takes them."""
        return self.cache.writable(slots)

    def plan_decode(self, pages: Tensor, lengths: Tensor) -> Any:
        """The plan of sequences of one row: their page tables `[B, W]` and lengths `[B]`."""
        slots, alive = self.slots(pages), lengths[:, None] > 0
        mask = _sees(torch.arange(slots.shape[1], device=slots.device), lengths[:, None] - 1, self.cache.window)
        if len(slots):
            # A masked token is multiplied too, and 0 · NaN is NaN: the row's own takes its place, which is written.
            own = slots.gather(1, (lengths[:, None] - 1).clamp(min=0).long()).where(alive, 0)
            slots = torch.where(mask, slots, own)
        return slots, mask, alive[:, None]

    def plan_prompts(
        self,
        batch: Batch,
        pages: Tensor,
        prompts: Sequence[Prompt],
        here: Callable[[Any], Any] = lambda tokens: tokens,
        gathered: Sequence[Tensor] | None = None,
    ) -> Any:
        """The plan of sequences of several rows, from the page tables of all sequences.

        here: the number of a sequence's first tokens that are on this rank, for an int or a tensor. gathered: the slots
        of each prompt's tokens, if they are not in its pages.
        """
        window, found = self.cache.window, []
        for i, (first, count, context, sequence) in enumerate(prompts):
            slots = self.slots(pages[sequence], here(context + count)) if gathered is None else gathered[i]
            begin = 0 if window is None else max(0, context - window + 1)
            row = here(torch.arange(context + 1, context + count + 1, device=pages.device)) - 1
            mask = _sees(torch.arange(begin, len(slots), device=pages.device), row[:, None], window)
            found.append((slice(first, first + count), slots[begin:], mask))
        return found

    def slots(self, pages: Tensor, tokens: int | None = None) -> Tensor:
        """The slots of page tables `[…, W]` in the order of the tokens, `[…, W · page_size]`, or of the first ones."""
        page_size = self.cache.page_size
        if tokens is not None:
            pages = pages[: -(-tokens // page_size)]
        offsets = torch.arange(page_size, dtype=torch.int32, device=pages.device)
        return (pages[..., None] * page_size + offsets).flatten(-2)[..., :tokens]

    def store(self, plan: Plan, layer: int, k: Tensor, v: Tensor | None) -> None:
        """See `Backend.store`."""
        self.cache.write(layer, plan.stored, k, v)

    def store_projected(self, plan: Plan, layer: int, qkv: Tensor | SplitKPartials, heads: HeadSplit) -> Tensor:
        """See `Backend.store_projected`."""
        q, k, v = heads.split(qkv.total() if isinstance(qkv, SplitKPartials) else qkv)
        self.store(plan, layer, k, v)
        return q

    def store_latent(
        self, plan: Plan, layer: int, q: Tensor, kv: Tensor, parts: LatentSplit, absorbed: Absorbed
    ) -> tuple[Tensor, Absorbed]:
        """See `Backend.store_latent`."""
        q, key = parts.split(q, kv)
        self.store(plan, layer, key, None)
        return q, absorbed

    def attend(
        self, plan: Plan, layer: int, q: Tensor, scale: float, lse: bool, absorbed: Absorbed | None, gathered: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `Backend.attend`."""

        def decode(q: Tensor) -> tuple[Tensor, Tensor | None]:
            out, sums = self.decode(plan.decode, layer, q if absorbed is None else absorbed.query(q), scale, lse)
            return out if absorbed is None else absorbed.output(out), sums

        if plan.rows is None:
            return decode(q)
        spec, prompts, tokens = self.cache.spec, plan.prompts, self.cache.of_layer(layer)
        expanded: list[Any] = []
        if isinstance(spec, Latent) and spec.expanded is not None and absorbed is not None and not lse:
            prompts = []
            for prompt in plan.prompts:
                (expanded if pays(spec, *prompt[2].shape) else prompts).append(prompt)
        query = q if absorbed is None or not prompts else absorbed.query(q)
        out, sums = self.unfilled(query, lse)
        self.prompts(prompts, query, *tokens, scale, out, sums)
        if absorbed is not None:
            out = absorbed.output(out) if prompts else q.new_empty(*q.shape[:2], absorbed.values.shape[1])
            for at, slots, mask in expanded:
                out[at] = self._expanded(q[at], tokens[0], slots, mask, scale, absorbed)
        if plan.decode is not None:
            out[plan.rows], total = decode(q[plan.rows])
            if sums is not None and total is not None:
                sums[plan.rows] = total
        return out, sums

    def _expanded(
        self, q: Tensor, latents: Stored, slots: Tensor, mask: Tensor, scale: float, absorbed: Absorbed
    ) -> Tensor:
        """Attention of a prompt, q `[rows, heads, n + rotary]`, with keys and values of heads: `[rows, heads, value
        dim]`."""
        assert absorbed.up is not None
        width, n = self.cache.values.shape[-1], absorbed.up.shape[1] - absorbed.values.shape[1]
        latent, rotated = take(latents, slots, q.dtype).tensor_split([width], dim=-1)
        out = q.new_empty(*q.shape[:2], absorbed.values.shape[1])
        heads = max(1, MAX_ELEMENTS // (len(slots) * absorbed.up.shape[1]))
        for i in range(0, q.shape[1], heads):
            up = absorbed.up[i : i + heads]
            both = F.linear(latent[:, 0], up.flatten(0, 1)).unflatten(1, up.shape[:2])
            own, values = both.tensor_split([n], dim=-1)
            keys = torch.cat((own, rotated.expand(-1, len(up), -1)), dim=-1)
            out[:, i : i + heads] = _attend(q[None, :, i : i + heads], keys[None], values[None], mask, scale)[0]
        return out

    def unfilled(self, q: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
        """Empty tensors for the output of attention with q `[T, heads, D]`, and for log-sum-exps where requested."""
        sums = q.new_empty(q.shape[:2], dtype=torch.float32) if lse else None
        return q.new_empty(*q.shape[:2], self.cache.values.shape[-1]), sums

    def decode(self, plan: Any, layer: int, q: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        """Attention of sequences of one row, q `[B, heads, D]`, over the tokens of this rank."""
        if not len(q):
            return self.unfilled(q, True)
        slots, mask, alive = plan
        keys, values = self.cache.of_layer(layer)
        seen, mask = take(keys, slots, q.dtype), mask[:, None, None]
        one = _attend(q[:, None], seen, take(values, slots, q.dtype), mask, scale)[:, 0]
        total = _lse(q[:, None], seen, mask, scale)[:, 0] if lse else None
        return one.where(alive, 0.0), total

    def prompts(
        self, plan: Any, q: Tensor, keys: Stored, values: Stored, scale: float, out: Tensor, sums: Tensor | None
    ) -> None:
        """Attention of sequences of several rows, q `[T, heads, D]`, over keys and values `[slots, …]`. Fills their
        rows of out, and of the log-sum-exps where requested.
        """
        for at, slots, mask in plan:
            if not len(slots):  # all lie on other ranks
                assert sums is not None
                sums[at] = float("-inf")
                continue
            seen = take(keys, slots[None], q.dtype)
            out[at] = _attend(q[None, at], seen, take(values, slots[None], q.dtype), mask, scale)[0]
            if sums is not None:
                sums[at] = _lse(q[None, at], seen, mask, scale)[0]


def _sees(position: Tensor, row: Tensor, window: int | None) -> Tensor:
    """Whether a row at a position sees the token at another."""
    seen = position <= row
    return seen if window is None else seen & (position > row - window)


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
