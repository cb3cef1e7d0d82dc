"""How often ranks may fail: some faults pass when the ranks are started anew, others come again each time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from weft.engine.config import EngineError


class FaultWindow:
    """Counts failures. most: that are borne within window_s; clock: seconds, rising."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic):
        self._most, self._window_s, self._clock = most, window_s, clock
        self._failures: deque[tuple[float, str]] = deque()
        self.total = 0
        """Failures so far, whenever they were."""

    def add(self, cause: str) -> None:
        """Notes a failure. Raises EngineError, with every failure of the window, where it is one too many."""
        now = self._clock()
        self.total += 1
        self._failures.append((now, cause))
        while self._failures[0][0] < now - self._window_s:
            self._failures.popleft()
        if len(self._failures) > self._most:
            causes = Counter(cause for _, cause in self._failures)
            listed = "; ".join(f"{cause} ({n} times)" if n > 1 else cause for cause, n in causes.items())
            if self._most == 0:
                raise EngineError(listed)
            raise EngineError(
                f"gave up after {len(self._failures)} failures in {self._window_s:g} s (max_restarts={self._most}): "
                f"{listed}"
            )


def one_line(error: Exception) -> str:
    """What the engine says of an error."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
