"""/v1/responses, OpenAI's newer shape of a chat, with text and tools. Responses are stored for a while."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from weft.engine.messages.request import Output
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.parsed_output import OutputPart, PartEvent, PartKind, Reply
from weft.serve.chat.protocol import (
    HARMLESS,
    MAX_ITEMS,
    MAX_NAMED,
    Metadata,
    OutputRequest,
    SharedRequest,
    Text,
    limited_to,
)
from weft.serve.chat.service import ChatJob, Service
from weft.serve.dialects.items import ChatMessages, Include, ReasoningConfig, TextConfig
from weft.serve.http.bodies import JsonRoute, work_on
from weft.serve.http.errors import ApiError, bad_field
from weft.serve.http.wire import typed_event

ITEMS: dict[PartKind, tuple[str, str, str]] = {
    "text": ("message", "msg", "output_text"),
    "thought": ("reasoning", "rs", "reasoning_text"),
    "call": ("function_call", "fc", "function_call_arguments"),
}
"""Kind of a part → type of its item, prefix of its id, and name of its text in events."""

BODY: tuple[str, ...] = ("id", "object", "created_at", "status", "error", "incomplete_details", "instructions")
BODY += ("max_output_tokens", "model", "output", "parallel_tool_calls", "previous_response_id", "store", "temperature")
BODY += ("text", "tool_choice", "tools", "top_p", "truncation", "reasoning", "metadata", "usage")
"""Members of a response in order. Members that are not computed are copied from the request."""

FIELDS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
"""A chat's name → this endpoint's name of a field."""


class ResponsesRequest(SharedRequest, OutputRequest):
    """Body of POST /v1/responses. store: keep the response, so that requests can continue it by its id.
    previous_response_id: response with items that precede `input`, without its `instructions`."""

    harmless = HARMLESS - {"metadata", "store"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "data_parallel_rank": (0,),
    }

    input: Annotated[Text | list[dict[str, Any]], limited_to(MAX_ITEMS)]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
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
        """True, like for a chat; there may also be many earlier items."""
        return True

    @property
    def items(self) -> list[dict[str, Any]]:
        """Input items of this request."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def chat(self, before: Sequence[bytes] = ()) -> ChatRequest:
        """Return the request as a chat. before: earlier items, in JSON arrays. ApiError 400."""
        self.refuse_unsupported()
        messages = ChatMessages()
        if self.instructions:
            messages.add({"role": "system", "content": self.instructions}, "instructions", "role", "content")
        for items in before:
            messages.add_items(json.loads(items), "previous_response_id")
        if isinstance(self.input, str):
            messages.add({"role": "user", "content": self.input}, "input", "role", "content")
        else:
            messages.add_items(self.input, "input")
        body: dict[str, Any] = {
            "messages": messages.made,
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        if self.tools:
            body["tools"] = [_nested(tool, "function") for tool in self.tools]
            body["tool_choice"] = self._tool_choice()
        elif self.tool_choice not in ("none", "auto"):
            raise bad_field("tool_choice", " needs tools")
        if self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_unset=True)
            kind = form.pop("type")
            body["response_format"] = {"type": kind} | ({"json_schema": form} if kind == "json_schema" else form)
        return ChatRequest.of(self, FIELDS | messages.names, **body)

    def _tool_choice(self) -> Any:
        """Return tool_choice in a chat's shape, with the fields next to the type in an object."""
        choice = self.tool_choice
        if isinstance(choice, str) or choice.get("type") != "allowed_tools":
            return choice if isinstance(choice, str) else _nested(choice, "function")
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_nested(tool, "function") if isinstance(tool, dict) else tool for tool in tools]
        return _nested(choice | {"tools": tools}, "allowed_tools")


def _nested(item: dict[str, Any], name: str) -> dict[str, Any]:
    return {"type": item.get("type"), name: {**item, "type": None}}


def router(service: Service) -> APIRouter:
    """Return the routes of responses."""
    routes, shared, stores = APIRouter(route_class=JsonRoute), service.shared, service.options.max_stored_mb > 0

    async def earlier(body: ResponsesRequest) -> tuple[bytes, ...]:
        """Return the items of the previous response."""
        if not stores and (body.store or body.previous_response_id is not None):
            name = "store" if body.store else "previous_response_id"
            raise bad_field(name, " is not supported here; start weft serve with --max-stored-mb")
        if (previous := body.previous_response_id) is None:
            return ()
        if (found := await shared.ask("stored", previous)) is None:
            raise _unknown(400, previous, "previous_response_id", "previous_response_not_found")
        return tuple(found[1])

    def prepared(before: tuple[bytes, ...], body: ResponsesRequest) -> tuple[ChatJob, tuple[bytes, ...]]:
        """Return the job of the request as a chat, and all items of the conversation."""
        return service.chat_job(body.chat(before)), (*before, _json(body.items))

    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        job, items = await work_on(request, partial(prepared, await earlier(body)), body)
        reply = ResponseReply(service, job, body, items, stores and body.store is not False)
        return await service.respond_chat(request, job, reply)

    @routes.get("/v1/responses/{response_id}", response_model=None)
    async def stored(response_id: str) -> Response:
        if (found := await shared.ask("stored", response_id)) is None:
            raise _unknown(404, response_id, "response_id")
        return Response(found[0], media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        if not await shared.ask("delete", response_id):
            raise _unknown(404, response_id, "response_id")
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


class ResponseReply(Reply):
    """Reply with a response of items.

    Args:
        body: the request.
        before: items of the conversation up to the output, in JSON arrays.
        stores: store the whole response.
    """

    def __init__(self, service: Service, job: ChatJob, body: ResponsesRequest, before: tuple[bytes, ...], stores: bool):
        super().__init__(service.model_name, [job.prompt], job.outputs())
        self._shared, self._asked, self._before, self._stores = service.shared, body, before, stores
        self._id, self._created, self._number = f"resp_{uuid.uuid4().hex}", int(time.time()), 0

    def increment(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterator[bytes]:
        if begins:
            empty: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
            body = self._body() | empty
            yield self._event("response.created", response=body)
            yield self._event("response.in_progress", response=body)
        for event in events:
            part = event.part
            _, prefix, name = ITEMS[part.kind]
            place = {"item_id": f"{prefix}_{part.id}", "output_index": part.at}
            place |= {} if part.call else {"content_index": 0}
            logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
            match event.kind:
                case "opens":
                    item = _item(part, closed=False)
                    yield self._event("response.output_item.added", output_index=part.at, item=item)
                    if not part.call:
                        yield self._event("response.content_part.added", **place, part=_content(part, ""))
                case "grows":
                    yield self._event(f"response.{name}.delta", **place, delta=event.text, **logprobs)
                case "closes":
                    if part.call:
                        yield self._event(f"response.{name}.done", **place, arguments=part.text, name=part.call.name)
                    else:
                        yield self._event(f"response.{name}.done", **place, text=part.text, **logprobs)
                        yield self._event("response.content_part.done", **place, part=_content(part, part.text))
                    yield self._event("response.output_item.done", output_index=part.at, item=_item(part))

    async def finish(self) -> None:
        output = self.outputs[0]
        self._last = [] if output.parts else [*output.opened("text"), *output.closed()]  # an output without parts
        self._ended = self._body()
        if self._stores and output.finished:
            items = (*self._before, _json(self._ended["output"]))
            await self._shared.ask("store", self._id, _json(self._ended), items)

    def end(self) -> Iterator[bytes]:
        yield from self.increment(0, self.outputs[0].whole, self._last, False)
        yield self._event(f"response.{self._ended['status']}", response=self._ended)

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def whole(self) -> Response:
        return JSONResponse(self._ended)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return typed_event(kind, sequence_number=self._number - 1, **fields)

    def _body(self) -> dict[str, Any]:
        output, request, counts = self.outputs[0], self._asked, self.usage()
        cut = output.whole.finish_reason == "length"
        return {name: getattr(request, name, None) for name in BODY} | {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": [_item(part) for part in output.parts],
            "store": self._stores,
            "text": {"format": {"type": "text"}} | request.text.model_dump(exclude_unset=True),
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            },
        }


def _item(part: OutputPart, closed: bool = True) -> dict[str, Any]:
    """Return the item of a part. closed: complete; otherwise as it opens."""
    kind, prefix, _ = ITEMS[part.kind]
    item: dict[str, Any] = {"id": f"{prefix}_{part.id}", "type": kind}
    status = {"status": "completed" if closed else "in_progress"}
    if part.call:
        arguments = part.text if closed else ""
        return item | {"call_id": part.call.id, "name": part.call.name, "arguments": arguments} | status
    item["content"] = [_content(part, part.text)] if closed else []
    more: dict[str, Any] = {"summary": []} if part.kind == "thought" else {"role": "assistant", **status}
    return item | more


def _content(part: OutputPart, text: str) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "annotations": [], "text": text, "logprobs": []}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _unknown(status: int, name: str, param: str, code: str | None = None) -> ApiError:
    return ApiError(status, f"no response with id {name!r} is stored here", param=param, code=code)
