"""Structured outputs of the embedded model, greedy, with the official client: each is whole, and of its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pydantic
import pytest

from server.conftest import Served, serve
from server.test_tools import TEMPLATE
from weft.engine.assets import embedded_model_dir
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine

MESSAGES: Any = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does Tom have?"}]
NAMES = ("name", "age", "city", "count", "tags", "kind")


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    with Engine(EngineConfig(embedded_model_dir(), executor="thread", kv_tokens=32768)) as engine:
        yield engine


@pytest.fixture(scope="module")
def shipped(embedded: Engine) -> Iterator[Served]:
    yield from serve(embedded)


def made_up(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that values of bounded length fulfil."""
    kinds: list[Any] = ["string", "integer", "boolean", "enum", *(["array", "object"] * (depth < 2))]
    kind = rng.choice(kinds) if depth else "object"
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 3))
        properties = {name: made_up(rng, depth + 1) for name in names}
        return {"type": kind, "properties": properties, "required": names, "additionalProperties": False}
    if kind == "array":
        return {"type": kind, "items": made_up(rng, depth + 1), "minItems": 1, "maxItems": 2}
    bounds: dict[str, Any] = {"string": {"maxLength": 6}, "integer": {"minimum": 0, "maximum": 99}}
    return {"enum": ["red", "blue", 3, None]} if kind == "enum" else {"type": kind} | bounds.get(kind, {})


def test_fifty_of_fifty_schemas_are_completed(shipped: Served) -> None:
    rng = random.Random(5)
    schemas = [made_up(rng) for _ in range(50)]
    client = shipped.client()

    def completed(schema: dict[str, Any]) -> tuple[str, str | None]:
        form: Any = {"type": "json_schema", "json_schema": {"name": "made_up", "schema": schema, "strict": True}}
        created = client.chat.completions.create(model="small", messages=MESSAGES, response_format=form, max_tokens=120)
        return created.choices[0].finish_reason, created.choices[0].message.content

    with ThreadPoolExecutor(50) as pool:
        for schema, (reason, text) in zip(schemas, pool.map(completed, schemas), strict=True):
            assert reason == "stop", f"{text!r} is no whole value of {json.dumps(schema)}"
            assert text is not None
            jsonschema_rs.validate(schema, json.loads(text))


class Person(pydantic.BaseModel):
    age: int = pydantic.Field(ge=0, le=99)
    kind: str = pydantic.Field(max_length=8)


def test_parse(shipped: Served) -> None:
    client: Any = shipped.client()
    chat = client.chat.completions.parse(model="small", messages=MESSAGES, response_format=Person, max_tokens=60)
    response = client.responses.parse(model="small", input="hi", text_format=Person, max_output_tokens=60)
    for parsed in (chat.choices[0].message.parsed, response.output_parsed):
        assert isinstance(parsed, Person)


TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "parameters": Person.model_json_schema() | {"additionalProperties": False}},
    }
    for name in ("greet", "invite")
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "invite"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_must_be_called(shipped: Served, monkeypatch: pytest.MonkeyPatch, choice: Any, stream: bool) -> None:
    monkeypatch.setattr(shipped.engine.tokenizer, "chat_template", TEMPLATE)
    asked: Any = {"model": "small", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    asked["parallel_tool_calls"] = False
    if stream:
        with shipped.client().chat.completions.stream(**asked) as events:
            [choice_made] = events.get_final_completion().choices
    else:
        [choice_made] = shipped.client().chat.completions.create(**asked).choices
    assert choice_made.finish_reason == "tool_calls", choice_made
    [call] = choice_made.message.tool_calls
    assert call.function.name == "invite" or choice == "required"
    Person.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("how", [{"response_format": {"type": "json_object"}}, {"guided_json": {"type": "object"}}])
def test_whitespace_is_bounded_and_may_be_free(embedded: Engine, shipped: Served, how: dict[str, Any]) -> None:
    """The model writes blanks where it may, whatever is asked for."""
    body = {"messages": MESSAGES, "max_tokens": 40} | how

    def content(served: Served) -> str:
        with served.http() as http:
            return str(http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])

    assert "  " not in content(shipped)
    for free in serve(embedded, any_whitespace=True):
        assert content(free).startswith("{") and content(free)[1:].isspace()
