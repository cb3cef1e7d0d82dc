"""Outputs as parts (text, thought, calls) that open, grow and close, and the response that an API makes of them."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

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
"""Logprobs that are written on the event loop; a thread writes more, as tables of them may take seconds."""
PartKind = Literal["text", "thought", "call"]


@dataclass
class OutputPart:
    """A part of an output.

    Attributes:
        kind: what its text is; that of a call is the call's arguments.
        at: its index among the output's parts.
        number: its index among those of its kind.
        call: the call, without arguments.
        pieces: its text so far.
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


class PartOpened(NamedTuple):
    part: OutputPart


class Delta(NamedTuple):
    """More text of the open part."""

    part: OutputPart
    text: str


class PartClosed(NamedTuple):
    part: OutputPart


PartEvent = PartOpened | Delta | PartClosed


class ParsedOutput:
    """Output of one choice so far.

    Args:
        parser: finds its parts; None: it is all text.

    Attributes:
        parts: in their order; the last may be open.
        token_ids, logprobs, prompt_logprobs: those of all increments.
        last: the last increment.
        reasoning_tokens: tokens up to the end of its thought.
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
        """Whether its last increment is here."""
        return self.last is not None and self.last.finish_reason is not None

    @property
    def calls(self) -> list[Call]:
        """Its calls, with their arguments so far."""
        return [replace(part.call, arguments=part.text) for part in self.parts if part.call]

    def text(self, kind: PartKind = "text") -> str:
        """Return all text of one kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def whole(self) -> Output:
        """All increments in one. Precondition: one is here."""
        assert self.last is not None
        more = {"token_ids": self.token_ids, "logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        return msgspec.structs.replace(self.last, text=self.text(), **more)

    def add(self, output: Output) -> list[PartEvent]:
        """Add an increment, and return what it does to the parts."""
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
        """Open a part, without text, where the open one ends."""
        number = sum(part.kind == kind for part in self.parts)
        closed, self._open = self.closed(), OutputPart(kind, len(self.parts), number, call)
        self.parts.append(self._open)
        return [*closed, PartOpened(self._open)]

    def _more(self, kind: PartKind, text: str) -> list[PartEvent]:
        """Add text to the open part, or to a new one where that is of another kind."""
        if not text:
            return []
        events = [] if self._open and self._open.kind == kind else self.opened(kind)
        part = self.parts[-1]
        part.pieces.append(text)
        events.append(Delta(part, text))
        return events

    def closed(self) -> list[PartEvent]:
        """End the open part."""
        part, self._open = self._open, None
        return [PartClosed(part)] if part else []


class Reply(ABC):
    """Response to one request in the shape of one API: events while the outputs are made, or a body at their end.

    Args:
        model: its name for the client.
        prompts: the tokens of each.
        outputs: one for each choice, those of a prompt in a row.
    """

    def __init__(self, model: str, prompts: Sequence[Sequence[int]], outputs: Sequence[ParsedOutput]):
        self.model, self.prompts, self.outputs = model, prompts, outputs
        self.choices_of_prompt = len(outputs) // len(prompts)

    @abstractmethod
    def increment(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterable[bytes]:
        """Return the events of an increment.

        Args:
            index: of the choice.
            output: the increment, which has been added to the choice.
            events: what it does to the choice's parts.
            begins: it is the choice's first.
        """

    @abstractmethod
    def end(self) -> Iterable[bytes]:
        """Return the events after all increments."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that ends with an error."""

    @abstractmethod
    def whole(self) -> Response:
        """Return the response that is no stream."""

    def usage(self) -> dict[str, Any]:
        """Count tokens so far. A prompt counts once for all its choices, and so do the tokens of it that were cached:
        what the first of them found, as the others find what the first has computed."""
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
    """Make the response to a request of the increments of its choices."""
    outputs = reply.outputs
    if not streamed:
        async with aclosing(stream):
            async for index, output in stream:
                outputs[index].add(output)
        if not all(output.finished for output in outputs):
            return Response(status_code=499)  # the client has gone: nobody reads this
        small = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in outputs) <= QUICK_LOGPROBS
        return reply.whole() if small else await run_in_threadpool(reply.whole)
    # Fetch the first increment before the headers go out: a refusal must still be an HTTP status.
    if (first := await anext(stream, None)) is None:
        return Response(status_code=499)

    async def events() -> AsyncIterator[bytes]:
        increment: tuple[int, Output] | None = first
        try:
            async with aclosing(stream):
                while increment is not None:
                    index, output = increment
                    begins = outputs[index].last is None
                    made = reply.increment(index, output, outputs[index].add(output), begins)
                    if len(output.prompt_logprobs) > QUICK_LOGPROBS:
                        made = await run_in_threadpool(list, made)
                    for event in made:
                        yield event
                    increment = await anext(stream, None)
            for event in reply.end():
                yield event
        except Exception as error:  # the headers are gone: say it in the stream
            yield reply.failed(as_api_error(error, request.scope["state"]))

    return EventStream(events())
