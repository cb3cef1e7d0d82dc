"""The forms in which models write calls of tools, by what their chat templates hold."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_CALLS = 16
"""Calls in one answer that must be calls."""
Functions = Sequence[dict[str, Any]]
"""The functions that may be called: `name`, and `parameters`, a JSON schema."""


@dataclass(frozen=True)
class Call:
    """A call of a function, its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def plain(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Form:
    """Calls stand between begin and end. marks: what all stands in a chat template that asks for this form.

    read(text between, functions): the calls; none where it is no call. call(functions): Lark rules, of which `call` is
    one call. head, tail: around all calls of an answer that must be calls.
    """

    begin: str
    end: str
    marks: tuple[str, ...]
    read: Callable[[str, Functions], list[Call]]
    call: Callable[[Functions], str]
    head: str = ""
    tail: str = ""

    def grammar(self, functions: Functions, several: bool) -> str:
        """Of answers that are calls of these functions, and nothing else."""
        calls = f'call ("\\n" call)~0..{MOST_CALLS - 1}' if several else "call"
        around = [_literal(text) for text in (self.head, self.tail)]
        return f"start: {around[0]} {calls} {around[1]}\n{self.call(functions)}"


def form_of(template: str) -> Form | None:
    """The form that a chat template asks for; None where it knows no tools."""
    return next((form for form in FORMS if all(mark in template for mark in form.marks)), None)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}


# Hermes, Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>


def _read_json(body: str, functions: Functions) -> list[Call]:
    try:
        read = json.loads(body)
        arguments = read.get("arguments", {})
        return [Call(str(read["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))]
    except (ValueError, KeyError, AttributeError):
        return []


def _json_call(functions: Functions) -> str:
    each = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": _schema(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    body = json.dumps(each[0] if len(each) == 1 else {"anyOf": each})
    return f'call: "<tool_call>\\n" body "\\n</tool_call>"\nbody: %json {body}\n'


# Qwen3-Coder, Qwen3.5, Step-3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>

FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _is_text(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind == "string" or (isinstance(kind, list) and "string" in kind) or not schema


def _value(text: str, schema: Any) -> Any:
    """A parameter is bare text; what else it is only the schema tells."""
    if _is_text(schema):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_xml(body: str, functions: Functions) -> list[Call]:
    found = FUNCTION.search(body)
    if found is None:
        return []
    name = found[1].strip()
    schema = next((_schema(f) for f in functions if f["name"] == name), {}).get("properties") or {}
    arguments = {key: _value(text, schema.get(key)) for key, text in PARAMETER.findall(found[2])}
    return [Call(name, json.dumps(arguments))]


def _xml_call(functions: Functions) -> str:
    """Parameters in the schema's order; text without <, which would end it."""
    names = [f"function{i}" for i in range(len(functions))]
    rules = [f'call: "<tool_call>\\n" ({" | ".join(names)}) "</function>\\n</tool_call>"']
    for name, function in zip(names, functions, strict=True):
        schema, parts = _schema(function), [_literal(f"<function={function['name']}>\n")]
        for j, (key, kind) in enumerate((schema.get("properties") or {}).items()):
            value = f"{name}_{j}"
            parts.append(value if key in schema.get("required", ()) else f"{value}?")
            rules.append(f'{value}: {_literal(f"<parameter={key}>" + chr(10))} {value}_value "\\n</parameter>\\n"')
            if _is_text(kind) and "enum" in (kind or {}):
                body = " | ".join(_literal(str(choice)) for choice in kind["enum"])
            elif _is_text(kind):
                body = f"/[^<]{{0,{most}}}/" if (most := (kind or {}).get("maxLength")) else "/[^<]*/"
            else:
                body = f"%json {json.dumps(kind)}"
            rules.append(f"{value}_value: {body}")
        rules.append(f"{name}: {' '.join(parts)}")
    return "\n".join(rules) + "\n"


# DeepSeek: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, JSON in a fence (V3), or NAME<｜tool▁sep｜>JSON (V3.1)

DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
FENCED = re.compile(r"(.*?)\n```json\n(.*)\n```", re.DOTALL)


def _read_deepseek(body: str, functions: Functions) -> list[Call]:
    calls = []
    for name, rest in DEEPSEEK.findall(body):
        if (fenced := FENCED.fullmatch(rest.strip())) is not None:
            name, rest = fenced.groups()
        try:
            calls.append(Call(name.strip(), json.dumps(json.loads(rest))))
        except ValueError:
            return []
    return calls


def _deepseek_call(before: str, between: str, after: str) -> Callable[[Functions], str]:
    def call(functions: Functions) -> str:
        rules = [f"call: {' | '.join(f'function{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            head = _literal(f"<｜tool▁call▁begin｜>{before}{function['name']}{between}")
            rules.append(f"function{i}: {head} arguments{i} {_literal(after + '<｜tool▁call▁end｜>')}")
            rules.append(f"arguments{i}: %json {json.dumps(_schema(function))}")
        return "\n".join(rules) + "\n"

    return call


_MANY = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FORMS = (
    Form("<tool_call>", "</tool_call>", ("<tool_call>", "<function="), _read_xml, _xml_call),
    Form("<tool_call>", "</tool_call>", ("<tool_call>",), _read_json, _json_call),
    Form(
        *(*_MANY, (_MANY[0], "```json"), _read_deepseek),
        *(_deepseek_call("function<｜tool▁sep｜>", "\n```json\n", "\n```"), *_MANY),
    ),
    Form(*_MANY, _MANY[:1], _read_deepseek, _deepseek_call("", "<｜tool▁sep｜>", ""), *_MANY),
)
"""The first that fits is taken."""
