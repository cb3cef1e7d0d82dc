"""Tools: what a model is told of them by its chat template, and the calls in what it answers.

Calls are read as Hermes models and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A call of a function, its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def plain(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallParser:
    """Splits one answer, as it comes, into text and calls. What is no call in the end is text."""

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False
        self.calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[Call]]:
        """(text, calls) that are whole now; last: nothing more comes. Line breaks after a call are no text."""
        self._held += text
        content, calls = "", []
        while BEGIN in self._held:
            before, _, inside = self._held.partition(BEGIN)
            body, end, rest = inside.partition(END)
            if not end and not last:
                break
            call = _call(body)
            content += self._text(before if call else before + BEGIN + body + end)
            if call:
                calls.append(call)
                self._after_call = True
            self._held = rest
        self.calls += len(calls)
        kept = 0 if last else self._undecided()
        content += self._text(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return content, calls

    def _text(self, text: str) -> str:
        text = text.lstrip("\n") if self._after_call else text
        self._after_call = self._after_call and not text
        return text

    def _undecided(self) -> int:
        """Length of the end that is, or may become, a call."""
        if (at := self._held.find(BEGIN)) >= 0:
            return len(self._held) - at
        lengths = range(min(len(BEGIN) - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if BEGIN.startswith(self._held[-n:])), 0)


def _call(body: str) -> Call | None:
    try:
        read = json.loads(body)
        arguments = read.get("arguments", {})
        return Call(str(read["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (ValueError, KeyError, AttributeError):
        return None


def calls_grammar(functions: Sequence[dict[str, Any]], several: bool) -> str:
    """A Lark grammar of answers that are calls of these functions, and nothing else."""
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    body = json.dumps(each[0] if len(each) == 1 else {"anyOf": each})
    repeated = f'call ("\\n" call)~0..{15 if several else 0}' if several else "call"
    return f'start: {repeated}\ncall: "{BEGIN}\\n" body "\\n{END}"\nbody: %json {body}\n'
