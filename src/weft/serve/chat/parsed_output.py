"""Outputs as parts (text, thought, calls) that open, grow and close, and the API's response from these parts."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from weft.engine.messages.request import Output, TokenLogprob
from weft.serve.chat.tool_formats import Call
from weft.serve.chat.tools import Parser
from weft.serve.http.errors import ApiError
from weft.serve.http.record import as_api_error
from weft.serve.http.wire import EventStream

QUICK_LOGPROBS = 256
"""Maximum logprobs to format on the event loop; a thread formats more, as large tables may take seconds."""
PartKind = Literal["text", "thought", "call"]


@dataclass
class OutputPart:
    """Part of an output.

    Attributes:
        kind: text, thought or call; the text of a call is its arguments.
        at: index among the output's parts.
        number: index among the parts of this kind.
        call: the call, without arguments.
        pieces: text so far.
        id: unique among all parts.
    """

    kind: PartKind
    at: int
    number: int
    call: Call | None = None
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartEvent(msgspec.Struct):  # a NamedTuple takes four times as long to make, for each token
    """Event of a part: it opens, grows by a text, or closes."""

    kind: Literal["opens", "grows", "closes"]
    part: OutputPart
    text: str = ""


class ParsedOutput:
    """Output of one choice up to now.

    Args:
        parser: finds the parts; None if all is text.

    Attributes:
        parts: in order; the last may be open.
        token_ids, logprobs, prompt_logprobs: of all increments.
        reasoning_tokens: tokens up to the end of the thought.
    """

    def __init__(self, parser: Parser | None = None):
        self._parser = parser
        self._open: OutputPart | None = None
        self.parts: list[OutputPart] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.last: Output | None = None
        self.reasoning_tokens = 0

    @property
    def finished(self) -> bool:
        """True once the last increment has been added."""
        return self.last is not None and self.last.finish_reason is not None

    @property
    def calls(self) -> list[Call]:
        """Calls with their arguments so far."""
        return [replace(part.call, arguments=part.text) for part in self.parts if part.call]

    def text(self, kind: PartKind = "text") -> str:
        """Return all text of one kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def whole(self) -> Output:
        """Return all increments as one. Requires at least one increment."""
        assert self.last is not None
        more = {"token_ids": self.token_ids, "logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        return msgspec.structs.replace(self.last, text=self.text(), **more)

    def add(self, output: Output) -> list[PartEvent]:
        """Add an increment, and return its events of parts."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.last = output
        last = output.finish_reason is not None
        if self._parser is None:
            events = self._more("text", output.text)
            return events + self.closed() if last else events
        found = self._parser.push(output.text, last)
        if found.thought:
            self.reasoning_tokens = output.completion_tokens
        events = self._more("call", found.arguments)
        events += self._more("thought", found.thought)
        events += self._more("text", found.text)
        for call in found.calls:
            events += [*self.opened("call", replace(call, arguments="")), *self._more("call", call.arguments)]
        return events + self.closed() if last else events

    def opened(self, kind: PartKind, call: Call | None = None) -> list[PartEvent]:
        """Close the open part, open an empty one, and return the events."""
        number = sum(part.kind == kind for part in self.parts)
        closed, self._open = self.closed(), OutputPart(kind, len(self.parts), number, call)
        self.parts.append(self._open)
        return [*closed, PartEvent("opens", self._open)]

    def _more(self, kind: PartKind, text: str) -> list[PartEvent]:
        """Add text to the open part, or to a new one if the kind differs."""
        if not text:
            return []
        events = [] if self._open and self._open.kind == kind else self.opened(kind)
        part = self.parts[-1]
        part.pieces.append(text)
        return [*events, PartEvent("grows", part, text)]

    def closed(self) -> list[PartEvent]:
        """Close the open part and return the events."""
        part, self._open = self._open, None
        return [PartEvent("closes", part)] if part else []


class Reply(ABC):
    """Response to one request in the shape of one API: events during generation, or a body at its end.

    Args:
        model: name for the client.
        prompts: tokens of each prompt.
        outputs: one per choice, consecutive for each prompt.
    """

    def __init__(self, model: str, prompts: Sequence[Sequence[int]], outputs: Sequence[ParsedOutput]):
        self.model, self.prompts, self.outputs = model, prompts, outputs
        self.choices_of_prompt = len(outputs) // len(prompts)

    @abstractmethod
    def increment(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterable[bytes]:
        """Return the events of an increment.

        Args:
            index: of the choice.
            output: the increment, already added to the choice.
            events: its events of the choice's parts.
            begins: true for the choice's first increment.
        """

    @abstractmethod
    def end(self) -> Iterable[bytes]:
        """Return the events after all increments."""

    async def finish(self) -> None:  # noqa: B027  # most replies have nothing to finish
        """Finish the reply before its client learns that it has ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that ends with an error."""

    @abstractmethod
    def whole(self) -> Response:
        """Return the whole response, without a stream."""

    def usage(self) -> dict[str, Any]:
        """Return token counts up to now. A prompt and its cached tokens count once for all its choices; cached are the
        tokens that the first choice found, as the other choices find what the first has computed."""
        lasts, each = [output.last for output in self.outputs], self.choices_of_prompt
        groups = [lasts[at : at + each] for at in range(0, len(lasts), each)]
        cached = [min((last.cached_tokens for last in group if last), default=0) for group in groups]
        prompt, completion = sum(map(len, self.prompts)), sum(last.completion_tokens for last in lasts if last)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }


async def respond(
    request: Request, stream: AsyncGenerator[tuple[int, Output], None], reply: Reply, streamed: bool
) -> Response:
    """Return the response to a request from the increments of its choices."""
    outputs = reply.outputs
    if not streamed:
        async with aclosing(stream):
            async for index, output in stream:
                outputs[index].add(output)
        if not all(output.finished for output in outputs):
            return Response(status_code=499)  # the client has disconnected: nobody reads this
        await reply.finish()
        small = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in outputs) <= QUICK_LOGPROBS
        return reply.whole() if small else await run_in_threadpool(reply.whole)
    # Fetch the first increment before sending headers: a refusal must still be an HTTP status.
    if (first := await anext(stream, None)) is None:
        return Response(status_code=499)

    def events_of(index: int, output: Output) -> bytes:
        begins = outputs[index].last is None
        return b"".join(reply.increment(index, output, outputs[index].add(output), begins))

    async def events() -> AsyncIterator[bytes]:
        increment: tuple[int, Output] | None = first
        try:
            async with aclosing(stream):
                while increment is not None:
                    quick = len(increment[1].prompt_logprobs) <= QUICK_LOGPROBS
                    yield events_of(*increment) if quick else await run_in_threadpool(events_of, *increment)
                    increment = await anext(stream, None)
            await reply.finish()
            yield b"".join(reply.end())
        except Exception as error:  # the headers are sent: report it in the stream
            yield reply.failed(as_api_error(error, request.scope["state"]))

    return EventStream(events(), events_of)
