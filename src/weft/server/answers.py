"""From an HTTP request to the engine and back: choices, increments, and a client that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from weft.engine.config import EngineError
from weft.engine.engine import Engine
from weft.engine.request import Output, SamplingParams, TokenLogprob
from weft.server.errors import ApiError
from weft.server.metrics import Metrics


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


async def answers(
    engine: Engine,
    metrics: Metrics,
    request: Request,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> AsyncGenerator[tuple[int, Output], None]:
    """(choice, increment) as they come, until every choice has ended; one choice for each prompt and params.

    Cancels what still runs when the client is gone or the caller stops. ApiError: 400 for a prompt that the engine
    refuses, 503 where the engine fails before the first increment.
    """
    loop = asyncio.get_running_loop()
    increments: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
    live: dict[int, int] = {}

    def listen(choice: int) -> Callable[[Output], None]:
        timer = metrics.timer()

        def on_output(output: Output) -> None:  # on the engine's thread
            timer.observe(len(output.token_ids))
            loop.call_soon_threadsafe(increments.put_nowait, (choice, output))

        return on_output

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        increments.put_nowait(None)

    watcher = asyncio.create_task(watch())
    try:
        for choice, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
            try:
                live[choice] = engine.submit(prompt, how, listen(choice))
            except ValueError as error:
                too_long = len(prompt) + (how.max_tokens or 1) > engine.max_model_len
                code = "context_length_exceeded" if too_long else None
                raise ApiError(400, str(error), code=code) from error
            except EngineError as error:
                raise ApiError(503, str(error)) from error
        while live and (increment := await increments.get()):
            choice, output = increment
            if output.finish_reason == "error":
                raise ApiError(503, engine.error or "the engine failed")
            if output.finish_reason:
                del live[choice]
            yield choice, output
    finally:
        watcher.cancel()
        for request_id in live.values():
            engine.cancel(request_id)
