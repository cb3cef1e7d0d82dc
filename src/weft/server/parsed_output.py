"""Outputs with parts (text, thought, calls): streamed as events while they come, or sent whole at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from weft.engine.messages.request import Output
from weft.server.engine_client import Choice
from weft.server.errors import ApiError
from weft.server.record import as_api_error
from weft.server.tools import OutputDelta, Parser
from weft.server.wire import EventStream


class ParsedOutput:
    """The output of one choice so far. parser: finds its parts; None: it is all text. reasoning_tokens: up to the
    end of its thought."""

    def __init__(self, parser: Parser | None):
        self._parser = parser
        self.choice = Choice()
        self.reasoning_tokens = 0

    @property
    def whole(self) -> bool:
        """Whether its last increment has come."""
        return self.choice.last is not None and self.choice.last.finish_reason is not None

    def add(self, output: Output) -> OutputDelta:
        """Takes an increment: what has become clear."""
        self.choice.add(output)
        if self._parser is None:
            return OutputDelta(output.text)
        parts = self._parser.push(output.text, last=output.finish_reason is not None)
        if parts.thought:
            self.reasoning_tokens = output.completion_tokens
        return parts


class Shape(Protocol):
    """How an endpoint sends it: the events of its beginning, of each increment and of its end, or the whole body."""

    @property
    def whole(self) -> bool: ...
    def begin(self) -> Sequence[bytes]: ...
    def increment(self, output: Output) -> Sequence[bytes]: ...
    def end(self) -> Sequence[bytes]: ...
    def failed(self, error: ApiError) -> bytes: ...
    def body(self) -> dict[str, Any]: ...


async def respond(
    request: Request, stream: AsyncGenerator[tuple[int, Output], None], made: Shape, streamed: bool
) -> Response:
    """The response of a request with one choice, from its increments."""
    if streamed:
        first = await anext(stream, None)  # a refusal must still be an HTTP status

        async def events() -> AsyncIterator[bytes]:
            try:
                for event in made.begin():
                    yield event
                async with aclosing(stream):
                    if first is not None:
                        for event in made.increment(first[1]):
                            yield event
                        async for _, output in stream:
                            for event in made.increment(output):
                                yield event
                for event in made.end():
                    yield event
            except Exception as error:
                yield made.failed(as_api_error(error, request.scope["state"]))

        return EventStream(events())
    async with aclosing(stream):
        async for _, output in stream:
            made.increment(output)
    if not made.whole:
        return Response(status_code=499)  # the client has gone: nobody reads this
    made.end()
    return JSONResponse(made.body())
