"""Interleaving of a sequence's tokens over ranks, shared by the cache, attention and tests.

A sequence's tokens go to `ranks` ranks round-robin, `chunk` tokens at a time. An entry of a page table then covers
`page_size` tokens of each rank, `span = page_size · ranks` tokens of the sequence in all. A rank keeps its own tokens
in order: its token number j lies in page `table[j // page_size]` at offset `j % page_size`, so that attention over a
rank's tokens is attention over an ordinary paged cache of `length` tokens.

All functions accept integers or tensors of them, and with tensors the host does not wait. torch is imported only by
functions that make tensors: options are checked without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Whole = TypeVar("Whole", int, "Tensor")


@dataclass(frozen=True, slots=True)
class Interleave:
    """Interleaving over a dcp group. Raises ValueError if page_size is no multiple of chunk.

    A page must hold the same tokens of all sequences.
    """

    ranks: int  # ranks of the dcp group
    chunk: int  # consecutive tokens that one rank holds
    page_size: int  # tokens of a rank's page

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunk < 1 or self.page_size % self.chunk:
            raise ValueError(
                f"tokens are interleaved {self.chunk} at a time over {self.ranks} rank(s); both must be 1 or more, and "
                f"the page of {self.page_size} tokens a multiple of the first"
            )

    @property
    def span(self) -> int:
        """Tokens of a sequence per entry of its page table."""
        return self.ranks * self.page_size

    def owner(self, token: Whole) -> Whole:
        """Return the place in the group of the rank that holds a token, by its position."""
        return token // self.chunk % self.ranks

    def local(self, token: Whole) -> Whole:
        """Return a token's number among its owner's tokens."""
        return token // (self.chunk * self.ranks) * self.chunk + token % self.chunk

    def token(self, local: Whole, place: int) -> Whole:
        """Return the position of token number `local` of the rank at `place`: the inverse of `owner` and `local`."""
        return (local // self.chunk * self.ranks + place) * self.chunk + local % self.chunk

    def length(self, tokens: Whole, place: int) -> Whole:
        """Return the number of a sequence's first `tokens` tokens that the rank at `place` holds.

        A query at position p sees the first `length(p + 1, place)` tokens of that rank.
        """
        rounds = tokens // (self.chunk * self.ranks)
        rest = tokens - rounds * self.chunk * self.ranks - place * self.chunk
        return rounds * self.chunk + _clip(rest, self.chunk)

    def max_length(self, tokens: int) -> int:
        """Return the largest `length` of any rank."""
        return self.length(tokens, 0)

    def slots(self, slots: Tensor, place: int) -> Tensor:
        """Return the slots of the rank at `place` for `slots` of a cache with pages of `span` tokens.

        Slot page · span + offset becomes page · page_size + local offset; −1 if another rank holds the token, or if the
        slot is −1, which stores nothing.
        """
        import torch

        page, offset = slots // self.span, slots % self.span
        is_local = (slots >= 0) & (self.owner(offset) == place)
        return torch.where(is_local, page * self.page_size + self.local(offset), -1)

    def gathered(
        self, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> tuple[tuple[int, ...], list[Tensor]]:
        """Return the tokens of each rank, and the row of each sequence's tokens after a gather, int64 `[length]` each.

        Rows lie rank after rank, and sequence after sequence within a rank. lengths: lengths of the sequences.
        """
        import torch

        lengths_held = [[self.length(n, place) for n in lengths] for place in range(self.ranks)]
        rows, begins = [], [sum(map(sum, lengths_held[:place])) for place in range(self.ranks)]
        for at, length in enumerate(lengths):
            token = torch.arange(length, device=device)
            begin = torch.tensor(begins, device=device)
            rows.append(begin[self.owner(token)] + self.local(token))
            begins = [begin + own_lengths[at] for begin, own_lengths in zip(begins, lengths_held, strict=True)]
        return tuple(map(sum, lengths_held)), rows


def _clip(value: Whole, limit: int) -> Whole:
    return min(max(value, 0), limit) if isinstance(value, int) else value.clamp(0, limit)
