"""Choice of the prompts of latent attention that expand their vectors to keys and values of heads.

Absorbed projections (`weft.engine.attention.backend.Absorbed`) cost width + value_width multiplications per query,
token and head, plus value_width · (n + value_dim) per row. Expanded keys and values cost n + rotary + value_dim, plus
value_width · (n + value_dim) per token of the sequence. So a prompt without cached tokens is always expanded, and a
single row never is. The choice depends only on the sequence's rows and tokens, so all ranks agree.

Prompts may also attend to contiguous copies of their tokens. Copies are placed in the same way.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from weft.engine.kv.cache_spec import Latent, PagedKV

Number = TypeVar("Number", int, Tensor)
ALIGNMENT = 128
"""Alignment of sequences among a step's expanded or copied tokens."""
MAX_TOKENS = 1 << 16
"""Maximum expanded or copied tokens of a step on a GPU. Further sequences attend absorbed, or over pages."""
MAX_ELEMENTS = 1 << 27
"""Maximum elements expanded at a time (heads are computed in groups), or copied in a step."""
MIN_MEAN_ROWS = 512
"""Minimum mean number of rows that see a token, for copies. On an H200 a copy costs the gain of 130 rows where 8 query
heads share a key head, and of 1,000 rows where none do."""


class Copies(NamedTuple):
    """Destinations of copied tokens of a step's sequences, on the device.

    Args:
        bases: int32 `[B]`, first place of a sequence; −1: it attends over pages.
        lengths: int32 `[B]`, tokens of a sequence.
        live: int32 `[1]`, occupied places.
        places: capacity.
    """

    bases: Tensor
    lengths: Tensor
    live: Tensor
    places: int


class Expansion(NamedTuple):
    """Destinations of expanded tokens of a step's sequences, on the device.

    Args:
        bases: int32 `[B]`, first place of a sequence; −1: it attends absorbed.
        lengths: int32 `[B]`, tokens of a sequence.
        live: int32 `[1]`, occupied places.
        absorbed: bool `[T]`, rows of sequences that attend absorbed.
        places: capacity.
    """

    bases: Tensor
    lengths: Tensor
    live: Tensor
    absorbed: Tensor
    places: int


def saved_operations(spec: Latent, rows: Number, length: Number) -> Number:
    """Return the operations per head that expansion saves for a sequence. length: its tokens, including `rows`. Accepts
    ints or int64 tensors."""
    assert spec.expanded is not None
    n, value_dim = spec.expanded
    saved = spec.width + spec.value_width - (n + spec.width - spec.value_width + value_dim)
    return rows * (2 * length - rows + 1) * saved - 2 * spec.value_width * (n + value_dim) * (length - rows)


def pays(spec: Latent, rows: Number, length: Number) -> Number:
    """Decide if a sequence is expanded. See `saved_operations`."""
    return saved_operations(spec, rows, length) > 0


def plan_expansion(
    spec: Latent, starts: Tensor, lengths: Tensor, rows: int, longest: int, copies: Copies | None = None
) -> Expansion:
    """Plan the expansion of a step without waiting for the device.

    Args:
        starts, lengths: as in `Batch`.
        rows: rows of the step.
        longest: capacity of a sequence's page table, in tokens.
        copies: if given, sequences without a copy attend absorbed.
    """
    sequences, counts = len(lengths), starts.diff().long()
    places = min(MAX_TOKENS, sequences * _aligned(longest))
    chosen = (counts > 1) & pays(spec, counts, lengths.long())
    bases, live = _places(chosen if copies is None else chosen & (copies.bases >= 0), lengths, places)
    at = torch.arange(rows, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), at, right=True)
    others = (bases < 0).index_select(0, sequence.clamp(max=sequences - 1)) & (sequence < sequences)
    return Expansion(bases, lengths, live, others, places)


def plan_copies(
    spec: PagedKV | Latent, starts: Tensor, lengths: Tensor, rows: int, longest: int, short: bool = False
) -> Copies | None:
    """Plan the copies of a step without waiting for the device; None if no sequence of `rows` rows is copied. See
    `plan_expansion`. short: copy sequences of few rows too."""
    if rows <= MIN_MEAN_ROWS and not short:
        return None
    elements = spec.width if isinstance(spec, Latent) else 2 * spec.heads * spec.dim
    places = min(MAX_TOKENS, len(lengths) * _aligned(longest), MAX_ELEMENTS // elements)
    counts, wide = starts.diff().long(), lengths.long()
    chosen = counts > 1
    if not short:
        chosen &= counts * (2 * wide - counts + 1) > 2 * MIN_MEAN_ROWS * wide
    places = places // ALIGNMENT * ALIGNMENT
    bases, live = _places(chosen, lengths, places)
    return Copies(bases, lengths, live, places)


def pages_of_copies(copies: Copies, longest: int) -> Tensor:
    """Return the copies as pages of ALIGNMENT tokens: int32 `[B, W]`, valid for sequences with a base. longest:
    capacity of a sequence's page table, in tokens."""
    page = torch.arange(_aligned(longest) // ALIGNMENT, dtype=torch.int32, device=copies.bases.device)
    return (copies.bases // ALIGNMENT)[:, None] + page


def _aligned(tokens: Number) -> Number:
    return (tokens + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _places(chosen: Tensor, lengths: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Return (bases, live) of the chosen sequences, as far as there are places. chosen: bool `[B]`."""
    taken = torch.where(chosen, _aligned(lengths.long()), 0)
    until = taken.cumsum(0)
    chosen = chosen & (until <= places)
    live = torch.where(chosen, until, 0).amax(0, keepdim=True).int()
    return torch.where(chosen, until - taken, -1).int(), live
