"""Items that go into POST /v1/responses, checked, and the messages of a chat that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from weft.server.chats import TextPart, only_text, text_of
from weft.server.errors import ApiError, field_errors
from weft.server.protocol import Body, Text


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


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `weft.server.chats.Message` takes them. ApiError 400 for an item that cannot be served, with its place."""
    messages: list[dict[str, Any]] = []
    thought = ""
    for at, value in enumerate(items):
        item = _checked(value, f"input.{at}")
        if isinstance(item, Reasoning):
            thought += "".join(part.text for part in item.content)
            continue
        message = _message(item)
        if thought and message["role"] == "assistant":  # the chat template may use it
            message, thought = message | {"reasoning_content": thought}, ""
        if "tool_calls" in message and messages and "tool_calls" in messages[-1]:
            messages[-1]["tool_calls"] += message["tool_calls"]  # calls at once are one message
        else:
            messages.append(message)
    return messages


def _checked(value: dict[str, Any], place: str) -> Item:
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise ApiError(400, f"input of type {kind!r} is not supported", param=f"{place}.type")
    try:
        item = ITEMS[kind].model_validate(value)
    except ValidationError as error:
        raise field_errors(error.errors(include_url=False), value, f"{place}.") from error
    item.refuse_unsupported(f"{place}.")
    return item


def _message(item: Item) -> dict[str, Any]:
    if isinstance(item, InputMessage):
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": text_of(item.content)}
    if isinstance(item, FunctionCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    assert isinstance(item, FunctionCall)
    function = {"name": item.name, "arguments": item.arguments}
    return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
