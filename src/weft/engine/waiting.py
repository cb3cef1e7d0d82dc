"""The sequences of one DP group that wait for a place in the batch, in the order in which they get one.

Those that have run before and had to stop come first. The others take turns by client, first come first served within
each: a client with a thousand requests does not keep one with a single request waiting for all of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from weft.engine.request import Sequence


class WaitingQueue:
    """Every operation but iteration takes the same time however many wait."""

    def __init__(self) -> None:
        self._returned: OrderedDict[int, Sequence] = OrderedDict()
        self._clients: OrderedDict[str, OrderedDict[int, Sequence]] = OrderedDict()
        self._size = 0
        self.rows = 0
        """Rows still to run for all that wait: the sum of `Sequence.left`, kept as they come and go."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they would be taken, were none added."""
        yield from self._returned.values()
        lines = deque(iter(line.values()) for line in self._clients.values())
        while lines:
            sequence = next(line := lines.popleft(), None)
            if sequence is not None:
                yield sequence
                lines.append(line)

    def add(self, sequence: Sequence) -> None:
        """At the end of its client's line; behind those that have run before where it has itself."""
        new = sequence.admitted is None
        line = self._clients.setdefault(sequence.client, OrderedDict()) if new else self._returned
        line[sequence.request] = sequence
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Before everyone: it ran last, and must give way."""
        self._returned[sequence.request] = sequence
        self._returned.move_to_end(sequence.request, last=False)
        self._count(sequence, 1)

    def first(self) -> Sequence:
        """The one whose turn it is; it stays. It is the same one until it is taken or removed."""
        line = self._returned or next(iter(self._clients.values()))
        return next(iter(line.values()))

    def take(self) -> Sequence:
        """Removes the one whose turn it is; its client's turn comes again after all others'."""
        sequence = self.first()
        if not self._returned:
            self._clients.move_to_end(sequence.client)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes out one that waits, wherever it is. Raises KeyError where it does not wait."""
        if self._returned.pop(sequence.request, None) is None:
            line = self._clients[sequence.client]
            del line[sequence.request]
            if not line:
                del self._clients[sequence.client]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._size += sign
        self.rows += sign * sequence.left
