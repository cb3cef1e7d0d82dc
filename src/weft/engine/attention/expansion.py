"""Which prompts of latent attention expand their tokens' vectors to keys and values of heads.

With the projections absorbed (`weft.engine.attention.backend.Absorbed`), a query, a token and a head take width +
value_width multiplications; with keys and values expanded, n + rotary + value_dim, after value_width · (n + value_dim)
for each token of the sequence. Absorbing takes as many for each row. So a prompt without cached tokens is always
expanded, and one row never is. The choice follows from the sequence's rows and tokens alone, the same on all ranks.

Prompts may attend to copies of their tokens in a row. The places of these are found likewise.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from weft.engine.kv.cache_spec import Latent, PagedKV

Number = TypeVar("Number", int, Tensor)
ALIGNMENT = 128
"""Of places of sequences among a step's expanded tokens."""
MAX_TOKENS = 1 << 16
"""Expanded or copied tokens of a step on a GPU. Sequences beyond attend absorbed, or over pages."""
MAX_ELEMENTS = 1 << 27
"""Expanded elements at a time, heads are computed in groups; and copied elements of a step."""
MIN_MEAN_ROWS = 512
"""Rows that see a token, in the mean, from which on it is copied. On an H200 a copy costs what 130 rows gain where 8
heads of queries share one of keys, and what 1,000 rows gain where none do."""


class Copies(NamedTuple):
    """Where the tokens of a step's sequences are copied to, on the device.

    bases: int32 `[B]`, a sequence's first place; −1: it attends over pages. lengths: int32 `[B]`, its tokens.
    live: int32 `[1]`, places that are taken. places: of all that there are.
    """

    bases: Tensor
    lengths: Tensor
    live: Tensor
    places: int


class Expansion(NamedTuple):
    """Where the tokens of a step's sequences are expanded to, on the device.

    bases: int32 `[B]`, a sequence's first place; −1: it attends absorbed. lengths: int32 `[B]`, its tokens.
    live: int32 `[1]`, places that are taken. absorbed: bool `[T]`, the rows of sequences that attend absorbed.
    places: of all that there are.
    """

    bases: Tensor
    lengths: Tensor
    live: Tensor
    absorbed: Tensor
    places: int


def saved_operations(spec: Latent, rows: Number, length: Number) -> Number:
    """Operations of a head that a sequence of so many rows saves by expansion; length: its tokens, the rows included.
    Int64 tensors or ints."""
    assert spec.expanded is not None
    n, value_dim = spec.expanded
    saved = spec.width + spec.value_width - (n + spec.width - spec.value_width + value_dim)
    return rows * (2 * length - rows + 1) * saved - 2 * spec.value_width * (n + value_dim) * (length - rows)


def pays(spec: Latent, rows: Number, length: Number) -> Number:
    """Whether a sequence is expanded. Arguments as for `saved_operations`."""
    return saved_operations(spec, rows, length) > 0


def plan_expansion(
    spec: Latent, starts: Tensor, lengths: Tensor, rows: int, longest: int, copies: Copies | None = None
) -> Expansion:
    """The expansion of a step, without waiting for the device.

    starts, lengths: as in `Batch`. rows: of the step. longest: capacity of a sequence's page table, in tokens.
    copies: where given, sequences without a copy attend absorbed.
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
    """The copies of a step, without waiting for the device; None where so few rows have none. Arguments as for
    `plan_expansion`. short: sequences of few rows are copied, too.
    """
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
    """The copies as pages of ALIGNMENT tokens: int32 `[B, W]`, valid in rows of sequences with a base.

    longest: capacity of a sequence's page table, in tokens.
    """
    page = torch.arange(_aligned(longest) // ALIGNMENT, dtype=torch.int32, device=copies.bases.device)
    return (copies.bases // ALIGNMENT)[:, None] + page


def _aligned(tokens: Number) -> Number:
    return (tokens + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _places(chosen: Tensor, lengths: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """(bases, live) of the chosen sequences, bool `[B]`, as many as there are places for."""
    taken = torch.where(chosen, _aligned(lengths.long()), 0)
    until = taken.cumsum(0)
    chosen = chosen & (until <= places)
    live = torch.where(chosen, until, 0).amax(0, keepdim=True).int()
    return torch.where(chosen, until - taken, -1).int(), live
