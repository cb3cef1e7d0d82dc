"""Responses that are stored: fetched, gone on from and deleted, with the official client; and how many there may be."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from server.conftest import QuietEngine, Served, serve
from server.test_responses import FIXED, FLAT
from server.test_tools import TEMPLATE
from weft.serve.http.shared import MAX_RESPONSES, Store


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_another(served: Served, stream: bool) -> None:
    """Answers equal those to the whole conversation; also after a continued response, and after that was deleted."""
    client = served.client()

    def create(**body: Any) -> Any:
        if not stream:
            return client.responses.create(**FIXED | body)
        return list(client.responses.create(**FIXED | body, stream=True))[-1].response

    said: list[Any] = []
    previous = None
    for text in ("one", "two", "three"):
        response = create(input=text, instructions=f"be {text}", previous_response_id=previous)
        said.append({"role": "user", "content": text})
        whole = create(input=said, instructions=f"be {text}", store=False)
        assert response.output_text == whole.output_text and response.usage.input_tokens == whole.usage.input_tokens
        assert (response.store, whole.store, response.previous_response_id) == (True, False, previous)
        assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
        said += [item.to_dict() for item in response.output]
        if previous is not None:
            client.responses.delete(previous)
            for forgotten in (previous, whole.id):
                with pytest.raises(openai.NotFoundError, match="no response with id"):
                    client.responses.retrieve(forgotten)
        previous = response.id
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_never")
    with pytest.raises(openai.BadRequestError, match="no response with id") as refused:
        create(input="four", previous_response_id="resp_never")
    assert refused.value.code == "previous_response_not_found"  # what OpenAI's says


def test_the_output_of_a_function_follows_its_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    client = served.client()
    body: Any = {"model": "small", "tools": FLAT, "max_output_tokens": 200, "temperature": 30}
    first = client.responses.create(input="hi", tool_choice={"type": "function", "name": "time"}, **body)
    [call] = first.output
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = client.responses.create(input=[output], previous_response_id=first.id, **body | {"max_output_tokens": 1})
    arguments = json.dumps(json.loads(call.arguments), ensure_ascii=False)
    prompt = f"weather;time;user:hi\nassistant:<tool_call>{arguments}</tool_call>\ntool:noon\n"
    assert second.usage.input_tokens == len(prompt.encode())


def test_a_server_that_stores_nothing_says_so(quiet: QuietEngine) -> None:
    for served in serve(quiet, max_stored_mb=0):
        with served.http() as http:
            for name, value in (("store", True), ("previous_response_id", "resp_1")):
                error = http.post("/v1/responses", json={"input": "a", name: value}).json()["error"]
                assert error["param"] == name and "--max-stored-mb" in error["message"]
            assert http.get("/v1/responses/resp_1").status_code == 404


def test_the_longest_unused_are_forgotten() -> None:
    store, turn = Store(100), b"x" * 20
    for name in "abc":
        store.put(name, b"y" * 10, (turn,))
    assert store.get("a")
    store.put("d", b"", (turn,))
    assert not store.get("b") and all(map(store.get, "acd"))
    store.put("e", b"y" * 40, (turn, turn))
    assert not any(map(store.get, "ac")) and store.get("d") and store.get("e")
    store.put("f", b"y" * 101, ())
    assert store.get("d") and store.get("e") and not store.get("f") and not store.delete("f")
    store.put("g", b"y" * 100, ())
    assert store.delete("g") and not store.delete("g")
    store.put("h", b"y" * 100, ())
    assert store.get("h")


def test_small_responses_are_counted() -> None:
    store = Store(2**40)
    for name in range(MAX_RESPONSES + 2):
        store.put(str(name), b"", ())
    assert [name for name in range(MAX_RESPONSES + 2) if not store.get(str(name))] == [0, 1]
