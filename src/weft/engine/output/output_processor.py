"""The answers that are being made: what steps draw is given to them, and their listeners hear of it until they end."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

from weft.engine.controller.request_queue import Intake
from weft.engine.messages import Result
from weft.engine.output.request_output import Answer
from weft.engine.request import FinishReason
from weft.engine.scheduler.scheduler import Scheduled


class Answers:
    """Of all requests between `begin` and their end; on the engine's thread. intake: is told of every end.

    The counts are totals so far, as in `weft.engine.output.results.EngineStats`; they may be read on any thread.
    """

    def __init__(self, intake: Intake):
        self._intake = intake
        self._open: dict[int, Answer] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries of requests that have ended stay until due
        self._untold: deque[Answer] = deque()
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.timeouts = 0
        self.queue_seconds = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._open.values())

    def begin(self, answer: Answer) -> None:
        """A request that has a place in a scheduler."""
        self._open[(sequence := answer.sequence).request] = answer
        self.prompt_tokens += sequence.prompt_tokens
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.request))

    def take(self, scheduled: Scheduled, result: Result) -> None:
        """Gives what a step drew and scored to whom it belongs. Listeners hear of it from `tell`."""
        for sequence, scored in scheduled.scored(result):
            self._open[sequence.request].score(scored)
        generated = 0
        for sequence, token, known in scheduled.drawn(result):
            answer = self._open[sequence.request]
            count = answer.accept(token, known)
            generated += count > 0
            if count <= 1:
                self.cached_tokens += sequence.cached or 0
                self.queue_seconds += sequence.queue_s
            if answer.end is not None:
                self._forget(answer)
            self._untold.append(answer)
        self.generated_tokens += generated

    def tell(self) -> None:
        """Gives listeners word of what came of the last step: mostly while the ranks run the next."""
        while self._untold:
            if (answer := self._untold.popleft()).tell():
                self._told(answer)

    def cancel(self, request: int) -> None:
        """Ends a request, also one that has not begun. No harm where it has ended already."""
        if (answer := self._intake.withdraw(request) or self._open.get(request)) is not None:
            self.end(answer, "abort")

    def end_overdue(self) -> None:
        """Ends those whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            due = self._open.get(heapq.heappop(self._deadlines)[1])
            if due is not None:
                self.timeouts += 1
                self.end(due, "timeout", "the request was not answered in its time")

    def end_all(self, reason: FinishReason, error: str) -> None:
        """Ends every one, and leaves the schedulers alone, which may be in any state when the engine ends."""
        for answer in list(self):
            answer.scheduler = None
            self.end(answer, reason, error)

    def end(self, answer: Answer, reason: FinishReason, error: str | None = None) -> None:
        """Ends one before its time, also one that has not begun."""
        self.tell()
        self._forget(answer)
        answer.cut(reason, error)
        if answer.tell():
            self._told(answer)

    def _forget(self, answer: Answer) -> None:
        self._open.pop(answer.sequence.request, None)
        if answer.scheduler is not None:
            answer.scheduler.finish(answer.sequence)

    def _told(self, answer: Answer) -> None:
        """Its listener knows that it has ended."""
        self._intake.ended()
        if answer.sequence.request in self._open:  # it has failed; steps under way may still draw for it
            self._intake.put(partial(self.cancel, answer.sequence.request))
