"""Lark rules of required and optional calls, shared by the forms of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from weft.engine.grammar.nullable import with_null
from weft.serve.chat.tool_values import CONSTANTS, SchemaCheck, choices_of

Functions = Sequence[dict[str, Any]]
"""Functions of a request: `name`, and `parameters`, a JSON schema."""
Literal = Callable[[str], str]
"""Function from a text to its Lark."""
MAX_DEPTH = 4
"""Maximum depth of nested choices between schemas outside JSON."""


def literals(named: Collection[str], rules: Mapping[str, str] = {}) -> Literal:
    """Return a function that writes texts in Lark, with these tokens by name or by the rule of the token."""
    among = re.compile(f"({'|'.join(map(re.escape, sorted(named))) or '(?!)'})")

    def literal(text: str) -> str:
        texts_and_tokens = enumerate(among.split(text))  # llguidance's Lark names a token by its text
        parts = [rules.get(part, part) if at % 2 else quoted(part) for at, part in texts_and_tokens]
        return " ".join(part for part in parts if part != '""') or '""'

    return literal


def quoted(text: str) -> str:
    """Return a text in Lark, without named tokens."""
    return json.dumps(text, ensure_ascii=False)


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters."""
    return function.get("parameters") or {"type": "object"}


def _placed(part: Any, place: str) -> Any:
    """Return a schema with references adapted to its place in another schema. place: JSON pointer."""
    if isinstance(part, list):
        return [_placed(value, place) for value in part]
    if not isinstance(part, dict):
        return part
    placed = {name: _placed(value, place) for name, value in part.items()}
    if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
        placed["$ref"] = place + reference[1:]
    return placed


class CallRules(NamedTuple):
    """Rules of calls of these functions. schema: function from a JSON schema to Lark's `%json`."""

    functions: Functions
    literal: Literal
    schema: Callable[[Any], str]

    def object(self, arguments: str) -> str:
        """Return the rule of a JSON object with a function's name and its arguments. arguments: their key."""
        schemas = []
        for at, function in enumerate(self.functions):
            place = f"#{f'/anyOf/{at}' if len(self.functions) > 1 else ''}/properties/{arguments}"
            parameters = _placed(parameters_of(function), place)
            members = {"name": {"const": function["name"]}, arguments: parameters}
            fixed = {"required": ["name", arguments], "additionalProperties": False}
            schemas.append({"type": "object", "properties": members} | fixed)
        return f"%json {self.schema(schemas[0] if len(schemas) == 1 else {'anyOf': schemas})}\n"

    def headed(self, head: Callable[[str], str], tail: str) -> str:
        """Return rules of a call with a head and JSON arguments. head: from the function's name to Lark."""
        rules = [f"call: {self._any}"]
        for i, function in enumerate(self.functions):
            rules.append(f"function{i}: {head(function['name'])} arguments{i} {self.literal(tail)}")
            rules.append(f"arguments{i}: %json {self.schema(parameters_of(function))}")
        return "\n".join(rules) + "\n"

    def tagged(self, names: Sequence[str], around: tuple[str, str], parameter: tuple[str, ...], end: str = "") -> str:
        """Return rules of a call with each parameter in tags, in the schema's order. Texts exclude <, which ends them.

        names: beginning of each function's call. around: rules before and after it. parameter: texts before the key,
        between key and value, and after the value. end: a line break if a value ends its line; a text, which may have
        line breaks and is matched greedily, includes this one.
        """
        rules = [f"call: {around[0]} ({self._any}) {around[1]}"]
        for i, (named, function) in enumerate(zip(names, self.functions, strict=True)):
            parameters, parts = parameters_of(function), [named]
            for j, (key, kind) in enumerate((parameters.get("properties") or {}).items()):
                value = f"function{i}_{j}"
                parts.append(value if key in parameters.get("required", ()) else f"{value}?")
                rules.append(f"{value}: {parameter[0]} {self.literal(key)} {parameter[1]} {value}_value {parameter[2]}")
                rules.append(f"{value}_value: {' | '.join(self._bodies(kind, parameters, end))}")
            rules.append(f"function{i}: {' '.join(parts)}")
        return "\n".join(rules) + "\n"

    @property
    def _any(self) -> str:
        return " | ".join(f"function{i}" for i in range(len(self.functions)))

    def _bodies(self, kind: Any, root: dict[str, Any], end: str, depth: int = 0) -> list[str]:
        """Return Lark of a value between tags, per reading that `weft.serve.chat.tool_values.value_for` distinguishes.

        kind: schema of the value. root: schema of all parameters. end: text that ends the value.
        """
        kind = with_null(SchemaCheck(root).resolved(with_null(kind)))
        if isinstance(kind, Mapping):
            fixed: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
            choices = choices_of(kind) or fixed.get(str(kind.get("type")))
            if choices is not None:
                written = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
                written += [name for name, value in CONSTANTS.items() if any(value is choice for choice in choices)]
                return [self.literal(f"{choice}{end}") for choice in written]
            kinds = kind.get("type")
            some = [dict(kind) | {"type": each} for each in kinds] if isinstance(kinds, list) else []
            for parts in (some, kind.get("anyOf"), kind.get("oneOf")):
                if isinstance(parts, list) and parts and depth < MAX_DEPTH:
                    return [body for part in parts for body in self._bodies(part, root, end, depth + 1)]
        if SchemaCheck(root, exact=False).allows(kind, ""):
            limit = kind.get("maxLength", "") if isinstance(kind, Mapping) else ""
            return [f"/[^<]{{0,{limit}}}{json.dumps(end)[1:-1]}/"]
        named = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return [f"%json {self.schema(named | kind if isinstance(kind, dict) else kind)} {self.literal(end)}"]
