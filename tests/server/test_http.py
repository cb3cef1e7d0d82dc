"""The server as clients see it: the official openai client, and raw HTTP for what that client cannot send."""

from __future__ import annotations

import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.conftest import WAIT_S
from engine.stub import World
from server.conftest import Served, serve
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.kernels import cpu_rows

MESSAGES: Any = [{"role": "user", "content": "hello"}]
FIXED: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def test_completion_streams_what_it_gives_whole(served: Served) -> None:
    whole = served.client().completions.create(model="small", prompt="abc", **FIXED)
    assert whole.object == "text_completion" and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, 12, 15)
    chunks = list(
        served.client().completions.create(
            model="small", prompt="abc", stream=True, stream_options={"include_usage": True}, **FIXED
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({c.id for c in chunks}) == 1
    assert sum(len(c.choices) for c in chunks) <= 12  # tokens that are there together share an event


def test_chat_streams_what_it_gives_whole(served: Served) -> None:
    whole = served.client().chat.completions.create(model="small", messages=MESSAGES, **FIXED)
    assert whole.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    chunks = list(served.client().chat.completions.create(model="small", messages=parts, stream=True, **FIXED))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_the_template_is_the_models(served: Served) -> None:
    whole = served.client().chat.completions.create(model="small", messages=MESSAGES, **FIXED)
    plain = served.client().completions.create(model="small", prompt="user: hello\nassistant:", **FIXED)
    assert whole.choices[0].message.content == plain.choices[0].text
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens


def test_prompts_of_every_kind_and_several_choices(served: Served) -> None:
    client, tokenizer = served.client(), served.engine.tokenizer
    one = client.completions.create(model="small", prompt=tokenizer.encode("abc"), **FIXED)
    two = client.completions.create(model="small", prompt=["abc", "xyz"], **FIXED)
    ids = client.completions.create(model="small", prompt=[tokenizer.encode("abc"), tokenizer.encode("xyz")], **FIXED)
    assert [c.text for c in two.choices] == [c.text for c in ids.choices]
    assert one.choices[0].text == two.choices[0].text != two.choices[1].text
    warm = {"temperature": 5.0, "seed": 4, "max_tokens": 8}
    many = client.completions.create(model="small", prompt="abc", n=3, **warm)
    again = client.completions.create(model="small", prompt="abc", n=3, **warm)
    assert len({c.text for c in many.choices}) == 3 and [c.index for c in many.choices] == [0, 1, 2]
    assert [c.text for c in many.choices] == [c.text for c in again.choices]
    echoed = client.completions.create(model="small", prompt="abc", echo=True, **FIXED)
    assert echoed.choices[0].text == "abc" + one.choices[0].text


def test_logprobs(served: Served) -> None:
    plain = served.client().completions.create(model="small", prompt="abc", logprobs=2, **FIXED)
    table = plain.choices[0].logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs) == len(table.text_offset) == 12
    assert all(p <= 0 for p in table.token_logprobs)
    chat = served.client().chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, top_logprobs=3, **FIXED
    )
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 12 and all(len(e.top_logprobs) == 3 for e in entries)
    assert all(e.logprob == e.top_logprobs[0].logprob for e in entries)


def test_stop_strings_end_the_text(served: Served) -> None:
    free = served.client().completions.create(model="small", prompt="abc", **FIXED).choices[0].text
    readable = [c for c in free if c != "\ufffd"]
    stopped = served.client().completions.create(model="small", prompt="abc", stop=readable[-1], **FIXED)
    assert stopped.choices[0].text == free[: free.index(readable[-1])] and stopped.choices[0].finish_reason == "stop"


C, H = "/v1/completions", "/v1/chat/completions"
HELLO = {"model": "small", "messages": MESSAGES}
FORM = {"type": "json_schema", "json_schema": {"schema": {}}}
IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:image/png,x"}}]
BAD: list[tuple[str, Any, int, str]] = [
    (C, "{", 400, "JSON"),
    (C, [], 400, "the body must be a JSON object"),
    (C, "[" * 50_000, 400, "not JSON that can be read: maximum recursion"),
    (C, b'{"prompt": "\xff"}', 400, "not JSON that can be read: 'utf-8' codec"),
    (C, {"prompt": None}, 400, "prompt: Field required"),
    (C, {"prompt": [1.5]}, 400, "prompt: Input should be a valid string or"),
    (C, '{"prompt": "\\ud800"}', 400, "prompt: a lone surrogate"),
    (C, '{"prompt": "a", "bad_words": ["b", "\\udfff"]}', 400, "bad_words.1: a lone surrogate"),
    (C, '{"prompt": "a", "\\udfff": 1}', 400, "the body: a lone surrogate"),
    (C, '{"prompt": "a", "temperature": NaN}', 400, "NaN is no number of JSON"),
    (C, '{"prompt": "a", "seed": ' + "7" * 5000 + "}", 400, "JSON that can be read: Integer value out of range"),
    (C, '{"prompt": "\\udfff", "seed": ' + "7" * 5000 + "}", 400, "not JSON that can be read: Exceeds the limit"),
    (C, {"model": "small"}, 400, "prompt: Field required"),
    (C, {"prompt": ""}, 400, "prompt is empty"),
    (C, {"prompt": []}, 400, "prompt is empty"),
    (C, {"prompt": [1, 99999]}, 400, "between 0 and 256"),
    (C, {"prompt": [-1]}, 400, "between 0 and 256"),
    (C, {"prompt": "a" * 300}, 400, "300 in the prompt"),
    (C, {"prompt": "a" * 250, "max_tokens": 100}, 400, "350 tokens (250 in the prompt, 100 in the completion)"),
    (C, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1"),
    (C, {"prompt": "a", "prompt_logprobs": 21}, 400, "prompt_logprobs is 21"),
    (C, {"prompt": "a" * 257, "max_tokens": 0}, 400, "257 in the prompt"),
    (C, {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
    (C, {"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
    (C, {"prompt": "a", "top_p": 0}, 400, "top_p is 0"),
    (C, {"prompt": "a", "n": 0}, 400, "n:"),
    (C, {"prompt": "a", "logprobs": 21}, 400, "logprobs is 21"),
    (C, {"prompt": "a", "stop": ["x"] * 17}, 400, "at most 16"),
    (C, {"prompt": "a", "stop": [""]}, 400, "without empty strings"),
    (C, {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
    (C, {"prompt": "a", "best_of": 3, "n": 2}, 400, "best_of=3 above n=2 is not supported"),
    (C, {"prompt": "a", "stop_token_ids": [9999]}, 400, "between 0 and 256"),
    (C, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "needs stream"),
    (C, {"prompt": "a", "model": "other"}, 404, "'other' is not served here; this is 'small'"),
    (C, {"prompt": "a", "model": "other", "stream": True}, 404, "not served"),
    (C, {"prompt": "a" * 300, "stream": True}, 400, "300 in the prompt"),
    (H, {"messages": []}, 400, "messages: List should have at least 1 item"),
    (H, '{"messages": [{"role": "user", "content": "\\udc00"}]}', 400, "messages.0.content: a lone surrogate"),
    (H, HELLO | {"tools": [{"type": "function"}]}, 400, "tools.0.function"),
    (H, HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "template knows no tools"),
    (H, HELLO | {"tool_choice": "required"}, 400, "tool_choice needs tools"),
    (H, HELLO | {"functions": [{"name": "f"}]}, 400, "functions is not supported"),
    (H, HELLO | {"reasoning_effort": "huge"}, 400, "reasoning_effort: Input should be 'none'"),
    (
        H,
        HELLO | {"response_format": {"type": "json_schema"}},
        400,
        "the type json_schema needs a schema",
    ),
    (H, HELLO | {"response_format": {"type": "xml"}}, 400, "response_format.type: 'xml' is not supported"),
    (H, HELLO | {"guided_regex": "(", "n": 2}, 400, "the grammar cannot be used"),
    (H, HELLO | {"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_regex and guided_choice ask for two"),
    (H, HELLO | {"structured_outputs": {"structural_tag": "x"}}, 400, "structural_tag is not supported"),
    (H, HELLO | {"guided_choice": []}, 400, "guided_choice has no choice"),
    (H, HELLO | {"logit_bias": {"5": 101}}, 400, "logit_bias is"),
    (H, HELLO | {"logit_bias": {"257": 1}}, 400, "logit_bias: its tokens must be between 0 and 256"),
    (H, HELLO | {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    (C, {"prompt": "a", "min_p": 1.5}, 400, "min_p is 1.5"),
    (C, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty is 3"),
    (C, {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty is 0"),
    (C, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids is ()"),
    (C, {"prompt": "a", "bad_words": [""]}, 400, "without empty words"),
    (C, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search is not supported"),
    (C, {"prompt": "a", "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    (H, HELLO | {"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs cannot set tokenize"),
    (H, HELLO | {"top_logprobs": 2}, 400, "needs logprobs"),
    (
        H,
        {"messages": [{"role": "user", "content": IMAGE}]},
        400,
        "a part of type 'image_url' cannot be read: this serv",
    ),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": IMAGE}]},
        400,
        "messages.0.content: Value error, a part of",
    ),
    ("/v1/nothing", {}, 404, "there is no path /v1/nothing here"),
]


@pytest.mark.parametrize("path, body, status, text", BAD, ids=[str(b[3]) for b in BAD])
def test_bad_input_gets_an_openai_error_and_breaks_nothing(
    served: Served, path: str, body: Any, status: int, text: str
) -> None:
    with served.http() as http:
        text_of = body if isinstance(body, str | bytes) else json.dumps(body)
        response = http.post(path, content=text_of, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and text in error["message"]
        assert http.post(C, json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", [C, H, "/v1/responses", "/tokenize"])
def test_bodies_are_read_by_the_fast_parser(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what that refuses by Python's, which says where it is wrong."""
    with served.http() as http:
        response = http.post(path, content='{"prompt": "a",}', headers={"Content-Type": "application/json"})
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and re.search("the body is not JSON: .* at character 1[45]$", message)
        monkeypatch.setattr("weft.serve.http.bodies.json", None)
        body = {"prompt": "a", "input": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        fields = {C: ("prompt", "max_tokens"), H: ("messages", "max_tokens"), "/v1/responses": ("input",)}
        assert http.post(path, json={k: body[k] for k in fields.get(path, ("prompt",))}).status_code == 200


def test_neutral_and_unknown_fields_are_taken(served: Served) -> None:
    body = HELLO | {
        "presence_penalty": 0,
        "use_beam_search": False,
        "metadata": {"a": "b"},
        "tools": [],
        "n": None,
        "temperature": None,
        "min_p": None,
        "response_format": {"type": "text"},
        "user": "me",
        "max_tokens": 1,
    }
    with served.http() as http:
        assert http.post(H, json=body).status_code == 200


TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}, "index": 0}
CALLED = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "inside, place",
    [
        ({"messages": [{"role": "user", "content": [TEXT, TEXT | {"shout": True}]}]}, "messages.0.content.1.shout"),
        (
            {"messages": [CALLED | {"tool_calls": [CALL | {"why": 1}]}]},
            "messages.0.tool_calls.0.why",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "returns": {}}}]}, "tools.0.function.returns"),
        ({"stream": True, "stream_options": {"include_time": True}}, "stream_options.include_time"),
    ],
    ids=["part", "call", "tool", "options"],
)
def test_fields_inside_are_refused_by_their_place(served: Served, inside: dict[str, Any], place: str) -> None:
    with served.http() as http:
        response = http.post(H, json=HELLO | {"max_tokens": 1} | inside)
    assert response.status_code == 400 and response.json()["error"]["param"] == place, response.text
    assert response.json()["error"]["message"] == f"{place} is not supported; leave it out"


def test_what_clients_send_back_of_responses_is_taken(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further fields of a message reach the chat template, which uses those that it knows."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
    template += "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    part = TEXT | {"annotations": [], "cache_control": {"type": "ephemeral"}}
    said = {"role": "assistant", "content": [part], "refusal": None, "annotations": [], "reasoning_content": "hm, "}
    with served.http() as http:
        response = http.post(H, json={"messages": [said, CALLED | {"audio": None}], "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == len("assistant:hm, hi" + "assistant:{}")


def test_errors_name_the_parameter_and_the_kind(served: Served) -> None:
    with served.http() as http:

        def error(path: str, **body: Any) -> Any:
            return http.post(path, json=body).json()["error"]

        assert error(C, prompt={"a": 1})["param"] == "prompt"
        assert error(H, messages=[{"role": "user", "content": [{"type": "text"}]}])["param"].startswith("messages.0")
        assert error(C, prompt="a" * 300)["code"] == "context_length_exceeded"
        assert error(C, prompt="a" * 250, max_tokens=100)["code"] == "context_length_exceeded"
        assert error(C, prompt=[99999])["code"] is None
        assert error(C, prompt="a", max_tokens=1, min_tokens=2)["param"] == "min_tokens"


def test_no_path_leads_to_another_host(served: Served) -> None:
    """A client that followed would bring its prompt and its key there."""
    with served.http() as http:
        for path in (f"{C}/", "/health/", "/v1/models/small/"):
            response = http.post(path, json={"prompt": "a"}, headers={"Host": "elsewhere.example"})
            assert response.status_code in (404, 405) and "location" not in response.headers
        assert http.get(C).status_code == 405 and http.get(C).headers["allow"] == "POST"


def test_the_schema_tells_errors_as_they_come(served: Served) -> None:
    with served.http() as http:
        schema = http.get("/openapi.json").json()
    for methods in schema["paths"].values():
        for operation in methods.values():
            assert operation["responses"].keys() == {"200", "4XX", "5XX"}
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_models_are_found_by_name(served: Served) -> None:
    assert served.client().models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="'other/model' is not served here"):
        served.client().models.retrieve("other/model")


def test_the_key_is_asked_for(locked: Served) -> None:
    with locked.http() as http:
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.post(C, json={"prompt": "a"}).status_code == http.get("/weft/report").status_code == 401
        assert http.get("/openapi.json").status_code == http.get("/docs").status_code == 401
        assert (
            http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).json()["error"]["code"]
            == "invalid_api_key"
        )
    assert [m.id for m in locked.client().models.list()] == ["small"]
    assert locked.key is not None
    for wrong in ("wrong", f"{locked.key}1", locked.key[:-1], locked.key.swapcase()):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{locked.url}/v1", api_key=wrong, max_retries=0).models.list()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_cancelled(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes after a few steps; the next one is held until all four choices have been cancelled."""
    steps, begun, cancelled, left = itertools.count(1), threading.Event(), threading.Semaphore(0), threading.Event()
    executor, cancel = served.engine._executor, served.engine.cancel
    collect = executor.collect

    def held() -> Any:
        if next(steps) == 4:
            begun.set()
            if all([cancelled.acquire(timeout=WAIT_S) for _ in range(4)]):
                left.set()
        return collect()

    def noted(request: int) -> None:
        cancel(request)
        cancelled.release()

    monkeypatch.setattr(executor, "collect", held)
    monkeypatch.setattr(served.engine, "cancel", noted)
    body = {"prompt": "abc", "max_tokens": 250, "temperature": 0, "ignore_eos": True, "n": 4, "stream": stream}
    before = served.engine.stats().generated_tokens
    text = json.dumps(body).encode()
    with served.socket() as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % C.encode())
        connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        assert begun.wait(WAIT_S) and (not stream or connection.recv(9).startswith(b"HTTP/1.1 "))
    assert left.wait(2 * WAIT_S)
    served.engine.check_idle()
    assert 0 < served.engine.stats().generated_tokens - before <= 4 * 4 and not served.engine.stats().running


def test_metrics_health_plan_and_report(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.client().completions.create(model="small", prompt="metrics", **FIXED)
    with served.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert "saving" in http.get("/weft/plan", params={"tokens": 4}).text
        for tokens in ("-1", "x", "1" + "0" * 40):  # the last would be beyond the cost model, and end a rank
            assert http.get("/weft/plan", params={"tokens": tokens}).status_code == 400
        while not served.engine.last_comm_report()[0]:  # it is told once the engine has been idle for a while
            threading.Event().wait(0.01)
        report = http.get("/weft/report").json()
        limits = served.engine.config
        assert report["max_running"] == limits.batch_sequences and report["max_batch_tokens"] == limits.batch_tokens
        assert report["kv_tokens"] == limits.cached_tokens and report["ranks"]["lost_places"] == []
        monkeypatch.setattr(served.engine._recovery, "lost_places", [(0, 1)])
        ranks = http.get("/weft/report").json()["ranks"]
        assert ranks["lost"] == 1 and ranks["lost_places"] == [{"node": 0, "place": 1}]
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    assert report["attention_backend"] == "native" and report["cpu_kernels"] == cpu_rows.isa()
    assert sum(s["count"] for s in report["ran"]) > 0 and sum(s["bytes"] for s in report["naive"]) > 0

    def total(name: str, suffix: str = "_total") -> float:
        return sum(s.value for s in families[name].samples if s.name == name + suffix)

    stats = served.engine.stats()
    assert (
        total("weft_generated_tokens") == stats.generated_tokens and total("weft_prompt_tokens") == stats.prompt_tokens
    )
    assert total("weft_time_to_first_token_seconds", "_count") >= 1
    assert total("weft_inter_token_latency_seconds", "_count") >= 11
    assert total("weft_collective_calls") > 0 and total("weft_collective_bytes") > 0
    plans = {(s.labels["plan"], s.labels["by"]): s.value for s in families["weft_plan_seconds"].samples}
    assert plans["followed", "measured"] > 0 and plans["naive", "predicted"] >= plans["followed", "predicted"] > 0
    assert {s.labels["group"] for s in families["weft_kv_cache_used_ratio"].samples} == {"0", "1"}
    assert families["weft_requests_running"].samples[0].value == 0


def test_probes_and_scrapers_wait_for_no_step(chat_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step hangs, and every thread that may ask the engine does: health and metrics are answered meanwhile."""
    world = World(chat_model_dir, monkeypatch)
    with world.engine() as engine, ThreadPoolExecutor(60) as threads:
        for served in serve(engine):
            world.go.clear()

            def get(path: str, url: str = served.url) -> int:
                return httpx.get(f"{url}{path}", timeout=WAIT_S).status_code

            asked = threads.submit(served.client().completions.create, model="small", prompt="abc", **FIXED)
            while len(world.steps) < 2:  # the engine waits for the first, and takes nothing in
                threading.Event().wait(0.01)
            waiting = [threads.submit(get, "/weft/report") for _ in range(50)]
            while len(engine._requests._commands) < 40:  # as many as there are threads
                threading.Event().wait(0.01)
            assert get("/health") == get("/metrics") == 200
            assert not asked.done() and not any(w.done() for w in waiting)
            world.go.set()
            assert asked.result(WAIT_S).choices[0].finish_reason == "length"
            assert {w.result(WAIT_S) for w in waiting} == {200}


def test_an_engine_that_fails_is_reported(chat_model_dir: Path) -> None:
    engine = Engine(EngineConfig(chat_model_dir, executor="thread", kv_tokens=512, page_size=4, max_restarts=0))
    for served in serve(engine):

        def fail(step: Any) -> Any:
            raise RuntimeError("the rank is gone")

        engine._executor.send = fail
        with served.http() as http:
            for stream in (False, True):
                response = http.post(C, json={"prompt": "abc", "stream": stream})
                assert response.status_code == 503 and "the rank is gone" in response.json()["error"]["message"]
            assert http.get("/health").status_code == 503
            assert http.get("/metrics").status_code == 200
            for path in ("/weft/plan", "/weft/report"):
                response = http.get(path)
                assert response.status_code == 503 and "the rank is gone" in response.json()["error"]["message"]
    engine.close()
