"""Tools: calls told apart from text however it is cut, and whole conversations with the official client."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from server.conftest import Served
from weft.server.tools import CallParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 4}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
)


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser, text, calls = CallParser(), "", []
    for at, piece in enumerate(pieces):
        more, found = parser.push(piece, last=at == len(pieces) - 1)
        text += more
        calls += [(c.name, json.loads(c.arguments)) for c in found]
    return text, calls


@pytest.mark.parametrize(
    "answer, text, calls",
    [
        (CALL, "", 1),
        (f"{CALL}\n{CALL}", "", 2),
        (f"I look. {CALL}", "I look. ", 1),
        ("a <tool and <tool_calls> b", "a <tool and <tool_calls> b", 0),
        ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", 0),
        ("a <tool_call>{", "a <tool_call>{", 0),
        (CALL.removesuffix("</tool_call>"), "", 1),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
        ("", "", 0),
    ],
    ids=range(9),
)
def test_calls_however_they_are_cut(answer: str, text: str, calls: int) -> None:
    wanted = (text, [("weather", {"city": "Zürich"})] * calls)
    assert parse([answer]) == wanted and parse([*answer, ""]) == wanted
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(answer) + 1), k=4))
        assert parse([answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]) == wanted


@pytest.fixture
def tooled(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    yield served


def chat(served: Served, stream: bool = False, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": "hi"}])
    body: Any = {"model": "small", "messages": messages, "tools": TOOLS, "max_tokens": 200, "temperature": 9, "seed": 5}
    return served.client().chat.completions.create(**body | more, stream=stream)


def test_calls_that_must_be(tooled: Served) -> None:
    choice = chat(tooled, tool_choice="required", parallel_tool_calls=False).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert call.function.name in ("weather", "time") and list(json.loads(call.function.arguments)) == ["city"]
    named = chat(tooled, tool_choice={"type": "function", "function": {"name": "time"}}).choices[0]
    assert [c.function.name for c in named.message.tool_calls] == ["time"]


def test_streamed_calls_are_the_same(tooled: Served) -> None:
    whole = chat(tooled, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    chunks = [c.choices[0] for c in chat(tooled, True, tool_choice="required", parallel_tool_calls=False)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [c.index for c in calls] == [0] and chunks[-1].finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        (c.function.name, c.function.arguments) for c in whole
    ]


def test_a_conversation_with_calls(tooled: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    prompt = 'weather;time;user:hi\nassistant:<tool_call>{"city": "Bern"}</tool_call>\ntool:rain\n'
    assert chat(tooled, messages=messages, max_tokens=1).usage.prompt_tokens == len(prompt)
    without = chat(tooled, tool_choice="none", max_tokens=1)
    assert without.usage.prompt_tokens == len("user:hi\n") and without.choices[0].message.tool_calls is None


def test_bad_calls_are_refused(tooled: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    for body, text in [
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "arguments of a call of weather are not JSON"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x', which is not among the tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "ask for two grammars"),
    ]:
        with tooled.http() as http:
            hello = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
            answer = http.post("/v1/chat/completions", json=hello | body)
        assert answer.status_code == 400 and text in answer.text, answer.text
