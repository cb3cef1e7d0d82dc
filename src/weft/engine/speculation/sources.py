"""Sources of drafts: tokens that may follow a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from weft.engine.kv.tokens import TOKEN_BYTES


class DraftSource(Protocol):
    """Source of drafts. It may propose any tokens: wrong ones cost time and change no output."""

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow a sequence's `tokens`, the nearest first."""
        ...


class NgramSource:
    """Prompt lookup: the tokens after the last earlier occurrence of a sequence's end, the longest end first.

    shortest, longest: tokens of an end.
    """

    def __init__(self, shortest: int, longest: int):
        self._lengths = range(longest, shortest - 1, -1)

    def propose(self, tokens: array[int], count: int) -> list[int]:
        """See `DraftSource.propose`. An occurrence that overlaps the end repeats with its own period."""
        content, shortest = tokens.tobytes(), self._lengths[-1]
        limit = _last_occurrence(content, shortest)
        if limit is None:
            return []  # most sequences end here, after one search
        place = next((at for n in self._lengths[:-1] if (at := _last_occurrence(content, n)) is not None), limit)
        period = len(tokens) - place
        return [tokens[place + at % period] for at in range(count)]


SOURCES: dict[str, Callable[[int, int], DraftSource]] = {"ngram": NgramSource}
"""Sources by their value of `--speculative`, made with prompt_lookup_min and prompt_lookup_max."""


def _last_occurrence(content: bytes, length: int) -> int | None:
    """Return the number of the token after the last earlier occurrence of the last `length` tokens; None: there is
    none. content: tokens as bytes, which are searched much more quickly than numbers."""
    size, end = length * TOKEN_BYTES, len(content) - 1
    if len(content) <= size:
        return None
    pattern = content[-size:]
    while (at := content.rfind(pattern, 0, end)) % TOKEN_BYTES:  # bytes of two neighbouring tokens; -1 too
        if at < 0:
            return None
        end = at + size - 1
    return at // TOKEN_BYTES + length
