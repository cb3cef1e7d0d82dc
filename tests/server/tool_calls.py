"""Made-up calls of tools, and each form's text of them: as the models' published chat templates write it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.serve.chat.tool_formats import TOOL_FORMATS, ToolFormat

HARMONY, XML, GLM, HERMES, DEEPSEEK, DEEPSEEK_31, KIMI, MINIMAX, LLAMA = TOOL_FORMATS

TAGS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=city>", "</parameter>", "<arg_key>"]
TAGS += ["</arg_key>", "<arg_value>", "</arg_value>", '<invoke name="f">', "</invoke>", '<parameter name="city">']
TAGS += ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>", "<|message|>", "<|call|>", "<|end|>"]
TAGS += [
    "<|start|>assistant",
    "<|channel|>analysis",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
]
TAGS += ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"]
TAGS += ["<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "```", "```json", "; "]
TAGS += ['{"name": "weather", "arguments": {', '{"name": "time", "parameters": {}}', "}", "]", "{", "[", "<", ">", "</"]
TAGS += ["<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"]
TAGS += ["<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>", "</parameter></function></tool_call>"]
QUOTES = ['"', "'", "\\", '\\"', "\\n", "\\u00e9", "\n", "\n\n", "\t", " ", ",", ":", "`", "\x0b", "\u2028"]
WORDS = ["Zürich", "90210", "null", "None", "true", "False", "NaN", "1e999", "-0", "[1, 2]", "日本", "😀", "a b", ""]


def text(sampled: random.Random) -> str:
    pieces = sampled.choices([TAGS, QUOTES, WORDS], k=sampled.randrange(1, 7))
    return "".join(map(sampled.choice, pieces))


def plain_text(sampled: random.Random) -> str:
    """A text that is no JSON and no constant."""
    return "x" + text(sampled)


def number(sampled: random.Random) -> Any:
    return sampled.choice([0, -7, 3.5, -1e-9, 12345678901234567890, 1e22, sampled.randrange(10**6)])


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
KINDS: list[tuple[dict[str, Any], Callable[[random.Random], Any]]] = [
    (STRING, text),
    (STRING, text),
    (INTEGER, lambda r: r.randrange(-100, 10**6)),
    ({"type": "number"}, number),
    ({"type": "boolean"}, lambda r: r.random() < 0.5),
    ({"anyOf": [STRING, NULL]}, lambda r: r.choice([None, "90210", "true", plain_text(r)])),
    ({"type": ["string", "null"]}, lambda r: r.choice([None, "90210", plain_text(r)])),
    ({"type": "string", "nullable": True}, lambda r: r.choice([None, plain_text(r)])),
    ({"anyOf": [INTEGER, NULL]}, lambda r: r.choice([None, 5])),
    ({"type": "integer", "nullable": True}, lambda r: r.choice([None, 5])),
    ({"oneOf": [INTEGER, STRING]}, lambda r: r.choice([5, plain_text(r)])),
    ({"oneOf": [{"const": "7"}, {"enum": [True, "x"]}]}, lambda r: r.choice(["7", True, "x"])),
    ({"enum": ["1", "2", "null", "</parameter>"]}, lambda r: r.choice(["1", "2", "null", "</parameter>"])),
    ({"enum": [1, "two", None, False]}, lambda r: r.choice([1, "two", None, False])),
    ({"const": "5"}, lambda r: "5"),
    ({"allOf": [STRING, {"minLength": 0}]}, text),
    ({"$ref": "#/$defs/code"}, lambda r: r.choice(["90210", plain_text(r)])),
    ({"$ref": "#/$defs/point"}, lambda r: {"x": r.randrange(9), "label": text(r)}),
    ({"type": "array", "items": STRING}, lambda r: [text(r) for _ in range(r.randrange(4))]),
    ({"type": "array", "items": {"type": "number"}}, lambda r: [number(r) for _ in range(r.randrange(4))]),
    ({"type": "object"}, lambda r: {text(r): text(r), "b": [None, {"c": text(r)}]}),
    ({"anyOf": [{"type": "array", "items": INTEGER}, STRING]}, lambda r: r.choice([[1, 2], '["x"]', plain_text(r)])),
]
"""Schemas and values that they allow; of values that a text between tags cannot tell apart, one."""
DEFINITIONS = {
    "code": {"anyOf": [STRING, {"$ref": "#/$defs/nothing"}]},
    "nothing": NULL,
    "point": {"type": "object", "properties": {"x": INTEGER, "label": STRING}, "required": ["x"]},
}
NAMES = ["weather", "time", "get-it_2", "weather_of_tomorrow"]
KEYS = ["city", "days", "a_b", "x-y", "wo"]


@dataclass
class Made:
    """An output: its functions, the text before its calls, and the calls."""

    functions: list[dict[str, Any]]
    before: str
    calls: list[tuple[str, dict[str, Any]]]


def made_up(seed: int) -> Made:
    sampled = random.Random(seed)
    functions, kinds = [], {}
    for name in NAMES:
        chosen = {key: sampled.choice(KINDS) for key in sampled.sample(KEYS, k=sampled.randrange(4))}
        kinds[name] = chosen
        properties = {key: schema for key, (schema, _) in chosen.items()}
        parameters = {"type": "object", "properties": properties, "required": [*chosen], "$defs": DEFINITIONS}
        functions.append({"name": name, "parameters": parameters})
    calls = []
    for name in sampled.choices(NAMES, k=sampled.choice([1, 1, 2, 3])):
        calls.append((name, {key: value(sampled) for key, (_, value) in kinds[name].items()}))
    return Made(functions, sampled.choice(["", "", "I look.", 'So: a < b, "{x}".\n']), calls)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_string(value: Any) -> str:
    """Write a value like Jinja's filters in Qwen3-Coder's and Step's templates: `tojson` for containers, else
    `string`.
    """
    return dumped(value) if isinstance(value, dict | list) else str(value)


def as_json(value: Any) -> str:
    """Write a value like GLM's, MiniMax's and Qwen3.5's templates."""
    return value if isinstance(value, str) else dumped(value)


def xml(calls: list[tuple[str, dict[str, Any]]], written: Callable[[Any], str] = as_string) -> str:
    made = []
    for name, arguments in calls:
        parameters = "".join(f"<parameter={k}>\n{written(v)}\n</parameter>\n" for k, v in arguments.items())
        made.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(made)


def glm(calls: list[tuple[str, dict[str, Any]]], line: str = "\n") -> str:
    made = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{k}</arg_key>{line}<arg_value>{as_json(v)}</arg_value>{line}" for k, v in arguments.items()
        )
        made.append(f"<tool_call>{name}{line}{pairs}</tool_call>")
    return line.join(made)


def minimax(calls: list[tuple[str, dict[str, Any]]]) -> str:
    made = ""
    for name, arguments in calls:
        pairs = "".join(f'<parameter name="{k}">{as_json(v)}</parameter>\n' for k, v in arguments.items())
        made += f'<invoke name="{name}">\n{pairs}</invoke>\n'
    return f"\n<minimax:tool_call>\n{made}</minimax:tool_call>"


def hermes(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(given)}}}\n</tool_call>' for name, given in calls
    )


def llama(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {dumped(given)}}}' for name, given in calls)


def deepseek(calls: list[tuple[str, dict[str, Any]]]) -> str:
    made = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(made) + "<｜tool▁calls▁end｜>"


def deepseek_31(calls: list[tuple[str, dict[str, Any]]]) -> str:
    made = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(made) + "<｜tool▁calls▁end｜>"


def kimi(calls: list[tuple[str, dict[str, Any]]]) -> str:
    made = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{dumped(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(made) + "<|tool_calls_section_end|>"


def harmony(calls: list[tuple[str, dict[str, Any]]]) -> str:
    made = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(given)}<|call|>"
        for name, given in calls
    ]
    return "<|start|>assistant".join(made)


Writer = Callable[[list[tuple[str, dict[str, Any]]]], str]
NONE = "(?!)"
XML_END = (
    r"</parameter>[ \t]*\n\s*(<parameter=|(</function>\s*)?(</tool_call>\s*)?<(tool_call|function))"
    r"|\A((?!<function=|<parameter=|<tool_call>)[\s\S])*</parameter>[ \t]*\n\s*</function>[ \t]*\n\s*</tool_call>"
)
GLM_END = r"</arg_value>\s*(<arg_key>|</tool_call>\s*<tool_call>)|</arg_value>[ \t]*\n\s*</tool_call>"
MINIMAX_END = r"</parameter>\s*(<parameter name|(</invoke>\s*)?(</minimax:tool_call>\s*)?<(minimax|invoke))"
FORMS: dict[str, tuple[ToolFormat, Writer, str]] = {
    "harmony": (HARMONY, harmony, NONE),
    "qwen3-coder": (XML, xml, XML_END),
    "qwen3.5": (XML, lambda calls: xml(calls, as_json), XML_END),
    "glm-4.5": (GLM, glm, GLM_END),
    "glm-4.7": (GLM, lambda calls: glm(calls, ""), GLM_END),
    "hermes": (HERMES, hermes, NONE),
    "deepseek-v3": (DEEPSEEK, deepseek, NONE),
    "deepseek-v3.1": (DEEPSEEK_31, deepseek_31, NONE),
    "kimi": (KIMI, kimi, NONE),
    "minimax": (MINIMAX, minimax, MINIMAX_END),
    "llama": (LLAMA, llama, NONE),
}
"""Each form, what writes its calls, and a pattern of texts that cannot be told from the form's own tags."""


def ambiguous(made: Made, pattern: str) -> bool:
    values = [as_json(value) for _, arguments in made.calls for value in arguments.values()]
    return any(re.search(pattern, value) for value in values)
