"""The forms in which models write calls of tools, by what their chat templates hold."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.engine.output.grammar import schema_text

TEXT = "TEXT: /(.|\\n)+/\n"
"""A terminal of Lark: whatever matches no special token."""
MAX_CALLS = 16
"""Calls in one output that must be calls."""
Functions = Sequence[dict[str, Any]]
"""The functions that may be called: `name`, and `parameters`, a JSON schema."""
Literal = Callable[[str], str]
"""A text as Lark writes it."""
Schema = Callable[[Any], str]
"""A JSON schema as `%json` of Lark takes it."""


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
class ToolFormat:
    """How a model writes calls. marks: what all stands in a chat template that asks for this form.

    begin, end: calls stand between; without them, a call is the whole output. read(text, functions): the calls; none
    where it is no call. call(functions, literal, schema): Lark rules, of which `call` is one call. opening: where
    arguments are JSON, matches what stands before the object that they are, from the end of another call's or the
    beginning on; `name` is the function's. head, between, tail: around the calls of an output that must be calls.
    tokens: what stands in an output and may be special tokens, which are then no text. channels: every output has parts
    for several readers, with calls or without.
    """

    marks: tuple[str, ...]
    read: Callable[[str, Functions], list[Call]]
    call: Callable[[Functions, Literal, Schema], str]
    opening: re.Pattern[str] | None = None
    begin: str = ""
    end: str = ""
    head: str = ""
    between: str = "\n"
    tail: str = ""
    tokens: tuple[str, ...] = ()
    channels: bool = False

    def grammar(
        self,
        functions: Functions,
        several: bool,
        named: Collection[str] = (),
        *,
        among_text: bool = False,
        any_whitespace: bool = False,
    ) -> str:
        """Of outputs that are calls of these functions, and nothing else, or text with such calls in it.

        named: tokens; see `Grammars.named`. any_whitespace: in JSON, as in `weft.engine.output.grammar.schema_text`.
        ValueError where text has no calls in it in this form.
        """
        named = set(named) & set(self.tokens)
        literal = literals(named)
        if among_text and self.begin and self.begin not in named:  # what begins a call is then the end of a text
            literal = literals({*named, self.begin}, {self.begin: "begun"})
        calls = "call"
        if several and not self.channels:
            calls += f" ({literal(self.between)} call)~0..{MAX_CALLS - 1}"
        calls = f"{literal(self.head)} {calls} {literal(self.tail)}"
        rules = self.call(functions, literal, partial(schema_text, any_whitespace=any_whitespace))
        if not among_text:
            return f"start: {calls}\n{rules}"
        if self.channels:
            if not {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= named:
                raise ValueError("its marks are no tokens of this tokenizer")
            start = 'start: (message <|end|> <|start|> "assistant")* (message | call)\n'
            start += f"message: <|channel|> /analysis|commentary|final/ <|message|> TEXT?\n{TEXT}"
        elif not self.begin:
            start = f"start: {calls} | /(\\s*[^\\s{{](.|\\n)*)?/\n"
        elif self.begin in named:
            start = f"start: TEXT? (calls TEXT?)*\ncalls: {calls}\n{TEXT}"
        else:
            start = f"start: calls* TEXT?\ncalls: {calls}\nbegun[lazy]: /(.|\\n)*/ {_quoted(self.begin)}\n{TEXT}"
        return start + rules


def literals(named: Collection[str], rules: Mapping[str, str] = {}) -> Literal:
    """Writes texts in which these tokens are named, or have a rule of this name."""
    among = re.compile("|".join(map(re.escape, sorted(named))) or "(?!)")

    def literal(text: str) -> str:
        parts = [_quoted(part) for part in among.split(text)]
        for at, token in enumerate(among.findall(text)):
            parts.insert(2 * at + 1, rules.get(token, token))  # Lark of llguidance names a token as it is written
        return " ".join(part for part in parts if part != '""') or '""'

    return literal


def tool_format_of(template: str) -> ToolFormat | None:
    """The form that a chat template asks for; None where it knows no tools."""
    return next((form for form in TOOL_FORMATS if all(mark in template for mark in form.marks)), None)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}


# Hermes, Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>

JSON_CALL = re.compile(r'\}?[\s;]*\{\s*"name"\s*:\s*"(?P<name>[^"\\<]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def _read_json(body: str, functions: Functions) -> list[Call]:
    try:
        read = json.loads(body)
        arguments = read.get("arguments", {})
        return [Call(str(read["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments))]
    except (ValueError, KeyError, AttributeError):
        return []


def _calls_schema(functions: Functions, arguments: str) -> dict[str, Any]:
    """JSON schema of an object with a function's name, and its arguments under this name."""
    each = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: _schema(function)},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return each[0] if len(each) == 1 else {"anyOf": each}


def _json_call(functions: Functions, literal: Literal, schema: Schema) -> str:
    around = literal("<tool_call>\n"), literal("\n</tool_call>")
    return f"call: {around[0]} body {around[1]}\nbody: %json {schema(_calls_schema(functions, 'arguments'))}\n"


# Llama 3.1 to 3.3: {"name": …, "parameters": {…}}, several with ; between, as the whole output


def _read_bare(text: str, functions: Functions) -> list[Call]:
    calls, names, at = [], {f["name"] for f in functions}, 0
    try:
        while at < len(text):
            found, end = json.JSONDecoder().raw_decode(text, at)
            arguments = found["parameters"] if "parameters" in found else found["arguments"]
            if found["name"] not in names or not isinstance(arguments, dict):
                return []
            calls.append(Call(found["name"], json.dumps(arguments, ensure_ascii=False)))
            at = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    except (ValueError, KeyError, TypeError):
        return []  # JSON that is no call is text, as the client may have asked for it
    return calls


def _bare_call(functions: Functions, literal: Literal, schema: Schema) -> str:
    return f"call: %json {schema(_calls_schema(functions, 'parameters'))}\n"


# Qwen3-Coder, Qwen3.5, Step-3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>

FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _is_text(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind == "string" or (isinstance(kind, list) and "string" in kind) or not schema


def _value(text: str, schema: Any) -> Any:
    """A parameter is bare text; the schema alone says what else it is."""
    if _is_text(schema):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _call_of(name: str, parameters: Iterable[tuple[str, str]], functions: Functions) -> Call:
    schema = next((_schema(f) for f in functions if f["name"] == name), {}).get("properties") or {}
    arguments = {key: _value(text, schema.get(key)) for key, text in parameters}
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _read_xml(body: str, functions: Functions) -> list[Call]:
    found = FUNCTION.search(body)
    return [] if found is None else [_call_of(found[1].strip(), PARAMETER.findall(found[2]), functions)]


def _xml_call(functions: Functions, literal: Literal, schema: Schema) -> str:
    around = literal("<tool_call>\n"), literal("</function>\n</tool_call>")
    parameter = literal("<parameter="), literal(">\n"), literal("</parameter>\n")
    names = [literal(f"<function={f['name']}>\n") for f in functions]
    return _tagged_call(functions, literal, schema, names, around, parameter, line=True)


def _tagged_call(
    functions: Functions,
    literal: Literal,
    schema: Schema,
    names: Sequence[str],
    around: tuple[str, str],
    parameter: tuple[str, ...],
    line: bool = False,
) -> str:
    """Rules of a call with each parameter in tags, in the schema's order; text holds no <, which would end it.

    names: what each function begins with. parameter: before its key, between key and value, and after it. line: a
    value ends its line. As a text may hold line breaks too, and is matched as far as it goes, it is matched with that.
    """
    end = "\n" if line else ""
    rules = [f"call: {around[0]} ({' | '.join(f'function{i}' for i in range(len(functions)))}) {around[1]}"]
    for i, (named, function) in enumerate(zip(names, functions, strict=True)):
        parameters, parts = _schema(function), [named]
        for j, (key, kind) in enumerate((parameters.get("properties") or {}).items()):
            value = f"function{i}_{j}"
            parts.append(value if key in parameters.get("required", ()) else f"{value}?")
            rules.append(f"{value}: {parameter[0]} {literal(key)} {parameter[1]} {value}_value {parameter[2]}")
            if _is_text(kind) and "enum" in (kind or {}):
                body = " | ".join(literal(f"{choice}{end}") for choice in kind["enum"])
            elif _is_text(kind):
                limit = (kind or {}).get("maxLength", "")
                body = f"/[^<]{{0,{limit}}}{json.dumps(end)[1:-1]}/"
            else:
                body = f"%json {schema(kind)} {literal(end)}"
            rules.append(f"{value}_value: {body}")
        rules.append(f"function{i}: {' '.join(parts)}")
    return "\n".join(rules) + "\n"


# GLM-4.5 to 4.7: <tool_call>NAME, <arg_key>KEY</arg_key>, <arg_value>VALUE</arg_value>, …</tool_call>

ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_glm(body: str, functions: Functions) -> list[Call]:
    name = body.partition("<arg_key>")[0].strip()
    known = not functions or name in {f["name"] for f in functions}
    return [_call_of(name, [(k.strip(), v) for k, v in ARGUMENT.findall(body)], functions)] if name and known else []


def _glm_call(functions: Functions, literal: Literal, schema: Schema) -> str:
    line = ' "\\n"? '  # GLM-4.5 breaks lines, GLM-4.7 does not
    around = literal("<tool_call>"), literal("</tool_call>")
    between = literal("</arg_key>") + line + literal("<arg_value>")
    names = [literal(f["name"]) + line for f in functions]
    return _tagged_call(
        functions, literal, schema, names, around, (literal("<arg_key>"), between, literal("</arg_value>") + line)
    )


# DeepSeek: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, JSON in a fence (V3), or NAME<｜tool▁sep｜>JSON (V3.1)

DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
DEEPSEEK_CALL = re.compile(
    "(?:\\s*```)?(?:<｜tool▁call▁end｜>)?\\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    "(?P<name>[^<{\n]+)(?:<｜tool▁sep｜>|\n```json)\\s*(?=\\{)"
)
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


def _deepseek_call(before: str, between: str, after: str) -> Callable[[Functions, Literal, Schema], str]:
    return lambda functions, literal, schema: _headed_call(
        functions,
        literal,
        schema,
        lambda name: f"<｜tool▁call▁begin｜>{before}{name}{between}",
        after + "<｜tool▁call▁end｜>",
    )


def _headed_call(functions: Functions, literal: Literal, schema: Schema, head: Callable[[str], str], tail: str) -> str:
    """Rules of a call that is JSON of its arguments, after a head with the function's name."""
    rules = [f"call: {' | '.join(f'function{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        rules.append(f"function{i}: {literal(head(function['name']))} arguments{i} {literal(tail)}")
        rules.append(f"arguments{i}: %json {schema(_schema(function))}")
    return "\n".join(rules) + "\n"


# GPT-OSS ("harmony"): <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>

ARGUMENTS = re.compile(r"(?P<name>)\s*(?=\{)")


def _read_arguments(body: str, functions: Functions) -> list[Call]:
    """Of `weft.server.tools.ChannelParser`, which has read the name: that of the only function."""
    try:
        return [Call(functions[0]["name"], json.dumps(json.loads(body), ensure_ascii=False))]
    except ValueError:
        return []


def _harmony_call(functions: Functions, literal: Literal, schema: Schema) -> str:
    def head(name: str) -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"

    return _headed_call(functions, literal, schema, head, "")


_MANY = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_in_tool_call = partial(ToolFormat, begin="<tool_call>", end="</tool_call>", tokens=("<tool_call>", "</tool_call>"))
_in_many = partial(
    ToolFormat,
    opening=DEEPSEEK_CALL,
    begin=_MANY[0],
    end=_MANY[1],
    head=_MANY[0],
    tail=_MANY[1],
    tokens=(*_MANY, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
TOOL_FORMATS = (
    ToolFormat(
        ("<|start|>assistant", "<|channel|>"),
        _read_arguments,
        _harmony_call,
        ARGUMENTS,
        tokens=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
        channels=True,
    ),
    _in_tool_call(("<tool_call>", "<function="), _read_xml, _xml_call),
    _in_tool_call(("<tool_call>", "<arg_key>"), _read_glm, _glm_call),
    _in_tool_call(("<tool_call>",), _read_json, _json_call, JSON_CALL),
    _in_many((_MANY[0], "```json"), _read_deepseek, _deepseek_call("function<｜tool▁sep｜>", "\n```json\n", "\n```")),
    _in_many(_MANY[:1], _read_deepseek, _deepseek_call("", "<｜tool▁sep｜>", "")),
    ToolFormat(('{"name": function name, "parameters": ',), _read_bare, _bare_call, JSON_CALL, between="; "),
)
"""The first that fits is taken."""
