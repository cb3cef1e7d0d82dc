"""OpenAPI's `nullable` in JSON schemas, which llguidance ignores, as JSON Schema says it."""

from __future__ import annotations

from typing import Any

NULL = {"type": "null"}
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema for each name."""
VALUES = ("const", "enum", "default", "example", "examples")
"""Keywords with JSON values, which are no schemas."""


def with_null(schema: Any) -> Any:
    """Return a schema without its own `nullable: true`, and with null allowed instead. Its other parts stay in place,
    as references name places, unless it is a reference itself or `allOf`."""
    if not isinstance(schema, dict) or schema.get("nullable") is not True:
        return schema
    made = {name: value for name, value in schema.items() if name != "nullable"}
    if "$ref" in made or "allOf" in made:
        return {"anyOf": [made, dict(NULL)]}
    if "const" in made:
        made["enum"] = [made.pop("const")]
    kinds = [made["type"]] if isinstance(made.get("type"), str) else made.get("type")
    for name, values, null in (("type", kinds, "null"), ("enum", made.get("enum"), None)):
        if isinstance(values, list) and null not in values:
            made[name] = [*values, null]
    for name in ("anyOf", "oneOf"):
        if isinstance(some := made.get(name), list) and NULL not in some:
            made[name] = [*some, dict(NULL)]
    return made


def each_with_null(schema: Any) -> Any:
    """Return a schema in which each schema is `with_null`. Changes the schema that is given."""
    whole = [schema]
    parts: list[tuple[Any, bool]] = [(whole, False)]  # the flag: it has a schema for each name
    while parts:
        part, named = parts.pop()
        for name, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if named or name not in VALUES:
                names = not named and name in NAMED
                value = part[name] = value if names else with_null(value)
                parts += [(value, names and isinstance(value, dict))] * isinstance(value, dict | list)
    return whole[0]
