"""Waiting sequences of one DP group, in the order of admission to the batch.

Lower priority numbers come first. Within one priority, preempted sequences come first. New sequences take turns by
client, first come first served within a client: a thousand requests of one client do not delay another client's single
request.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.engine.messages.request import Sequence


@dataclass(eq=False, slots=True)
class _Level:
    """Waiting sequences of one priority."""

    returned: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    clients: OrderedDict[str, OrderedDict[int, Sequence]] = field(default_factory=OrderedDict)


class WaitingQueue:
    """Queue with operations in constant time, whatever the number of sequences per priority; iteration is linear."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of `_levels`, sorted
        self._size = 0
        self.rows = 0
        """Rows still to run of all waiting sequences: a running sum of `Sequence.left`."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in the order of `take`, if no sequence is added."""
        for priority in self._priorities:
            level = self._levels[priority]
            yield from level.returned.values()
            lines = deque(iter(line.values()) for line in level.clients.values())
            while lines:
                sequence = next(line := lines.popleft(), None)
                if sequence is not None:
                    yield sequence
                    lines.append(line)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence at the end of its client's line, or behind other preempted ones if it has run before."""
        level, new = self._level(sequence), sequence.admitted is None
        line = level.clients.setdefault(sequence.sharing.client, OrderedDict()) if new else level.returned
        line[sequence.request] = sequence
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others of its priority."""
        returned = self._level(sequence).returned
        returned[sequence.request] = sequence
        returned.move_to_end(sequence.request, last=False)
        self._count(sequence, 1)

    def first(self) -> Sequence:
        """Return the next sequence without removing it."""
        level = self._levels[self._priorities[0]]
        line = level.returned or next(iter(level.clients.values()))
        return next(iter(line.values()))

    def take(self) -> Sequence:
        """Remove and return the next sequence; its client gets the next turn after all other clients."""
        sequence, level = self.first(), self._levels[self._priorities[0]]
        if not level.returned:
            level.clients.move_to_end(sequence.sharing.client)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from any place in the queue. Raises KeyError if it does not wait."""
        level = self._levels[priority := sequence.sharing.priority]
        if level.returned.pop(sequence.request, None) is None:
            line = level.clients[sequence.sharing.client]
            del line[sequence.request]
            if not line:
                del level.clients[sequence.sharing.client]
        if not (level.returned or level.clients):
            del self._levels[priority]
            self._priorities.remove(priority)
        self._count(sequence, -1)

    def _level(self, sequence: Sequence) -> _Level:
        priority = sequence.sharing.priority
        if priority not in self._levels:
            self._levels[priority] = _Level()
            bisect.insort(self._priorities, priority)
        return self._levels[priority]

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._size += sign
        self.rows += sign * sequence.left
