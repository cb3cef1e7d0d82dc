"""Responses that clients may fetch again or go on from: in the server's memory, where the longest unused go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_RESPONSES = 10_000
"""Responses, however small."""


@dataclass(frozen=True)
class Stored:
    """body: as its client was sent it. items: of the conversation up to its end, turn by turn, each a JSON array; a
    response that goes on from it holds the same arrays, which count for both."""

    body: bytes
    items: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.body) + sum(map(len, self.items))


class Store:
    """By their ids, up to so many bytes and MAX_RESPONSES. For one thread, that of the event loop."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, name: str, stored: Stored) -> None:
        """Remembers one; not where it alone exceeds the limit of all."""
        if stored.size > self._max_bytes:
            return
        self._stored[name] = stored
        self._bytes += stored.size
        while self._bytes > self._max_bytes or len(self._stored) > MAX_RESPONSES:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, name: str) -> Stored | None:
        """One that is used now; None where it is not here, or not any more."""
        if name in self._stored:
            self._stored.move_to_end(name)
        return self._stored.get(name)

    def delete(self, name: str) -> bool:
        """Forgets one; False where it is not here."""
        stored = self._stored.pop(name, None)
        self._bytes -= stored.size if stored else 0
        return stored is not None
