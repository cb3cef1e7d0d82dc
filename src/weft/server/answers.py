"""From an HTTP request to the engine and back: choices, increments, a client that goes away, a server that leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from weft.engine.config import EngineError
from weft.engine.engine import Engine
from weft.engine.request import Output, SamplingParams, TokenLogprob
from weft.server.errors import ApiError
from weft.server.metrics import Metrics

RETRY_S = 5
"""When to try again what a server that leaves refuses: by then another may have its place."""


@dataclass
class Choice:
    """One answer as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Output | None = None

    def add(self, output: Output) -> None:
        """Takes an increment."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.last = output


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts; a prompt counts once for all its choices."""
    prompt = sum(len(p) for p in prompts)
    completion = sum(c.last.completion_tokens for c in choices if c.last)
    cached = sum(c.last.cached_tokens for c in choices if c.last)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


class Intake:
    """Takes requests to the engine, and knows those that run. Lives on the event loop."""

    def __init__(self, engine: Engine, metrics: Metrics):
        self.engine, self.metrics = engine, metrics
        self.closed = False
        self._live: set[asyncio.Queue[Any]] = set()

    @property
    def live(self) -> int:
        """Requests that run."""
        return len(self._live)

    def close(self) -> None:
        """Refuses newcomers from now on."""
        self.closed = True

    def end_all(self) -> None:
        """Ends what runs: each gets the error of a server that leaves."""
        for increments in self._live:
            increments.put_nowait(self._leaving())

    def _leaving(self) -> ApiError:
        message = "the server is shutting down; try again"
        return ApiError(503, message, code="shutting_down", headers={"Retry-After": str(RETRY_S)})

    async def answers(
        self, request: Request, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """(choice, increment) as they come, until every choice has ended; one choice for each prompt and params.

        Cancels what still runs when the client is gone or the caller stops. ApiError: 400 for a prompt that the engine
        refuses, 503 where the engine fails or the server leaves.
        """
        if self.closed:
            raise self._leaving()
        engine, loop = self.engine, asyncio.get_running_loop()
        increments: asyncio.Queue[tuple[int, Output] | ApiError | None] = asyncio.Queue()
        running: dict[int, int] = {}

        def listen(choice: int) -> Callable[[Output], None]:
            timer = self.metrics.timer()

            def on_output(output: Output) -> None:  # on the engine's thread
                timer.observe(len(output.token_ids))
                with contextlib.suppress(RuntimeError):  # the loop has ended, and all who waited
                    loop.call_soon_threadsafe(increments.put_nowait, (choice, output))

            return on_output

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            increments.put_nowait(None)

        watcher = asyncio.create_task(watch())
        self._live.add(increments)
        try:
            for choice, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
                try:
                    running[choice] = engine.submit(prompt, how, listen(choice))
                except ValueError as error:
                    too_long = len(prompt) + (how.max_tokens or 1) > engine.max_model_len
                    code = "context_length_exceeded" if too_long else None
                    raise ApiError(400, str(error), code=code) from error
                except EngineError as error:
                    raise ApiError(503, str(error)) from error
            while running and (increment := await increments.get()):
                if isinstance(increment, ApiError):
                    raise increment
                choice, output = increment
                if output.finish_reason == "error":
                    raise ApiError(503, engine.error or "the engine failed")
                if output.finish_reason:
                    del running[choice]
                yield choice, output
        finally:
            watcher.cancel()
            self._live.discard(increments)
            for request_id in running.values():
                engine.cancel(request_id)
