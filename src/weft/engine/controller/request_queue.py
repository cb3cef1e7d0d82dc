"""Queue of requests and commands to the engine's thread. Requests are limited in number; commands come first.

A client may fill the whole queue while it is alone. Where it is full, a client with less than an equal share of it is
still accepted, so nobody is refused because of another client's requests. With k clients the queue then holds at most
1 + 1/2 + … + 1/k times its limit.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from weft.engine.config.config import EngineError, QueueFull
from weft.engine.output.request_output import RequestOutput

T = TypeVar("T")
Command = Callable[[], None]
RATE_OVER = 64
"""Number of latest ends of requests, for the estimate of a refused request's wait."""
MAX_RETRY_S = 60.0


class RequestQueue:
    """Thread-safe queue. max_requests: limit of waiting and running requests; further ones are refused, except of
    clients with less than an equal share of them."""

    def __init__(self, max_requests: int):
        self.max_requests = max_requests
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._newcomers: OrderedDict[int, RequestOutput] = OrderedDict()
        self._of_client = Counter[str]()
        self._ends: deque[float] = deque(maxlen=RATE_OVER)
        self._closed: str | None = None
        self._open = True
        self.here = self.refused = 0
        """here: accepted requests that have not ended; refused: requests refused so far because of the limit."""

    def put(self, command: Command) -> bool:
        """Hand over a command, which will run. Returns False if the queue is closed."""
        with self._changed:
            if self._open:
                self._commands.append(command)
                self._changed.notify()
            return self._open

    def ask(self, question: Callable[[], T]) -> T:
        """Hand over a question and wait for its result or error. Raises EngineError if the queue is closed."""
        reply: Future[T] = Future()

        def run() -> None:
            try:
                reply.set_result(question())
            except BaseException as error:
                reply.set_exception(error)

        if not self.put(run):
            raise EngineError(self._closed or "the engine is closed")
        return reply.result()

    def add(self, newcomers: Sequence[RequestOutput]) -> None:
        """Hand over a client's requests, all or none. Raises QueueFull, and EngineError if new requests are refused."""
        client = newcomers[0].sequence.sharing.client
        with self._changed:
            if self._closed is not None:
                raise EngineError(self._closed)
            share = self.max_requests // (len(self._of_client) + (client not in self._of_client))
            over = len(newcomers) + min(self.here - self.max_requests, self._of_client[client] - share)
            if over > 0:
                self.refused += len(newcomers)
                raise QueueFull(self.here, self._retry_after_s(over))
            self.here += len(newcomers)
            self._of_client[client] += len(newcomers)
            self._newcomers.update((a.sequence.request, a) for a in newcomers)
            self._changed.notify()

    def withdraw(self, request: int) -> RequestOutput | None:
        """Remove and return a request that `newcomers` has not returned yet; None if there is none."""
        with self._changed:
            return self._newcomers.pop(request, None)

    def ended(self, client: str) -> None:
        """Note the end of a client's request."""
        with self._changed:
            self.here -= 1
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]
            self._ends.append(time.monotonic())
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a command or a newcomer. Returns False after timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._commands or self._newcomers), timeout_s)

    def pause(self, seconds: float, take_in: Callable[[], None]) -> None:
        """Wait, and call `take_in` for each arrival and at least once a second."""
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0:
            self.wait(min(remaining, 1.0))
            take_in()

    def wait_for_capacity(self, timeout_s: float) -> bool:
        """Wait until another request would be accepted. Returns False after timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: self.here < self.max_requests, timeout_s)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no request is here. Returns False after timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: self.here == 0, timeout_s)

    def commands(self) -> list[Command]:
        """Remove and return all commands."""
        if not self._commands:  # the usual case, without a lock
            return []
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def newcomers(self, max_requests: int) -> list[RequestOutput]:
        """Remove and return up to `max_requests` requests, oldest first."""
        if not self._newcomers:
            return []
        with self._changed:
            return [self._newcomers.popitem(last=False)[1] for _ in range(min(max_requests, len(self._newcomers)))]

    def refuse(self, why: str) -> None:
        """Refuse new requests from now on, with this line, or the line of an earlier call; still accept commands."""
        with self._changed:
            self._closed = self._closed or why

    def close(self) -> bool:
        """Close the queue if it is empty. Returns False if it is not."""
        with self._changed:
            self._open = bool(self._commands or self._newcomers)
            return not self._open

    def _retry_after_s(self, over: int) -> float:
        """Return the seconds until `over` more requests end, at the rate of the latest ends."""
        if len(self._ends) < 2:
            return 1.0
        interval = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(1.0, over * interval), MAX_RETRY_S)
