"""Distribution of each step's tokens to the outputs of running requests, and calls of their callbacks."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from weft.engine.controller.request_queue import RequestQueue
from weft.engine.messages.rank_messages import Result
from weft.engine.messages.request import FinishReason
from weft.engine.output.request_output import RequestOutput
from weft.engine.scheduler.scheduled import Scheduled


class OutputProcessor:
    """Outputs of all requests between `begin` and their end; used on the engine's thread.

    Counts are totals so far, as in `weft.engine.output.results.EngineStats`; any thread may read them.

    Args:
        requests: counts the end of every request.
    """

    def __init__(self, requests: RequestQueue):
        self._requests = requests
        self._open: dict[int, RequestOutput] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap; entries of ended requests stay until due
        self._to_notify: deque[RequestOutput] = deque()
        self.notified: Callable[[], None] = lambda: None
        """Called after the callbacks of a step."""
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.timeouts = 0
        self.queue_seconds = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[RequestOutput]:
        return iter(self._open.values())

    def begin(self, output: RequestOutput) -> None:
        """Add a request that was added to a scheduler."""
        self._open[(sequence := output.sequence).request] = output
        self.prompt_tokens += sequence.prompt_tokens
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.request))

    def take(self, scheduled: Scheduled, result: Result) -> None:
        """Process a step's tokens and prompt logprobs. `notify` then calls the callbacks."""
        for sequence, scored in scheduled.scored(result):
            self._open[sequence.request].score(scored)
        generated, first = 0, list[RequestOutput]()
        for sequence, token, known in scheduled.take_tokens(result):
            output = self._open[sequence.request]
            count = output.accept(token, known)
            generated += count > 0
            if count <= 1:
                self.cached_tokens += sequence.cached or 0
                self.queue_seconds += sequence.queue_s
                first.append(output)
            else:
                self._to_notify.append(output)
            if output.end is not None:
                self._forget(output)
        self._to_notify.extendleft(reversed(first))  # work on hundreds of others would delay them by milliseconds
        self.generated_tokens += generated

    def notify(self) -> None:
        """Call the callbacks for the tokens of the last step, mostly while the ranks run the next one."""
        if not (waiting := self._to_notify):
            return
        while waiting:
            output = waiting.popleft()
            if output.notify():
                self._end_seen(output)
        self.notified()

    def cancel(self, request: int) -> None:
        """End a request, even one that has not begun, unless it has ended already."""
        if (output := self._requests.withdraw(request) or self._open.get(request)) is not None:
            self.end(output, "abort")

    def end_overdue(self) -> None:
        """End all requests past their deadline."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            due = self._open.get(heapq.heappop(self._deadlines)[1])
            if due is not None:
                self.timeouts += 1
                self.end(due, "timeout", "the request did not end before its deadline")

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End every request without a change of the schedulers, since the engine may end in any state."""
        for output in list(self):
            output.scheduler = None
            self.end(output, reason, error)

    def end(self, output: RequestOutput, reason: FinishReason, error: str | None = None) -> None:
        """End a request early, even one that has not begun."""
        self.notify()
        self._forget(output)
        output.cut(reason, error)
        if output.notify():
            self._end_seen(output)
        self.notified()

    def _forget(self, output: RequestOutput) -> None:
        self._open.pop(output.sequence.request, None)
        if output.scheduler is not None:
            output.scheduler.finish(output.sequence)

    def _end_seen(self, output: RequestOutput) -> None:
        """Note that the callback of the last increment was called."""
        output.end_seen = True
        self._requests.ended(output.sequence.sharing.client)
        if output.sequence.request in self._open:  # it failed while steps in flight sample for it
            self._requests.put(partial(self.cancel, output.sequence.request))
