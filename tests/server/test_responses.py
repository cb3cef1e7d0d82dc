"""POST /v1/responses, with the official client."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from server.conftest import QuietEngine, Served, output, serve
from server.test_tools import TEMPLATE, TOOLS
from weft.serve.dialects.responses import ResponsesRequest

FIXED: Any = {"model": "small", "temperature": 0, "max_output_tokens": 8}
FLAT: Any = [{"type": "function"} | tool["function"] for tool in TOOLS]


def test_text(served: Served) -> None:
    client = served.client()
    whole = client.responses.create(input="hello", **FIXED)
    chat = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=8
    )
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 8)
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ]
    assert client.responses.create(input=items, **FIXED).usage.input_tokens == len(
        "system: be kind\nuser: hello\nassistant:"
    )
    assert client.responses.create(input="hello", instructions="be kind", **FIXED).usage.input_tokens == len(
        "system: be kind\nuser: hello\nassistant:"
    )


def test_streamed_text_is_the_same(served: Served) -> None:
    client = served.client()
    whole = client.responses.create(input="hello", **FIXED)
    events = list(client.responses.create(input="hello", stream=True, **FIXED))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.incomplete" and events[-1].response.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_structure(served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    client = served.client()
    body: Any = {"model": "small", "input": "hi", "tools": FLAT, "max_output_tokens": 200, "temperature": 30}
    body |= {"tool_choice": {"type": "function", "name": "time"}}
    if stream:
        response = list(client.responses.create(**body, stream=True))[-1].response
    else:
        response = client.responses.create(**body)
    [call] = response.output
    assert (call.type, call.name) == ("function_call", "time") and list(json.loads(call.arguments)) == ["city"]
    said: Any = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": call.call_id, "name": "time", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    prompt = 'weather;time;user:hi\nassistant:<tool_call>{"city": "Bern"}</tool_call>\ntool:noon\n'
    assert client.responses.create(
        model="small", input=said, tools=FLAT, max_output_tokens=1
    ).usage.input_tokens == len(prompt)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    text = client.responses.create(**body | {"tools": [], "tool_choice": "auto", "text": form}).output_text
    assert json.loads(text)["n"] in (True, False)


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALLED = THOUGHT + '<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"city": "Bern"}'


@pytest.mark.parametrize("completion", [THOUGHT + "<|channel|>final<|message|>Noon.", CALLED], ids=["text", "call"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_thought_is_an_item_of_its_own(quiet: QuietEngine, completion: str, stream: bool) -> None:
    """GPT-OSS's form of thoughts is read, and clients may send the item back."""
    quiet.tokenizer.chat_template = "{# <|start|>assistant<|channel|> #}" + TEMPLATE
    pieces = [completion[at : at + 7] for at in range(0, len(completion), 7)]

    def say() -> None:
        for piece in pieces:
            quiet.say(output(piece))
        quiet.say(output("", "stop"))

    for served in serve(quiet):
        client = served.client()
        threading.Thread(target=say).start()
        body: Any = {"model": "small", "input": "hi", "tools": FLAT}
        if stream:
            events = list(client.responses.create(**body, stream=True))
            assert [e.sequence_number for e in events] == list(range(len(events)))
            assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hm."
            deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == '{"city": "Bern"}' * (completion == CALLED) and len(deltas) in (0, 3)
            response = events[-1].response
        else:
            response = client.responses.create(**body)
        thought, item = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        if completion == CALLED:
            assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "time", {"city": "Bern"})
        else:
            assert response.output_text == "Noon."
        back = [item.to_dict() for item in response.output]
        asked = ResponsesRequest.model_validate({"input": [{"role": "user", "content": "hi"}, *back]}).chat()
        assert asked.messages[-1].plain()["reasoning_content"] == "Hm."


def test_what_is_asked_comes_back(served: Served) -> None:
    asked: Any = {"metadata": {"run": "7"}, "text": {"verbosity": "medium", "format": {"type": "text"}}}
    asked |= {"truncation": "auto", "reasoning": {"effort": "low", "summary": None}}
    with served.http() as http:
        response = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1} | asked).json()
        assert {name: response[name] for name in asked} == asked
        null = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": None}]}
        body = {"input": [null, {"role": "user", "content": "a"}], "max_output_tokens": 1}
        assert http.post("/v1/responses", json=body).status_code == 200


def test_what_newer_clients_ask_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts in a form to send back, an input that is cut where it is too long, and values for the template."""
    client = served.client()
    include: Any = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    cut = client.responses.create(input="a" * 300, truncation="auto", include=include, **FIXED)
    assert (cut.usage.input_tokens, cut.usage.output_tokens, cut.truncation) == (248, 8, "auto")
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", "{{ mood }}{{ messages[0].content }}")
    more = {"chat_template_kwargs": {"mood": "glad"}}
    assert client.responses.create(input="a", extra_body=more, **FIXED).usage.input_tokens == len("glada")


@pytest.mark.parametrize(
    "body, text",
    [
        ({}, "input"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include.0: Input should be"),
        ({"input": "a", "truncation": "middle"}, "truncation: Input should be 'auto' or 'disabled'"),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort: Input should be"),
        ({"input": "a", "reasoning": {"mode": "deep"}}, "reasoning.mode is not supported"),
        ({"input": "a", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs cannot set tools"),
        ({"input": "a", "tools": FLAT, "tool_choice": {"type": "allowed_tools", "tools": 5}}, "or Field required"),
        ({"input": "a", "tools": FLAT, "tool_choice": {"type": "allowed_tools", "tools": [5]}}, "or Field required"),
        ({"input": "a", "previous_response_id": "resp_1"}, "no response with id 'resp_1' is stored"),
        ({"input": "a", "background": True}, "background is not supported"),
        ({"input": [{"type": "image"}]}, "input of type 'image' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type 'input_image' cannot be read"),
        ({"input": [{"type": ["message"]}]}, "input of type ['message'] is not supported"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity is not supported"),
        ({"input": "a", "text": {"style": "terse"}}, "text.style is not supported"),
        ({"input": "a", "text": {"format": "json"}}, "text.format: Input should be a valid dict"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "text.format.x is not"),
        ({"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "schema is not supported"),
        ({"input": [{"role": "user", "content": "a", "tone": "kind"}]}, "input.0.tone is not supported"),
        ({"input": [{"role": "u", "content": [{"type": "input_text", "text": "a", "x": 1}]}]}, "input.0.content.0.x"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "namespace": "n"}]}, "input.0.namespace is"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input.0.call_id: Field required"),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input.0.content.0.text: Input should be"),
        ({"input": [{"type": "reasoning", "content": "thought"}]}, "input.0.content: Input should be a valid list"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content is not supported"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata.a: Input should be a valid string"),
        ({"input": "a", "tools": FLAT, "tool_choice": {"type": "custom", "name": "time"}}, "'allowed_tools'"),
        ({"input": []}, "input: List"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice needs tools"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens is -1"),
        ({"input": "a", "model": "other"}, "not served here"),
    ],
    ids=range(32),
)
def test_bad_input(served: Served, body: Any, text: str) -> None:
    with served.http() as http:
        response = http.post("/v1/responses", json=body)
    assert response.status_code in (400, 404) and text in response.json()["error"]["message"], response.text


def test_a_refusal_is_a_status_in_streams_too(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="317 in the input"):
        served.client().responses.create(model="small", input="a" * 300, stream=True)
