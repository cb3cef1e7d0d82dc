"""Objects inside a request of POST /v1/responses: options, items, and the messages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError

from weft.serve.chat.chats import Effort, TextPart, only_text, text_of
from weft.serve.chat.protocol import JsonSchema, Text
from weft.serve.http.bodies import Body
from weft.serve.http.errors import bad_field, field_errors


class TextFormat(JsonSchema):
    """Like `weft.serve.chat.protocol.ResponseFormat`, but with the schema's fields next to the type."""

    type: Text


class TextConfig(Body):
    """Options of the text. verbosity: only the default is accepted, as no model supports others."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """Options of reasoning. effort: see a chat's. The whole thought is returned, without a summary."""

    harmless = frozenset({"summary", "generate_summary"})

    effort: Effort | None = None


Include = Literal[
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""Additions to the response: to items that no model here writes, and encrypted thoughts, which are readable here."""


class Item(Body):
    """Item of a conversation. Clients return items of responses with their id and status."""

    harmless = frozenset({"id", "status"})


class InputText(TextPart):
    """Part of a message or of a function's output."""

    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]


TextOrParts = Annotated[Text | list[InputText], BeforeValidator(only_text)]


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Text
    content: TextOrParts


class FunctionCall(Item):
    """Earlier call of the assistant. arguments: JSON text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text = "{}"


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: TextOrParts


class ReasoningText(Body):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: Text = ""


class Reasoning(Item):
    """Earlier thought of the assistant; its summary is ignored."""

    harmless = Item.harmless | {"summary"}

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)


ITEMS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}


class ChatMessages:
    """Messages of a chat (`weft.serve.chat.chats.Message`) made of items.

    names: field of a message → the client's name.
    """

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}

    def add(self, message: dict[str, Any], place: str, *parts: str) -> None:
        """Append a `message`. place: in the request; parts: fields of the message that are not in this place."""
        field = f"messages.{len(self.made)}"
        self.names |= {field: place} | {f"{field}.{name}": place for name in parts}
        self.made.append(message)

    def add_items(self, items: Sequence[dict[str, Any]], place: str) -> None:
        """Append the messages of a list of items. place: of the list. ApiError 400 for an unsupported item."""
        first = len(self.made)
        for at, value in enumerate(items):
            path = f"{place}.{at}"
            item = _checked(value, path)
            message = _message(item)
            if isinstance(item, Reasoning) and not any(message["reasoning_content"]):
                continue
            if len(self.made) > first and _continues(self.made[-1], message):
                for name in message.keys() - {"role"}:
                    self.made[-1].setdefault(name, []).extend(message[name])
            else:
                self.add(message, path, *([] if isinstance(item, InputMessage) else ["role"]))
            if "tool_calls" in message:
                calls = f"messages.{len(self.made) - 1}.tool_calls"
                self.names |= {calls: path, f"{calls}.{len(self.made[-1]['tool_calls']) - 1}.function": path}
        for message in self.made[first:]:
            message |= {name: "".join(message[name]) for name in ("content", "reasoning_content") if name in message}


def _continues(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether two messages are parts of one output: a thought, a text and calls. Two texts are two messages."""
    one = (last["role"], message["role"]) == ("assistant", "assistant")
    return one and ("tool_calls" in last or "tool_calls" in message or not last["content"])


def _checked(value: dict[str, Any], place: str) -> Item:
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise bad_field(f"{place}.type", f": an input of type {kind!r} is not supported")
    try:
        item = ITEMS[kind].model_validate(value)
    except ValidationError as error:
        raise field_errors(error.errors(include_url=False), value, f"{place}.") from error
    item.refuse_unsupported(f"{place}.")
    return item


def _message(item: Item) -> dict[str, Any]:
    """Return the message of an item, with lists of texts, as further items may extend them."""
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": [text_of(item.content)] if item.content else []}
    if isinstance(item, Reasoning):  # the chat template may use it
        return {"role": "assistant", "content": [], "reasoning_content": [part.text for part in item.content]}
    if isinstance(item, FunctionCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": [text_of(item.output)]}
    assert isinstance(item, FunctionCall)
    function = {"name": item.name, "arguments": item.arguments}
    return {"role": "assistant", "content": [], "tool_calls": [{"id": item.call_id, "function": function}]}
