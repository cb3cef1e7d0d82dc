"""Bodies drawn from the protocol's own models, valid and nearly valid: no response is the server's fault."""

from __future__ import annotations

import contextlib
import json
from copy import deepcopy
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from server.conftest import QuietEngine, Served, shared_templates
from server.test_tools import TEMPLATE
from weft.serve.chat.chats import ChatRequest, Function, Message
from weft.serve.chat.protocol import CompletionRequest, DetokenizeRequest, TokenizeRequest
from weft.serve.chat.service import Service
from weft.serve.chat.tool_formats import TOOL_FORMATS, ToolFormat
from weft.serve.dialects.anthropic_messages import InputMessage, MessagesRequest
from weft.serve.dialects.items import ITEMS
from weft.serve.dialects.responses import ResponsesRequest
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.errors import ApiError
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options

ROUTES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
HUGE = "an integer of 5,000 digits"
DEEP: Any = {"a": []}
for _ in range(200):
    DEEP = {"a": [DEEP]}
SCHEMAS: Any = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"enum": ["a", 1, None]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    {"anyOf": []},
    {"type": "nothing"},
    {},
    {"properties": []},
    {"properties": {"a": True, "b": {"enum": 5}}, "required": 5},
    {"properties": {"a": {"type": "string", "maxLength": "many"}, "<b>\n": {"type": ["string", {}]}}},
    {"properties": {"a": {"type": "string", "enum": ["x", None]}}, "required": [5, {}, "a"]},
]
TEXT = st.text('ab <>{}[]"\\\n\x00é😀', min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-2, 2) | TEXT,
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(TEXT, inside, max_size=2),
    max_leaves=3,
)
OVERRIDES: dict[str, st.SearchStrategy[Any]] = {  # by a field's name: few tokens, and texts that mean something
    "ResponsesRequest.tools": st.lists(
        st.deferred(lambda: objects(Function)).map({"type": "function"}.__or__), max_size=2
    ),
    "MessagesRequest.messages": st.deferred(lambda: st.lists(objects(InputMessage), min_size=1, max_size=3)),
    "InputMessage.role": st.sampled_from(["user", "assistant"]),
    "input_schema": st.sampled_from(SCHEMAS),
    "max_tokens": st.just(1),
    "max_completion_tokens": st.just(1),
    "max_output_tokens": st.just(1),
    "n": st.integers(1, 2),
    "best_of": st.none(),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 9),
    "logprobs": st.integers(0, 20) | st.booleans(),
    "top_logprobs": st.just(0),
    "prompt_logprobs": st.integers(0, 20),
    "min_tokens": st.integers(0, 1),
    "stream_options": st.none(),
    "model": st.just("small"),
    "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
    "messages": st.deferred(lambda: st.lists(objects(Message), min_size=1, max_size=3)),
    "ResponsesRequest.input": TEXT
    | st.lists(st.deferred(lambda: st.one_of([objects(item) for item in ITEMS.values()])), min_size=1, max_size=3),
    "parameters": st.sampled_from(SCHEMAS),
    "schema": st.sampled_from(SCHEMAS),
    "guided_json": st.sampled_from(SCHEMAS),
    "regex": st.sampled_from(["[ab]+", "(", "a{100000}", "(?=a)"]),
    "guided_choice": st.just([]) | st.just([f"choice {i}" for i in range(2100)]),
    "arguments": st.sampled_from(["{}", '{"a": 1}', "[1]", "{", "1" * 5000]),
}
NUMBERS: Any = [-1, 1.5, 2**31, 2**63, 10**30, HUGE]
TEXTS: Any = ["", "a", "\ud800", "\x00", "a" * 5000]
INSIDES: Any = [[], {}, [None], ["a"], [HUGE], {"a": None}, {"\ud800": 1}, {"type": []}, [[]], [5], [-1], DEEP]
ODD = st.sampled_from([None, True, *NUMBERS, *TEXTS, *INSIDES, list(range(300))])


def values(kind: Any) -> st.SearchStrategy[Any]:
    """JSON that a field of this type takes."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return values(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of([values(a) for a in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), min_size=1, max_size=3)
    if origin is dict:
        return st.dictionaries(values(arguments[0]).map(str), values(arguments[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return objects(kind)
    simple = {str: TEXT, int: st.integers(0, 256), float: st.floats(-1, 2), bool: st.booleans(), type(None): st.none()}
    return simple.get(kind, JSON)


def objects(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects that a model takes: what it requires, and a few of the rest."""
    fields = {f.alias or name: f for name, f in model.model_fields.items()}
    always = {name for name, f in fields.items() if f.is_required() or name.startswith("max_")}
    kinds = {
        name: next(
            (OVERRIDES[at] for at in (f"{model.__name__}.{name}", name) if at in OVERRIDES), values(f.annotation)
        )
        for name, f in fields.items()
    }
    some = st.lists(st.sampled_from(sorted(kinds)), max_size=4, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: kinds[name] for name in sorted({*names, *always})}))


@st.composite
def nearly(draw: st.DrawFn, model: type[BaseModel]) -> Any:
    """A valid body with something in it, however deep, left out, replaced by something odd, or added."""
    body = deepcopy(draw(objects(model)))
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [body]
    while waiting:
        inside = waiting.pop()
        members = inside.items() if isinstance(inside, dict) else enumerate(inside)
        places += [(inside, key) for key, _ in members]
        waiting += [value for _, value in members if isinstance(value, dict | list)][:9]
    owner, key = draw(st.sampled_from([*places, (body, "unknown")]))
    if isinstance(owner, dict) and draw(st.integers(0, 9)) == 0:
        owner[draw(st.sampled_from(["unknown", "\ud800", ""]))] = draw(ODD)
    owner[key] = draw(ODD)
    return body | {name: 1 for name in body if name.startswith("max_") and body[name] is None}  # null: to the end


def written(body: Any) -> bytes:
    """Return a body as JSON. Python does not write integers as long as `HUGE`'s."""
    return json.dumps(body).replace(json.dumps(HUGE), "7" * 5000).encode()


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=range(len(TOOL_FORMATS)))
def test_no_schema_of_a_function_is_the_servers_fault(quiet: QuietEngine, form: ToolFormat) -> None:
    """Every form is tried, whether the function must be called or is strict."""
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    quiet.tokenizer.chat_template = "".join("{# " + mark + " #}" for mark in form.marks)
    for schema in SCHEMAS:
        for more in ({"tool_choice": "required"}, {}):
            function = {"name": "f", "parameters": schema, "strict": True}
            body = {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": function}],
            }
            with contextlib.suppress(ApiError, ValidationError):
                service.chat_job(ChatRequest.model_validate(body | more))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("made", [objects, nearly], ids=["valid", "nearly valid"])
def test_no_body_is_the_servers_fault(served: Served, path: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.http() as http:

        @settings(
            max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(made(ROUTES[path]), st.sampled_from(TOOL_FORMATS))
        def check(body: Any, form: ToolFormat) -> None:
            marks = "".join("{# " + mark + " #}" for mark in form.marks)
            monkeypatch.setattr(served.engine.tokenizer, "chat_template", marks + TEMPLATE)
            response = http.post(path, content=written(body), headers={"Content-Type": "application/json"})
            assert response.status_code < 500 and "internal error" not in response.text, response.text
            if response.status_code >= 400:
                shape = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
                assert set(response.json()["error"]) == shape

        check()
        assert http.get("/health").status_code == 200
    served.engine.check_idle()
