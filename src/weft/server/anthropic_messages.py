"""POST /v1/messages: Anthropic's shape of a chat, as a translation of it and back; and how many tokens one has."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from weft.engine.messages.request import Output
from weft.server.bodies import JsonRoute, work_on
from weft.server.chats import ChatRequest, Effort, TextPart, chat_of, only_text, text_of, thinking
from weft.server.completions import ChatJob, Service
from weft.server.engine_client import usage
from weft.server.errors import AnthropicBody, ApiError, anthropic_body, client_names, described
from weft.server.items import ChatMessages
from weft.server.parsed_output import ParsedOutput, respond
from weft.server.protocol import MAX_ITEMS, MAX_NAMED, MAX_STOPS, Body, Metadata, Text, Texts, limited_to
from weft.server.tool_formats import Call
from weft.server.tools import Parser
from weft.server.wire import json_response

Kind = Literal["text", "thinking", "tool_use"]

FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
"""The names that a chat's fields have here."""


class Block(Body):
    """A part of a message."""

    harmless = frozenset({"cache_control", "citations", "caller"})  # for others, or what clients send back


class TextBlock(TextPart):
    harmless = Block.harmless


class ThinkingBlock(Block):
    """What the assistant thought before. signature: empty here."""

    harmless = Block.harmless | {"signature"}

    type: Literal["thinking"]
    thinking: Text


class ToolUse(Block):
    """A call that the assistant made before."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


TextOrBlocks = Annotated[Text | list[TextBlock], BeforeValidator(only_text)]


class ToolResult(Block):
    """What came of a call. is_error: chats know no such mark; the content says it."""

    harmless = Block.harmless | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextOrBlocks = ""


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class InputMessage(Body):
    """One message; a last one of the assistant is what the output continues."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[AnyBlock]

    def add_to(self, made: ChatMessages, place: str) -> None:
        """Appends it as chats have it: results of tools are messages of their own. place: its place in the request."""
        if isinstance(self.content, str):
            return made.add({"role": self.role, "content": self.content}, place)
        before = len(made.made)
        message: dict[str, Any] = {"role": self.role, "content": []}
        for at, block in enumerate(self.content):
            if isinstance(block, ToolResult):
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
                made.add(result, f"{place}.content.{at}")
                made.names[f"messages.{len(made.made) - 1}.role"] = f"{place}.content.{at}"
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
    """A function that the model may call."""

    harmless = frozenset({"cache_control", "eager_input_streaming"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"defer_loading": (False,), "input_examples": ([],)}

    type: Literal["custom"] = "custom"
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """As chats have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | {"strict": self.strict}}


class ToolChoice(Body):
    """name: of the tool, where the type is that."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    def plain(self) -> str | dict[str, Any]:
        """As chats have it. ApiError 400 for a tool without its name."""
        if self.type != "tool":
            return {"any": "required"}.get(self.type, self.type)
        if self.name is None:
            raise ApiError(400, "tool_choice.name: the tool's name is needed", param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(Body):
    """Whether the model thinks, and shows it. budget_tokens: no model here knows any, so it is taken without effect."""

    harmless = frozenset({"budget_tokens"})

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """effort: as a chat's reasoning_effort."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens: a conversation."""

    harmless = frozenset({"cache_control", "context_management", "service_tier"})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"speed": ("standard",)}

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1), limited_to(MAX_ITEMS)]
    system: TextOrBlocks = ""
    tools: Annotated[list[InputTool], limited_to(MAX_NAMED)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> ChatRequest:
        """The same as a chat. ApiError 400."""
        self.refuse_unsupported()
        made = ChatMessages()
        if self.system:
            made.add({"role": "system", "content": text_of(self.system)}, "system", whole=True)
        for at, message in enumerate(self.messages):
            message.add_to(made, f"messages.{at}")
        body: dict[str, Any] = {"messages": made.made, "tools": [tool.plain() for tool in self.tools]}
        if made.made[-1]["role"] == "assistant" and "tool_calls" not in made.made[-1]:
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
        body |= self._sampling()
        tools = {f"tools.{at}.function": f"tools.{at}" for at in range(len(self.tools))}
        schemas = {f"{tool}.parameters": f"{name}.input_schema" for tool, name in tools.items()}
        return chat_of(body, FIELDS | tools | schemas | made.names)

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest):
    """POST /v1/messages. metadata: its user_id distinguishes clients in the queue."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[Texts, limited_to(MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata = Field(default_factory=dict)

    @property
    def slow(self) -> bool:
        """As a chat."""
        return True

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        sampling = {name: getattr(self, name) for name in names}
        return sampling | {"stop": self.stop_sequences, "user": self.metadata.get("user_id")}


class Messages:
    """Serves both endpoints by a chat service."""

    def __init__(self, service: Service):
        self._service = service

    def router(self) -> APIRouter:
        """The routes."""
        made = APIRouter(route_class=JsonRoute, responses=described(AnthropicBody))

        @made.post("/v1/messages", response_model=None)
        async def messages(body: MessagesRequest, request: Request) -> Response:
            return await self._respond(body, request)

        @made.post("/v1/messages/count_tokens", response_model=None)
        async def count(body: CountRequest, request: Request) -> Response:
            return json_response({"input_tokens": await work_on(request, self._count, body)})

        return made

    def _count(self, body: CountRequest) -> int:
        self._service.check_model(body.model)
        chat = body.chat()
        with client_names(chat.names):
            return len(self._service.prompts.of_chat(chat))

    def _chat(self, body: MessagesRequest) -> tuple[ChatRequest, ChatJob]:
        self._service.check_model(body.model)
        chat = body.chat()
        with client_names(chat.names):
            return chat, self._service.chat_job(chat)

    async def _respond(self, body: MessagesRequest, request: Request) -> Response:
        service = self._service
        chat, (prompt, params, parsers) = await work_on(request, self._chat, body)
        stream = service.engine_client.generate(request, [prompt], [params], service.sharing(chat, request))
        made = _MessageBuilder(body, service.model_name, prompt, parsers() if parsers else None)
        with client_names(chat.names):
            return await respond(request, stream, made, body.stream)


class _MessageBuilder(ParsedOutput):
    """A message as far as it has come, and the events of its parts."""

    def __init__(self, body: MessagesRequest, model: str, prompt: list[int], parser: Parser | None):
        super().__init__(parser)
        self._stops, self._model, self._prompt = body.stop_sequences, model, prompt
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._open: Kind | None = None
        self._text = ""  # of the open block

    def body(self) -> dict[str, Any]:
        """The whole message."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": self._blocks, **self._stop(), "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        counts = usage([self._prompt], [self.choice])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }

    def _stop(self) -> dict[str, str | None]:
        last, reason, text = self.choice.last, None, None
        if last is not None and last.finish_reason == "length":
            reason = "max_tokens"
        elif last is not None and last.stop_reason in self._stops:
            reason, text = "stop_sequence", str(last.stop_reason)
        elif self.whole:
            reason = "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": text}

    def begin(self) -> list[bytes]:
        """Nothing: the message's usage is known with its first increment."""
        return []

    def increment(self, output: Output) -> list[bytes]:
        """The events of an increment."""
        begins = self.choice.last is None
        parts = self.add(output)
        unended = {"stop_reason": None, "stop_sequence": None}
        events = [_event("message_start", message=self.body() | unended)] if begins else []
        events += self._more("tool_use", parts.arguments)
        events += self._more("thinking", parts.thought)
        events += self._more("text", parts.text)
        for call in parts.calls:
            events += [*self._close(), *self._begin("tool_use", call), *self._more("tool_use", call.arguments)]
        return events

    def end(self) -> list[bytes]:
        """After everything has come."""
        events = [*self._close(), _event("message_delta", delta=self._stop(), usage=self._usage())]
        return [*events, _event("message_stop")]

    def failed(self, error: ApiError) -> bytes:
        """The event of an error."""
        return b"event: error\ndata: %b\n\n" % json.dumps(anthropic_body(error)).encode()

    def _begin(self, kind: Kind, call: Call | None = None) -> list[bytes]:
        block: dict[str, Any] = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""
        elif call is not None:
            block = {"type": kind, "id": call.id, "name": call.name, "input": {}}
        self._blocks.append(block)
        self._open, self._text = kind, ""
        return [self._of_block("content_block_start", content_block=block)]

    def _more(self, kind: Kind, text: str) -> list[bytes]:
        """Of more of the open block, or of a new one where that is of another kind."""
        if not text:
            return []
        events = [] if self._open == kind else [*self._close(), *self._begin(kind)]
        self._text += text
        delta: dict[str, str] = {"type": f"{kind}_delta", kind: text}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": text}
        return [*events, self._of_block("content_block_delta", delta=delta)]

    def _close(self) -> list[bytes]:
        """Ends the open block."""
        if (kind := self._open) is None:
            return []
        self._open = None
        self._blocks[-1] |= {"input": _input(self._text)} if kind == "tool_use" else {kind: self._text}
        return [self._of_block("content_block_stop")]

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=len(self._blocks) - 1, **fields)


def _input(arguments: str) -> Any:
    """Of a call that was cut short, as far as it came, as Anthropic's client reads it; empty for what is no JSON."""
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields, ensure_ascii=False)}\n\n".encode()
