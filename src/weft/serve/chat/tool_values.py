"""Values of arguments in bare text: the function's JSON schema decides their type."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from weft.engine.grammar.nullable import with_null

CONSTANTS = {"True": True, "False": False, "None": None}
"""Constants in Python's spelling, which models learn from templates with Jinja's `string` filter."""
KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
MAX_STEPS = 10_000
"""Maximum schemas to check for one value; further ones allow anything, as references may be endless."""
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


def value_for(schema: Any, text: str, root: Any = None) -> Any:
    """Return the value of `text` under a schema: its JSON value if the schema allows it, otherwise the text.

    If the schema allows neither, the nearest value: of an allowed type, or JSON, or the text.

    Args:
        schema: JSON schema; None, empty or True for any text.
        root: schema with the definitions of its references (`#/$defs/…`); None: `schema`.
    """
    if schema is None or schema is True or schema == {}:
        return text
    candidates: list[Any] = [text]
    try:
        parsed = parse_json(text)
        candidates.insert(isinstance(parsed, str), parsed)  # a quoted text is last: its quotes may be intended
    except ValueError:
        if text in CONSTANTS:
            candidates.insert(0, CONSTANTS[text])
    try:
        for exact in (True, False):
            for value in candidates:
                if SchemaCheck(schema if root is None else root, exact).allows(schema, value):
                    return value
    except RecursionError:
        pass  # the schema refers to itself endlessly
    return candidates[0]


def property_schema(parameters: Any, key: str) -> Any:
    """Return the schema of one argument from the schema of the parameters; None if it has none."""
    try:
        schemas = list(SchemaCheck(parameters).properties(parameters, key))
    except RecursionError:
        return None
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else None


def parse_json(text: str) -> Any:
    """Parse strict JSON. Raises ValueError, also for NaN, infinite numbers and too deep nesting."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_json(value: Any) -> str:
    """Return a value of `parse_json` or `value_for` as JSON that UTF-8 can encode."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def write_scalar(text: str) -> str:
    """Return the JSON of an unquoted text: a number or a constant unchanged, anything else as a string."""
    if text in ("true", "false", "null") or (NUMBER.fullmatch(text) and math.isfinite(float(text))):
        return text
    return json.dumps(CONSTANTS.get(text, text), ensure_ascii=False)


class SchemaCheck:
    """Check of values against schemas, as far as needed to choose between readings of a text.

    Args:
        root: schema with the definitions of references.
        exact: check choices, limits and members of objects and arrays in addition to types.
    """

    def __init__(self, root: Any, exact: bool = True):
        self._root, self._exact, self._steps = root, exact, 0

    def resolved(self, schema: Any) -> Any:
        """Return the target of a schema's references; True if one has no target."""
        while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
            schema, self._steps = self._root if self._steps < MAX_STEPS else True, self._steps + 1
            for part in reference.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(part, True) if isinstance(schema, Mapping) else True
        return schema

    def properties(self, schema: Any, key: str) -> Iterator[Any]:
        """Yield the schemas of one property from each part of an object's schema."""
        schema, self._steps = self.resolved(schema), self._steps + 1
        if not isinstance(schema, Mapping) or self._steps > MAX_STEPS:
            return
        named = schema.get("properties")
        if isinstance(named, Mapping) and key in named:
            yield named[key]
        elif isinstance(others := schema.get("additionalProperties"), Mapping):
            yield others
        for name in ("anyOf", "oneOf", "allOf"):
            for part in _list(schema.get(name)):
                yield from self.properties(part, key)

    def allows(self, schema: Any, value: Any) -> bool:
        """Return whether a schema allows a value. Unknown types and malformed parts allow anything."""
        schema, self._steps = self.resolved(with_null(schema)), self._steps + 1
        if not isinstance(schema, Mapping) or self._steps > MAX_STEPS:
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True
        for name in ("anyOf", "oneOf"):
            if (some := _list(schema.get(name))) and not any(self.allows(part, value) for part in some):
                return False
        if not all(self.allows(part, value) for part in _list(schema.get("allOf"))):
            return False
        choices = choices_of(schema)
        if choices is not None and not any(self._is_choice(value, choice) for choice in choices):
            return False
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]
        if kinds and not any(_is_kind(value, kind) for kind in kinds):
            return False
        return not self._exact or (_within(schema, value) and self._allows_inside(schema, value))

    def _is_choice(self, value: Any, choice: Any) -> bool:
        """Compare like JSON, with 1 equal to 1.0 but not to true; compare only types unless `exact`."""
        if isinstance(value, bool) != isinstance(choice, bool):
            return False
        return bool(value == choice) if self._exact else _is_kind(value, KINDS.get(type(choice), "null"))

    def _allows_inside(self, schema: Mapping[str, Any], value: Any) -> bool:
        if isinstance(value, list):
            return all(self.allows(schema.get("items", True), item) for item in value)
        if not isinstance(value, dict):
            return True
        named = schema.get("properties")
        named = named if isinstance(named, Mapping) else {}
        others = schema.get("additionalProperties", True)
        needed = all(name in value for name in _list(schema.get("required")) if isinstance(name, str))
        return needed and all(self.allows(named.get(name, others), part) for name, part in value.items())


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum")) or None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_kind(value: Any, kind: Any) -> bool:
    if kind == "integer":
        return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return kind == KINDS.get(type(value), "null") or kind not in ("null", *KINDS.values())


def _within(schema: Mapping[str, Any], value: Any) -> bool:
    """Check limits of numbers and lengths of texts, but no patterns, which may take unlimited time."""
    names = ("minLength", "maxLength") if isinstance(value, str) else ("minimum", "maximum")
    measured = len(value) if isinstance(value, str) else value
    if isinstance(measured, bool) or not isinstance(measured, int | float):
        return True
    low, high = (schema.get(name) for name in names)
    numbers = int | float
    return not (isinstance(low, numbers) and measured < low) and not (isinstance(high, numbers) and measured > high)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number")
    return value
