"""Stored responses for clients to fetch or continue, in memory, with the least recently used dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_RESPONSES = 10_000
"""Maximum stored responses of any size."""


class Stored(NamedTuple):
    """Stored response. body: as sent to the client. items: of the conversation up to its end, a JSON array per turn; a
    response that continues it shares the arrays, and both count them."""

    body: bytes
    items: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of the body and the items."""
        return len(self.body) + sum(map(len, self.items))


class Store:
    """Responses by id, at most `max_bytes` and MAX_RESPONSES. For the event loop's thread alone."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, name: str, body: bytes, items: Sequence[bytes]) -> None:
        """Store a response, with the fields of `Stored`, unless it alone exceeds `max_bytes`."""
        if (stored := Stored(body, tuple(items))).size > self._max_bytes:
            return
        self._stored[name] = stored
        self._bytes += stored.size
        while self._bytes > self._max_bytes or len(self._stored) > MAX_RESPONSES:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, name: str) -> Stored | None:
        """Return a response and mark it as used; None if it is not stored."""
        if name in self._stored:
            self._stored.move_to_end(name)
        return self._stored.get(name)

    def delete(self, name: str) -> bool:
        """Delete a response; return False if it is not stored."""
        stored = self._stored.pop(name, None)
        self._bytes -= stored.size if stored else 0
        return stored is not None
