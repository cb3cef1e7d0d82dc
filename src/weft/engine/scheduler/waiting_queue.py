"""The sequences of one DP group that wait for a place in the batch, in the order in which they get one.

Those of a lower priority number come first. Of one priority, those that have run before and had to stop come first. The
others take turns by client, first come first served within each: a client with a thousand requests does not keep one
with a single request waiting for all of them.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.engine.messages.request import Sequence


@dataclass(eq=False, slots=True)
class _Level:
    """The sequences of one priority."""

    returned: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    clients: OrderedDict[str, OrderedDict[int, Sequence]] = field(default_factory=OrderedDict)


class WaitingQueue:
    """Every operation but iteration takes the same time however many wait of each priority."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # those of the levels, sorted
        self._size = 0
        self.rows = 0
        """Rows still to run for all that wait: the sum of `Sequence.left`, kept as they come and go."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which `take` would return them, if none were added."""
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
        """Adds a sequence at the end of its client's line, or behind other preempted ones if it has run before."""
        level, new = self._level(sequence), sequence.admitted is None
        line = level.clients.setdefault(sequence.sharing.client, OrderedDict()) if new else level.returned
        line[sequence.request] = sequence
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Puts a preempted sequence before all others of its priority."""
        returned = self._level(sequence).returned
        returned[sequence.request] = sequence
        returned.move_to_end(sequence.request, last=False)
        self._count(sequence, 1)

    def first(self) -> Sequence:
        """The next sequence; it stays in the queue. It is the same one until it leaves, or a lower priority number
        comes."""
        level = self._levels[self._priorities[0]]
        line = level.returned or next(iter(level.clients.values()))
        return next(iter(line.values()))

    def take(self) -> Sequence:
        """Removes and returns the next sequence; its client's turn comes again after all others'."""
        sequence, level = self.first(), self._levels[self._priorities[0]]
        if not level.returned:
            level.clients.move_to_end(sequence.sharing.client)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, wherever it waits. Raises KeyError where it does not."""
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
