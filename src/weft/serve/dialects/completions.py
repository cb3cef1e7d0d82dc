"""POST /v1/completions and POST /v1/chat/completions, OpenAI's endpoints with choices."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from weft.engine.messages.request import Output, SamplingParams, TokenLogprob
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.parsed_output import ParsedOutput, PartEvent, PartKind, Reply
from weft.serve.chat.protocol import CommonRequest, CompletionRequest, StreamOptions
from weft.serve.chat.service import ChatJob, Service
from weft.serve.http.bodies import JsonRoute, work_on
from weft.serve.http.errors import ApiError
from weft.serve.http.wire import encode, event, json_response

UTF8 = codecs.getincrementaldecoder("utf-8")
DONE = b"data: [DONE]\n\n"
MARK = "\0"
"""Place of the text in a chunk that is made once; no name has this character."""
TEXT_FIELDS: dict[PartKind, tuple[str, ...]] = {"text": ("content",), "thought": ("reasoning_content", "reasoning")}
"""Kind of a part → its fields in a chat's message. A thought has the usual name and vLLM's newer one."""


def router(service: Service) -> APIRouter:
    """Return the routes of completions and chat completions."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await complete(service, body, request)

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        job = await work_on(request, service.chat_job, body)
        return await service.respond_chat(request, job, ChatReply(service, job))

    return routes


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Respond to a request for completions of prompts."""

    def prepared(body: CompletionRequest) -> tuple[SamplingParams, CompletionReply]:
        service.check(body)
        prompts = service.prompts.of_completion(body)
        scored = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
        tables: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": max(scored, default=None)}
        return service.params(body, max_tokens=body.max_tokens, **tables), CompletionReply(service, prompts, body)

    params, reply = await work_on(request, prepared, body)
    return await service.respond(request, body, params, reply)


class ChoicesReply(Reply):
    """Reply with a list of choices.

    Attributes:
        head_fields: fields next to the choices; in a stream, in its first chunk.
    """

    id_prefix: str
    name: str
    chunk_name: str

    def __init__(
        self, service: Service, prompts: Sequence[list[int]], outputs: Sequence[ParsedOutput], body: CommonRequest
    ):
        super().__init__(service.model_name, prompts, outputs)
        self._asked, self._text_processor = body, service.engine.text_processor
        self._options = body.stream_options or StreamOptions()
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        self._chunk_head = self._head | {"object": self.chunk_name}
        self._counts = {"usage": None} if self._options.include_usage else {}
        self.head_fields: dict[str, Any] = {}
        self._alike = not (self._options.continuous_usage_stats or body.return_token_ids)
        self._frames: dict[tuple[int, PartKind], list[bytes]] = {}

    def increment(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterable[bytes]:
        plain = len(events) == 1 and self._alike and not (output.logprobs or output.finish_reason)
        if not plain or events[0].kind != "grows" or (part := events[0].part).call is not None:
            return self._chunks(index, output, events, begins)
        # Chunks with nothing but text are alike but for it: encoding them anew takes most of a token's time.
        key = index, part.kind
        if (frame := self._frames.get(key)) is None:
            marked = msgspec.structs.replace(output, text=MARK), [PartEvent("grows", part, MARK)]
            frame = self._frames[key] = b"".join(self._chunks(index, *marked, begins)).split(encode(MARK))
        return (encode(events[0].text).join(frame),)

    def _chunks(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterator[bytes]:
        counts = {"usage": self.usage()} if self._options.continuous_usage_stats else self._counts
        for choice in self.chunks(index, output, events, begins):
            yield event({**self._chunk_head, **self.head_fields, "choices": [choice], **counts})
            self.head_fields = {}

    def end(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield event(self._chunk_head | {"choices": [], "usage": self.usage()})
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def whole(self) -> Response:
        choices = [self.choice(index, output.whole) for index, output in enumerate(self.outputs)]
        return json_response(
            self._head | self.head_fields | {"object": self.name, "choices": choices, "usage": self.usage()}
        )

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """Return a finished choice. output: all its increments as one."""

    @abstractmethod
    def chunks(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterable[dict[str, Any]]:
        """Return the streamed choices of an increment. Args: see `increment`."""

    def _prompt_logprobs(self, output: Output) -> dict[str, Any]:
        """Return vLLM's table without ranks: each token of the prompt, and the best tokens at its position."""
        if (limit := self._asked.prompt_logprobs) is None:
            return {}
        names = self._text_processor.token_name
        tables = [
            {
                str(token): {"logprob": value, "decoded_token": names(token)}
                for token, value in [(p.token_id, p.logprob), *p.top[:limit]]
            }
            for p in output.prompt_logprobs
        ]
        return {"prompt_logprobs": [None, *tables]}


class CompletionReply(ChoicesReply):
    """Reply of /v1/completions. An echoed prompt precedes the text of its choices and has logprobs too."""

    id_prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, prompts: Sequence[list[int]], body: CompletionRequest):
        super().__init__(service, prompts, [ParsedOutput() for _ in prompts for _ in range(body.n)], body)
        self._limit = body.logprobs
        self._echoed = [service.prompts.text(prompt) for prompt in prompts] if body.echo else []
        self._hidden = self._text_processor.special_ids if body.skip_special_tokens else ()
        self._returned: Counter[int] = Counter()  # characters of each choice's text
        self._offsets: defaultdict[int, int] = defaultdict(int)
        self._characters: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(lambda: UTF8("replace"))

    def choice(self, index: int, output: Output, begins: bool = True) -> dict[str, Any]:
        text, requested, prompt = output.text, self._asked, index // self.choices_of_prompt
        echoed: list[TokenLogprob | int] = []
        if begins and self._echoed:
            text, echoed = self._echoed[prompt] + text, [self.prompts[prompt][0], *output.prompt_logprobs]
        logprobs = None
        if self._limit is not None:
            self._returned[index] += len(text)
            logprobs = self._table(index, echoed, output.logprobs, self._limit)
            if output.finish_reason:  # a stop string may have removed the text of some tokens
                logprobs["text_offset"] = [min(at, self._returned[index]) for at in logprobs["text_offset"]]
        body: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs}
        body |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if requested.return_token_ids:
            body["token_ids"] = output.token_ids
            if begins:
                body["prompt_token_ids"] = self.prompts[prompt]
        return body | self._prompt_logprobs(output) if begins else body

    def chunks(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterable[dict[str, Any]]:
        # A token without complete text has an event too, as in vLLM: benchmarks count events.
        said = output.token_ids or output.text or output.finish_reason or (begins and self._echoed)
        return [self.choice(index, output, begins)] if said else []

    def _table(
        self, index: int, echoed: Sequence[TokenLogprob | int], output: Sequence[TokenLogprob], limit: int
    ) -> dict[str, Any]:
        """Return the table of logprobs. echoed: the prompt's tokens; the first is a bare id, as nothing predicts it."""
        scores = [TokenLogprob(e, None) if isinstance(e, int) else e for e in (*echoed, *output)]
        offsets, characters = [], self._characters[index]
        for number, p in enumerate(scores):
            raw = b""
            if number < len(echoed) or p.token_id not in self._hidden:
                raw = self._text_processor.grammars.tokens.decode_bytes([p.token_id])
            # A token that does not continue a begun character turns it into one replacement character.
            offsets.append(self._offsets[index] + _breaks(characters.getstate()[0], raw))
            self._offsets[index] += len(characters.decode(raw))
        names = self._text_processor.token_name
        tops = [{names(t): value for t, value in p.top[:limit]} for p in scores]
        return {
            "tokens": [names(p.token_id) for p in scores],
            "token_logprobs": [p.logprob for p in scores],
            "top_logprobs": [None if p.logprob is None else top for p, top in zip(scores, tops, strict=True)],
            "text_offset": offsets,
        }


def _breaks(begun: bytes, more: bytes) -> bool:
    """Return whether `more` cannot continue a begun UTF-8 character."""
    try:
        UTF8("strict").decode(begun + more[:1])
    except UnicodeDecodeError:
        return bool(begun)
    return False


class ChatReply(ChoicesReply):
    """Reply of /v1/chat/completions."""

    id_prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, job: ChatJob):
        super().__init__(service, [job.prompt], job.outputs(), job.chat)
        self._logprobs = job.chat.logprobs
        self.head_fields = {"prompt_token_ids": job.prompt} if job.chat.return_token_ids else {}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        parsed = self.outputs[index]
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text()}
        if thought := parsed.text("thought"):
            message |= dict.fromkeys(TEXT_FIELDS["thought"], thought)
        if calls := parsed.calls:
            message |= {"content": parsed.text() or None, "tool_calls": [call.plain() for call in calls]}
        return {"index": index, "message": message} | self._rest(index, output) | self._prompt_logprobs(output)

    def chunks(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterator[dict[str, Any]]:
        if begins:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield role | {"logprobs": None, "finish_reason": None}
        delta = _delta(events)
        if delta or output.logprobs or output.finish_reason or (self._asked.return_token_ids and output.token_ids):
            yield {"index": index, "delta": delta} | self._rest(index, output)

    def _rest(self, index: int, output: Output) -> dict[str, Any]:
        called = output.finish_reason == "stop" and any(part.call for part in self.outputs[index].parts)
        logprobs = {"content": [self._token(p) for p in output.logprobs]} if self._logprobs else None
        reason = "tool_calls" if called else output.finish_reason
        rest = {"logprobs": logprobs, "finish_reason": reason, "stop_reason": output.stop_reason}
        return rest | {"token_ids": output.token_ids} if self._asked.return_token_ids else rest

    def _token(self, p: TokenLogprob) -> dict[str, Any]:
        return self._entry(p.token_id, p.logprob) | {"top_logprobs": [self._entry(t, value) for t, value in p.top]}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        # A token may be a part of a character, or have no text: so its bytes are returned next to its text.
        raw = self._text_processor.grammars.tokens.decode_bytes([token])
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _delta(events: Sequence[PartEvent]) -> dict[str, Any]:
    """Return the additions of an increment to a chat's message."""
    delta: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    calls: list[dict[str, Any]] = delta["tool_calls"]
    for part_event in events:
        part, text = part_event.part, part_event.text
        if part.call is None:
            for name in TEXT_FIELDS[part.kind]:
                delta[name] += text
        elif part_event.kind == "opens":
            calls.append({"index": part.number} | part.call.plain())
        elif text:
            if not calls:  # it continues a call of an earlier increment
                calls.append({"index": part.number, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += text
    return {name: value for name, value in delta.items() if value}
