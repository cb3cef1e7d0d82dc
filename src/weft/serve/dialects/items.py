"""Objects inside a request of POST /v1/responses: its options, its items, and the messages that these stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError

from weft.serve.chat.chats import Effort, TextPart, only_text, text_of
from weft.serve.chat.protocol import JsonSchema, Text
from weft.serve.http.bodies import Body
from weft.serve.http.errors import ApiError, field_errors


class TextFormat(JsonSchema):
    """As `weft.serve.chat.protocol.ResponseFormat`, but that what it says of a schema stands beside its type."""

    type: Text


class TextConfig(Body):
    """verbosity: no model here knows any, so only the one that models know without it is taken."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """effort: as a chat's. The whole thought is returned, so there is no summary of it."""

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
"""More of items that no model here writes, and thoughts in a form that clients cannot read: here they can."""


class Item(Body):
    """One item. Clients send back what they were sent, with its id and status."""

    harmless = frozenset({"id", "status"})


class InputText(TextPart):
    """A part of a message or of a function's output."""

    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]


TextOrParts = Annotated[Text | list[InputText], BeforeValidator(only_text)]


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Text
    content: TextOrParts


class FunctionCall(Item):
    """A call that the assistant made before. arguments: JSON, as text."""

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
    """What the assistant thought before; a summary says nothing more."""

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
    """Messages of a chat, as `weft.serve.chat.chats.Message` takes them, that stand for items.

    Attributes:
        made: the messages so far.
        names: the client's names of their fields.
    """

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}

    def add(self, message: dict[str, Any], place: str, *, whole: bool = False) -> None:
        """Appends a message that is at this place in the request. whole: as the place's value, without fields."""
        field = f"messages.{len(self.made)}"
        self.names |= {field: place} | ({f"{field}.{name}": place for name in ("role", "content")} if whole else {})
        self.made.append(message)

    def add_items(self, items: Sequence[dict[str, Any]], place: str) -> None:
        """Appends the messages of items, in a list at this place. ApiError 400 for an item that cannot be served."""
        first = len(self.made)
        for at, value in enumerate(items):
            here = f"{place}.{at}"
            item = _checked(value, here)
            message = _message(item)
            if isinstance(item, Reasoning) and not any(message["reasoning_content"]):
                continue
            if len(self.made) > first and _continues(self.made[-1], message):
                for name in message.keys() - {"role"}:
                    self.made[-1].setdefault(name, []).extend(message[name])
            else:
                self.add(message, here)
                if not isinstance(item, InputMessage):
                    self.names[f"messages.{len(self.made) - 1}.role"] = here
            if "tool_calls" in message:
                calls = f"messages.{len(self.made) - 1}.tool_calls"
                self.names |= {calls: here, f"{calls}.{len(self.made[-1]['tool_calls']) - 1}.function": here}
        for message in self.made[first:]:
            message |= {name: "".join(message[name]) for name in ("content", "reasoning_content") if name in message}


def _continues(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether both are parts of one output: a thought, a text and calls. Two texts are two messages."""
    one = (last["role"], message["role"]) == ("assistant", "assistant")
    return one and ("tool_calls" in last or "tool_calls" in message or not last["content"])


def _checked(value: dict[str, Any], place: str) -> Item:
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise ApiError(400, f"{place}.type: an input of type {kind!r} is not supported", param=f"{place}.type")
    try:
        item = ITEMS[kind].model_validate(value)
    except ValidationError as error:
        raise field_errors(error.errors(include_url=False), value, f"{place}.") from error
    item.refuse_unsupported(f"{place}.")
    return item


def _message(item: Item) -> dict[str, Any]:
    """Return its message, with a list of texts for each text: further items may add to it."""
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": [text_of(item.content)] if item.content else []}
    if isinstance(item, Reasoning):  # the chat template may use it
        return {"role": "assistant", "content": [], "reasoning_content": [part.text for part in item.content]}
    if isinstance(item, FunctionCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": [text_of(item.output)]}
    assert isinstance(item, FunctionCall)
    function = {"name": item.name, "arguments": item.arguments}
    return {"role": "assistant", "content": [], "tool_calls": [{"id": item.call_id, "function": function}]}
