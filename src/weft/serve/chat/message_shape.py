"""Shape of the messages that a chat template reads, found by rendering probes.

Templates require shapes that no field announces: content that is null instead of empty, arguments as text, one system
message at the beginning. They silently drop messages of another shape. So messages with marks are rendered in one
shape after another, until all marks are in the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[dict[str, Any]]], str | None]
"""Function from messages and tools to the prompt; None if the template refuses them."""
COMMON_ROLES = ("system", "user", "assistant", "tool")
NoText = Literal["empty", "null", "absent"]
NO_TEXT: tuple[NoText, ...] = get_args(NoText)
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Templates' names for an assistant's thought."""
ID_LENGTH = 9
"""Letters and digits of a call's id for Mistral's templates, which refuse other ids."""


@dataclass(frozen=True)
class MessageShape:
    """Shape of messages for a chat template, and the kinds of messages that the template always drops.

    Attributes:
        in_parts: content is a list of text parts instead of text.
        one_system: system messages are one, at the beginning.
        developer: the template has a role for developers; otherwise their messages get the system's role.
        no_text: content of a message with calls alone.
        text_arguments: arguments of calls are JSON text instead of objects.
        calls_apart: text and calls are separate messages.
        one_call: a message has one call, and the call's result follows it.
        short_ids: ids of calls have nine letters and digits.
        tools: the prompt has the offered tools.
        calls: the prompt has calls and their results.
        dropped: common roles that the prompt lacks, apart from results of calls.
    """

    in_parts: bool = False
    one_system: bool = False
    developer: bool = False
    no_text: NoText = "empty"
    text_arguments: bool = False
    calls_apart: bool = False
    one_call: bool = False
    short_ids: bool = False
    tools: bool = True
    calls: bool = True
    dropped: Collection[str] = ()

    def role(self, role: str) -> str:
        """Return the template's name of a role."""
        return "system" if role == "developer" and not self.developer else role

    def built(self, messages: Iterable[Message]) -> list[Message]:
        """Return OpenAI's messages in this shape. The content of OpenAI's is text, arguments of calls are objects."""
        made = [message | {"role": self.role(message["role"])} for message in messages]
        if self.one_system:
            made = _join_system(made)
        if self.one_call:
            made = _split_calls(made)
        if self.calls_apart:
            made = [part for message in made for part in _split(message)]
        return [self._written(message) for message in made]

    def _written(self, message: Message) -> Message:
        made = dict(message)
        thought = next((made[name] for name in THOUGHT_FIELDS if made.get(name) is not None), None)
        if thought is not None:
            made |= {name: made.get(name) or thought for name in THOUGHT_FIELDS}
        if made.get("tool_call_id") is not None:
            made["tool_call_id"] = self._id(made["tool_call_id"])
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in calls]
        if calls and not made["content"] and self.no_text != "empty":
            made["content"] = None
            if self.no_text == "absent":
                del made["content"]
        elif self.in_parts:
            made["content"] = [{"type": "text", "text": made["content"]}] if made["content"] else []
        return made

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.text_arguments:
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return call | {"id": self._id(call["id"]), "function": function}

    def _id(self, name: str | None) -> str | None:
        fits = name is None or (len(name) == ID_LENGTH and name.isascii() and name.isalnum())
        return name if fits or not self.short_ids else hashlib.sha256(str(name).encode()).hexdigest()[:ID_LENGTH]


def _join_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system messages joined into the first."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    texts = [message["content"] for message in systems if message["content"]]
    return [*([systems[0] | {"content": "\n\n".join(texts)}] if systems else []), *rest]


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a message per call, followed by the call's results."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            made.append(message)
            continue
        begin = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        number = {call["id"]: i for i, call in enumerate(calls) if call["id"] is not None}
        results: list[list[Message]] = [[] for _ in calls]
        for i, result in enumerate(messages[begin:at]):
            results[number.get(result.get("tool_call_id"), min(i, len(calls) - 1))].append(result)
        for call, of_call in zip(calls, results, strict=True):
            made += [message | {"tool_calls": [call]}, *of_call]
            message = {"role": message["role"], "content": ""}  # the first message has the text and the thought
    return made


def _split(message: Message) -> list[Message]:
    """Return a message with text and calls as two messages."""
    if not message.get("tool_calls") or not message["content"]:
        return [message]
    text = {name: value for name, value in message.items() if name not in ("tool_calls", *THOUGHT_FIELDS)}
    return [text, message | {"content": ""}]


# Probes: messages with marks, words that no template contains.

MARKS = tuple(f"weftprobe{number}" for number in range(10, 20))
OTHER_ROLE = "weftrole"
"""Role that no template knows."""
KEY = "weftkey"


def _says(role: str, mark: str) -> Message:
    return {"role": role, "content": mark}


def _call(at: int) -> dict[str, Any]:
    function = {"name": f"weftcall{at}", "arguments": {KEY: MARKS[at]}}
    return {"id": f"call_{at:024}", "type": "function", "function": function}


def _result(at: int, mark: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{at:024}", "name": f"weftcall{at}", "content": mark}


USER = _says("user", MARKS[0])
ASSISTANT = _says("assistant", MARKS[1])
CONVERSATION = (USER, ASSISTANT, _says("user", MARKS[2]))
WITH_SYSTEMS = (
    _says("system", MARKS[3]),
    _says("system", MARKS[4]),
    *CONVERSATION[:2],
    _says("system", MARKS[5]),
    CONVERSATION[2],
)
WITH_CALLS = (
    USER,
    {"role": "assistant", "content": "", "tool_calls": [_call(1)]},
    _result(1, MARKS[2]),
    {"role": "assistant", "content": MARKS[3], "reasoning_content": MARKS[9], "tool_calls": [_call(4), _call(5)]},
    _result(4, MARKS[6]),
    _result(5, MARKS[7]),
)
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"type": "function", "function": {"name": f"weftcall{at}", "description": "text", "parameters": PARAMETERS}}
    for at in (1, 4, 5)
]


def find(render: Render) -> MessageShape:
    """Return the first shape with every kind of message in the prompt that the template can render. Thoughts do not
    count: many templates drop them on purpose."""

    def first(shapes: Iterable[MessageShape], messages: Sequence[Message], marks: Iterable[str]) -> MessageShape | None:
        tools = TOOLS if messages is WITH_CALLS else []
        return next((shape for shape in shapes if _holds(render(shape.built(messages), tools), marks)), None)

    shapes = [MessageShape(in_parts=parts, one_system=one) for one in (False, True) for parts in (False, True)]
    found = first(shapes, WITH_SYSTEMS, MARKS[:6]) or first(shapes[:2], CONVERSATION, MARKS[:3])
    shape = found or MessageShape(calls=False)
    shape = replace(shape, developer=_shows_developer(render, shape))
    shape = replace(shape, tools=_holds(render(shape.built([USER]), TOOLS), ["weftcall1"]))
    no, yes = False, True
    calling = [
        replace(shape, one_call=one, calls_apart=apart, short_ids=short, text_arguments=text, no_text=no_text)
        for one, apart, short, text, no_text in product((no, yes), (no, yes), (no, yes), (no, yes), NO_TEXT)
    ]
    if found is not None:
        shape = first(calling, WITH_CALLS, MARKS[:8]) or replace(shape, calls=False)
    return replace(shape, dropped=[role for role in COMMON_ROLES if drops(render, shape, role)])


def drops(render: Render, shape: MessageShape, role: str) -> bool:
    """Return whether the template silently drops messages of a role."""
    probe = _says(role, MARKS[3])
    before = {"system": [], "user": [], "assistant": [USER]}.get(role, [USER, ASSISTANT])
    text = render(shape.built([*before, probe, *([] if role == "user" else [USER])]), [])
    return text is not None and MARKS[3] not in text


def _shows_developer(render: Render, shape: MessageShape) -> bool:
    """Return whether the template renders the developer's role differently from an unknown role."""
    knowing = replace(shape, developer=True)
    as_developer, as_other = (
        render(knowing.built([USER, ASSISTANT, _says(role, MARKS[3]), USER]), []) for role in ("developer", OTHER_ROLE)
    )
    known = as_developer is not None and MARKS[3] in as_developer
    return known and (as_other is None or as_other.replace(OTHER_ROLE, "developer") != as_developer)


def _holds(text: str | None, marks: Iterable[str]) -> bool:
    """Return whether a prompt has all marks, and no arguments in Python's syntax or as quoted JSON text."""
    if text is None or f"'{KEY}'" in text or f'\\"{KEY}' in text:
        return False
    return all(mark in text for mark in marks)
