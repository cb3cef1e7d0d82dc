"""Which prompts of latent attention expand their tokens' vectors to keys and values of heads.

With the projections absorbed (`weft.attention.backend.Absorbed`), a query, a token and a head take width + value_width
multiplications; with keys and values expanded, n + rotary + value_dim, after value_width · (n + value_dim) for each
token of the sequence. Absorbing takes as many for each row. So a prompt without cached tokens is always expanded, and
one row never is. The choice follows from the sequence's rows and tokens alone, the same on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from weft.kv.cache_spec import Latent

Number = TypeVar("Number", int, Tensor)
ALIGNMENT = 128
"""Of places of sequences among a step's expanded tokens."""
MAX_TOKENS = 1 << 16
"""Expanded tokens of a step on a GPU. Sequences beyond attend absorbed."""
MAX_ELEMENTS = 1 << 27
"""Expanded elements at a time: heads are computed in groups."""


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


def pays(spec: Latent, rows: Number, length: Number) -> Number:
    """Whether a sequence of so many rows is expanded; length: its tokens, the rows included. Int64 tensors or ints."""
    assert spec.expanded is not None
    n, value_dim = spec.expanded
    saved = spec.width + spec.value_width - (n + spec.width - spec.value_width + value_dim)
    return rows * (2 * length - rows + 1) * saved > 2 * spec.value_width * (n + value_dim) * (length - rows)


def plan_expansion(spec: Latent, starts: Tensor, lengths: Tensor, rows: int, longest: int) -> Expansion:
    """The expansion of a step, without waiting for the device.

    starts, lengths: as in `Batch`. rows: of the step. longest: capacity of a sequence's page table, in tokens.
    """
    sequences = len(lengths)
    places = min(MAX_TOKENS, sequences * -(-longest // ALIGNMENT) * ALIGNMENT)
    counts, wide = starts.diff().long(), lengths.long()
    chosen = (counts > 1) & pays(spec, counts, wide)
    taken = torch.where(chosen, (wide + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, 0)
    until = taken.cumsum(0)
    chosen = chosen & (until <= places)
    bases = torch.where(chosen, until - taken, -1).int()
    live = torch.where(chosen, until, 0).amax(0, keepdim=True).int()
    at = torch.arange(rows, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), at, right=True)
    others = (bases < 0).index_select(0, sequence.clamp(max=sequences - 1)) & (sequence < sequences)
    return Expansion(bases, lengths, live, others, places)
