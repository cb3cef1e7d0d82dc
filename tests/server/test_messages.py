"""POST /v1/messages: Anthropic's shape, against its documentation and, where it is installed, its official client."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from server.conftest import QuietEngine, Served, output, serve
from server.test_tools import CALL, TEMPLATE, TOOLS
from weft.serve.dialects.anthropic_messages import MessagesRequest

M = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "small", "messages": HELLO, "max_tokens": 8, "temperature": 0}
FLAT: Any = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
THINKS = TEMPLATE + "{# <think> #}"
ANSWER = f"<think>\nHm.\n</think>\n\nI look.{CALL}\n{CALL}"
CITY = {"city": "Zürich"}
BLOCKS = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": CITY},
    {"type": "tool_use", "name": "weather", "input": CITY},
]


def chat(**body: Any) -> Any:
    return MessagesRequest.model_validate({"messages": HELLO, "max_tokens": 8} | body).chat()


def plain(**body: Any) -> list[dict[str, Any]]:
    return [message.plain() for message in chat(**body).messages]


def test_a_conversation_as_a_chat() -> None:
    called = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": CITY}
    cache = {"cache_control": {"type": "ephemeral"}}
    said: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"} | cache, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [*BLOCKS[:2], called]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    function = {"name": "weather", "arguments": CITY}
    call = {"id": "toolu_1", "type": "function", "function": function}
    assert plain(messages=said, system=[{"type": "text", "text": "be "} | cache, {"type": "text", "text": "kind"}]) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "so?"},
    ]
    assert plain(messages=said[:2])[-1]["tool_calls"] and not chat(messages=said[:2]).continue_final_message
    assert chat(messages=[*HELLO, {"role": "assistant", "content": "So "}]).continue_final_message


def test_fields_as_those_of_a_chat() -> None:
    made = chat(tools=FLAT, stop_sequences=["x"], metadata={"user_id": "u"}, top_k=5, thinking={"type": "disabled"})
    assert [t.function.name for t in made.tools] == ["weather", "time"] and made.tools[0].function.parameters
    assert (made.max_tokens, made.stop, made.user, made.top_k, made.include_reasoning) == (8, ["x"], "u", 5, False)
    assert made.chat_template_kwargs["enable_thinking"] is False
    assert chat(thinking={"type": "enabled", "budget_tokens": 1024}).include_reasoning
    assert not chat(thinking={"type": "adaptive", "display": "omitted"}).include_reasoning
    for choice, wanted in [("auto", "auto"), ("any", "required"), ("none", "none")]:
        assert chat(tools=FLAT, tool_choice={"type": choice}).tool_choice == wanted
    named = chat(tools=FLAT, tool_choice={"type": "tool", "name": "time", "disable_parallel_tool_use": True})
    assert named.tool_choice.function.name == "time" and not named.parallel_tool_calls
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}}
    form = chat(output_config={"format": {"type": "json_schema", "schema": schema}}).response_format
    assert form.type == "json_schema" and form.json_schema.schema_ == schema


def events(served: Served, **more: Any) -> list[dict[str, Any]]:
    with served.http() as http:
        response = http.post(M, json=ASKED | {"stream": True} | more)
    assert response.status_code == 200, response.text
    found = [event.split("\n") for event in response.text.removesuffix("\n\n").split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [d["type"] for d in data]
    return data


def say(quiet: QuietEngine, text: str, size: int, end: Any = "stop") -> threading.Thread:
    def run() -> None:
        for at in range(0, len(text), size):
            quiet.say(output(text[at : at + size]))
        quiet.say(output("", end))

    quiet.listeners.clear()
    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_build_the_message(quiet: QuietEngine, size: int) -> None:
    quiet.tokenizer.chat_template = THINKS
    for served in serve(quiet):
        say(quiet, ANSWER, size)
        with served.http() as http:
            whole = http.post(M, json=ASKED | {"tools": FLAT}).json()
        say(quiet, ANSWER, size)
        found = events(served, tools=FLAT)
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    assert blocks == BLOCKS and all(b["id"] for b in whole["content"][2:])
    assert (whole["type"], whole["role"], whole["model"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "small",
        "tool_use",
    )
    assert (
        whole["usage"]
        == {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 1,
        }
        or whole["usage"]["output_tokens"] == 1
    )
    begin, *between, delta, stop = found
    assert begin["type"] == "message_start" and begin["message"]["content"] == []
    assert begin["message"]["stop_reason"] is None and begin["message"]["usage"]["input_tokens"] > 0
    assert (delta["type"], stop["type"]) == ("message_delta", "message_stop")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and "output_tokens" in delta["usage"]
    texts: dict[int, str] = {}
    opened: list[dict[str, Any]] = []
    for event in between:
        if event["type"] == "content_block_start":
            assert event["index"] == len(opened)
            opened.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(opened) - 1
            kind = event["delta"]["type"]
            assert kind == {"tool_use": "input_json_delta"}.get(opened[-1]["type"], opened[-1]["type"] + "_delta")
            text = event["delta"][{"input_json_delta": "partial_json"}.get(kind, kind.removesuffix("_delta"))]
            texts[event["index"]] = texts.get(event["index"], "") + text
    assert [block["type"] for block in opened] == [block["type"] for block in BLOCKS]
    assert [texts[0], texts[1], json.loads(texts[2]), json.loads(texts[3])] == ["Hm.", "I look.", CITY, CITY]
    assert sum(event["type"] == "content_block_stop" for event in between) == len(BLOCKS)


@pytest.mark.parametrize("end", ["stop", "length"])
def test_the_official_client_reads_both_alike(quiet: QuietEngine, end: Any) -> None:
    """Also of a call that is cut short."""
    anthropic = pytest.importorskip("anthropic")
    quiet.tokenizer.chat_template = THINKS
    completion = ANSWER if end == "stop" else ANSWER[: -len("}}\n</tool_call>")]
    found = []
    for served in serve(quiet):
        client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
        body: Any = {"model": "small", "messages": HELLO, "max_tokens": 99, "tools": FLAT}
        for size in (1, 9, 1000):
            say(quiet, completion, size, end)
            with client.messages.stream(**body) as stream:
                found.append(stream.get_final_message())
        say(quiet, completion, 9, end)
        found.append(client.messages.create(**body))
    for message in found:
        blocks = [block.to_dict() for block in message.content]
        names = BLOCKS[0] | BLOCKS[1] | BLOCKS[2]
        assert [{k: v for k, v in block.items() if k in names} for block in blocks] == BLOCKS
        assert message.stop_reason == ("tool_use" if end == "stop" else "max_tokens")


@pytest.mark.parametrize("stop, reason", [("END", "stop_sequence"), (None, "end_turn"), (7, "end_turn")])
def test_why_it_ends(quiet: QuietEngine, stop: Any, reason: str) -> None:
    for served in serve(quiet):
        last = msgspec.structs.replace(output("Hm", "stop"), stop_reason=stop)
        threading.Thread(target=quiet.say, args=(last,)).start()
        with served.http() as http:
            found = http.post(M, json=ASKED | {"stop_sequences": ["END"]}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop if reason == "stop_sequence" else None)


def test_text_and_counts(served: Served) -> None:
    with served.http() as http:
        whole = http.post(M, json=ASKED).json()
        said = http.post("/v1/chat/completions", json=ASKED).json()
        text = said["choices"][0]["message"]["content"]
        assert whole["content"] == [{"type": "text", "text": text}] and whole["stop_reason"] == "max_tokens"
        usage = whole["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == said["usage"]["prompt_tokens"]
        edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        same = http.post(M, json=ASKED | {"context_management": edits, "output_config": {"effort": "medium"}}).json()
        assert same["content"] == whole["content"]
        body = {"model": "small", "messages": HELLO, "system": "be kind", "context_management": edits}
        counted = http.post(f"{M}/count_tokens", json=body).json()
        assert counted == {"input_tokens": len("system: be kind\nuser: hi\nassistant:")}
    found = events(served)
    assert "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta") == text


@pytest.mark.parametrize(
    "body, status, kind, text",
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "'image'"),
        ({"mcp_servers": [1]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        ({"priority": 1}, 400, "invalid_request_error", "priority is not supported"),
        ({"cache_salt": "a"}, 400, "invalid_request_error", "cache_salt is not supported"),
        ({"tools": [{"type": "web_search_20250305"}]}, 400, "invalid_request_error", "tools.0"),
        ({"tools": FLAT}, 400, "invalid_request_error", "knows no tools"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"output_config": {"effort": "huge"}}, 400, "invalid_request_error", "output_config.effort: Input should be"),
        ({"model": "other"}, 404, "not_found_error", "not served here"),
        ({"max_tokens": 10**6}, 400, "invalid_request_error", "maximum context length is 256 tokens"),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_shape(served: Served, body: Any, status: int, kind: str, text: str, stream: bool) -> None:
    with served.http() as http:
        response = http.post(M, json=ASKED | {"stream": stream} | body)
    error = response.json()
    assert response.status_code == status and error["type"] == "error", response.text
    assert error["error"]["type"] == kind and text in error["error"]["message"]


def test_a_key_as_their_clients_send_it(locked: Served) -> None:
    with locked.http() as http:
        assert http.post(M, json=ASKED, headers={"x-api-key": "secret"}).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}):
            response = http.post(M, json=ASKED, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"


def test_an_error_in_a_stream_is_an_event(quiet: QuietEngine) -> None:
    for served in serve(quiet):
        say(quiet, "Hm", 1, "timeout")
        *_, last = events(served)
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
