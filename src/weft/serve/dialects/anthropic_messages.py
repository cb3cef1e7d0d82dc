"""POST /v1/messages, Anthropic's shape of a chat, translated to a chat and back, and its count of tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from weft.engine.messages.request import Output
from weft.serve.chat.chats import ChatRequest, Effort, TextPart, only_text, text_of, thinking
from weft.serve.chat.parsed_output import OutputPart, PartEvent, PartKind, Reply
from weft.serve.chat.protocol import MAX_ITEMS, MAX_NAMED, MAX_STOPS, Metadata, OutputRequest, Text, Texts, limited_to
from weft.serve.chat.service import ChatJob, Service
from weft.serve.dialects.items import ChatMessages
from weft.serve.http.bodies import Body, JsonRoute, work_on
from weft.serve.http.errors import AnthropicBody, ApiError, anthropic_body, bad_field, client_names, described
from weft.serve.http.wire import json_response, typed_event

BLOCKS: dict[PartKind, tuple[str, str, str]] = {
    "text": ("text", "text_delta", "text"),
    "thought": ("thinking", "thinking_delta", "thinking"),
    "call": ("tool_use", "input_json_delta", "partial_json"),
}
"""Kind of a part → type of its content block, type of its deltas, and their field."""

FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
"""A chat's name → this endpoint's name of a field."""


class Block(Body):
    """Content block of a message."""

    harmless = frozenset({"cache_control", "citations", "caller"})  # other servers' fields, or echoed outputs


class TextBlock(TextPart):
    harmless = Block.harmless


class ThinkingBlock(Block):
    """Earlier thought of the assistant. signature: ignored, as Weft's are empty."""

    harmless = Block.harmless | {"signature"}

    type: Literal["thinking"]
    thinking: Text


class ToolUse(Block):
    """Earlier call of the assistant."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


TextOrBlocks = Annotated[Text | list[TextBlock], BeforeValidator(only_text)]


class ToolResult(Block):
    """Result of a call. is_error: ignored, as chats have no such field and the content tells it."""

    harmless = Block.harmless | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextOrBlocks = ""


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class InputMessage(Body):
    """Message of a conversation; the output continues a last message of the assistant."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[AnyBlock]

    def add_to(self, made: ChatMessages, place: str) -> None:
        """Append the message in a chat's shape, with a message per tool result. place: in the request."""
        if isinstance(self.content, str):
            return made.add({"role": self.role, "content": self.content}, place)
        before = len(made.made)
        message: dict[str, Any] = {"role": self.role, "content": []}
        for at, block in enumerate(self.content):
            if isinstance(block, ToolResult):
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
                made.add(result, f"{place}.content.{at}", "role")
            elif isinstance(block, ToolUse):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": block.id, "function": function})
            elif isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            else:
                message["content"].append({"type": "text", "text": block.text})
        if message.keys() > {"role", "content"} or message["content"] or len(made.made) == before:
            made.add(message, place)
            made.names[f"messages.{len(made.made) - 1}.tool_calls"] = f"{place}.content"


class InputTool(Body):
    """Function that the model may call."""

    harmless = frozenset({"cache_control", "eager_input_streaming"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"defer_loading": (False,), "input_examples": ([],)}

    type: Literal["custom"] = "custom"
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool in a chat's shape."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | {"strict": self.strict}}


class ToolChoice(Body):
    """Choice of tools. name: the tool's, for type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    def plain(self) -> str | dict[str, Any]:
        """Return the choice in a chat's shape. ApiError 400 for a tool without a name."""
        if self.type != "tool":
            return {"any": "required"}.get(self.type, self.type)
        if self.name is None:
            raise bad_field("tool_choice.name", ": the tool's name is needed")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(Body):
    """Options of thinking. display: show or omit the thought; budget_tokens: ignored, as no model supports it."""

    harmless = frozenset({"budget_tokens"})

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Options of the output. effort: a chat's reasoning_effort."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """Body of POST /v1/messages/count_tokens: a conversation."""

    harmless = frozenset({"cache_control", "context_management", "service_tier"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"speed": ("standard",)}

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1), limited_to(MAX_ITEMS)]
    system: TextOrBlocks = ""
    tools: Annotated[list[InputTool], limited_to(MAX_NAMED)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def slow(self) -> bool:
        """True, like for a chat."""
        return True

    def chat(self, **body: Any) -> ChatRequest:
        """Return the request as a chat. body: further fields of the chat. ApiError 400."""
        self.refuse_unsupported()
        messages = ChatMessages()
        if self.system:
            messages.add({"role": "system", "content": text_of(self.system)}, "system", "role", "content")
        for at, message in enumerate(self.messages):
            message.add_to(messages, f"messages.{at}")
        body |= {"messages": messages.made, "tools": [tool.plain() for tool in self.tools]}
        if messages.made[-1]["role"] == "assistant" and "tool_calls" not in messages.made[-1]:
            body["continue_final_message"] = True
        if (choice := self.tool_choice) is not None:
            body |= {"tool_choice": choice.plain(), "parallel_tool_calls": not choice.disable_parallel_tool_use}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            body["include_reasoning"] = thinks and self.thinking.display != "omitted"
            body["chat_template_kwargs"] = thinking(thinks)
        if (output := self.output_config) is not None:
            body["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {"name": "output", "schema": output.format.schema_}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
        schemas = {f"tools.{at}.function.parameters": f"tools.{at}.input_schema" for at in range(len(self.tools))}
        return ChatRequest.of(self, FIELDS | schemas | messages.names, **body)


class MessagesRequest(CountRequest, OutputRequest):
    """Body of POST /v1/messages. metadata: its user_id distinguishes clients in the queue."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[Texts, limited_to(MAX_STOPS)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)

    def chat(self, **body: Any) -> ChatRequest:
        return super().chat(stop=self.stop_sequences, user=self.metadata.get("user_id"), **body)


def router(service: Service) -> APIRouter:
    """Return the routes of messages and of their count."""
    routes = APIRouter(route_class=JsonRoute, responses=described(AnthropicBody))

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        job = await work_on(request, lambda body: service.chat_job(body.chat()), body)
        return await service.respond_chat(request, job, MessageReply(service, job, body))

    @routes.post("/v1/messages/count_tokens", response_model=None)
    def count(body: CountRequest) -> Response:
        service.check_model(body.model)
        chat = body.chat()
        with client_names(chat.names):
            return json_response({"input_tokens": len(service.prompts.of_chat(chat))})

    return routes


class MessageReply(Reply):
    """Reply with a message of content blocks."""

    def __init__(self, service: Service, job: ChatJob, body: MessagesRequest):
        super().__init__(service.model_name, [job.prompt], job.outputs())
        self._stops = body.stop_sequences
        self._id = f"msg_{uuid.uuid4().hex}"

    def increment(self, index: int, output: Output, events: Sequence[PartEvent], begins: bool) -> Iterator[bytes]:
        if begins:  # its usage is unknown before the first increment
            unended: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            yield typed_event("message_start", message=self._body() | unended)
        for event in events:
            part, (_, kind, field) = event.part, BLOCKS[event.part.kind]
            match event.kind:
                case "opens":
                    yield typed_event("content_block_start", index=part.at, content_block=_block(part, ""))
                case "grows":
                    yield typed_event("content_block_delta", index=part.at, delta={"type": kind, field: event.text})
                case "closes":
                    yield typed_event("content_block_stop", index=part.at)

    def end(self) -> list[bytes]:
        return [typed_event("message_delta", delta=self._stop(), usage=self._usage()), typed_event("message_stop")]

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % json.dumps(anthropic_body(error)).encode()

    def whole(self) -> Response:
        return JSONResponse(self._body())

    def _body(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model}
        blocks = [_block(part, part.text) for part in self.outputs[0].parts]
        return head | {"content": blocks, **self._stop(), "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.outputs[0].reasoning_tokens},
        }

    def _stop(self) -> dict[str, str | None]:
        last, reason, text = self.outputs[0].whole, None, None
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif last.stop_reason in self._stops:
            reason, text = "stop_sequence", str(last.stop_reason)
        elif last.finish_reason:
            reason = "tool_use" if self.outputs[0].calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": text}


def _block(part: OutputPart, text: str) -> dict[str, Any]:
    """Return the content block of a part with this text."""
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": _input(text)}
    kind = BLOCKS[part.kind][0]
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _input(arguments: str) -> Any:
    """Return the arguments of a call, completed if they were cut, like in Anthropic's client; empty without JSON."""
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
