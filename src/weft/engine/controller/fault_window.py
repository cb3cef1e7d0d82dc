"""Limit of failures of ranks: a restart cures some faults, while others come back each time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from weft.engine.config.config import EngineError

MAX_BACKOFF_S = 60.0
"""Maximum wait before a restart of ranks."""


class FaultWindow:
    """Counter of failures.

    Args:
        max_failures, window_s: number of failures allowed within seconds.
        clock: returns rising seconds.
        backoff_s: wait after the second failure without a step in between; each further failure doubles it.
    """

    def __init__(
        self, max_failures: int, window_s: float, clock: Callable[[], float] = time.monotonic, *, backoff_s: float = 0.0
    ):
        self._max_failures, self._window_s, self._clock, self._backoff_s = max_failures, window_s, clock, backoff_s
        self._in_a_row = 0
        self._failures: deque[tuple[float, str, tuple[int, ...]]] = deque()
        self.total = 0
        """Failures so far, also outside the window."""

    def worked(self) -> None:
        """Note that a step has succeeded, so the next failure is a new one."""
        self._in_a_row = 0

    def forget(self) -> None:
        """Forget the failures of the window, because other ranks run from now on."""
        self._failures.clear()
        self._in_a_row = 0

    def add(self, cause: str, ranks: tuple[int, ...] = (), for_good: bool = False) -> float:
        """Note a failure. Returns the seconds to wait before ranks are restarted: 0 after the first failure.

        cause, ranks, for_good: as in EngineError. Raises EngineError, with every failure of the window, if the limit is
        exceeded or the ranks are lost for good. Its `ranks` are these, or the ones that failed each time.
        """
        now = self._clock()
        self.total += 1
        self._failures.append((now, cause, ranks))
        while self._failures[0][0] < now - self._window_s:
            self._failures.popleft()
        if for_good or len(self._failures) > self._max_failures:
            causes = Counter(cause for _, cause, _ in self._failures)
            listed = "; ".join(f"{cause} ({n} times)" if n > 1 else cause for cause, n in causes.items())
            line = (
                f"gave up after {len(self._failures)} failures in {self._window_s:g} s "
                f"(max_restarts={self._max_failures}): {listed}"
                if self._max_failures
                else listed
            )
            same = for_good or all(each == ranks for _, _, each in self._failures)
            raise EngineError(line, ranks if same else ())
        self._in_a_row += 1
        doublings = min(self._in_a_row - 2, 62)
        return 0.0 if doublings < 0 else min(self._backoff_s * 2.0**doublings, MAX_BACKOFF_S)


def one_line(error: Exception) -> str:
    """Return an error in one line."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
