"""Values between tags: what the schema allows, and always valid JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.serve.chat.tool_arguments import JsonArguments
from weft.serve.chat.tool_values import property_schema, value_for, write_json

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
ROOT = {"$defs": {"code": {"anyOf": [STRING, {"$ref": "#/$defs/none"}]}, "none": NULL, "n/a": INTEGER}}


@pytest.mark.parametrize(
    "schema, text, value",
    [
        ({"anyOf": [STRING, NULL]}, "90210", "90210"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "None", None),
        ({"anyOf": [STRING, NULL]}, '"a"', '"a"'),
        ({"anyOf": [INTEGER, NULL]}, "90210", 90210),
        ({"oneOf": [{"type": "boolean"}, STRING]}, "true", True),
        ({"oneOf": [{"const": "5"}, {"enum": [True, 6]}]}, "5", "5"),
        ({"oneOf": [{"const": "5"}, {"enum": [True, 6]}]}, "6", 6),
        ({"type": ["string", "null"]}, "1.5", "1.5"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 1]}, "1", 1),
        ({"enum": [1, 0]}, "true", True),  # none of them is true
        ({"const": "5"}, "5", "5"),
        ({"allOf": [STRING, {"minLength": 1}]}, "5", "5"),
        ({"$ref": "#/$defs/code"}, "90210", "90210"),
        ({"$ref": "#/$defs/n~1a"}, "5", 5),
        ({"$ref": "#/$defs/gone"}, "5", 5),
        ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "array", "items": INTEGER}, STRING]}, "[1]", [1]),
        ({"anyOf": [{"type": "object", "required": ["a"]}, STRING]}, '{"b": 1}', '{"b": 1}'),
        ({"anyOf": [{"type": "integer", "minimum": 0}, STRING]}, "-5", "-5"),
        ({"type": "object"}, '{"a": [null, 1.5]}', {"a": [None, 1.5]}),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "3.0", 3.0),
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "3.5", 3.5),
        ({"enum": ["1"], "type": "string"}, "3", "3"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-Infinity", "-Infinity"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "[1, NaN]", "[1, NaN]"),
        ({"type": "array"}, "[-1e999]", "[-1e999]"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}, "5", 5),
        ({"type": {}}, "5", 5),
        ({"enum": 3, "anyOf": {}, "type": [[], "strange"]}, "5", 5),
        (STRING, '"a"', '"a"'),
        (STRING, "null", "null"),
        (None, "5", "5"),
        ({}, "5", "5"),
        (True, "5", "5"),
    ],
    ids=range(45),
)
def test_the_value_is_what_the_schema_allows(schema: Any, text: str, value: Any) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}
    root = {"$defs": ROOT["$defs"] | {"loop": loop}}
    found = value_for(schema, text, root)
    assert found == value and type(found) is type(value)
    assert json.loads(write_json(found), parse_constant=pytest.fail) == value


def test_a_lone_surrogate_is_written_so_that_it_can_be_sent() -> None:
    value = value_for({"type": "object"}, '{"a": "\\ud800é"}')
    assert json.loads(write_json(value).encode()) == value


def test_a_parameter_is_found_wherever_the_schema_has_it() -> None:
    by_reference = {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": {"properties": {"a": STRING}}}}
    assert property_schema(by_reference, "a") == STRING
    assert property_schema({"anyOf": [{"properties": {"a": STRING}}, {"properties": {"a": NULL}}]}, "a") == {
        "anyOf": [STRING, NULL]
    }
    assert property_schema({"additionalProperties": INTEGER, "properties": {"b": STRING}}, "a") == INTEGER
    for parameters in (None, {}, {"properties": 3}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}):
        assert property_schema(parameters, "a") is None


@pytest.mark.parametrize(
    "written, made",
    [
        ('{"a": NaN, "b": -Infinity, "c": 1e999}', '{"a": "NaN", "b": "-Infinity", "c": "1e999"}'),
        ('{"a": True, "b": [None, 01, tru]}', '{"a": true, "b": [null, "01", "tru"]}'),
        ('{"a": "x\ny\t\\d\\u12\\"", "b": -1.5e3}', '{"a": "x\\ny\\t\\\\d\\\\u12\\"", "b": -1.5e3}'),
        ('{"a": "}]</x>\\\\"}', '{"a": "}]</x>\\\\"}'),
    ],
    ids=range(4),
)
def test_json_that_none_can_parse_is_mended_as_it_streams(written: str, made: str) -> None:
    for size in (1, 2, 3, len(written)):
        arguments, held, found = JsonArguments(), "", ""
        for at in range(0, len(written), size):
            new, held = arguments.read(held + written[at : at + size], last=False)
            found += new
        assert found == made and arguments.closed and not held
    json.loads(made, parse_constant=pytest.fail)
