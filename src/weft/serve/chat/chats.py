"""Bodies of POST /v1/chat/completions: messages, tools, and their prompt by a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError

from weft.engine.grammar.grammar import Grammars
from weft.serve.chat.message_shape import COMMON_ROLES, MessageShape
from weft.serve.chat.protocol import MAX_ITEMS, MAX_NAMED, CommonRequest, Text, limited_to
from weft.serve.chat.templates import Templates
from weft.serve.chat.tool_formats import ToolFormat, tool_format_of
from weft.serve.http.bodies import Body
from weft.serve.http.errors import ApiError, Names, bad_field, client_names, field_errors

OUR_ARGUMENTS = {"conversation", "messages", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template"}
OUR_ARGUMENTS |= {"continue_final_message"}
"""Arguments of a chat template that `chat_template_kwargs` may not set."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of text parts in chats and responses."""


class TextPart(Body):
    """Text part of a message, the only kind that Weft reads."""

    harmless = frozenset({"annotations", "cache_control", "id", "logprobs"})  # echoed outputs, or other servers' fields

    type: Literal["text"]
    text: Text


def only_text(content: Any) -> Any:
    """Return the content; ValueError for other parts than text, clearer than their missing text fields."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            raise ValueError(f"a part of type {kind!r} cannot be read: this server reads text alone; omit it")
    return content


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """Return the joined parts of a message."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class CalledFunction(Body):
    """Function and arguments of a call. arguments: JSON text."""

    name: Text
    arguments: Text = "{}"


class ToolCall(Body):
    """Earlier call of the assistant."""

    harmless = frozenset({"index"})  # of streamed calls that clients return

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """Message of a chat. Unknown fields are passed to the chat template."""

    open = True

    role: Text
    content: Annotated[Text | Annotated[list[TextPart], Field(fail_fast=True)] | None, BeforeValidator(only_text)] = (
        None
    )
    name: Text | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: Text | None = None

    @property
    def text(self) -> str:
        """Joined text of the parts."""
        return text_of(self.content)

    @property
    def characters(self) -> int:
        """Length of the role, the text and the arguments of calls."""
        return len(self.role) + len(self.text) + sum(len(c.function.arguments) for c in self.tool_calls)

    def plain(self, place: str = "messages") -> dict[str, Any]:
        """Return the input of `MessageShape.built`. place: in the request. ApiError 400 for arguments without JSON."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [_call(c, f"{place}.tool_calls.{at}") for at, c in enumerate(self.tool_calls)]
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message | (self.model_extra or {})


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        rest = f": the arguments of a call of {call.function.name} are not JSON: {error}"
        raise bad_field(f"{place}.function.arguments", rest) from error
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema; ValueError for faults in the parts that forms of calls read. Its compiler checks the rest."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("properties must be an object and required a list")
    for name, kind in properties.items():
        if isinstance(kind, dict) and not isinstance(kind.get("enum", []), list):
            raise ValueError(f"the enum of {name} must be a list")
        if isinstance(kind, dict) and not (isinstance(length := kind.get("maxLength", 0), int) and 0 <= length < 2**20):
            raise ValueError(f"the maxLength of {name} must be an integer from 0 to {2**20}")
    return schema


class Function(Body):
    """Function that the model may call. parameters: a JSON schema."""

    name: Text = Field(min_length=1)
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_an_object)] | None = None
    strict: bool | None = None


class Tool(Body):
    """Tool of a chat: a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    """tool_choice that requires a call of one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Allowed tools. mode: `required` if the output must call one."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(Body):
    """tool_choice that hides all other tools from the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChosenTools = Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
GPT_OSS_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Level of reasoning → the nearest of GPT-OSS's three levels."""


class ChatRequest(CommonRequest):
    """Body of POST /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = CommonRequest.neutral | {
        "functions": ([],),
        "function_call": ("none", "auto"),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), limited_to(MAX_ITEMS)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], limited_to(MAX_NAMED)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: Text | None = Field(None, min_length=1)
    chat_template_kwargs: Annotated[dict[str, Any], limited_to(MAX_NAMED)] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    _names: Names = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, body: Body, names: Names, **own: Any) -> ChatRequest:
        """Return the chat of another endpoint's request. ApiError 400.

        Args:
            body: request; the chat takes over fields of the same name.
            names: checked name → that endpoint's name of a field.
            own: further fields of the chat.
        """
        names_of_both = type(body).model_fields.keys() & cls.model_fields.keys()
        fields = {name: getattr(body, name) for name in names_of_both & body.model_fields_set} | own
        tools = {f"tools.{at}.function": f"tools.{at}" for at in range(len(own.get("tools", ())))}
        names = tools | dict(names)
        with client_names(names):
            try:
                chat = cls.model_validate(fields)
            except ValidationError as error:
                raise field_errors(error.errors(include_url=False), fields) from error
        chat._names = names
        return chat

    @cached_property
    def offered(self) -> list[dict[str, Any]]:
        """Functions that the output may call."""
        return [function.model_dump(exclude_none=True) for function in self._functions]

    @property
    def _functions(self) -> list[Function]:
        if self.tool_choice == "none":
            return []
        allowed = self.allowed
        return [t.function for t in self.tools if allowed is None or t.function.name in allowed]

    @property
    def allowed(self) -> set[str] | None:
        """Names of the tools that tool_choice allows; None if it allows all."""
        if not isinstance(self.tool_choice, AllowedToolChoice):
            return None
        return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def slow(self) -> bool:
        """True, as another process renders the prompt."""
        return True

    @property
    def names(self) -> Names:
        """Checked name of a field → the client's name."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        base = {"prompt": "messages", "max_tokens": limit} | ({"logprobs": "top_logprobs"} if self.logprobs else {})
        return {**base, **self._names}

    @property
    def must_call(self) -> bool:
        """True if the output must be calls."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def refuse_unsupported(self, place: str = "") -> None:
        super().refuse_unsupported(place)
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", " needs logprobs to be true")
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            raise bad_field("continue_final_message", " and add_generation_prompt exclude each other; leave one out")
        if reserved := OUR_ARGUMENTS & set(self.chat_template_kwargs):
            raise bad_field("chat_template_kwargs", f" cannot set {min(reserved)}")
        if self.must_call and not self.tools:
            raise bad_field("tool_choice", " needs tools")
        if unknown := (self.allowed or set()) - {tool.function.name for tool in self.tools}:
            raise _not_a_tool(min(unknown))

    def calls_grammar(
        self, form: ToolFormat | None, grammars: Grammars, *, bare: bool = False, any_whitespace: bool = False
    ) -> str | None:
        """Return the grammar of outputs with required or strict calls; None for free outputs. ApiError 400.

        Args:
            form: form of calls; None without calls.
            bare: an output is either calls or text, even if calls are optional. Calls without an opening mark are then
                excluded, as nothing distinguishes them from text.
            any_whitespace: of JSON, as in `weft.engine.grammar.grammar.schema_text`.
        """
        strict = any(function.strict for function in self._functions)  # then all calls follow their schemas
        if form is None or not self.offered or not (self.must_call or strict or bare):
            return None
        if bare and not (self.must_call or form.begin):
            return None
        functions = self.offered
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            functions = [f for f in functions if f["name"] == name]
            if not functions:
                raise _not_a_tool(name)
        several = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        try:
            among_text = not (self.must_call or bare)
            named = grammars.named
            return form.grammar(functions, several, named, among_text=among_text, any_whitespace=any_whitespace)
        except ValueError as error:
            at = next((at for at, tool in enumerate(self.tools) if tool.function.strict), 0)
            rest = f" is not supported with this tokenizer: {error}; leave it out"
            raise bad_field(f"tools.{at}.function.strict", rest) from error

    def template(self, tokenizer: Any) -> str:
        """Return the request's chat template or the model's; empty if neither exists."""
        if self.chat_template or not tokenizer.chat_template:
            return self.chat_template or ""
        return str(tokenizer.get_chat_template(None, self.offered or None))  # tools may have their own template

    def prompt(self, tokenizer: Any, templates: Templates) -> str:
        """Return the prompt's text. ApiError 400 for messages that the template refuses or drops, or if it fails."""
        if not (template := self.template(tokenizer)):
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        default = self.chat_template is None
        shape = templates.shape(template)
        form = tool_format_of(template)
        if self.offered and (form is None or not shape.tools):
            raise ApiError(400, "this model's chat template knows no tools; leave them out", param="tools")
        if default:
            self._refuse_dropped(shape, partial(templates.drops, template))
        arguments = (
            self._effort(form)
            | self.chat_template_kwargs
            | {
                "tools": [{"type": "function", "function": f} for f in self.offered] or None,
                "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
                "continue_final_message": self.continue_final_message,
            }
        )
        plain = [message.plain(f"messages.{at}") for at, message in enumerate(self.messages)]
        return templates.render(template, shape.built(plain), default, **arguments)

    def _effort(self, form: ToolFormat | None) -> dict[str, Any]:
        """Return the template's arguments for reasoning_effort. ApiError 400 for a level that the model lacks."""
        if self.reasoning_effort is None:
            return {}
        if form is not None and form.channels:
            if self.reasoning_effort == "none":
                rest = " is 'none', but this model always thinks; use low, medium or high"
                raise bad_field("reasoning_effort", rest)
            return {"reasoning_effort": GPT_OSS_EFFORTS[self.reasoning_effort]}
        thinks = {} if self.reasoning_effort != "none" else thinking(False)
        return {"reasoning_effort": self.reasoning_effort} | thinks

    def _refuse_dropped(self, shape: MessageShape, drops: Callable[[str], bool]) -> None:
        for at, message in enumerate(self.messages):
            role = shape.role(message.role)
            field, what = f"messages.{at}.role", f"messages of role {message.role!r}"
            dropped = role in shape.dropped if role in COMMON_ROLES else drops(role)
            if role == "tool":
                dropped = dropped and not shape.calls
            if message.tool_calls and not (dropped or (role == "assistant" and shape.calls)):
                field, what, dropped = f"messages.{at}.tool_calls", f"calls in {what}", True
            if dropped:
                raise bad_field(field, f": this model's chat template leaves {what} out of the prompt; send none")


def thinking(on: bool) -> dict[str, bool]:
    """Return the template's arguments that switch thinking on or off: Qwen's and GLM's name, and DeepSeek's."""
    return {"enable_thinking": on, "thinking": on}


def _not_a_tool(name: str) -> ApiError:
    return bad_field("tool_choice", f" names {name!r}, which is not among the tools")
