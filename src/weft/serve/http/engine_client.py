"""Client of the engine: submits requests, yields increments, and handles disconnects and the server's shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from weft.engine.config.config import EngineError, QueueFull
from weft.engine.messages.request import FAIR_SHARE, Output, SamplingParams, Sharing
from weft.engine.output.request_output import RequestOutput
from weft.serve.http.errors import ApiError, of_value
from weft.serve.http.metrics import Observations
from weft.serve.http.record import Record
from weft.serve.http.remote_engine import AnyEngine

RETRY_S = 5
"""Seconds after which to retry a request that a stopping server refuses: a new server may run by then."""

QUICK_TOKENS = 16_384
"""Maximum prompt tokens that the event loop submits to the engine itself, in at most a millisecond."""
MAX_UNREAD = 1024
"""Maximum unread increments of each choice of a slow client, in addition to socket buffers: one with logprobs has
kilobytes."""
MIN_UNREAD = 8 * MAX_UNREAD
"""Lower bound of the maximum unread increments of a request."""
WHOLE = ("stop", "length", "abort")
"""Ends that may be read together with tokens before them."""
OUTCOMES = {400: "refused", 408: "client_slow", 429: "queue_full", 504: "timeout"}


class Unread(msgspec.Struct, eq=False):  # a dataclass takes several times as long to make, for each token
    """Unread increments of a choice."""

    choice: int
    output: RequestOutput
    count: int = 1


Entry = Unread | tuple[int, Output] | Exception | None
"""Entry of a queue: unread increments, one that is read already, an error, or None once the client is gone."""


class IncrementQueue:
    """Queue of one request's increments to the task that reads them.

    Increments of a choice that wait are read as one, except an error. While the task of a stream waits, increments are
    written to its connection directly: waking it would cost more than the rest of a token's way.

    Args:
        choices: number of the request's choices.
        state: of the request. A stream adds `events`, which returns the bytes of an increment, and its connection
            `write` (`weft.serve.http.connections`).
        read: called with each increment that is written directly.

    Attributes:
        running: choice → the engine's number of each unfinished choice.
    """

    def __init__(self, choices: int, state: dict[str, Any], read: Callable[[int, Output], None]):
        self.running: dict[int, int] = {}
        self._limit = max(MIN_UNREAD, MAX_UNREAD * choices)
        self._state, self._read = state, read
        self._entries: deque[Entry] = deque()
        self._last: dict[int, Unread] = {}
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None

    @property
    def overrun(self) -> bool:
        """True if too many increments are unread."""
        return self._unread >= self._limit

    def give_up(self) -> None:
        """Drop the unread increments, and end the request with an error about them."""
        self._entries.clear()
        self._last.clear()
        self._unread = 0
        self.end(ApiError(408, f"{self._limit} increments were not read in time; read them as they come"))

    def put(self, choice: int, output: RequestOutput) -> None:
        """Add an increment; `hand_over` follows."""
        self._unread += 1
        last = self._last.get(choice)
        if last is not None and last.output is output and (output.end is None or output.end.reason in WHOLE):
            last.count += 1
        else:
            self._last[choice] = unread = Unread(choice, output)
            self._entries.append(unread)

    def hand_over(self) -> None:
        """Write the increments if they are all plain and the task waits; else wake it."""
        if self._reader is None or self._reader.done():
            return
        write: Any = self._state.get("write")
        events, entries = self._state.get("events"), self._entries
        pieces = b""
        try:
            if events is not None and write is not None and write(b""):
                while entries and isinstance(entry := entries[0], Unread) and entry.output.end is None:
                    choice, output = self._take(entry)
                    if output.finish_reason or output.prompt_logprobs:
                        entries.appendleft((choice, output))
                        break
                    self._read(choice, output)
                    pieces += events(choice, output)
        except Exception as error:
            entries.appendleft(error)
        if pieces:
            write(pieces)
        if entries:
            self._reader.set_result(None)

    def end(self, entry: ApiError | None) -> None:
        """Add an error, or that the client is gone."""
        self._entries.append(entry)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> tuple[int, Output] | None:
        """Return the next increment, or None once the client is gone. Raises the error that ends the request."""
        while not self._entries:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        entry = self._entries[0]
        if isinstance(entry, Unread):
            with refusals():
                choice, output = self._take(entry)
            self._read(choice, output)
            return choice, output
        del self._entries[0]
        if isinstance(entry, Exception):
            raise entry
        if entry is not None:
            self._read(*entry)
        return entry

    def _take(self, entry: Unread) -> tuple[int, Output]:
        del self._entries[0]
        self._unread -= entry.count
        if self._last.get(entry.choice) is entry:
            del self._last[entry.choice]
        return entry.choice, entry.output.take(entry.count)


class EngineClient:
    """Client that submits requests to the engine and tracks running ones, on the event loop. timeout_s: per request."""

    def __init__(self, engine: AnyEngine, metrics: Observations, timeout_s: float | None = None):
        self.engine, self.metrics, self.timeout_s = engine, metrics, timeout_s
        self.closed = False
        self._live: set[IncrementQueue] = set()
        self._arrived: deque[tuple[IncrementQueue, int, RequestOutput]] = deque()
        self._woken = False

    @property
    def live(self) -> int:
        """Number of running requests."""
        return len(self._live)

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.closed = True

    def end_all(self) -> None:
        """End all running requests with the error of a stopping server."""
        for increments in self._live:
            increments.end(self._leaving())

    def _leaving(self) -> ApiError:
        message = "the server is shutting down; try again"
        return ApiError(503, message, code="shutting_down", headers={"Retry-After": str(RETRY_S)})

    async def generate(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        sharing: Sharing = FAIR_SHARE,
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield (choice, output increment) until every choice has ended; each pair of prompt and params is a choice.

        Cancels running choices once the client is gone or the caller stops. ApiError: 400 if the engine refuses the
        request, at once or later; 429 if too many wait; 500 if the output cannot be made; 503 if the engine fails or
        the server stops; 504 after the request's time-out.
        """
        if self.closed:
            raise self._leaving()
        loop = asyncio.get_running_loop()
        record = Record(self.metrics, request, prompts)
        increments = IncrementQueue(len(prompts), request.scope["state"], record.increment)
        self.metrics.asked(len(params), params[0].max_tokens)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            increments.end(None)

        pairs = enumerate(zip(prompts, params, strict=True))
        jobs = [(prompt, each, partial(self._arrive, loop, increments, choice)) for choice, (prompt, each) in pairs]
        running = increments.running

        def submit() -> None:
            with refusals():
                ids = self.engine.submit_all(jobs, sharing=sharing, timeout_s=self.timeout_s, name=record.id)
            running.update(enumerate(ids))  # here: the caller may be cancelled

        watcher = asyncio.create_task(watch())
        self._live.add(increments)
        try:
            if sum(map(len, prompts)) + sum(each.named for each in params) <= QUICK_TOKENS:
                submit()
            else:  # on a thread: the engine checks each token of prompts and parameters
                await run_in_threadpool(submit)
            while running and (increment := await increments.get()):
                choice, output = increment
                if output.finish_reason in ("error", "timeout"):
                    ended = 503 if self.engine.state == "failed" else 500  # 500: only this request has failed
                    status = 504 if output.finish_reason == "timeout" else 400 if output.refused else ended
                    raise ApiError(status, output.error or "the engine failed")
                if output.finish_reason:
                    del running[choice]
                    record.outcome = output.finish_reason if not running else record.outcome
                yield choice, output
        except ApiError as error:
            record.outcome = OUTCOMES.get(error.status, "error")
            raise
        finally:
            watcher.cancel()
            self._live.discard(increments)
            self._cancel(increments)

    def _arrive(
        self, loop: asyncio.AbstractEventLoop, increments: IncrementQueue, choice: int, completion: RequestOutput
    ) -> None:
        """Queue an output, on the engine's thread: a step wakes the event loop once, not once per stream."""
        self._arrived.append((increments, choice, completion))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: later arrivals wake the loop again
        with_more = dict[IncrementQueue, None]()
        while self._arrived:
            increments, choice, completion = self._arrived.popleft()
            if increments.overrun:
                increments.give_up()
                self._cancel(increments)
            increments.put(choice, completion)
            with_more[increments] = None
        for increments in with_more:
            increments.hand_over()

    def _cancel(self, increments: IncrementQueue) -> None:
        for request_id in increments.running.values():
            self.engine.cancel(request_id)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise an engine's refusal of a request as an ApiError."""
    try:
        yield
    except ValueError as error:
        raise of_value(error) from error
    except QueueFull as error:
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
        raise ApiError(429, str(error), code="queue_full", headers=headers) from error
    except EngineError as error:
        raise ApiError(503, str(error)) from error
