"""Lark rules of calls that a model must write, or may write in its text: parts that forms of calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from weft.serve.chat.tool_values import CONSTANTS, SchemaCheck, choices_of

Functions = Sequence[dict[str, Any]]
"""The functions that may be called: `name`, and `parameters`, a JSON schema."""
Literal = Callable[[str], str]
"""A text as Lark writes it."""
Schema = Callable[[Any], str]
"""A JSON schema as `%json` of Lark takes it."""
MAX_DEPTH = 4
"""Of nested choices between schemas that are distinguished outside of JSON."""


def literals(named: Collection[str], rules: Mapping[str, str] = {}) -> Literal:
    """Write texts so that these tokens are named in them, or have a rule of this name."""
    among = re.compile("|".join(map(re.escape, sorted(named))) or "(?!)")

    def literal(text: str) -> str:
        parts = [quoted(part) for part in among.split(text)]
        for at, token in enumerate(among.findall(text)):
            parts.insert(2 * at + 1, rules.get(token, token))  # Lark of llguidance names a token as it is written
        return " ".join(part for part in parts if part != '""') or '""'

    return literal


def quoted(text: str) -> str:
    """A text as Lark writes it where no token is named."""
    return json.dumps(text, ensure_ascii=False)


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a function's parameters."""
    return function.get("parameters") or {"type": "object"}


def calls_schema(functions: Functions, arguments: str) -> dict[str, Any]:
    """JSON schema of an object with a function's name, and its arguments under this name."""
    each = []
    for at, function in enumerate(functions):
        place = f"#{f'/anyOf/{at}' if len(functions) > 1 else ''}/properties/{arguments}"
        parameters = _placed(parameters_of(function), place)
        each.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, arguments: parameters},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return each[0] if len(each) == 1 else {"anyOf": each}


def _placed(part: Any, place: str) -> Any:
    """Make the references of a schema lead to its own parts where it is inside of another, at this JSON pointer."""
    if isinstance(part, list):
        return [_placed(each, place) for each in part]
    if not isinstance(part, dict):
        return part
    placed = {name: _placed(each, place) for name, each in part.items()}
    if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
        placed["$ref"] = place + reference[1:]
    return placed


def headed_call(functions: Functions, literal: Literal, schema: Schema, head: Callable[[str], str], tail: str) -> str:
    """Rules of a call that is JSON of its arguments, after a head, in Lark, with the function's name."""
    rules = [f"call: {' | '.join(f'function{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        rules.append(f"function{i}: {head(function['name'])} arguments{i} {literal(tail)}")
        rules.append(f"arguments{i}: %json {schema(parameters_of(function))}")
    return "\n".join(rules) + "\n"


def tagged_call(
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
    rules = [f"call: {around[0]} ({' | '.join(f'function{i}' for i in range(len(functions)))}) {around[1]}"]
    for i, (named, function) in enumerate(zip(names, functions, strict=True)):
        parameters, parts = parameters_of(function), [named]
        for j, (key, kind) in enumerate((parameters.get("properties") or {}).items()):
            value = f"function{i}_{j}"
            parts.append(value if key in parameters.get("required", ()) else f"{value}?")
            rules.append(f"{value}: {parameter[0]} {literal(key)} {parameter[1]} {value}_value {parameter[2]}")
            body = " | ".join(_bodies(kind, parameters, literal, schema, "\n" if line else ""))
            rules.append(f"{value}_value: {body}")
        rules.append(f"function{i}: {' '.join(parts)}")
    return "\n".join(rules) + "\n"


def _bodies(kind: Any, root: dict[str, Any], literal: Literal, schema: Schema, end: str, depth: int = 0) -> list[str]:
    """Lark of a value between tags, for each reading of it that `weft.serve.chat.tool_values.value_for` tells apart.

    kind: its schema. root: that of all parameters. end: what ends it.
    """
    kind = SchemaCheck(root).resolved(kind)
    if isinstance(kind, Mapping):
        fixed: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        choices = choices_of(kind) or fixed.get(str(kind.get("type")))
        if choices is not None:
            written = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
            written += [name for name, value in CONSTANTS.items() if any(value is choice for choice in choices)]
            return [literal(f"{choice}{end}") for choice in written]
        kinds = kind.get("type")
        some = [dict(kind) | {"type": each} for each in kinds] if isinstance(kinds, list) else []
        for parts in (some, kind.get("anyOf"), kind.get("oneOf")):
            if isinstance(parts, list) and parts and depth < MAX_DEPTH:
                return [body for part in parts for body in _bodies(part, root, literal, schema, end, depth + 1)]
    if SchemaCheck(root, exact=False).allows(kind, ""):
        limit = kind.get("maxLength", "") if isinstance(kind, Mapping) else ""
        return [f"/[^<]{{0,{limit}}}{json.dumps(end)[1:-1]}/"]
    named = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return [f"%json {schema(named | kind if isinstance(kind, dict) else kind)} {literal(end)}"]
