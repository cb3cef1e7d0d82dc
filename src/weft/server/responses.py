"""/v1/responses: OpenAI's newer shape of a chat, with text and tools. Responses are stored for a while."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from weft.engine.messages.request import Output
from weft.server.bodies import JsonRoute, work_on
from weft.server.chats import ChatRequest, chat_of
from weft.server.completions import ChatJob, Service
from weft.server.engine_client import usage
from weft.server.errors import ApiError, Names, client_names
from weft.server.items import ChatMessages, Include, ReasoningConfig, TextConfig
from weft.server.parsed_output import ParsedOutput, respond
from weft.server.protocol import (
    HARMLESS,
    MAX_ITEMS,
    MAX_NAMED,
    Metadata,
    SharedRequest,
    Text,
    limited_to,
)
from weft.server.stored import Store, Stored
from weft.server.tool_formats import Call
from weft.server.tools import Parser

Kind = Literal["message", "reasoning"]
PARTS: dict[Kind, dict[str, Any]] = {
    "message": {"type": "output_text", "annotations": []},
    "reasoning": {"type": "reasoning_text"},
}
"""What items of text are made of."""
PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs"}

FIELDS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
"""The names that a chat's fields have here."""


class ResponsesRequest(SharedRequest):
    """The served fields. store: whether others may go on from the response by its id. previous_response_id: the
    items of that response go before `input`; its `instructions` do not."""

    harmless = HARMLESS - {"metadata", "store"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "data_parallel_rank": (0,),
    }

    model: str | None = None
    input: Annotated[Text | list[dict[str, Any]], limited_to(MAX_ITEMS)]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stream: bool = False
    tools: Annotated[list[dict[str, Any]], limited_to(MAX_NAMED)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    include: Annotated[list[Include], limited_to(MAX_NAMED)] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: Annotated[dict[str, Any], limited_to(MAX_NAMED)] = Field(default_factory=dict)
    metadata: Metadata = Field(default_factory=dict)
    store: bool | None = None
    previous_response_id: Text | None = None

    @property
    def slow(self) -> bool:
        """As a chat; the items before may be many."""
        return True

    @property
    def items(self) -> list[dict[str, Any]]:
        """What it says."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def chat(self, before: Sequence[bytes] = ()) -> ChatRequest:
        """The same as a chat. before: items that go before its own, in JSON arrays. ApiError 400."""
        self.refuse_unsupported()
        messages = ChatMessages()
        if self.instructions:
            messages.add({"role": "system", "content": self.instructions}, "instructions", whole=True)
        for items in before:
            messages.add_items(json.loads(items), "previous_response_id")
        if isinstance(self.input, str):
            messages.add({"role": "user", "content": self.input}, "input", whole=True)
        else:
            messages.add_items(self.input, "input")
        body: dict[str, Any] = {
            "messages": messages.made,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "user": self.user,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.tools:
            body["tools"] = [_nested(tool, "function") for tool in self.tools]
            body["tool_choice"] = self._tool_choice()
        elif self.tool_choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_unset=True)
            kind = form.pop("type")
            body["response_format"] = {"type": kind} | ({"json_schema": form} if kind == "json_schema" else form)
        tools = {f"tools.{at}.function": f"tools.{at}" for at in range(len(self.tools))}
        return chat_of(body, FIELDS | tools | messages.names)

    def _tool_choice(self) -> Any:
        """As chats have it: what stands beside the type is an object of its own there."""
        choice = self.tool_choice
        if isinstance(choice, str) or choice.get("type") != "allowed_tools":
            return choice if isinstance(choice, str) else _nested(choice, "function")
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_nested(tool, "function") if isinstance(tool, dict) else tool for tool in tools]
        return _nested(choice | {"tools": tools}, "allowed_tools")


def _nested(item: dict[str, Any], name: str) -> dict[str, Any]:
    return {"type": item.get("type"), name: {**item, "type": None}}


class Responses:
    """Serves the endpoint by a chat service. max_stored_bytes: of responses that are stored; 0: none are."""

    def __init__(self, service: Service, max_stored_bytes: int):
        self._service = service
        self._store = Store(max_stored_bytes) if max_stored_bytes else None

    def router(self) -> APIRouter:
        """The routes."""
        made = APIRouter(route_class=JsonRoute)

        @made.post("/v1/responses", response_model=None)
        async def responses(body: ResponsesRequest, request: Request) -> Response:
            return await self._respond(body, request)

        @made.get("/v1/responses/{response_id}", response_model=None)
        async def stored(response_id: str) -> Response:
            if self._store is None or (found := self._store.get(response_id)) is None:
                raise _unknown(404, response_id, "response_id")
            return Response(found.body, media_type="application/json")

        @made.delete("/v1/responses/{response_id}")
        async def delete(response_id: str) -> dict[str, Any]:
            if self._store is None or not self._store.delete(response_id):
                raise _unknown(404, response_id, "response_id")
            return {"id": response_id, "object": "response", "deleted": True}

        return made

    def _before(self, body: ResponsesRequest) -> tuple[bytes, ...]:
        """The items that it goes on from."""
        if self._store is None and (body.store or body.previous_response_id is not None):
            name = "store" if body.store else "previous_response_id"
            raise ApiError(400, f"{name} is not supported here; start weft serve with --max-stored-mb", param=name)
        if self._store is None or (previous := body.previous_response_id) is None:
            return ()
        if (found := self._store.get(previous)) is None:
            raise _unknown(400, previous, "previous_response_id", "previous_response_not_found")
        return found.items

    def _chat(self, before: tuple[bytes, ...], body: ResponsesRequest) -> tuple[ChatJob, tuple[bytes, ...], Names]:
        """Return the same as a chat, the conversation's items with its own, and names of its fields."""
        chat = body.chat(before)
        self._service.check_model(body.model)
        with client_names(chat.names):
            return self._service.chat_job(chat), (*before, _json(body.items)), chat.names

    async def _respond(self, body: ResponsesRequest, request: Request) -> Response:
        service = self._service
        (prompt, params, parsers), items, names = await work_on(request, partial(self._chat, self._before(body)), body)
        stream = service.engine_client.generate(request, [prompt], [params], service.sharing(body, request))
        made = _ResponseBuilder(body, service.model_name, prompt, parsers() if parsers else None)
        if self._store is not None and body.store is not False:
            made.stored = partial(self._put, self._store, items)
        with client_names(names):
            return await respond(request, stream, made, body.stream)

    def _put(self, store: Store, before: tuple[bytes, ...], made: _ResponseBuilder) -> None:
        store.put(made.id, Stored(_json(made.body()), (*before, _json(made.items))))


class _ResponseBuilder(ParsedOutput):
    """A response as far as it has come, and the events of its parts. stored: called with it once it is whole."""

    def __init__(self, body: ResponsesRequest, model: str, prompt: list[int], parser: Parser | None):
        super().__init__(parser)
        self._asked, self._model, self._prompt = body, model, prompt
        self.stored: Callable[[_ResponseBuilder], None] | None = None
        self.id, self._created, self._number = f"resp_{uuid.uuid4().hex}", int(time.time()), 0
        self.items: list[dict[str, Any]] = []
        self._open: Kind | Literal["function_call"] | None = None
        self._text = ""

    def body(self, status: str | None = None) -> dict[str, Any]:
        """The whole response."""
        last, asked = self.choice.last, self._asked
        cut = last is not None and last.finish_reason == "length"
        counts = usage([self._prompt], [self.choice])
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut and not status else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._model,
            "output": self.items,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "store": self.stored is not None,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}} | asked.text.model_dump(exclude_unset=True),
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": asked.top_p,
            "truncation": asked.truncation,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "metadata": asked.metadata,
            "usage": None
            if status
            else {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            },
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event, numbered."""
        made = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(made, ensure_ascii=False)}\n\n".encode()

    def begin(self) -> list[bytes]:
        """Before anything has come."""
        body = self.body("in_progress")
        return [self.event("response.created", response=body), self.event("response.in_progress", response=body)]

    def increment(self, output: Output) -> list[bytes]:
        """The events of an increment."""
        parts = self.add(output)
        events = self._argument_events(parts.arguments)
        events += self._text_events(parts.thought, "reasoning") if parts.thought else []
        events += self._text_events(parts.text) if parts.text else []
        for call in parts.calls:
            events += self._close() + self._call_events(call)
        return events

    def end(self) -> list[bytes]:
        """After everything has come."""
        events = [] if self.items else self._text_events("")  # an empty output is a message too
        events += self._close()
        body = self.body()
        if self.stored is not None and self.whole:  # before its client hears of the end
            self.stored(self)
        return [*events, self.event(f"response.{body['status']}", response=body)]

    def failed(self, error: ApiError) -> bytes:
        """The event of an error."""
        return self.event("error", message=error.message, code=error.code, param=error.param)

    def _text_events(self, text: str, kind: Kind = "message") -> list[bytes]:
        """Of more text of the open item, or of a new one where that is of another kind."""
        events = [] if self._open == kind else self._close()
        if self._open is None:
            item: dict[str, Any] = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "content": []}
            if kind == "message":
                item |= {"role": "assistant", "status": "in_progress"}
            else:
                item["summary"] = []
            self.items.append(item)
            self._open, self._text = kind, ""
            events.append(self.event("response.output_item.added", output_index=self._at, item=item))
            events.append(self._part("response.content_part.added", part=_part(kind, "")))
        if text:
            self._text += text
            events.append(self._part(f"response.{PARTS[kind]['type']}.delta", delta=text, **_logprobs(kind)))
        return events

    def _close(self) -> list[bytes]:
        """Ends the open item."""
        if (kind := self._open) is None:
            return []
        item, self._open = self.items[-1], None
        if kind == "function_call":
            item |= {"arguments": self._text, "status": "completed"}
            kept = {"arguments": self._text, "name": item["name"]}
            events = [self._of_item("response.function_call_arguments.done", **kept)]
        else:
            part = _part(kind, self._text)
            item |= {"content": [part]} | ({"status": "completed"} if kind == "message" else {})
            events = [
                self._part(f"response.{part['type']}.done", text=self._text, **_logprobs(kind)),
                self._part("response.content_part.done", part=part),
            ]
        return [*events, self.event("response.output_item.done", output_index=self._at, item=item)]

    @property
    def _at(self) -> int:
        return len(self.items) - 1

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self.event(kind, item_id=self.items[-1]["id"], output_index=self._at, **fields)

    def _part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _call_events(self, call: Call) -> list[bytes]:
        """Of a call that begins."""
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.id, "name": call.name}
        item |= {"arguments": "", "status": "in_progress"}
        self.items.append(item)
        self._open, self._text = "function_call", ""
        added = self.event("response.output_item.added", output_index=self._at, item=item)
        return [added, *self._argument_events(call.arguments)]

    def _argument_events(self, arguments: str) -> list[bytes]:
        """Of more arguments of the open call."""
        self._text += arguments
        return [self._of_item("response.function_call_arguments.delta", delta=arguments)] if arguments else []


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _unknown(status: int, name: str, param: str, code: str | None = None) -> ApiError:
    return ApiError(status, f"no response with id {name!r} is stored here", param=param, code=code)


def _part(kind: Kind, text: str) -> dict[str, Any]:
    return PARTS[kind] | {"text": text} | _logprobs(kind)


def _logprobs(kind: Kind) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
