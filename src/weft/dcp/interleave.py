"""Which rank holds which tokens of a sequence, and where: the one definition that cache, attention and tests share.

A sequence's tokens are dealt out over `ranks` ranks in turn, `run` tokens at a time. A page of a page table then stands
for `page_size` tokens of every rank, `span = page_size · ranks` tokens of the sequence in all. A rank keeps its own
tokens in order: its token number j lies in page `table[j // page_size]` at offset `j % page_size`, so that attention
over a rank's tokens is attention over an ordinary paged cache of `length` tokens.

Every function takes whole numbers or tensors of them, and works on tensors without a word to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Whole = TypeVar("Whole", int, Tensor)


@dataclass(frozen=True, slots=True)
class Interleave:
    """ranks: N, of a dcp group. run: I, tokens in a row that one rank holds. page_size: P, tokens of a rank's page.

    Raises ValueError where the runs do not divide the page: a page must hold the same tokens of every sequence.
    """

    ranks: int
    run: int
    page_size: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.run < 1 or self.page_size % self.run:
            raise ValueError(
                f"tokens are dealt out {self.run} at a time over {self.ranks} rank(s); both must be 1 or more, and the "
                f"page of {self.page_size} tokens a multiple of the first"
            )

    @property
    def span(self) -> int:
        """Tokens of a sequence that an entry of its page table stands for."""
        return self.ranks * self.page_size

    def owner(self, token: Whole) -> Whole:
        """The place in the group of the rank that holds a token, by its position."""
        return token // self.run % self.ranks

    def local(self, token: Whole) -> Whole:
        """A token's number among its owner's."""
        return token // (self.run * self.ranks) * self.run + token % self.run

    def token(self, local: Whole, place: int) -> Whole:
        """The position of the token that is number `local` on the rank at `place`: the inverse of the two."""
        return (local // self.run * self.ranks + place) * self.run + local % self.run

    def length(self, tokens: Whole, place: int) -> Whole:
        """How many of a sequence's first `tokens` tokens the rank at `place` holds.

        A query at position p sees `length(p + 1, place)` tokens there, which are that rank's first ones.
        """
        turns = tokens // (self.run * self.ranks)
        rest = tokens - turns * self.run * self.ranks - place * self.run
        return turns * self.run + _clip(rest, self.run)

    def most(self, tokens: int) -> int:
        """The most of `tokens` tokens that any rank holds."""
        return self.length(tokens, 0)

    def slots(self, slots: Tensor, place: int) -> Tensor:
        """Where the rank at `place` keeps the tokens that lie at `slots` of a cache whose pages hold `span` tokens.

        That is page · page_size + offset from page · span + offset; −1 where another rank holds the token, and where
        the slot is −1, which is nowhere.
        """
        page, offset = slots // self.span, slots % self.span
        mine = (slots >= 0) & (self.owner(offset) == place)
        return torch.where(mine, page * self.page_size + self.local(offset), -1)

    def gathered(
        self, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> tuple[tuple[int, ...], list[Tensor]]:
        """Where tokens lie once every rank's were put one after the other, sequence by sequence within a rank.

        lengths: of the sequences. Gives how many tokens each rank holds of all, and for each sequence, int64
        `[length]`, the row of each of its tokens.
        """
        held = [[self.length(n, place) for n in lengths] for place in range(self.ranks)]
        rows, begins = [], [sum(map(sum, held[:place])) for place in range(self.ranks)]
        for at, length in enumerate(lengths):
            token = torch.arange(length, device=device)
            begin = torch.tensor(begins, device=device)
            rows.append(begin[self.owner(token)] + self.local(token))
            begins = [begin + own[at] for begin, own in zip(begins, held, strict=True)]
        return tuple(map(sum, held)), rows


def _clip(value: Whole, most: int) -> Whole:
    if isinstance(value, Tensor):
        return value.clamp(0, most)
    return min(max(value, 0), most)
